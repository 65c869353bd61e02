"""What a team of agents costs in tokens next to the single chain distilled from it: the measure of the paper's Figure 5, on the same tasks.

Reads the traces that distill.py has recorded and counts, with one tokenizer for both sides:

team           every call of an agent reads that agent's private history again and writes a reply
team, cached   the same with a prefix cache: each agent's history is read once
chain          the brief prompt and the chain in one decoding, every token once (a KV cache that lives through the episode, or a prefix cache)
chain, resent  the chain through a completion server without a prefix cache: the text so far is read again after each tool

The paper divides by solved tasks. A server's own token counts are added where distill.py has kept its replies. With the scripted teacher the
team is the real one in its messages, prompts and tools, but no model wrote the words: read the ratio as one of form, not of skill.

    python distill.py && python bench/bench_distill.py
    python distill.py --teacher http://127.0.0.1:8000/v1 --teacher-model NAME --limit 20 --out runs/served
    python bench/bench_distill.py --out runs/served --model data/smollm2
"""
import argparse
import contextlib
import json
import sqlite3
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from coa_format import encode_text, parse, prompt  # noqa: E402
from distill import Trace, agent_prompt, team  # noqa: E402
from hf import InputError, exit_on_input_error  # noqa: E402
from model import load_tokenizer  # noqa: E402
from hf import read_jsonl  # noqa: E402


def trace_cost(trace, count):
    """{"team" (resent at every call), "team, cached", "chain", "chain, resent": tokens, "calls": of the team's model, "tool calls"} of one episode; count(text) -> tokens."""
    prompts = {name: agent_prompt(trace.agent, tag) for tag, (name, _, _) in team(trace.agent).items()}
    read, total = {}, 0                                                     # read: an agent's whole history, a prefix of which it is sent at every call
    for step in trace.steps:
        agent = step["agent"]
        read[agent] = read.get(agent, count(prompts[agent])) + count(step["state"]) + count(step["reply"])
        total += read[agent]
    opening = count(prompt(trace.agent, trace.question, True))
    stops = [segment.end for segment in parse(trace.chain) if segment.source == "environment"] + [len(trace.chain)]
    return {"team": total, "team, cached": sum(read.values()), "chain": opening + count(trace.chain), "chain, resent": sum(opening + count(trace.chain[:stop]) for stop in stops),
            "calls": len(trace.steps), "tool calls": len(stops) - 1}


def server_usage(cache):
    """The server's own counts over all cached replies of a run, None without such a file."""
    if not cache.exists():
        return None
    with contextlib.closing(sqlite3.connect(cache)) as db:
        usage = [json.loads(value).get("usage") or {} for value, in db.execute("SELECT value FROM answers")]
    return {"calls": len(usage), **{key: sum(u.get(key) or 0 for u in usage) for key in ("prompt_tokens", "completion_tokens")}}


if __name__ == "__main__":
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/demo/distill", help="folder of a distill.py run (default %(default)s)")
    parser.add_argument("--model", default="data/base", help="whose tokenizer counts (default %(default)s)")
    args = parser.parse_args()
    traces = [trace for row in read_jsonl(Path(args.out) / "traces.jsonl") if (trace := Trace(**row)).steps]
    if not traces:
        raise InputError(f"{args.out}/traces.jsonl: no episodes of a team")
    tokenizer = load_tokenizer(args.model)
    costs = [trace_cost(trace, lambda text: len(encode_text(text, tokenizer))) for trace in traces]
    solved = sum(trace.score >= 1 for trace in traces)
    print(f"teacher: {traces[0].teacher}; {len(traces)} episodes, {solved} solved\n\n{'':16}{'per episode':>14}{'per solved task':>18}")
    total = {key: sum(cost[key] for cost in costs) for key in costs[0]}
    for key, n in total.items():
        print(f"{key:16}{n / len(traces):14.1f}{n / solved if solved else float('nan'):18.1f}")
    if usage := server_usage(Path(args.out) / "llm_cache.sqlite"):
        print("the server counted for the team: {calls} calls, {prompt_tokens} prompt and {completion_tokens} completion tokens".format(**usage))
    for key, peer in (("chain", "team, cached"), ("chain, resent", "team")):                # like with like: a prefix cache for both, or for neither
        saving = 1 - total[key] / total[peer]
        print(f"{key}: {abs(100 * saving):.1f} % {'fewer' if saving > 0 else 'more'} tokens than {peer}")
        print(json.dumps({"bench": "distill_tokens", "ours": round(total[key] / len(traces), 1), "peer": round(total[peer] / len(traces), 1),
                          "ratio": round(total[peer] / total[key], 2), "unit": "tokens per episode",
                          "setting": {"form": key, "peer": peer, "teacher": traces[0].teacher, "episodes": len(traces), "solved": solved,
                                      "tokenizer": args.model, "server": usage}}))
