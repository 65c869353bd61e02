"""evaluate.py and report.py: honest statistics, and a run end to end: resumable, shardable, served or local, with tools or without."""
import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch

import evaluate
import report
from coa_format import PROFILES, encode, eos_id, observation, parse, prompt, prompt_ids
from llm import LLM, LLMError
from hf import InputError, train_tokenizer
from model import PRESETS, Transformer, load_tokenizer, save_model
from sampler import Episode
from tasks import Task
from tools import add_tool_arguments, make_toolbox

ROOT = Path(__file__).resolve().parent.parent


def row(i, score, sample=0, **columns):
    return {"id": f"t{i}", "suite": "mhqa", "sample": sample, "question": "q", "gold": "g", "answer": "a" if score else "b", "score": float(score), "end_reason": "answered",
            "violations": 0, "turns": 1, "tool_calls": 2, "tools": {"wiki_search": 2}, "tokens_written": 10, "tokens_read": 30, "metric": "em", "double_check": None,
            "wording": ("sft", "test")[i % 2], "text": "<answer>a</answer>", **columns}


# ----------------------------------------------------------------------------------------------------------------------------------
# Statistics


@pytest.mark.parametrize("n", (1, 2, 5, 6))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_answer(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert report.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased_in_simulation():
    rng, p, n, k = np.random.default_rng(0), 0.3, 8, 3
    estimates = [report.pass_at_k(n, int(c), k) for c in rng.binomial(n, p, size=20_000)]
    assert np.mean(estimates) == pytest.approx(1 - (1 - p) ** k, abs=4 * np.std(estimates) / math.sqrt(len(estimates)))


def test_pass_at_more_than_was_sampled_is_refused():
    with pytest.raises(ValueError, match="pass@4 needs at least 4"):
        report.pass_at_k(3, 1, 4)


def test_bootstrap_interval_covers_the_truth_at_its_nominal_rate():
    rng, hits, trials = np.random.default_rng(1), 0, 400
    for i in range(trials):
        low, high = report.bootstrap_interval(rng.random(80) < 0.6, resamples=300, seed=i)
        hits += low <= 0.6 <= high
    assert 0.915 <= hits / trials <= 0.975                                           # 0.95 within three standard errors of the simulation


def test_paired_difference_is_taken_on_common_questions_only():
    a, b = [row(i, i % 3 != 0) for i in range(60)], [row(i, i % 3 == 1) for i in range(30, 90)]
    difference = report.paired_difference(a, b)
    assert difference["n"] == 30 and difference["mean"] == pytest.approx(1 / 3) and difference["ci95"][0] > 0
    assert report.paired_difference(a, [row(99, 1)]) is None


def test_pairing_narrows_the_interval():
    rng = np.random.default_rng(2)
    hard = rng.random(300)
    a, b = [row(i, h < 0.6) for i, h in enumerate(hard)], [row(i, h < 0.5) for i, h in enumerate(hard)]
    paired, alone = report.paired_difference(a, b)["ci95"], report.bootstrap_interval([r["score"] for r in a])
    assert paired[1] - paired[0] < 0.75 * (alone[1] - alone[0])


def test_best_of_k_never_sees_the_gold():
    votes = [row(0, 0, 1, answer="x"), row(0, 1, 2, answer="Y."), row(0, 1, 3, answer="y"), row(0, 0, 4, answer="")]
    assert report.majority(votes) is votes[1]
    assert report.majority([row(0, 0, 1, answer=""), row(0, 0, 2, answer="")])["sample"] == 1
    checked = [row(0, 0, 1), row(0, 1, 2, double_check=4), row(0, 0, 3, double_check=3)]
    assert report.own_choice(checked) is checked[1]


@pytest.mark.parametrize("metric, answers, winner", [
    ("em", ["-3", "3", "3.0"], 1), ("em", ["12", "1/2", "1/2"], 1), ("em", ["15", "1.5", "1.50"], 1), ("em", ["0", "0.0", "x"], 0), ("judge", ["x", "The Y.", "y"], 1),
    ("math", ["\\boxed{x+1}", "\\boxed{x-1}", "$x - 1$"], 1), ("math", ["12", "\\frac{1}{2}", "\\boxed{\\frac{1}{2}}"], 1), ("all tests", ["print(a+b)", "print(a-b)", "print(a-b)"], 1)])
def test_votes_that_differ_in_value_are_not_added_up(metric, answers, winner):
    rows = [row(0, 0, s, answer=answer, metric=metric) for s, answer in enumerate(answers, 1)]
    assert report.majority(rows) is rows[winner]


def test_a_chain_s_score_for_itself_stands_in_its_last_double_check():
    task = Task("t", "q", "a", "gaia", "web")
    game = "<wiki_search>game</wiki_search>" + observation("The score was 4-1.")
    checks = "<double_check>The score is 4.</double_check>\n<plan>again</plan>\n<double_check>The score is 2.</double_check>\n"
    for text, score in ((game, None), (checks + game, 2), ("<double_check>The score is 3.</double_check>\n<double_check>unsure</double_check>\n", None)):
        (graded,) = evaluate.graded([task], [{**evaluate.empty_row("t", 0), "text": text + "<answer>a</answer>"}], None)
        assert graded["double_check"] == score


def test_numbers_keep_failed_questions_in_every_denominator():
    rows = [row(0, 1, em=True, f1=1.0), row(1, 0, answer="", end_reason="token_cap"), row(2, 0, answer="", end_reason="server_error"), row(3, 0, em=False, f1=0.5)]
    x = report.numbers(rows)
    assert x["mean"] == 0.25 and x["em"] == 0.25 and x["f1"] == 0.375 and x["n"] == 4
    assert x["per_solved"] == {"tool_calls": 8.0, "tokens_written": 40.0, "tokens_read": 120.0}
    assert x["ends"] == {"answered": 2, "token_cap": 1, "server_error": 1}


def test_em_and_partial_are_averages_over_the_questions_that_have_them():
    looked_up = [row(0, 1, em=True, em_first=True, f1=1.0, cover_em=True), row(1, 0, answer=""), row(2, 1, metric="judge", em=False, em_first=False, f1=0.5, cover_em=False)]
    others = [row(3, 1, metric="math"), row(4, 0, metric="all tests", partial=0.5), row(5, 0, metric="public tests", answer="")]
    x = report.numbers(looked_up + others)
    assert x["mean"] == 0.5 and x["em"] == x["em_first"] == x["cover_em"] == pytest.approx(1 / 3) and x["f1"] == 0.5 and x["partial"] == 0.25
    table = report.quality_table({"sft": report.scores([{**r, "suite": "gaia" if r in looked_up else "code"} for r in looked_up + others])}).split("\n")
    head, gaia = ([cell.strip() for cell in line.split("|")] for line in (table[0], next(line for line in table if "| gaia |" in line)))
    assert gaia[head.index("em")] == "33.3 %"                                         # beside the judge's score


def test_sampled_rows_give_mean_pass_and_best_and_leave_greedy_alone():
    rows = [row(i, 0) for i in range(4)] + [row(i, s <= i, s, judges_choice=s == 1) for i in range(4) for s in range(1, 5)]
    x = report.numbers(rows)
    assert x["mean"] == 0 and x["mean_at_k"] == pytest.approx((0 + 1 + 2 + 3) / 16) and x["k"] == 4
    assert x["pass_at"] == {1: pytest.approx(6 / 16), 2: pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4), 3: pytest.approx((0 + 3 / 4 + 1 + 1) / 4), 4: 0.75}
    assert x["best_at_k"]["judge"] == 0.75


# ----------------------------------------------------------------------------------------------------------------------------------
# The report and its check


def good_report():
    stage = {"mean": 0.5, "ci95": [0.4, 0.6], "n": 4, "suites": {"mhqa": {"mean": 0.5, "n": 4, "tool_calls": 1.5}}, "tool_calls": 1.5, "tokens": 90.0, "violations": 0.0}
    return json.loads(json.dumps({"stages": {"base": {**stage, "mean": 0.0, "ci95": [0.0, 0.1]}, "sft": stage, "rl": stage}, "seconds": {"sft": 1.0}, "machine": "m", "commit": "c"}))


def test_a_good_report_passes(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(good_report()))
    assert report.check_report(tmp_path) == []


@pytest.mark.parametrize("path, value, complaint", [
    (("stages", "sft", "mean"), 1.5, "sft.mean"), (("stages", "sft", "mean"), None, "sft.mean"), (("stages", "sft", "ci95"), [0.6, 0.7], "sft.ci95"), (("stages", "sft", "n"), 5, "add up"),
    (("stages", "rl", "tokens"), "many", "rl.tokens"), (("seconds", "sft"), -1, "seconds.sft"), (("commit",), "", "commit"), (("stages", "rl"), None, "rl"),
    (("stages", "sft", "mean"), 0.0, "sft"), (("stages", "rl", "suites", "mhqa", "tool_calls"), 0, "no tool call was executed")])
def test_a_bad_report_is_refused(tmp_path, path, value, complaint):
    data = good_report()
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None and path[-1] == "rl":
        del place["rl"]
    else:
        place[path[-1]] = value
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert any(complaint in problem for problem in report.check_report(tmp_path))


def test_sft_that_does_not_beat_base_is_refused(tmp_path):
    data = good_report()
    data["stages"]["base"] = data["stages"]["sft"]
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert report.check_report(tmp_path) == ["sft (50.0 %) does not beat base (50.0 %)"]


def test_rl_groups_come_whole_and_from_steps_up_to_the_last(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "question": "who?", "answer": "x"}\n{"id": "b", "question": "when?", "answer": "y"}\n')
    (tmp_path / "config.json").write_text(json.dumps({"tasks": [str(tmp_path / "tasks.jsonl")]}))
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps({"step": step, "advantage": 0.5, "task_id": task, "sample": s, "suite": "mhqa", "reward": 1, "score": 1, "end_reason": "answered",
                                                               "turns": 1, "tool_calls": 0, "violations": 0, "text": "<answer>x</answer>"}) + "\n" for step in range(1, 11) for task in "ab" for s in range(4)))
    assert report.rl_groups(tmp_path) == []                                        # a stage of the evaluation that is called rl: no training log beside it
    (tmp_path / "metrics.jsonl").write_text("")
    rows = report.rl_groups(tmp_path, most=24)
    assert sorted({row["step"] for row in rows}) == [2, 6, 10] and len(rows) == 24
    assert all(len(group) == 12 for group in report.by_question(rows).values()) and rows[0]["question"] == "who?"
    assert report.rl_groups(tmp_path / "absent") == [] and "who?" in report.trace_page({"rl training": rows})


def test_numbers_keep_the_commit_that_made_them(tmp_path, monkeypatch):
    out, tasks, commits = tmp_path / "eval", [Task("t", "q", "a", "mhqa", "mhqa")], iter(["one", "two"])
    monkeypatch.setattr(evaluate, "commit", lambda: next(commits))
    args, ranks = argparse.Namespace(fresh=False, chunk=9, samples=0, tasks=["t"], turns=1, total_tokens=9, prompt="brief", seed=0), SimpleNamespace(rank=0, world=1, is_main=True)
    toolbox, answer = SimpleNamespace(close=lambda: None), lambda *_: [{**evaluate.empty_row("t", 0), "text": "<answer>a</answer>", "end_reason": "answered"}]
    for name in ("base", "sft", "base"):                                              # base is done by then
        evaluate.run_stage(out / name, {"stage": name}, tasks, lambda: (answer, toolbox), args, ranks, None)
    report.write_report(tmp_path, {name: out / name for name in ("base", "sft")}, {"eval": 1.0}, args)
    made = json.loads((tmp_path / "report.json").read_text())
    assert made["commit"] == "one, two" and [s["commit"] for s in made["stages"].values()] == ["one", "two"] and report.validate_report(made) == []
    assert "Commit one, two." in (tmp_path / "report.md").read_text()


def test_curves_are_drawn_from_whatever_logs_exist(tmp_path):
    stage = {"mean": 0.5, "ci95": [0.4, 0.6]}
    report.draw_curves(tmp_path, {"base": stage})
    small = (tmp_path / "curves.png").stat().st_size
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.2, "dev": null}\n{"step": 2, "reward": 0.3, "dev": 0.25}\n')
    report.draw_curves(tmp_path, {"base": stage, "rl": stage})
    assert (tmp_path / "curves.png").stat().st_size > small


# ----------------------------------------------------------------------------------------------------------------------------------
# Pieces of answering


def test_trim_keeps_plans_and_reflections_then_the_newest_in_order():
    old, new = (f"<think>{n}</think>\n<wiki_search>{n}</wiki_search>{observation(n * 50)}" for n in ("a", "b"))
    text = f"<think>start</think>\n<plan>p</plan>\n{old}<reflection>r</reflection>\n{new}"
    short = evaluate.trim(text, 175, len)
    assert [s.tag for s in parse(short)] == ["plan", "reflection", "think", "wiki_search", "observation"] and "bbb" in short and "aaa" not in short
    assert len(short) <= 175 and evaluate.trim(text, 10_000, len) == text
    assert [s.tag for s in parse(evaluate.trim(text, 30, len))] == ["reflection"]


@pytest.mark.parametrize("text, reason, stop", [
    ("<think>x</think>\n<wiki_search>q", None, "</wiki_search>"), ("<answer>42", None, "</answer>"), ("<think>done", None, ""), ("", None, ""), ("<code>\n```py\nx", "</code>", "</code>"),
    ("I will not <web_search> but\n<wiki_search>q", None, "</wiki_search>"), ("<answer>x</answer>", None, "")])
def test_the_stop_string_that_a_server_took_off_is_put_back(text, reason, stop):
    assert evaluate.restore_stop(text, reason, ["</wiki_search>", "</web_search>", "</code>", "</answer>", "<observation>"]) == stop


def test_a_subset_is_fixed_and_even_over_suites():
    tasks = [Task(f"{s}-{i}", "q", "a", s, "mhqa") for s in ("x", "y", "z") for i in range(50)]
    chosen = evaluate.subset(tasks, 30)
    assert [sum(t.data_source == s for t in chosen) for s in ("x", "y", "z")] == [10, 10, 10]
    assert {t.id for t in evaluate.subset(tasks[::-1], 30)} == {t.id for t in chosen} and {t.id for t in chosen} <= {t.id for t in evaluate.subset(tasks, 60)}
    assert evaluate.subset(tasks, 0) == tasks


def options(**changes):
    return argparse.Namespace(**{**dict(prompt="full", declare=[], turns=4, new_tokens=64, total_tokens=400, top_p=1.0, seed=0), **changes})


def test_baselines_are_prompts():
    task = Task("t", "Who?", "a", "gaia", "web", prompt="The row's own prompt. Who?")
    assert evaluate.task_prompt(task, options(), "coa") == task.prompt
    react = evaluate.task_prompt(task, options(), "react")
    assert "<web_search>" in react and "<plan>" not in react and "<reflection>" not in react and react.endswith("Who?")
    direct = evaluate.task_prompt(task, options(), "direct")
    assert "search" not in direct and "<answer>" in direct and evaluate.answer_limits(options(), "direct").turns == 1


def test_an_unseen_tool_is_declared_beside_the_profile_s_own():
    task = Task("t", "Who?", "a", "gaia", "web", prompt="own")
    text = evaluate.task_prompt(task, options(declare=["code"]), "coa")
    assert "<code>" in text and "<crawl_page>" in text and PROFILES["web_code"].tools == ("web_search", "crawl_page", "code")
    assert PROFILES["web_code"].agents[-1] == "answer" and "code" not in PROFILES["web"].agents


class Screen(list):
    write, flush = list.append, lambda self: None


@pytest.mark.parametrize("colour", (False, True))
def test_ask_never_sends_a_trace_s_control_characters_to_the_terminal(colour):
    screen = Screen()
    painter = evaluate.Painter(screen, colour)
    text = "<think>a\x1b]0;owned\x07\x1b[2J\u202eb</think>\n<observation>\r\x08x\n</observation>\n\n<answer>Par"
    for piece in (text[i:i + 3] for i in range(0, len(text), 3)):
        painter.write(piece)
    painter.write("is</answer>", last=True)
    shown = "".join(screen)
    assert not re.search(r"[\x07\x08\r\u202e]|\x1b\]|\x1b\[2J", shown)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain.startswith("<think>a") and plain.endswith("<answer>Paris</answer>") and (plain == shown) is not colour


# ----------------------------------------------------------------------------------------------------------------------------------
# End to end: a tiny model that has learnt six chains by heart, on its own pages


class Demo:
    """Pages, tasks, a model folder, and how to run evaluate.py on them."""

    def __init__(self, folder):
        self.folder, self.corpus, self.tasks, self.model = folder, folder / "pages.jsonl", folder / "tasks.jsonl", folder / "model"
        self.lands = [f"Land{c}" for c in "abcdef"]
        self.corpus.write_text("".join(json.dumps({"id": i, "title": land, "url": f"https://x.example/{i}", "text": f"The capital of {land} is City{land[-1]}."}) + "\n"
                                       for i, land in enumerate(self.lands)))
        self.tasks.write_text("".join(json.dumps({"id": f"t{i}", "question": f"Capital of {land}?", "answer": f"City{land[-1]}", "data_source": "mhqa" if i % 2 else "geo", "agent": "mhqa"}) + "\n"
                                      for i, land in enumerate(self.lands)))
        self.learn()

    def chain(self, land, toolbox):
        query = f"capital of {land}"
        call = f"<think>look up {land}</think>\n<wiki_search>{query}</wiki_search>"
        return call + observation(toolbox.session("").run("wiki_search", query)) + f"<think>found</think>\n<answer>City{land[-1]}</answer>"

    def learn(self):
        parser = argparse.ArgumentParser()
        add_tool_arguments(parser)
        with make_toolbox(parser.parse_args(["--corpus", str(self.corpus)])) as toolbox:
            chains = [self.chain(land, toolbox) for land in self.lands]
        prompts = [prompt("mhqa", f"Capital of {land}?", brief=True) for land in self.lands]
        tokenizer = train_tokenizer(chains + prompts, 320, [f"<{c}{t}>" for t in (*PROFILES["mhqa"].agents, "observation") for c in ("", "/")])
        config = dataclasses.replace(PRESETS["tiny-1m"], vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        torch.manual_seed(0)
        model, rows = Transformer(config), []
        for text, chain in zip(prompts, chains):
            start, encoded = prompt_ids(text, tokenizer), encode(chain, tokenizer)
            rows.append((start + encoded.ids, [False] * len(start) + list(encoded.loss_mask)))
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [eos_id(tokenizer)] * (longest - len(ids)) for ids, _ in rows])
        mask = torch.tensor([list(map(bool, mask)) + [False] * (longest - len(mask)) for _, mask in rows])
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
        for step in range(400):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1, (step + 1) / 20)
            loss = -model.token_logprobs(model(ids[:, :-1]), ids[:, 1:], mask[:, 1:]).sum() / mask.sum()
            if loss < 0.01:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss < 0.05
        save_model(model, tokenizer, self.model)

    def command(self, out, *arguments):
        return [*arguments[:0], "evaluate.py", "--model", f"sft={self.model}", "--tasks", str(self.tasks), "--corpus", str(self.corpus), "--out", str(out), "--total-tokens", "400",
                "--subset", "0", "--chunk", "2", *arguments]

    def run(self, out, *arguments, launcher=(), code=0):
        result = subprocess.run([sys.executable, *launcher, *self.command(out, *arguments)], cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment())
        assert result.returncode == code, result.stdout + result.stderr
        return result


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    torch.set_num_threads(1)
    return Demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def finished(demo, tmp_path_factory):
    """The output folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("finished") / "eval"
    demo.run(out)
    return out


def results(out, stage="sft"):
    """All numbers of a run; timesand the commit left out."""
    report_json = json.loads((out.parent / "report.json").read_text())
    return ((out / stage / "traces.jsonl").read_text(), (out / stage / "scores.json").read_text(), {k: v for k, v in report_json.items() if k not in ("seconds", "commit")})


@pytest.mark.long
def test_a_run_solves_what_the_model_knows_with_live_tools_and_fails_without(demo, tmp_path):
    result = demo.run(tmp_path / "eval", "--subset", "6", "--samples", "2", "--temperature", "0.01")
    stages = json.loads((tmp_path / "report.json").read_text())
    assert report.validate_report(stages) == []
    sft = stages["stages"]["sft"]
    assert sft["mean"] == 1.0 and sft["tool_calls"] == 1.0 and sft["pass_at"]["2"] == 1.0 and set(sft["suites"]) == {"mhqa", "geo"}
    assert set(stages["stages"]) == {"sft"} and stages["no_tools"]["sft_no_tools"]["n"] == 6
    traces = [json.loads(line) for line in (tmp_path / "eval" / "sft_no_tools" / "traces.jsonl").open()]
    assert all("tool unavailable" in row["text"].lower() for row in traces if row["tool_calls"])
    assert "| sft | 6 | 100.0 %" in result.stdout
    for name in ("report.md", "curves.png", "traces.html"):
        assert (tmp_path / name).stat().st_size > 1000
    assert "seconds" in stages and stages["seconds"]["eval"] > 0


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_numbers_and_a_finished_one_does_nothing(demo, finished, tmp_path):
    process = subprocess.Popen([sys.executable, *demo.command(tmp_path / "b" / "eval")], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    parts = tmp_path / "b" / "eval" / "sft" / "parts"
    deadline = time.monotonic() + 200
    while not list(parts.glob("0*.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {file: file.stat().st_mtime_ns for file in parts.glob("0*.jsonl")}
    assert done and not (tmp_path / "b" / "report.json").exists()
    demo.run(tmp_path / "b" / "eval")
    assert {file: file.stat().st_mtime_ns for file in done} == done                   # what was done was not done again
    assert results(finished) == results(tmp_path / "b" / "eval")
    before = (tmp_path / "b" / "eval" / "sft" / "traces.jsonl").stat().st_mtime_ns
    assert "questions in" not in demo.run(tmp_path / "b" / "eval").stdout and (tmp_path / "b" / "eval" / "sft" / "traces.jsonl").stat().st_mtime_ns == before
    refused = demo.run(tmp_path / "b" / "eval", "--turns", "3", code=2)
    assert refused.stderr.count("\n") == 1 and "turns (8 -> 3)" in refused.stderr


@pytest.mark.long
def test_two_ranks_give_the_numbers_of_one(demo, finished, tmp_path):
    demo.run(tmp_path / "b" / "eval", launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"))
    assert results(finished) == results(tmp_path / "b" / "eval")


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import torch
from model import load_model, load_tokenizer
torch.set_num_threads(1)
model, tokenizer = load_model(sys.argv[1]), load_tokenizer(sys.argv[1])

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        start, finish, text = len(ids), "length", ""
        with torch.inference_mode():                      # the whole text again for every token: slow, and nothing of the sampler in it
            while len(ids) - start < body["max_tokens"]:
                ids.append(int(model.logits(model(torch.tensor([ids]))[0, -1]).argmax()))
                if ids[-1] == tokenizer.eos_token_id:
                    finish = "stop"
                    break
                text = tokenizer.decode(ids[start:])
                found = [text.index(stop) for stop in body.get("stop", []) if stop in text]
                if found:
                    text, finish = text[:min(found)], "stop"
                    break
        reply = {"choices": [{"text": text, "finish_reason": finish}], "usage": {"prompt_tokens": start, "completion_tokens": len(ids) - start}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.mark.long
def test_a_served_model_gives_the_local_path_s_greedy_answers(demo, finished, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(demo.model), str(port)], cwd=ROOT, env=environment())
    try:
        for _ in range(600):
            try:
                requests.post(f"http://127.0.0.1:{port}", json={"prompt": "x", "max_tokens": 1}, timeout=30)
                break
            except requests.ConnectionError:
                time.sleep(0.2)
        demo.run(tmp_path / "served" / "eval", "--endpoint", f"http://127.0.0.1:{port}/v1", "--tokenizer", str(demo.model), "--concurrency", "2")
    finally:
        server.terminate()
        server.wait()
    local, served = ([json.loads(line) for line in (out / "sft" / "traces.jsonl").open()] for out in (finished, tmp_path / "served" / "eval"))
    tokenizer = load_tokenizer(demo.model)
    for ours, theirs in zip(local, served):
        again = encode(ours["text"], tokenizer, eos=False).ids
        assert ours["text"] == theirs["text"], f"{ours['id']}: ids differ, the text is read in {len(again)} tokens: {theirs['text']}"
        assert (ours["answer"], ours["score"], ours["end_reason"], ours["tool_calls"]) == (theirs["answer"], theirs["score"], theirs["end_reason"], theirs["tool_calls"])
    assert sum(row["score"] for row in served) == 6


@pytest.mark.long
def test_a_dead_server_is_an_error_not_a_score_of_zero(demo, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = demo.run(tmp_path / "eval", "--endpoint", f"http://127.0.0.1:{port}/v1", "--limit", "1", code=2)
    assert result.stderr.count("\n") == 1 and "goes on where it stopped" in result.stderr and not (tmp_path / "report.json").exists()


def failing(monkeypatch, problem, down=False):
    """Servers of any address that answer right, but fail with `problem` where a request is about Landb; down: and from then on."""
    seen = []

    def request(self, path, body):
        if "Landb" in str(body) or down and seen:
            seen.append(body)
            raise LLMError(f"http://x/v1{path}: {problem}")
        return {"choices": [{"text": "<answer>Citya", "finish_reason": "stop", "message": {"content": '{"judgement": "correct"}'}}]}
    monkeypatch.setattr(LLM, "_request", request)


def ask_two(method="coa"):
    tasks = [Task(land, f"Capital of {land}?", "Citya", "mhqa", "mhqa") for land in ("Landa", "Landb")]
    toolbox = SimpleNamespace(session=lambda question: SimpleNamespace(run=lambda *_: "found"))
    return tasks, lambda: evaluate.served_chains(toolbox, None, "m", options(endpoint="http://x/v1", timeout=1.0, concurrency=2, trim=False, prompt="brief"), method, tasks, [0], 0.0)


@pytest.mark.parametrize("problem", ["HTTP 503: loading\nwait", "HTTP 404: no such model", "ConnectionError: refused"])
def test_an_outage_is_an_error_even_where_other_questions_were_answered(monkeypatch, problem):
    failing(monkeypatch, problem, down=True)
    tasks, answer = ask_two()
    for run in (answer, ask_two("team")[1], lambda: evaluate.graded(tasks, [{**row(0, 1), "id": task.id} for task in tasks], evaluate.Server("http://x/v1", "m"))):
        with pytest.raises(InputError, match="goes on where it stopped") as error:
            run()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("problem", ["HTTP 400: too long", "HTTP 413: too long", "HTTP 422: too long", "HTTP 500: out of memory", "ReadTimeout: 600 s"])
def test_a_question_that_a_server_cannot_take_counts_as_wrong(monkeypatch, problem):
    failing(monkeypatch, problem)
    tasks, answer = ask_two()
    assert [r["end_reason"] for r in answer()] == ["answered", "server_error"]
    judged = evaluate.graded(tasks, [{**row(0, 1), "id": task.id} for task in tasks], evaluate.Server("http://x/v1", "m"))
    assert [(r["score"], r["judge_failed"]) for r in judged] == [(1.0, False), (0.0, True)]
    failing(monkeypatch, problem)
    monkeypatch.setattr(evaluate, "task_prompt", lambda *_: "Landb")                  # all of them: then it is not the question
    with pytest.raises(InputError, match="no request succeeded"):
        answer()


@pytest.mark.long
def test_ask_streams_one_chain_with_live_tools_in_plain_text_when_piped(demo, tmp_path):
    result = demo.run(tmp_path / "eval", "--ask", "Capital of Landc?")
    assert "<wiki_search>capital of Landc</wiki_search>" in result.stdout and "The capital of Landc is Cityc." in result.stdout
    assert "\x1b" not in result.stdout and result.stdout.rstrip().endswith("answer: Cityc   [answered, 1 tool calls]")


def test_a_full_context_is_trimmed_and_the_chain_goes_on():
    plan, call, block = "<plan>look it up</plan>\n", "<wiki_search>a</wiki_search>", observation(" ".join(map(str, range(80))))
    last, task = "<think>found</think>\n<answer>Citya</answer>", Task("t", "Capital of Landa?", "Citya", "mhqa", "mhqa")
    tokenizer = train_tokenizer([plan + call + block, last], 300, ["<plan>", "</plan>"])
    own = prompt_ids(prompt("mhqa", task.question, brief=True), tokenizer)

    def run(total_tokens, *texts, trim=True):
        """(row, requests) of episodes that end at a cap with these (text, pending observation), and then one with the answer."""
        said, seen = iter(texts), []

        class Recorder:
            def rollout(self, requests, **_):
                seen.extend(requests)
                text, pending = next(said, (last, None))
                encoded, start = encode(text, tokenizer, eos=False), requests[0].prompt_ids
                return [Episode(start + encoded.ids, [0] * len(start) + list(encoded.source), [], "answered" if pending is None else "token_cap", text, len(start), "t", 0, 1, 1, 0, 0, 0.0, pending or "")]
        recorder = Recorder()
        recorder.tokenizer = tokenizer
        (row,) = evaluate.sampled_chains(recorder, options(prompt="brief", trim=trim, total_tokens=total_tokens), "coa", [task], [0], 0.0)
        return row, seen

    def ids(text):
        return encode(text, tokenizer, eos=False).ids
    whole = len(own) + len(ids(plan + call + block))
    for text, pending in ((plan + call + block, ""), (plan + call, block)):           # full behind the observation; the observation did not fit
        row, seen = run(whole, (text, pending))
        assert row["text"] == plan + call + block + last and (row["trimmed"], row["turns"], row["tool_calls"], row["end_reason"]) == (1, 2, 2, "answered")
        assert seen[1].prompt_ids == own + ids(plan) and seen[1].limits.turns == 3 and row["tokens_read"] == len(ids(block))
        assert run(whole, (text, pending), trim=False)[0]["text"] == text
    row, seen = run(len(own) + 2 * (whole - len(own)), (plan + call, block))          # where there is room, the call goes on with its result
    assert seen[1].prompt_ids == own + ids(plan + call + block)
    row, seen = run(whole + 1, (plan + call + block, ""))                             # the cap on one generation: a served chain ends here too
    assert (row["end_reason"], row["turns"], len(seen)) == ("token_cap", 1, 1)


def test_a_missing_model_names_the_command_that_makes_it(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    result = subprocess.run([sys.executable, str(ROOT / "evaluate.py"), "--model", "sft=runs/demo/sft/model", "--tasks", "t.jsonl"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                            env=environment())
    assert result.returncode == 2 and "python sft.py" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments, complaint", [
    (("--model", "a/model", "b/model"), "two stages are called model"), (("--ask", "Who?", "--endpoint", "http://127.0.0.1:9/v1"), "--ask")])
def test_options_that_contradict_each_other_end_in_one_line(arguments, complaint):
    result = subprocess.run([sys.executable, "evaluate.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment())
    assert result.returncode == 2 and complaint in result.stderr and result.stderr.count("\n") == 1


def test_ask_answers_as_a_stage_would(monkeypatch, capsys):
    tokenizer, seen, loaded = train_tokenizer(["abc"], 300, ["<think>"]), [], []

    class Recorder:
        def rollout(self, requests, **_):
            seen.extend(requests)
            return [SimpleNamespace(text="<answer>Citya</answer>", end_reason="answered", tool_calls=0)]
    recorder = Recorder()
    recorder.tokenizer = tokenizer
    monkeypatch.setattr(evaluate, "load_model", lambda path, dtype, device: loaded.append((dtype, device.type)))
    monkeypatch.setattr(evaluate, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(evaluate, "Sampler", lambda *_, **__: recorder)
    parser = argparse.ArgumentParser()
    add_tool_arguments(parser)
    for method, declare, device in (("coa", [], "cpu"), ("coa", ["code"], "cuda"), ("direct", [], "cuda")):
        args = options(**vars(parser.parse_args(["--no-tools"])), agent="web", method=[method], declare=declare)
        evaluate.ask("Who?", "m", args, torch.device(device))
        assert seen[-1].prompt_ids == prompt_ids(evaluate.task_prompt(Task("ask", "Who?", "", "", "web"), args, method), tokenizer)
    assert [(r.profile, r.limits.turns) for r in seen] == [("web", 4), ("web_code", 4), ("web", 1)] and "answer: Citya" in capsys.readouterr().out
    assert loaded == [(torch.float32, "cpu"), (torch.bfloat16, "cuda"), (torch.bfloat16, "cuda")]
    with pytest.raises(InputError, match="agent profile 'nobody'"):
        evaluate.ask("Who?", "m", options(**vars(parser.parse_args(["--no-tools"])), agent="nobody", method=["coa"]), torch.device("cpu"))


def test_a_team_of_agents_on_a_server_is_a_baseline(monkeypatch):
    replies = iter(["Thought: first the capital.\nPlan: find the capital of Landa", "Thought: I search.\nQuery: capital of Landa", "Thought: found.\nAnswer: Citya"])

    class Served:
        usage = {"prompt_tokens": 7, "completion_tokens": 5}

        def chat(self, messages, **_):
            return next(replies)
    parser = argparse.ArgumentParser()
    add_tool_arguments(parser)
    task = Task("t", "Capital of Landa?", "Citya", "mhqa", "mhqa")
    with make_toolbox(parser.parse_args(["--no-tools"])) as toolbox:
        row = evaluate.team_chain(Served(), toolbox, task, 0, 0.0, options())
    assert (row["end_reason"], row["tool_calls"], row["tokens_read"]) == ("answered", 1, 7)
    assert evaluate.graded([task], [row], None)[0]["score"] == 1


def test_a_judge_that_names_no_attempt_chooses_none():
    class Judge:
        def __init__(self, reply):
            self.reply = reply

        def chat(self, messages, **_):
            return self.reply
    rows = [row(0, 0, s) for s in (1, 2)]
    assert evaluate.judge_choice(Judge("Attempt 2"), rows) == 1
    assert evaluate.judge_choice(Judge("neither"), rows) is None and evaluate.judge_choice(Judge("7"), rows) is None


def test_a_dead_judge_is_an_error_not_a_score_of_zero():
    class Dead:
        base_url = "http://127.0.0.1:9/v1"

        def chat(self, messages, **_):
            raise LLMError("refused")
    task = Task("t", "q", "a", "gaia", "web")
    with pytest.raises(InputError, match="no readable verdict"):
        evaluate.graded([task], [{**row(0, 1), "id": "t"}], Dead())


def test_a_missing_report_names_the_command_that_makes_it():
    with pytest.raises(InputError, match="python evaluate.py"):
        report.check_report("/nonexistent")
