"""The report: rows of graded chains in, numbers and pages out. evaluate.py calls `write_report`; nothing here runs a model.

    mean       share of all questions solved by the greedy answer; a question that got no answer counts as wrong
    mean@k     the same averaged over k sampled answers. Every interval is a 95 % bootstrap over questions
    pass@k     chance that one of k is right (Chen et al. 2021, eq. 1): 1 - C(n-c, k) / C(n, k), unbiased for n >= k samples, c of them right
    best@k     one of the k is chosen without seeing the gold: the majority's, the chain with the highest double_check score, a judge's choice
    per solved tool calls, tokens written and read in all chains, divided by the number of solved questions (paper section 5.1)

The column "metric" says what a score is: "em" is not called accuracy, and public tests are not called LiveCodeBench.
"""
import base64
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch

from coa_format import find_answer, find_calls, parse
from hf import InputError, read_jsonl
from parallel import write_atomic
from tasks import as_number, load_tasks, math_content, normalise, tidy_math

# ----------------------------------------------------------------------------------------------------------------------------------
# Statistics


def pass_at_k(n, c, k):
    """Chance that at least one of k answers drawn from n, of which c are right, is right."""
    if not 0 < k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(values, resamples=2000, seed=0):
    """95 % percentile interval [lo, hi] of the mean of `values`, one number a question, by resampling questions."""
    values, rng = np.asarray(values, float), np.random.default_rng(seed)
    n = len(values)
    block = max(1, 1_000_000 // n)                                      # resamples at a time
    sizes = [min(block, resamples - i) for i in range(0, resamples, block)]
    means = np.concatenate([values[rng.integers(n, size=(size, n))].mean(axis=1) for size in sizes])
    return [float(x) for x in np.quantile(means, (0.025, 0.975))]


def by_question(rows):
    """{id: rows}, in order of first appearance."""
    found = defaultdict(list)
    for row in rows:
        found[row["id"]].append(row)
    return found


def paired_difference(rows, others):
    """How much better `rows` did than `others` on the questions that both answered: {"mean", "ci95", "n"}; None without such questions."""
    ours, theirs = ({key: mean(r["score"] for r in part) for key, part in by_question(x).items()} for x in (rows, others))
    differences = [ours[key] - theirs[key] for key in ours if key in theirs]
    return {"mean": mean(differences), "ci95": bootstrap_interval(differences), "n": len(differences)} if differences else None


def mean(values):
    values = list(values)
    return float(sum(values) / len(values)) if values else 0.0


def vote(row):
    """What a row's answer counts as: numbers by value (normalised, -3 and 3 would be the same), formulas and words tidied, programs as they are."""
    answer = row["answer"]
    if row["metric"] == "math":
        answer = tidy_math(math_content(answer[:20_000]))               # in runaway text the patterns take time quadratic in it
    number = as_number(answer)
    if number is not None:
        return number
    return (normalise(answer) or answer) if row["metric"] in ("em", "judge") else answer


def majority(rows):
    """The first row whose answer is the most frequent; rows without an answer have no vote."""
    votes = Counter(vote(row) for row in rows if row["answer"])
    best = max(votes.values(), default=0)
    return next((row for row in rows if votes[vote(row)] == best), rows[0])


def own_choice(rows):
    """The first row with the highest score that the chain gave itself in its last double_check; no check counts as 0."""
    return max(rows, key=lambda row: row["double_check"] or 0)


# ----------------------------------------------------------------------------------------------------------------------------------
# Numbers

WORDINGS = {"sft": "wording shown in SFT", "rl": "first shown in RL", "test": "never shown"}            # of built-in tasks


def scores(rows):
    """All numbers of a stage: over everything, by suite, and by who showed the question's wording first: SFT, RL, or nobody."""
    suites, wordings = defaultdict(list), {}
    for row in rows:
        suites[row["suite"]].append(row)
    for key in WORDINGS:
        part = [row["score"] for row in rows if row["sample"] == 0 and row["wording"] == key]
        if part:
            wordings[key] = {"mean": mean(part), "n": len(part)}
    return {**numbers(rows), "suites": {name: numbers(part) for name, part in suites.items()}, "wordings": wordings}


def numbers(rows):
    """The numbers of some rows; sample 0 is the greedy answer. em, f1 ... are averages over look-up questions,
    partial over those with tests; one that got no answer counts as 0 in them."""
    greedy, sampled = ([row for row in rows if (row["sample"] == 0) is first] for first in (True, False))
    solved = sum(row["score"] == 1 for row in greedy)
    out = {key: mean(row[column] for row in greedy) for key, column in (("mean", "score"), ("tool_calls", "tool_calls"), ("tokens", "tokens_written"),
                                                                         ("violations", "violations"))}
    out |= {"ci95": bootstrap_interval([row["score"] for row in greedy]), "n": len(greedy), "metric": ", ".join(sorted({row["metric"] for row in greedy})),
            "per_solved": {key: sum(row[key] for row in greedy) / solved if solved else None for key in ("tool_calls", "tokens_written", "tokens_read")},
            "ends": dict(Counter(row["end_reason"] for row in greedy)), "calls": dict(sum((Counter(row["tools"]) for row in greedy), Counter())),
            "judge_failed": sum(bool(row.get("judge_failed")) for row in rows)}
    for key in ("em", "em_first", "f1", "cover_em", "partial"):
        part = [row for row in greedy if (row["metric"].endswith("tests") if key == "partial" else row["metric"] in ("em", "judge"))]
        if any(key in row for row in part):
            out[key] = mean(float(row.get(key, 0)) for row in part)
    return out | (sampled_numbers(list(by_question(sampled).values())) if sampled else {})


def sampled_numbers(groups):
    """mean@k, pass@k and best@k of the sampled rows, one list a question."""
    k, means = min(map(len, groups)), [mean(row["score"] for row in group) for group in groups]
    right = [sum(row["score"] == 1 for row in group) for group in groups]
    sizes = [j for j in sorted({1, 2, 3, 4, 8, 16, k}) if j <= k]
    best = {"majority": mean(majority(group)["score"] for group in groups), "double_check": mean(own_choice(group)["score"] for group in groups)}
    chosen = [row["score"] for group in groups for row in group if row.get("judges_choice")]
    if chosen:
        best["judge"] = sum(chosen) / len(groups)                       # a question without a readable choice counts as wrong
    return {"k": k, "mean_at_k": mean(means), "mean_at_k_ci95": bootstrap_interval(means), "best_at_k": best,
            "pass_at": {j: mean(pass_at_k(len(group), c, j) for group, c in zip(groups, right)) for j in sizes}}


# ----------------------------------------------------------------------------------------------------------------------------------
# Report


def percent(value):
    return "" if value is None else f"{100 * value:.1f} %"


def span(interval):
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"


def markdown(header, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows])


def final_table(stages):
    suites = sorted({suite for s in stages.values() for suite in s["suites"]})
    header = ["stage", "questions", "right", "95 % interval", *suites, "tool calls", "tokens written", "violations"]
    rows = []
    for name, s in stages.items():
        rows.append([name, s["n"], percent(s["mean"]), span(s["ci95"]), *(percent(s["suites"].get(suite, {}).get("mean")) for suite in suites),
                     f"{s['tool_calls']:.2f}", f"{s['tokens']:.0f}", f"{s['violations']:.2f}"])
    return markdown(header, rows)


def wording_section(stages):
    """By who showed the question's wording first: of built-in tasks alone, "" for others."""
    if not any(s["wordings"] for s in stages.values()):
        return ""
    rows = []
    for name, s in stages.items():
        parts = [s["wordings"].get(key, {"mean": None, "n": 0}) for key in WORDINGS]
        rows.append([name, *(cell for part in parts for cell in (percent(part["mean"]), part["n"]))])
    return "\n## Wordings of the question\n\n" + markdown(["stage", *(cell for name in WORDINGS.values() for cell in (name, "n"))], rows) + "\n"


def quality_table(stages):
    header = ["stage", "suite", "n", "metric", "greedy", "em", "em, first part", "F1", "cover-em", "partial", "judge failures", "mean@k",
              "pass@k", "best@k"]
    rows = []
    for name, s in stages.items():
        for suite, x in [*s["suites"].items(), ("all", s)]:
            rows.append([name, suite, x["n"], x["metric"], f"{percent(x['mean'])} ({span(x['ci95'])})",
                         *(percent(x.get(key)) for key in ("em", "em_first", "f1", "cover_em", "partial")), x["judge_failed"]])
            if "k" in x:
                rows[-1] += [f"{percent(x['mean_at_k'])} ({span(x['mean_at_k_ci95'])})", ", ".join(f"{k}: {percent(v)}" for k, v in x["pass_at"].items()),
                             ", ".join(f"{how} {percent(v)}" for how, v in x["best_at_k"].items())]
    width = max(map(len, rows))
    return markdown(header[:width], rows)


def cost_table(stages):
    header = ["stage", "suite", "calls executed", "violations", "calls per solved", "tokens written per solved", "tokens read per solved",
              "calls written, in all", "end reasons"]
    rows = []
    for name, s in stages.items():
        for suite, x in [*s["suites"].items(), ("all", s)]:
            rows.append([name, suite, f"{x['tool_calls']:.2f}", f"{x['violations']:.2f}", *("" if v is None else f"{v:.1f}" for v in x["per_solved"].values()),
                         *(", ".join(f"{key} {n}" for key, n in x[column].items()) for column in ("calls", "ends"))])
    return markdown(header, rows)


def report_text(report, stages, args):
    """report.md: what was measured, and how. stages: {name: numbers}, those without tools too."""
    sampled = f" and {args.samples} sampled at temperature {args.temperature}, top-p {args.top_p}" if args.samples else ""
    differences = [[pair, percent(d["mean"]), span(d["ci95"]), d["n"]] for pair, d in report["differences"].items()]
    return f"""# Report

Questions: {', '.join(args.tasks)}. One greedy answer each{sampled}. At most {args.turns} turns and {args.total_tokens} tokens; {args.prompt} prompt; seed {args.seed}.
Machine: {report['machine']}. Commit {report['commit']}. Intervals: 95 % bootstrap over questions. Every question stays in the denominator.

{final_table(stages)}

Tool calls, tokens and violations are averages a question. Every chain: [traces.html](traces.html)

![curves](curves.png)

## Differences on the same questions

{markdown(["stages", "difference", "95 % interval", "questions"], differences)}
{wording_section(stages)}
## Quality by suite

{quality_table(stages)}

## Cost by suite

{cost_table(stages)}

## Time

{markdown(["step", "seconds"], report["seconds"].items())}
"""


def validate_report(report):
    """What is wrong with a report.json, as lines; empty when it is valid."""
    problems = []

    def need(path, value, low=0.0, high=math.inf):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            problems.append(f"{path}: expected a number from {low:g} to {high:g}, got {value!r}")
            return False
        return True
    for name, s in report.get("stages", {}).items():
        interval = s.get("ci95") or [None, None]
        sound = [need(f"{name}.mean", s.get("mean"), 0, 1), *(need(f"{name}.ci95", x, 0, 1) for x in interval)]
        if all(sound) and not interval[0] <= s["mean"] <= interval[1]:
            problems.append(f"{name}.ci95: does not hold the mean")
        for key in ("n", "tool_calls", "tokens", "violations"):
            need(f"{name}.{key}", s.get(key), key == "n")
        for suite, part in s.get("suites", {}).items():
            need(f"{name}.suites.{suite}.mean", part.get("mean"), 0, 1)
            need(f"{name}.suites.{suite}.n", part.get("n"), 1)
        if sum(part.get("n", 0) for part in s.get("suites", {}).values()) != s.get("n"):
            problems.append(f"{name}.suites: questions do not add up to n")
    for step, value in report.get("seconds", {}).items():
        need(f"seconds.{step}", value)
    return problems + [f"{key}: missing" for key in ("stages", "seconds", "machine", "commit") if not report.get(key)]


def check_report(folder):
    """What a quick run must show; the problems as lines: the report is valid, SFT beats base, every suite has executed tool calls."""
    file = Path(folder) / "report.json"
    if not file.is_file():
        raise InputError(f"{file}: no such file; make it with `python evaluate.py`")
    report = json.loads(file.read_text(encoding="utf-8"))
    stages = report.get("stages", {})
    problems = validate_report(report) + [f"stages.{name}: missing" for name in ("base", "sft", "rl") if name not in stages]
    if problems:
        return problems
    if stages["sft"]["mean"] <= stages["base"]["mean"]:
        problems.append(f"sft ({percent(stages['sft']['mean'])}) does not beat base ({percent(stages['base']['mean'])})")
    return problems + [f"stages.{name}.suites.{suite}: no tool call was executed" for name in ("sft", "rl")
                       for suite, part in stages[name]["suites"].items() if not part["tool_calls"]]


def machine():
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else []
    gpu = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores{gpu}"


def commit():
    """The commit of this code, with "-dirty" when files differ from it; "unknown" outside of a repository."""
    if not shutil.which("git"):
        return "unknown"
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"


def draw_curves(folder, stages):
    """curves.png: the losses of SFT, the rewards of RL, and the stages with their intervals. Parts without data stay away."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    logs = {name: read_jsonl(folder / name / "metrics.jsonl") for name in ("sft", "rl") if (folder / name / "metrics.jsonl").is_file()}
    panels = [("sft", "SFT: loss per trained token", ("loss", "validation_loss")), ("rl", "RL: reward and held-out score", ("reward", "dev"))]
    panels = [panel for panel in panels if logs.get(panel[0])]
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(4.6 * (len(panels) + 1), 3.6), squeeze=False, layout="constrained")
    for axis, (name, title, keys) in zip(axes[0], panels):
        for key in keys:
            points = [(row["step"], row[key]) for row in logs[name] if row.get(key) is not None]
            if points:
                axis.plot(*zip(*points), marker="o" if len(points) < 40 else None, markersize=3, linewidth=1, label=key.replace("_", " "))
        axis.set(title=title, xlabel="step", ylim=(0, 1) if name == "rl" else (0, None))
        axis.legend()
    means = [s["mean"] for s in stages.values()]
    below, above = ([abs(s["mean"] - s["ci95"][side]) for s in stages.values()] for side in (0, 1))
    axes[0][-1].bar(list(stages), means, yerr=[below, above], capsize=4, color="#7a9cc6")
    axes[0][-1].set(title="share of questions answered right", ylim=(0, 1))
    axes[0][-1].tick_params(axis="x", labelrotation=20)
    temporary = folder / ".curves.png"
    figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)
    os.replace(temporary, folder / "curves.png")


# ----------------------------------------------------------------------------------------------------------------------------------
# traces.html


PAGE_BYTES = 18_000_000


def page_row(row, run):
    """A row of traces.html; segments are [tag, text, 1 if the model wrote it, problem if any]."""
    names = {"id": "id", "suite": "suite", "sample": "sample", "gold": "gold", "score": "score", "end": "end_reason", "violations": "violations", "turns": "turns",
             "tools": "tools", "metric": "metric", "written": "tokens_written", "read": "tokens_read", "advantage": "advantage", "step": "step"}
    segments = [[s.tag or "", s.text, int(s.source == "model"), *([s.problem] if s.problem else [])] for s in parse(row["text"])]
    return {"run": run, "question": shorten(row["question"], 2000), "answer": shorten(row["answer"], 2000), "segments": segments,
            **{ours: row[theirs] for ours, theirs in names.items() if row.get(theirs) is not None}}


def shorten(text, longest):
    """A text of more than `longest` characters without its middle."""
    cut = len(text) - longest
    return text if cut <= 0 else f"{text[:longest // 2]}\n[... {cut:,} characters, see traces.jsonl ...]\n{text[-(longest // 2):]}"


def trace_page(runs):
    """traces.html from {run: rows}: one file that refers to no other. Every "<" of the data is written as an escape, and the content policy
    admits the page's own script alone, so that no text of a trace can become markup or run. What would exceed about 18 MB is cut:
    first the middle of long texts, then questions, evenly."""
    total = sum(map(len, runs.values()))
    rows = [page_row(row, i) for i, run in enumerate(runs.values()) for part in by_question(run).values() for row in part]
    for longest in (100_000, 30_000, 10_000, 3_000, 1_000, 300):
        if sum(400 + sum(60 + min(len(segment[1]), longest) for segment in row["segments"]) for row in rows) <= PAGE_BYTES:
            break
    for row in rows:
        for segment in row["segments"]:
            segment[1] = shorten(segment[1], longest)
    while True:
        notes = "" if len(rows) == total else f"{len(rows)} of {total} traces, the rest is in traces.jsonl"
        text = json.dumps({"runs": list(runs), "rows": rows, "notes": notes}, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        if len(text.encode()) <= PAGE_BYTES:
            break
        places = {key: i for i, key in enumerate(dict.fromkeys((row["run"], row.get("step"), row["id"]) for row in rows))}
        rows = [row for row in rows if places[row["run"], row.get("step"), row["id"]] % 2 == 0]      # a group stays whole
    page = (Path(__file__).parent / "traces_template.html").read_text(encoding="utf-8")
    script = page[page.rindex("<script>") + len("<script>"):page.rindex("</script>")]
    page = page.replace("__SCRIPT_HASH__", "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())
    before, after = page.split("__DATA__")
    return before + text + after


def rl_groups(folder, most=800):
    """Whole groups of an RL run's traces.jsonl, from evenly spaced steps up to the last, as rows for the page."""
    if not all((folder / name).is_file() for name in ("traces.jsonl", "metrics.jsonl")):      # a stage of the evaluation may be called rl too
        return []
    rows, config = read_jsonl(folder / "traces.jsonl"), json.loads((folder / "config.json").read_text())
    tasks = {task.id: task for task in load_tasks([file for file in config.get("tasks", []) if Path(file).is_file()])}
    chosen = set(sorted({row["step"] for row in rows})[::-max(1, math.ceil(len(rows) / most))])
    found = []
    for row in rows:
        if row["step"] in chosen and row["task_id"] in tasks:
            task = tasks[row["task_id"]]
            found.append({**row, "id": task.id, "question": task.question, "gold": task.answer, "answer": find_answer(row["text"]) or "",
                          "tools": dict(Counter(call.tag for call in find_calls(row["text"])))})
    return found


# ----------------------------------------------------------------------------------------------------------------------------------
# All of it


def write_report(folder, stages, seconds, args):
    """Write report.json, report.md, curves.png and traces.html into `folder` -> the final table.

    stages: {name: folder with scores.json and traces.jsonl}, in order; names that end in _no_tools are kept apart. seconds: of the evaluation,
    {"eval": s}; those of the other steps come from `folder`/seconds.json when it is there. args: evaluate.py's options, for the text."""
    numbers_of = {name: json.loads((out / "scores.json").read_text()) for name, out in stages.items()}
    runs = {name: read_jsonl(out / "traces.jsonl") for name, out in stages.items()}
    names = list(stages)
    apart = [name for name in names if name.endswith("_no_tools")]
    together = [name for name in names if name not in apart]
    pairs = list(zip(together, together[1:])) + [(together[0], together[-1])] * (len(together) > 2)
    greedy = {name: [row for row in rows if row["sample"] == 0] for name, rows in runs.items()}
    differences = {f"{b} - {a}": paired_difference(greedy[b], greedy[a]) for a, b in pairs + [(name, name.removesuffix("_no_tools")) for name in apart]}
    steps = json.loads((folder / "seconds.json").read_text()) if (folder / "seconds.json").is_file() else {}
    steps.pop("evaluate", None)                                         # speedrun.sh's name for what is measured here
    report = {"stages": {name: numbers_of[name] for name in together}, "no_tools": {name: numbers_of[name] for name in apart},
              "differences": {pair: d for pair, d in differences.items() if d}, "seconds": {**steps, **seconds}, "machine": machine(),
              "commit": ", ".join(dict.fromkeys(s.get("commit", "unknown") for s in numbers_of.values()))}  # of the code that made the numbers
    write_atomic(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_atomic(folder / "report.md", report_text(report, numbers_of, args))
    draw_curves(folder, numbers_of)
    groups = rl_groups(folder / "rl")
    write_atomic(folder / "traces.html", trace_page({**runs, **({"rl training": groups} if groups else {})}))
    return final_table(numbers_of)
