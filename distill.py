"""Multi-agent distillation: a team of agents solves tasks, its episodes become chains for one model (paper section 3.2.1).

The teacher is a real multi-agent system in the OAgents pattern: planner, search, crawl and code agents, reflector and verifier, each with a
prompt and a private history of its own. They see each other only through messages; the orchestrator (`Teacher`) runs the tools and decides
from the messages who acts next. What happens is recorded as tau = {(S_t, phi_t, o_t)} (eq. 5): the state an agent was given, which agent it
was, what it wrote and what its tool returned. `to_chain` lays a record out as one Chain-of-Agents text, the hard target of SFT. A backend is
one function `chat(role, messages) -> text`:

    --teacher scripted      plays all roles offline by reading the task's solution graph, and errs on purpose now and then (a wrong query, a
                            wrong page, a slip in code, an over-confident answer) so that reflection and double_check have something to
                            catch. Its scores and costs say nothing about a model: it reads the solution.
    --teacher http://.../v1 any OpenAI-compatible server (--teacher-model NAME); replies are cached, a killed run pays for nothing twice
    --teacher DIR           a local checkpoint trained on chains: it is the whole team in one model, so the sampler takes the place of the
                            orchestrator (rejection sampling, --samples N); recording and filters are the same

Then the paper's progressive filter: complexity, quality, reflection enrichment, error-correction up-sampling. Two measures are used. An
*interaction* is one act of an agent (plan, tool call, reflection, suggested answer, double check, answer) or one reply of a tool; the filter
wants 5, for mhqa 4. A *hop* is one act of an agent, which is the unit that fits the averages of the paper's Tables 2, 3 and 9.
The paper gives no ratios for the last two stages; --plain-ratio and --error-factor are ours. Left out: an LLM judge as a filter.

    python distill.py                                                              # the demo, under a minute on 2 cores
    python distill.py --teacher http://127.0.0.1:8000/v1 --teacher-model NAME      # any server; key from OPENAI_API_KEY
    python distill.py --teacher runs/demo/rl/model --samples 4 --out runs/self     # the student as its own teacher
    python distill.py --pass-filter --samples 8 --max-pass 0.99 --teacher runs/demo/sft/model --tasks data/tasks/rl.jsonl --out runs/rl_tasks

Writes sft.jsonl, traces.jsonl (the raw records), funnel.json and report.md. The columns of sft.jsonl are AFM's: LLaMA-Factory reads them as they are,
TRL after load_dataset("json", data_files=...).rename_columns({"instruction": "prompt", "output": "completion"}).
"""
import argparse
import hashlib
import json
import random
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from coa_format import (PROFILES, TOOLS, Segment, check, code_blocks, double_check_score, inert, parse, prompt, prompt_ids,
                        render, reveal)
from data.scripted import Scripted
from llm import LLM, LLMError
from hf import InputError, exit_on_input_error
from model import load_model, load_tokenizer
from parallel import add_common_arguments, amount, from_rank_0, gather_lists, natural, positive, run_config, setup, start_run, teardown, write_atomic, write_jsonl
from sampler import Limits, Request, Sampler
from tasks import grade, load_tasks
from tools import add_tool_arguments, make_toolbox

# ---------------------------------------------------------------------------------------------------------------------------------
# The team: which agent writes which tag, the field it writes it in, and its own prompt

AGENTS = {
    "plan": ("planner", "Plan", "You split the question into numbered sub-tasks, and again when the team is stuck."),
    "wiki_search": ("searcher", "Query", "You look things up in an encyclopedia, one short query at a time."),
    "web_search": ("web_searcher", "Query", "You search the web, one short query at a time."),
    "crawl_page": ("crawler", "URL", "You open the page that should hold the fact; several addresses are separated by |."),
    "code": ("coder", "Code", "You write a Python program in a ```py fence that prints what is asked."),
    "visual_inspector": ("inspector", "Image", "You look at an image: JSON in a fence with file_path and question."),
    "reflection": ("reflector", "Reflection", "You judge the work so far in one line of three criteria, each good, fair or poor with the reason: "
                   "conflict (do the facts agree), tools (was the last call useful), progress (is the team stuck)."),
    "double_check": ("verifier", "Score", "You judge a suggested answer from 1 (wrong) to 4 (right) against what was read, as `score: N`."),
}
FORM = """You are the {name} of a team that answers one question together. {job}
The others see your replies but not what your tools return. Reply with these lines only:
Thought: in one or two short sentences, what you have just learnt and what comes next.
{field}: your own move.
Instead of your own move you may write `To: NAME` to hand over to one of {others}{answer}."""


def team(profile):
    """{tag: (agent name, field, job)} of a profile; a tool that a user registered gets an agent of its own."""
    return {tag: AGENTS.get(tag, (tag + "_agent", "Argument", f"You use the tool {tag}. {TOOLS.get(tag, '')}"))
            for tag in PROFILES[profile].agents if tag in AGENTS or tag in PROFILES[profile].tools}


def agent_prompt(profile, tag):
    """The system prompt of the agent that writes `tag`."""
    name, field_name, job = team(profile)[tag]
    others = ", ".join(other for other, _, _ in team(profile).values() if other != name)
    answer = ", or `Answer: TEXT` when the question is settled" if tag in PROFILES[profile].tools else ""
    return FORM.format(name=name, job=job, field=field_name, others=others, answer=answer)


FIELD = re.compile(r"^[ \t*#>-]*(thought|question|plan|query|url|code|image|argument|reflection|score|answer|to)[ \t*]*:[ \t*]*", re.I | re.M)


def read_reply(text, own):
    """The fields of an agent's reply as {lower-case name: text}; the first of each counts, lines inside code fences are no fields.
    A reply without any field is taken as the agent's own move."""
    hidden = re.sub(r"```.*?(```|\Z)", lambda fence: "." * len(fence[0]), text, flags=re.S)
    marks = list(FIELD.finditer(hidden))
    if not marks:
        return {own: text.strip()}
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    fields = {}
    for mark, end in zip(marks, ends):
        fields.setdefault(mark[1].lower(), text[mark.end():end].strip())
    return fields


# ---------------------------------------------------------------------------------------------------------------------------------
# The orchestrator and its record

@dataclass
class Step:
    """One entry of tau: the agent phi_t, the state S_t it was given (what is new since it last acted: with its earlier states and replies
    this is its whole private history), its reply, and the reply read as thought, tag and output; observation o_t is the tool's raw text."""
    agent: str
    state: str
    reply: str
    thought: str
    tag: str | None                # None: a message to another agent without a move of its own
    output: str
    to: str | None = None
    observation: str | None = None


@dataclass
class Trace:
    """One episode of a teacher. end: "answered", "cap", "refused", or a checkpoint's end reason. `steps`: list of Step as dicts."""
    id: str
    sample: int
    question: str
    agent: str
    data_source: str
    teacher: str
    steps: list = field(default_factory=list)
    end: str = "cap"
    chain: str = ""                # `to_chain` of the steps
    score: float = 0.0             # of the grader
    problems: list = field(default_factory=list)       # of `revalidate`
    refusal: str = ""              # the server's words, where end is "refused"


REFUSED = re.compile("HTTP (400|413|422)")                 # in an LLMError: the server is there, but does not take this request


class Teacher:
    """The team at work on one question. chat(role, messages) -> text is its only intelligence; session its only access to the world."""

    def __init__(self, chat, session, question, profile, max_acts=24):
        self.chat, self.session, self.profile, self.max_acts, self.refusal = chat, session, PROFILES[profile], max_acts, ""
        self.team = team(profile)
        self.tag_of = {name: tag for tag, (name, _, _) in self.team.items()}
        self.history = {name: [{"role": "system", "content": agent_prompt(profile, tag)}] for tag, (name, _, _) in self.team.items()}
        self.mail = {name: [f"Question: {question}"] for name in self.tag_of}
        self.workers = [name for name, tag in self.tag_of.items() if tag in self.profile.tools]
        self.asked = self.workers[0]                                                   # who gets the floor back after a judgement
        # In profiles without a direct way from a tool to the answer, the verifier stands between them.
        self.checked = "verifier" in self.tag_of and "answer" not in self.profile.follow["tool"].split()
        self.cleared, self.suggestion = not self.checked, None

    def ask(self, name):
        """Give the agent its mail, get its reply, pass the reply on to the others -> Step without observation."""
        state, self.mail[name] = "\n".join(self.mail[name]), []
        self.history[name].append({"role": "user", "content": state})
        reply = self.chat(name, list(self.history[name]))
        self.history[name].append({"role": "assistant", "content": reply})
        for other in self.mail:
            if other != name:
                self.mail[other].append(f"{name}: {reply}")
        tag = self.tag_of[name]
        own = self.team[tag][1].lower()
        fields = read_reply(reply, own)
        step = Step(name, state, reply, " ".join(fields.get("thought", "").split()), None, "", fields.get("to"))
        if fields.get(own):
            step.tag, step.output = tag, tool_argument(tag, fields[own])
        elif fields.get("answer"):
            step.tag, step.output = "answer" if self.cleared else "suggested_answer", " ".join(fields["answer"].split())
        return step

    def run_tool(self, step):
        """Execute the call. Its observation goes to the caller, to the reflector, and from a search also to the crawler."""
        step.observation = self.session.run(step.tag, step.output, step.thought)
        readers = {step.agent, "reflector"} | ({"crawler"} if step.tag == "web_search" else set())
        for name in readers & set(self.mail):
            self.mail[name].append(f"Observation: {step.observation}")
        self.cleared = not self.checked

    def route(self, step):
        """Who acts next, decided from the message of the agent that has just acted; None ends the episode."""
        names = {name for name in self.tag_of if name != step.agent}
        to = (step.to or "").strip().lower()
        if step.tag == "answer":
            return None
        if step.tag == "plan":
            return to if to in self.workers else self.workers[0]
        if step.tag in self.profile.tools:
            self.asked = step.agent
            return "reflector" if self.profile.follow["tool"] == "reflection" else step.agent
        if step.tag == "reflection":
            if re.search(r"\bpoor\b", step.output.lower()) and "plan" in self.profile.follow["reflection"].split():
                return "planner"
            return to if to in self.workers else self.asked
        if step.tag == "suggested_answer":
            self.asked, self.suggestion = step.agent, step.output
            return "verifier"
        if step.tag == "double_check":
            self.cleared = (double_check_score(step.output) or 0) >= 3
            return self.asked if self.cleared else "planner"
        allowed = names - {"verifier"} if self.suggestion is None else names
        if step.agent in self.workers:
            self.asked = step.agent
        return to if to in allowed else self.asked if self.asked != step.agent else "planner"

    def solve(self):
        """Run until an answer or the cap on acts -> (steps, end). A request that the server refuses for what it holds (say, a history too long
        for its model) ends this episode as "refused"; a server that is gone raises LLMError."""
        steps, name = [], "planner"
        while name is not None and len(steps) < self.max_acts:
            try:
                step = self.ask(name)
            except LLMError as error:
                if not REFUSED.search(str(error)):
                    raise
                self.refusal = str(error)
                return steps, "refused"
            if step.tag in self.profile.tools:
                self.run_tool(step)
            steps.append(asdict(step))
            name = self.route(step)
        return steps, "answered" if name is None else "cap"


def tool_argument(tag, text):
    """An agent's move as it stands in the chain: programs in their fence on lines of their own, the rest on one line."""
    if tag != "code":
        return text.strip() if tag == "visual_inspector" else " ".join(text.split())
    code, stdin = code_blocks(text)
    return f"```py\n{code.strip()}\n```" + (f"\n```sh\n{stdin}\n```" if stdin else "")


def to_chain(trace):
    """The record as one CoA text: thoughts stand before the act that they lead to; those of an agent that only hands over join the next.
    The code and math grammars have no think before plan and reflection: the reflector's thought opens its reflection, the planner's is dropped."""
    strict, segments, thoughts = PROFILES[trace.agent].first == "plan", [], []
    for step in trace.steps:
        tag, output = step["tag"], step["output"]
        thoughts.append(step["thought"])
        if tag is None:
            continue
        thought, thoughts = " ".join(filter(None, thoughts)), []
        if strict and tag == "reflection":
            output = f"{thought} {output}".strip()
        elif thought and not (strict and tag == "plan"):
            segments.append(Segment("think", thought))
        segments.append(Segment(tag, output))
        if step["observation"] is not None:
            segments.append(Segment("observation", inert(step["observation"])))
    return render(segments)


def revalidate(trace, session=None):
    """Why a trace's chain is no faithful record of real tool use: list of str. Calls and observations of the chain must be those recorded,
    in order; with a (fresh) session every call is run again and must return the same text."""
    recorded = [step for step in trace.steps if step["observation"] is not None]
    segments = parse(trace.chain)
    calls = [(segment.tag, segment.text.strip()) for segment in segments if segment.tag in PROFILES[trace.agent].tools]
    observations = [reveal(segment.text) for segment in segments if segment.source == "environment"]
    problems = []
    if calls != [(step["tag"], step["output"]) for step in recorded]:
        problems.append("other calls than recorded")
    if observations != [step["observation"] for step in recorded]:
        problems.append("other observations than recorded")
    for step in recorded if session else ():
        if session.run(step["tag"], step["output"], step["thought"]) != step["observation"]:
            problems.append(f"{step['tag']} returns something else when run again")
    return problems


# ---------------------------------------------------------------------------------------------------------------------------------
# The progressive filter: four functions, traces in, (traces kept, Counter of reasons) out

def hops(trace):
    """Acts of agents: the paper's hop."""
    return sum(step["tag"] is not None for step in trace.steps)


def interactions(trace):
    """Acts of agents and replies of tools."""
    return hops(trace) + sum(step["observation"] is not None for step in trace.steps)


def pick_fraction(trace, seed, fraction):
    """The same traces for the same seed, whatever else is in the list."""
    return random.Random(f"{seed}|{trace.id}|{trace.sample}|keep").random() < fraction


def complexity(traces, least=5, least_mhqa=4):
    """Stage 1: drop episodes with fewer than `least` interactions (`least_mhqa` in the mhqa profile, whose questions are shorter)."""
    kept = [t for t in traces if interactions(t) >= (least_mhqa if t.agent == "mhqa" else least)]
    return kept, Counter({"too few interactions": len(traces) - len(kept)})


def quality(traces):
    """Stage 2: drop wrong answers, tool inputs given twice, chains outside the grammar or not faithful to their tools. A trace is
    counted under the first reason that holds."""
    kept, reasons = [], Counter()
    for trace in traces:
        calls = Counter((s["tag"], " ".join(s["output"].lower().split())) for s in trace.steps if s["observation"] is not None)
        reason = (f"no answer: {trace.end}" if trace.end != "answered" else "wrong answer" if trace.score < 1
                  else "redundant tool input" if any(n > 1 for n in calls.values())
                  else "observation not from a tool" if trace.problems
                  else "grammar" if check(parse(trace.chain), trace.agent) else None)
        if reason:
            reasons[reason] += 1
        else:
            kept.append(trace)
    return kept, reasons


def reflection_enrichment(traces, plain_ratio=0.5, seed=0):
    """Stage 3: of the episodes without reflection keep the fraction `plain_ratio`; none of code and math."""
    kept = [t for t in traces if any(step["tag"] == "reflection" for step in t.steps)
            or t.agent not in ("code", "math") and pick_fraction(t, seed, plain_ratio)]
    return kept, Counter({"no reflection": len(traces) - len(kept)})


def error_correction(traces, factor=2):
    """Stage 4: an episode whose first double_check was low (1 or 2) and whose answer is right stands `factor` times in the result."""
    kept, reasons = [], Counter()
    for trace in traces:
        scores = [double_check_score(step["output"]) for step in trace.steps if step["tag"] == "double_check"]
        times = factor if scores and scores[0] is not None and scores[0] < 3 and trace.score >= 1 else 1
        kept += [trace] * times
        reasons["added: corrected after a low double_check"] += times - 1
    return kept, reasons


def corrected(trace):
    """True when a reflection said poor or a double_check was low, and the answer is right all the same."""
    return trace.score >= 1 and any(step["tag"] == "reflection" and re.search(r"\bpoor\b", step["output"].lower())
                                    or step["tag"] == "double_check" and (double_check_score(step["output"]) or 4) < 3 for step in trace.steps)


def progressive_filter(traces, args):
    """All four stages -> (traces, funnel): the funnel has one row a stage with the numbers in, out and why, over all and per suite."""
    stages = [("complexity", lambda rows: complexity(rows, args.min_interactions, args.min_interactions_mhqa)), ("quality", quality),
              ("reflection enrichment", lambda rows: reflection_enrichment(rows, args.plain_ratio, args.seed)),
              ("error correction", lambda rows: error_correction(rows, args.error_factor))]
    funnel = []
    for name, stage in [("recorded", lambda rows: (rows, Counter())), *stages]:
        before = len(traces)
        traces, reasons = stage(traces)
        funnel.append({"stage": name, "in": before, "out": len(traces), "reasons": {k: n for k, n in sorted(reasons.items()) if n},
                       "suites": dict(Counter(t.data_source for t in traces))})
    return traces, funnel


# ---------------------------------------------------------------------------------------------------------------------------------
# Recording: backends, many episodes at once, resumable

def chat_backend(args, llm):
    """(task, sample) -> chat(role, messages): the scripted teacher, or a server (which is told the messages and nothing else)."""
    if llm is None:
        return lambda task, sample: Scripted(task, team(task.agent), args.seed, sample, args.mistakes, args.reflect)

    def server(task, sample):
        seed = int.from_bytes(hashlib.sha256(f"{args.seed}|{task.id}|{sample}".encode()).digest()[:4], "big") >> 1

        return lambda role, messages: llm.chat(messages, temperature=args.temperature, max_tokens=args.max_reply_tokens, seed=seed)
    return server


def team_episode(task, sample, backend, toolbox, label, args):
    """One episode of the team on one task -> Trace. With --pass-filter --no-tools a model is asked for the answer, alone."""
    if args.pass_filter and args.no_tools:
        trace = Trace(task.id, sample, task.question, task.agent, task.data_source, label, end="answered")
        try:
            text = backend(task, sample)("", [{"role": "user", "content": f"{task.question}\nReply with the answer alone, as short as possible."}])
        except LLMError as error:
            if not REFUSED.search(str(error)):
                raise
            text, trace.end, trace.refusal = "", "refused", str(error)
        trace.chain = render([Segment("answer", inert(text.strip()))])
        return finish(trace, task, toolbox, args)
    for _ in range(3):                      # again where a tool ran into its deadline on a busy machine: replies are the same, a server's are cached
        teacher = Teacher(backend(task, sample), toolbox.session(task.question), task.question, task.agent, args.max_acts)
        trace = Trace(task.id, sample, task.question, task.agent, task.data_source, label, *teacher.solve(), refusal=teacher.refusal)
        trace.chain = to_chain(trace)
        if not finish(trace, task, toolbox, args).problems:
            break
    return trace


def finish(trace, task, toolbox, args):
    """Grade and re-validate a trace."""
    trace.score = grade(task, trace.chain).score
    trace.problems = revalidate(trace, toolbox.session(task.question) if args.replay else None)
    return trace


def chain_steps(chain, profile):
    """The record of a chain that one model wrote: its segments as steps. The state of a step is what the environment said just before."""
    steps, thoughts, state = [], [], ""
    for segment in parse(chain):
        if segment.source == "environment":
            state = reveal(segment.text)
            if steps:
                steps[-1]["observation"] = state
        elif segment.tag == "think":
            thoughts.append(segment.text.strip())
        elif segment.tag is not None:
            name = team(profile).get(segment.tag, (segment.tag,))[0]
            steps.append(asdict(Step(name, state, "", " ".join(thoughts), segment.tag, segment.text.strip())))
            thoughts, state = [], ""
    return steps


def student_episodes(jobs, sampler, label, args):
    """A local checkpoint as its own teacher: [(task, sample)] -> [Trace], all decoded together."""
    limits = Limits(args.max_acts, args.max_reply_tokens)
    requests = [Request(prompt_ids(task_prompt(task, args), sampler.tokenizer), task.agent, task.id, sample, limits, task.question)
                for task, sample in jobs]
    traces = []
    for (task, sample), episode in zip(jobs, sampler.rollout(requests, temperature=args.temperature)):
        trace = Trace(task.id, sample, task.question, task.agent, task.data_source, label, chain_steps(episode.text, task.agent),
                      episode.end_reason, episode.text)
        traces.append(finish(trace, task, sampler.toolbox, args))
    return traces


def task_prompt(task, args):
    """A row's own prompt, else ours."""
    return task.prompt or prompt(task.agent, task.question, args.prompt == "brief")


def record(jobs, produce, folder, ranks, workers, batch):
    """Run produce([(task, sample)]) -> [Trace] over this rank's share of the jobs, several batches at once -> the traces of all ranks, sorted by
    task id and sample. A finished trace is appended to this rank's file in `folder` at once; what stands in the folder is not made again."""
    folder.mkdir(parents=True, exist_ok=True)
    done = {}
    for path in sorted(folder.glob("*.jsonl")) if ranks.is_main else ():
        for line in path.read_bytes().split(b"\n")[:-1]:                # what follows the last newline was cut off by a kill
            trace = Trace(**json.loads(line))
            done[trace.id, trace.sample] = trace
    done = from_rank_0(done)
    todo = [job for job in jobs if (job[0].id, job[1]) not in done][ranks.rank::ranks.world]
    batches = [todo[i:i + batch] for i in range(0, len(todo), batch)]
    path = folder / f"{ranks.rank}.jsonl"
    whole = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    write_atomic(path, whole[0] + whole[1])
    made = []
    with open(path, "a", encoding="utf-8") as file, ThreadPoolExecutor(workers) as pool, \
            tqdm(total=len(todo), desc="episodes", disable=not ranks.is_main) as bar:
        futures = [pool.submit(produce, jobs) for jobs in batches]
        try:
            for future in as_completed(futures):
                for trace in future.result():
                    made.append(trace)
                    file.write(json.dumps(asdict(trace), ensure_ascii=False) + "\n")
                file.flush()
                bar.update(len(future.result()))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for trace in gather_lists(made):
        done[trace.id, trace.sample] = trace
    return [done[key] for key in sorted(done)]


# ---------------------------------------------------------------------------------------------------------------------------------
# Reports

def table(rows, header):
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def suite_statistics(traces):
    """Per suite and over all, what the paper's Tables 2 and 3 hold and more; shares from 0 to 1, mean characters that agents wrote."""
    groups = {"all": traces} if traces else {}
    for trace in traces:
        groups.setdefault(trace.data_source, []).append(trace)
    table = {}
    for name, rows in groups.items():
        written = sum(s.end - s.start for t in rows for s in parse(t.chain) if s.source == "model")
        reflective = sum(any(step["tag"] == "reflection" for step in t.steps) for t in rows)
        table[name] = {"chains": len(rows), "tasks": len({t.id for t in rows}), "hops": round(sum(map(hops, rows)) / len(rows), 2),
                       "hops_min": min(map(hops, rows)), "hops_max": max(map(hops, rows)), "reflection": round(reflective / len(rows), 3),
                       "corrected": round(sum(map(corrected, rows)) / len(rows), 3), "model_characters": round(written / len(rows))}
    return table


def funnel_report(funnel, statistics, traces, label):
    """report.md: the funnel, the statistics, one chain a suite."""
    suites = sorted(funnel[0]["suites"])
    stages = [[row["stage"], row["in"], row["out"], *(row["suites"].get(s, 0) for s in suites),
               "; ".join(f"{reason} {n}" for reason, n in row["reasons"].items())] for row in funnel]
    shown = {}
    for trace in traces:
        shown.setdefault((trace.data_source, corrected(trace)), trace)
    columns = list(next(iter(statistics.values()))) if statistics else []
    text = [f"# Distillation\n\nTeacher: {label}", table(stages, ["stage", "in", "out", *suites, "why (dropped unless it says added)"]),
            table([[name, *row.values()] for name, row in statistics.items()], ["suite", *columns]),
            "A hop is one act of an agent (plan, tool call, reflection, suggested answer, double check, answer).", "## Chains"]
    for (suite, mended), trace in sorted(shown.items()):
        title = f"{suite}, {trace.id}" + (", with a mistake that was corrected" if mended else "")
        text.append(f"### {title}\n\n{trace.question}\n\n~~~~\n{trace.chain}\n~~~~")
    return "\n\n".join(text) + "\n"


# ---------------------------------------------------------------------------------------------------------------------------------
# Choosing RL tasks by pass rate (paper section 3.3.1)

def pass_filter(traces, least=0.0, most=1.0):
    """{task id: share of its episodes that are right} of the tasks with least <= share <= most, and a Counter of why the others go.
    The paper: web drops a share above 0.3 without tools over 32 tries (--no-tools --samples 32 --max-pass 0.3); code and math drop 0 of 16
    (--samples 16 --min-pass 0.01) and 8 of 8 (--samples 8 --max-pass 0.99)."""
    scores = {}
    for trace in traces:
        scores.setdefault(trace.id, []).append(trace.score >= 1)
    rates = {name: sum(right) / len(right) for name, right in scores.items()}
    reasons = Counter("too easy" if rate > most else "too hard" for rate in rates.values() if not least <= rate <= most)
    return {name: rate for name, rate in rates.items() if least <= rate <= most}, reasons


# ---------------------------------------------------------------------------------------------------------------------------------
# Options

PRESETS = {                                                # tokens as in rl.py
    "mhqa": {"prompt": "full", "max_acts": 24, "max_reply_tokens": 2048, "total_tokens": 10240, "topk": 3},
    "web": {"prompt": "full", "max_acts": 48, "max_reply_tokens": 8192, "total_tokens": 32768, "web_topk": 10},
    "code": {"prompt": "full", "max_acts": 24, "max_reply_tokens": 16384, "total_tokens": 20480, "code_memory_mb": 5000}}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "runs/demo/distill", tasks=["data/tasks/sft.jsonl"])
    group = parser.add_argument_group("teacher")
    group.add_argument("--preset", choices=PRESETS, help="the paper's prompt form and room for this agent; options given beside it win")
    group.add_argument("--teacher", "--model", default="scripted", help="scripted, URL of an OpenAI-compatible server (.../v1), or a checkpoint (default %(default)s)")
    group.add_argument("--teacher-model", default="", help="name of the model on the server")
    group.add_argument("--samples", type=positive, default=2, help="episodes a task (default %(default)s)")
    group.add_argument("--limit", type=natural, default=0, help="only the first that many tasks (default: all)")
    group.add_argument("--max-acts", type=positive, default=24, help="acts of agents in an episode, or turns of a checkpoint (default %(default)s)")
    group.add_argument("--slots", type=positive, default=64, help="episodes of a checkpoint decoded at the same time (default %(default)s)")
    group.add_argument("--total-tokens", type=positive, default=768, help="prompt and chain of a checkpoint (default %(default)s)")
    group.add_argument("--temperature", type=amount, default=1.0, help="of a server or checkpoint (default %(default)s)")
    group.add_argument("--max-reply-tokens", type=positive, default=512, help="a reply of a server, a turn of a checkpoint (default %(default)s)")
    group.add_argument("--workers", type=positive, default=4, help="episodes at the same time, but for a checkpoint (default %(default)s)")
    group.add_argument("--mistakes", type=amount, default=0.22, help="scripted: share of episodes with a mistake (default %(default)s)")
    group.add_argument("--reflect", type=amount, default=0.35, help="scripted: share with a reflection without need (default %(default)s)")
    group.add_argument("--prompt", choices=("brief", "full"), default="brief", help="brief for tiny models (default), full for real ones")
    group.add_argument("--no-replay", dest="replay", action="store_false", help="do not run every call again to compare (web pages change)")
    group = parser.add_argument_group("filter")
    group.add_argument("--min-interactions", type=natural, default=5, help="acts of agents and replies of tools (default %(default)s)")
    group.add_argument("--min-interactions-mhqa", type=natural, default=4, help="the same for the mhqa profile (default %(default)s)")
    group.add_argument("--plain-ratio", type=amount, default=0.6, help="share of the episodes without reflection to keep (default %(default)s)")
    group.add_argument("--error-factor", type=natural, default=2, help="copies of a chain with a low first double_check (default %(default)s)")
    group = parser.add_argument_group("other work")
    group.add_argument("--pass-filter", action="store_true", help="instead of chains write tasks.jsonl: the tasks of which the teacher solves a "
                       "share of its --samples from --min-pass to --max-pass; with --no-tools a server is asked without the team")
    group.add_argument("--min-pass", type=amount, default=0.0, help="(default %(default)s)")
    group.add_argument("--max-pass", type=amount, default=1.0, help="(default %(default)s)")
    add_tool_arguments(parser)
    parser.set_defaults(**PRESETS.get(parser.parse_known_args(argv)[0].preset, {}))
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_input_error()
    args = parse_arguments()
    out, served = Path(args.out), args.teacher.startswith(("http://", "https://"))
    local = not served and args.teacher != "scripted"
    if args.pass_filter and args.no_tools and args.teacher == "scripted":
        raise InputError("--pass-filter --no-tools asks a model what it knows: give --teacher URL or DIR; the scripted one reads the solution")
    label = f"{args.teacher_model} at {args.teacher}" if served else args.teacher if local else "scripted, reads the solution"

    # -------------------------------------------------------------------------------------------------------------------------------
    # The run folder, the tasks, the teacher
    ranks = setup()
    tasks = load_tasks(args.tasks)
    tasks = tasks[:args.limit or len(tasks)]
    toolbox = make_toolbox(args, {task.agent for task in tasks})         # before the folder: what cannot run leaves nothing behind
    result = "tasks.jsonl" if args.pass_filter else "report.md"
    config = run_config(args, [*args.tasks, args.corpus, *([args.teacher] if local else [])], ignore=("workers",))
    if start_run(out, config, args.fresh, result, owns=("traces.jsonl", "sft.jsonl", "funnel.json", "progress")) == "done":
        shutil.rmtree(out / "progress", ignore_errors=True)
        print(f"{out / result} is there: done, --fresh to redo")
        toolbox.close()
        teardown()
        raise SystemExit(0)
    llm = None
    if local:
        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        sampler = Sampler(load_model(args.teacher, dtype=dtype, device=ranks.device), load_tokenizer(args.teacher), toolbox, slots=args.slots,
                          max_len=args.total_tokens, seed=args.seed)
        produce, workers, batch = lambda jobs: student_episodes(jobs, sampler, label, args), 1, 2 * args.slots
    else:
        cache = out / "llm_cache.sqlite"                                 # stays with --fresh: what was paid for is not paid again
        llm = LLM(args.teacher, args.teacher_model, cache, concurrency=args.workers, timeout=900) if served else None
        backend = chat_backend(args, llm)
        produce, workers, batch = lambda jobs: [team_episode(*job, backend, toolbox, label, args) for job in jobs], args.workers, 1

    # -------------------------------------------------------------------------------------------------------------------------------
    # Episodes, shared out over the ranks; a file of finished ones for each rank
    jobs = [(task, sample) for task in tasks for sample in range(args.samples)]
    try:
        traces = record(jobs, produce, out / "progress", ranks, workers, batch)
    except LLMError as error:
        raise SystemExit(f"error: {error}. What was done is kept: give the same command again to go on") from None
    for used in (toolbox, llm):
        if used:
            used.close()
    if not ranks.is_main:
        teardown()
        raise SystemExit(0)
    if traces and all(trace.end == "refused" for trace in traces):
        raise InputError(f"--teacher refused a request of every episode (--teacher-model? --max-reply-tokens? a short context?), the first with: "
                         f"{traces[0].refusal}; --fresh asks again")
    write_jsonl(out / "traces.jsonl", [asdict(trace) for trace in traces])

    # -------------------------------------------------------------------------------------------------------------------------------
    # Either tasks chosen by pass rate, or chains
    if args.pass_filter:
        rates, reasons = pass_filter(traces, args.min_pass, args.max_pass)
        rows = [{**{k: v for k, v in asdict(task).items() if v is not None and k != "meta"}, **task.meta, "pass_rate": rates[task.id]}
                for task in tasks if task.id in rates]
        write_jsonl(out / "tasks.jsonl", rows)
        print(f"{len(rows)} of {len(tasks)} tasks in {out / 'tasks.jsonl'}; dropped: {dict(reasons)}")
    else:
        by_id = {task.id: task for task in tasks}
        kept, funnel = progressive_filter(traces, args)
        statistics = suite_statistics(kept)
        write_jsonl(out / "sft.jsonl", [{"instruction": task_prompt(by_id[trace.id], args), "input": "", "output": trace.chain,
                                         "agent": trace.agent, "id": trace.id} for trace in kept])
        write_atomic(out / "funnel.json", json.dumps({"teacher": label, "stages": funnel, "suites": statistics}, indent=1) + "\n")
        report = funnel_report(funnel, statistics, kept, label)
        print(report.split("## Chains")[0])
        print(f"{len(kept)} chains in {out / 'sft.jsonl'}")
        write_atomic(out / "report.md", report)
    shutil.rmtree(out / "progress")
    teardown()
