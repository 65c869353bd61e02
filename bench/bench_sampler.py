"""How fast rollouts are, next to what one would write with transformers: same weights, prompts, lengths and machine, one run.

    python bench/bench_sampler.py                       # everything, for tiny-1m and tiny-5m
    python bench/bench_sampler.py --model data/smollm2  # another checkpoint beside them (a Hugging Face directory)
    python bench/bench_sampler.py --quick --only sampler_ten_turns

sampler_single_turn  64 prompts, output lengths 16 to 256 (a batch of generate() decodes every row until the longest ends), and equal lengths.
                     Peers: transformers generate(), the better of its dynamic and static cache; generate_batch() beside it.
sampler_ten_turns    tool episodes, prompt 1,000 ids, ten turns of 30 sampled and 200 observed, 32 at once in groups of 8, instant tools.
                     Peers: generate() on the whole batch turn by turn; generate() episode by episode; TRL's GRPOTrainer. All prefill the history
                     again each turn.
sampler_slow_tools   256 of these episodes over 64 slots with tools of 0 to 1 s, against the same with instant tools (seconds).

Random weights: what is sampled does not matter here, and the lengths are dictated to both sides. Each line ends in one JSON object.
`share` is ours' share of the hardware's limit: needed FLOP or bytes, whichever takes the measured peak longer, over the time taken.
"""
import argparse
import dataclasses
import json
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch

from coa_format import ROLES, TOOLS, encode_text
from hf import exit_on_input_error, train_tokenizer
from model import PRESETS, Transformer, load_model, load_tokenizer, save_model
from sampler import Limits, Request, Sampler


class ScriptedSampler(Sampler):
    """Samples as ever, then puts the dictated tokens where a turn of `turn_len` ids must begin and end: a call, on the last turn an answer."""

    def script(self, turn_len, turns):
        def turn(tag):
            head, tail = encode_text(f"<{tag}>", self.tokenizer), encode_text(f"</{tag}>", self.tokenizer)
            plain = encode_text("a", self.tokenizer)[0]
            return np.array(head + [plain] * (turn_len - len(head) - len(tail)) + tail)
        self.turns = np.stack([turn("wiki_search")] * (turns - 1) + [turn("answer")])  # (turns, turn_len)

    def decode(self, last, uniforms, rows):
        out = super().decode(last, uniforms, rows)
        now = np.array([(self.running[lane].turn - 1, self.pos[lane] - self.running[lane].turn_start) for lane in self.live])
        out[0] = torch.from_numpy(self.turns[now[:, 0], now[:, 1]]).to(out)
        return out


class Tools:
    """A tool box whose one tool answers with `ids_len` ids of text, at once or after a random time up to `seconds`."""
    tools = {"wiki_search": None}

    def __init__(self, tokenizer, ids_len, seconds=0.0):
        frame = len(encode_text("\n<observation>\n\n</observation>\n\n", tokenizer))
        self.text = tokenizer.decode(encode_text("ab " * ids_len, tokenizer)[:ids_len - frame])
        self.seconds, self.rng = seconds, random.Random(0)

    def counters(self):
        return {}

    def session(self, question):
        return self

    def submit(self, name, argument, thought=""):
        future = Future()
        if self.seconds:
            timer = threading.Timer(self.rng.random() * self.seconds, future.set_result, [self.text])
            timer.daemon = True
            timer.start()
        else:
            future.set_result(self.text)
        return future


# ---------------------------------------------------------------------------------------------------------------------------------------------
# peers

def generate(theirs, prompts, lengths, cache="dynamic"):
    """transformers generate() on one left-padded batch; row i counts lengths[i] ids, and the call ends when the last row has its own. -> seconds"""
    from transformers import StoppingCriteria, StoppingCriteriaList
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    goals = torch.tensor(lengths)

    class Enough(StoppingCriteria):
        def __call__(self, ids, scores, **_):
            return ids.shape[1] - width >= goals

    began = time.perf_counter()
    out = theirs.generate(ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0,
                          stopping_criteria=StoppingCriteriaList([Enough()]), cache_implementation=None if cache == "dynamic" else cache)
    assert out.shape[1] == width + max(lengths)
    return time.perf_counter() - began


def generate_batch(theirs, prompts, lengths):
    """transformers' continuous batching, each request to its own length, its cache sized to what they need. -> seconds, start and stop left out"""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    pages = sum(-(-(len(prompt) + length) // 32) for prompt, length in zip(prompts, lengths))
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=pages + 8, max_batch_tokens=2048, max_requests_per_batch=len(prompts))
    sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    with theirs.continuous_batching_context_manager(sampling, continuous_batching_config=batching, warmup=False, timeout=5) as manager:
        began, done = time.perf_counter(), 0
        for prompt, length in zip(prompts, lengths):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        while done < sum(lengths) and manager.is_running():
            result = manager.get_result(timeout=1)
            done += len(result.generated_tokens) if result and result.is_finished() else 0
        assert done == sum(lengths), f"generate_batch stopped after {done} of {sum(lengths)} tokens"
        return time.perf_counter() - began


def turn_by_turn(theirs, prompts, turns, sampled, observed):
    """The batched loop: every turn generate()s from the whole history, which is prefilled again. -> seconds"""
    began, histories = time.perf_counter(), [list(prompt) for prompt in prompts]
    for _ in range(turns):
        generate(theirs, histories, [sampled] * len(histories))
        for history in histories:
            history += [1] * (sampled + observed)
    return time.perf_counter() - began


def trl_rollout(theirs, tokenizer, prompts, turns, sampled, observed):
    """TRL's GRPOTrainer rolls out the same episodes: its own _generate and tool loop, told which text holds a call. -> seconds, None without TRL"""
    try:
        import trl.trainer.grpo_trainer as module
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        return None
    from datasets import Dataset
    tokenizer.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
                               "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
    tokenizer.response_schema = {}

    def look_up() -> str:
        """Look something up."""
        return "x"

    config = GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], num_generations=2, per_device_train_batch_size=len(prompts),
                        max_completion_length=turns * (sampled + observed), generation_kwargs={"max_new_tokens": sampled, "min_new_tokens": sampled})
    trainer = GRPOTrainer(theirs, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, tools=[look_up],
                          train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * len(prompts)), processing_class=tokenizer)
    trainer._tokenize_prompts = lambda messages: ([list(prompt) for prompt in prompts], None, {})
    trainer._get_tool_suffix_ids = lambda messages: [1] * observed
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"look_up": look_up}] * len(prompts), [{}] * len(prompts)
    parsed = []

    def parse_response(*_, **__):
        parsed.append(1)
        calls = [{"type": "function", "function": {"name": "look_up", "arguments": {}}}] if len(parsed) <= (turns - 1) * len(prompts) else None
        return {"role": "assistant", "content": "", "tool_calls": calls}
    original, module.parse_response = module.parse_response, parse_response
    began = time.perf_counter()
    completions = trainer._generate([[{"role": "user", "content": "x"}] for _ in prompts])[1]
    seconds, module.parse_response, tokenizer.chat_template = time.perf_counter() - began, original, None
    theirs.eval()
    assert all(len(ids) == turns * sampled + (turns - 1) * observed for ids in completions), sorted(set(map(len, completions)))
    return seconds


# ---------------------------------------------------------------------------------------------------------------------------------------------
# benches

def line(bench, ours, peer, setting, unit="tokens/s", higher_is_better=True, **more):
    ratio = ours / peer if higher_is_better else peer / ours
    print(f"{bench:20} {setting:80} ours {ours:9.1f}  peer {peer:9.1f} {unit}  ratio {ratio:.2f}", flush=True)
    print(json.dumps({"bench": bench, "ours": round(ours, 2), "peer": round(peer, 2), "ratio": round(ratio, 3), "unit": unit, "setting": setting, **more}), flush=True)


def bench_single_turn(name, model, theirs, tokenizer, args):
    rng, vocabulary = random.Random(0), min(len(tokenizer), model.config.vocab_size)
    n, longest = (8, 24) if args.quick else (64, 256)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(16, 96))] for _ in range(n)]
    for kind in ("mixed", "equal"):
        lengths = [round(longest / 16 + (longest - longest / 16) * i / (n - 1)) for i in range(n)] if kind == "mixed" else [longest // 2] * n
        rng.shuffle(lengths)
        sampler = Sampler(model, tokenizer, slots=n, max_len=96 + longest)
        sampler.eos = set()  # random weights would end at random
        sides = {"ours": lambda: sampler.generate(prompts, lengths, temperature=1.0) and sampler.stats["rollout_seconds"],
                 "dynamic": lambda: generate(theirs, prompts, lengths), "static": lambda: generate(theirs, prompts, lengths, "static"),
                 "batch": lambda: generate_batch(theirs, prompts, lengths)}
        sampler.generate(prompts[:2], 4, temperature=1.0)
        generate_batch(theirs, prompts[:2], [4, 4])
        times = {side: [] for side in sides}
        for _ in range(args.repeat):  # in turns, so that a machine that slows down slows all sides; the best of each counts
            for side, run in sides.items():
                times[side].append(run())
        best, share, useful = {side: min(seconds) for side, seconds in times.items()}, sampler.limit_share(), sum(lengths)
        setting = f"{name}, {n} requests, {min(lengths)} to {max(lengths)} new ids"
        cache = min(("dynamic", "static"), key=best.get)
        line("sampler_single_turn", useful / best["ours"], useful / best[cache], f"{setting}; generate(), {cache} cache", share=round(share, 3))
        line("sampler_single_turn", useful / best["ours"], useful / best["batch"], f"{setting}; generate_batch()")


def bench_ten_turns(name, model, theirs, tokenizer, args):
    n, group, prompt_len, turns, sampled, observed = (4, 2, 60, 3, 12, 40) if args.quick else (32, 8, 1000, 10, 30, 200)
    rng, vocabulary = random.Random(1), min(len(tokenizer), model.config.vocab_size)
    prompts = [[rng.randrange(vocabulary) for _ in range(prompt_len)] for _ in range(n // group)]
    limits = Limits(turns=turns, new_tokens=sampled)
    requests = [Request(prompts[i // group], "mhqa", str(i // group), i % group, limits) for i in range(n)]
    sampler = ScriptedSampler(model, tokenizer, Tools(tokenizer, observed), slots=n, max_len=prompt_len + turns * (sampled + observed) + 8)
    sampler.script(sampled, turns)
    generate(theirs, prompts[:1], [4])
    alone = [turn_by_turn(theirs, [prompts[0]], turns, sampled, observed)]  # one before ours, one after: a machine's speed drifts
    episodes = sampler.rollout(requests)
    assert all(e.turns == turns and e.end_reason == "answered" for e in episodes)
    alone.append(turn_by_turn(theirs, [prompts[1]], turns, sampled, observed))
    seconds, share, useful = sampler.stats["rollout_seconds"], sampler.limit_share(), n * turns * sampled
    setting = f"{name}, {n} episodes in groups of {group}, prompt {prompt_len}, {turns} turns of {sampled} + {observed} ids"
    everyone = [prompts[i // group] for i in range(n)]
    line("sampler_ten_turns", useful / seconds, useful / turn_by_turn(theirs, everyone, turns, sampled, observed), f"{setting}; batched loop", share=round(share, 3))
    line("sampler_ten_turns", useful / seconds, 2 * turns * sampled / sum(alone), f"{setting}; loop by episode (mean of 2)")
    trainer = trl_rollout(theirs, tokenizer, everyone, turns, sampled, observed)
    if trainer is None:
        print("TRL's GRPOTrainer: skipped, not installed (pip install -r bench/requirements.txt)", flush=True)
    else:
        line("sampler_ten_turns", useful / seconds, useful / trainer, f"{setting}; TRL GRPOTrainer rollout")


def bench_slow_tools(name, model, theirs, tokenizer, args):
    n, slots, prompt_len, turns, sampled, observed = (8, 4, 60, 3, 12, 40) if args.quick else (256, 64, 1000, 10, 30, 200)
    rng, vocabulary = random.Random(1), min(len(tokenizer), model.config.vocab_size)
    prompts = [[rng.randrange(vocabulary) for _ in range(prompt_len)] for _ in range(n // 4)]
    requests = [Request(prompts[i // 4], "mhqa", str(i // 4), i % 4, Limits(turns=turns, new_tokens=sampled)) for i in range(n)]
    seconds = {0.0: [], 1.0: []}
    for slowest in [0.0, 1.0] * (1 if args.quick else 3):  # in turns; the best of each counts
        sampler = ScriptedSampler(model, tokenizer, Tools(tokenizer, observed, slowest), slots=slots,
                                  max_len=prompt_len + turns * (sampled + observed) + 8, deterministic=False)
        sampler.script(sampled, turns)
        assert all(e.end_reason == "answered" for e in sampler.rollout(requests, progress=True))
        seconds[slowest].append((sampler.stats["rollout_seconds"], sampler.stats["tool_wait_seconds"]))
    setting = f"{name}, {n} episodes over {slots} slots, prompt {prompt_len}, {turns} turns of {sampled} + {observed} ids; tools of 0 to 1 s against instant ones"
    (slow, waited), (instant, _) = min(seconds[1.0]), min(seconds[0.0])
    runs = {kind: [round(total, 1) for total, _ in seconds[slowest]] for kind, slowest in (("slow", 1.0), ("instant", 0.0))}
    line("sampler_slow_tools", slow, instant, setting, unit="s", higher_is_better=False, waited_seconds=round(waited, 2), runs=runs)


BENCHES = {"sampler_single_turn": bench_single_turn, "sampler_ten_turns": bench_ten_turns, "sampler_slow_tools": bench_slow_tools}

if __name__ == "__main__":
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="preset of model.py or Hugging Face directory; several times (default: tiny-1m, tiny-5m)")
    parser.add_argument("--only", action="append", choices=BENCHES, help="just this bench; several times")
    parser.add_argument("--repeat", type=int, default=4, help="single turn: best of so many runs of each side, in turns")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; the ratios mean nothing")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.set_verbosity_error()
    torch.manual_seed(0)
    tags = [f"<{slash}{tag}>" for tag in (*ROLES, *TOOLS, "observation", "answer") for slash in ("", "/")]
    for name in args.model or ["tiny-1m", "tiny-5m"]:
        with tempfile.TemporaryDirectory() as folder:
            if name in PRESETS:
                tokenizer = train_tokenizer(["Kathmandu is the capital of Nepal."] * 9, 330, tags)
                model = Transformer(dataclasses.replace(PRESETS[name], vocab_size=len(tokenizer)))
                save_model(model, tokenizer, folder)
            else:
                model, tokenizer, folder = load_model(name), load_tokenizer(name), name
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            parameters = f"{Path(name).name} ({sum(p.numel() for p in model.parameters()) / 1e6:.1f}M)"
            for bench in args.only or BENCHES:
                BENCHES[bench](parameters, model, theirs, tokenizer, args)
