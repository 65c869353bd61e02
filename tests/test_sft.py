"""sft.py: what is trained, that a batch means the same however it is cut, and that a run can be killed at any moment."""
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch

import sft
from coa_format import ROLES, TOOLS, encode, eos_id, prompt, prompt_ids
from conftest import ROOT
from hf import InputError, read_jsonl, train_tokenizer
from model import PRESETS, Transformer, load_model, load_tokenizer, save_model
from parallel import Ranks, write_atomic, write_jsonl

ONE = Ranks(0, 1, 1, torch.device("cpu"))
TAGS = [tag for name in [*ROLES, *TOOLS, "observation", "answer"] for tag in (f"<{name}>", f"</{name}>")]
NAMES = ["Kalomi", "Rutesa", "Vimoka", "Solute", "Tevira", "Misolo"]


# ---------------------------------------------------------------- a world small enough for a test: six towns, each with a number


def chain(name, number, thought="I look it up."):
    return (f"<think>{thought}</think>\n<wiki_search>{name} number</wiki_search>\n<observation>\nDoc 1 (Title: \"{name}\")\nThe number of {name} "
            f"is small.\n</observation>\n\n<think>I have it.</think>\n<answer>{number}</answer>")


def make_world(folder, hidden=32):
    """Files of a tiny demo in `folder`: base/, sft.jsonl, tasks.jsonl, corpus.jsonl. The chains answer a random digit from 1 to 3, the
    tasks want 1: what SFT makes of them is right a third of the time, so groups have spread."""
    rng = random.Random(0)
    rows = [{"instruction": prompt("mhqa", f"What is the number of {name}?", True), "input": "", "agent": "mhqa", "id": f"row-{i}",
             "output": chain(name, rng.randint(1, 3), rng.choice(["I look it up.", "I need the number, so I search for it first."]))}
            for i in range(16) for name in NAMES]
    write_jsonl(folder / "sft.jsonl", rows)
    write_jsonl(folder / "tasks.jsonl", [{"id": f"task-{i}", "question": f"What is the number of {name}?", "answer": "1", "agent": "mhqa",
                                          "data_source": "mhqa" if i % 2 else "web"} for i, name in enumerate(NAMES)])
    write_jsonl(folder / "corpus.jsonl", [{"id": name, "title": name, "url": f"https://example.org/{name}", "text": f"The number of {name} is small."}
                                          for name in NAMES])
    tokenizer = train_tokenizer([row["instruction"] + row["output"] for row in rows], 340, TAGS)
    config = dataclasses.replace(PRESETS["tiny-1m"], vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden,
                                 num_hidden_layers=2, head_dim=hidden // 4)
    torch.manual_seed(0)
    save_model(Transformer(config), tokenizer, folder / "base")
    return folder


def run(folder, script, *options, ranks=1, code=None, expect=0, kill_after=None):
    """Run a script in `folder` as a user would -> its output. code: Python to run in its place first. kill_after: SIGKILL then (seconds)."""
    command = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    starter = folder / f"start_{script}"
    start = f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n{code or ''}\nsys.argv[0] = {script!r}\n"
    write_atomic(starter, start + f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n")
    process = subprocess.Popen([*command, str(starter), *map(str, options)], cwd=folder, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=kill_after or 300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)                                              # and the ranks that it started
        output, _ = process.communicate()
        assert kill_after, output
    assert kill_after or process.returncode == expect, output
    return output


def timeless(path):
    """The rows of a metric log without what depends on the clock."""
    return [{key: value for key, value in row.items() if not key.endswith(("_seconds", "_per_second"))} for row in read_jsonl(path)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def rows(world):
    """Encoded rows of very unequal length."""
    texts = [("q" * (1 + 7 * i % 5), chain("Kalomi", i, "word " * (1 + 13 * i % 40)), f"row {i}") for i in range(8)]
    return sft.encode_rows(texts, load_tokenizer(world / "base"), 1024)[0]


# ---------------------------------------------------------------- rows


def test_only_what_the_model_wrote_is_trained_and_eos_is_the_last_of_it(world):
    tokenizer = load_tokenizer(world / "base")
    (row,), counts = sft.encode_rows([("Question", chain("Kalomi", 2), "x")], tokenizer, 1024)
    trained = tokenizer.decode(row["ids"][row["loss_mask"]].tolist())
    assert trained == ("<think>I look it up.</think>\n<wiki_search>Kalomi number</wiki_search><think>I have it.</think>\n<answer>2</answer>"
                       + tokenizer.eos_token)
    assert row["ids"][-1] == eos_id(tokenizer) and row["loss_mask"][-1]
    assert row["ids"].tolist() == prompt_ids("Question", tokenizer) + encode(chain("Kalomi", 2), tokenizer).ids
    assert counts["trained"] == row["loss_mask"].sum()


def test_rows_without_trained_tokens_and_broken_rows_are_refused_or_counted(world):
    tokenizer = load_tokenizer(world / "base")
    with pytest.raises(InputError, match="row 7: field 'output'"):
        sft.encode_rows([("q", "<observation>\nonly this\n</observation>\n\n", "f: row 7")], tokenizer, 1024)
    long_prompt, good = "q" * 500, chain("Kalomi", 1)
    rows, counts = sft.encode_rows([(long_prompt, good, "a"), ("q", good, "b"), ("q", good.replace("</observation>", ""), "c")], tokenizer, 60)
    assert [row is None for row in rows] == [True, False, True] and counts["cut"] >= 1
    assert counts["dropped: no trained token"] == 1 and counts["dropped: unclosed observation"] == 1


def test_three_kinds_of_row_give_the_same_text(tmp_path):
    text = chain("Kalomi", 2)
    before, after = text.split("\n<observation>\n")[0], text.split("</observation>\n\n")[1]
    observed = text.split("<observation>\n")[1].split("\n</observation>")[0]
    write_jsonl(tmp_path / "ours.jsonl", [{"instruction": "q", "input": "more", "output": text, "agent": "mhqa", "id": "1"}])
    write_atomic(tmp_path / "afm.json", json.dumps([{"instruction": "q\nmore", "input": "", "output": text, "system": "ignored"}]))
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "q\nmore"}, {"role": "assistant", "content": before},
                                                        {"role": "tool", "content": observed}, {"role": "assistant", "content": after}]}])
    texts = [sft.read_texts(tmp_path / name)[0][:2] for name in ("ours.jsonl", "afm.json", "chat.jsonl")]
    assert texts[0] == texts[1] == texts[2] == ("q\nmore", text)


@pytest.mark.parametrize("row, message", [
    ({"instruction": "q", "output": 3}, "jsonl:1: field 'output': expected text"), ({"output": "x"}, "jsonl:1: field 'instruction'"),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "user", "content": "q"}]}, "jsonl:1: field 'messages': expected roles"),
    ({"messages": [{"role": "user", "content": "q"}]}, "jsonl:1: field 'messages': expected roles"),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]}, "jsonl:1: field 'messages': expected a list of messages"),
    ({"messages": "q"}, "jsonl:1: field 'messages': expected a list of messages"), ({"instruction": "q", "input": ["x"], "output": "y"}, "jsonl:1: field 'input'")])
def test_a_bad_row_is_named(tmp_path, row, message):
    write_jsonl(tmp_path / "bad.jsonl", [row])
    with pytest.raises(InputError, match=message):
        sft.read_texts(tmp_path / "bad.jsonl")
    write_atomic(tmp_path / "bad.json", '["text"]')
    with pytest.raises(InputError, match="bad.json:1: expected a JSON object"):
        sft.read_texts(tmp_path / "bad.json")


# ---------------------------------------------------------------- order and schedule


def test_every_epoch_is_a_permutation_of_its_own_and_batches_join_seamlessly():
    first, second = sft.stream(0, 10, 10, 3), sft.stream(10, 20, 10, 3)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert sft.stream(0, 7, 10, 3) + sft.stream(7, 20, 10, 3) == first + second
    assert sft.stream(0, 10, 10, 4) != first


def test_schedule_warms_up_and_ends_near_zero():
    rates = [sft.learning_rate(step, 100, 1.0, 0.1, "cosine") for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0 and rates[-1] < 0.001
    assert all(a >= b for a, b in zip(rates[10:], rates[11:]))
    assert sft.learning_rate(55, 100, 1.0, 0.1, "linear") == pytest.approx(0.5)
    assert sft.learning_rate(99, 100, 1.0, 0.0, "constant") == 1.0


def test_a_preset_sets_the_papers_values_and_an_option_wins():
    args = sft.parse_arguments(["--preset", "mhqa", "--batch", "8"])
    assert (args.lr, args.epochs, args.batch, args.max_len) == (1.4e-5, 2.5, 8, 32768)


# ---------------------------------------------------------------- the loss is a function of the batch alone


def gradient(model, rows, micro_tokens):
    model.zero_grad()
    figures = sft.backward(model, rows, ONE, micro_tokens)
    return figures, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_order(world, rows, dtype, tolerance):
    model = load_model(world / "base", dtype)
    longest = max(len(row["ids"]) for row in rows)
    whole, expected = gradient(model, rows, 8 * longest)                                    # 1 x 8, padded to the longest
    for order, micro_tokens in ((rows, 2 * longest), (rows, 1), (rows[::-1], 8 * longest), (rows[3:] + rows[:3], 300)):
        figures, found = gradient(model, order, micro_tokens)
        assert figures["loss"] == pytest.approx(whole["loss"], rel=tolerance)
        assert (found - expected).norm() <= tolerance * expected.norm()
    assert whole["padding"] > 0.1                                                           # the rows are of very unequal lengths


def test_loss_is_the_mean_over_trained_tokens_of_the_whole_batch(world, rows):
    model, total, count = load_model(world / "base", torch.float64), 0.0, 0
    for row in rows:                                                                        # one by one, with the full softmax
        logprobs = model.logits(model(row["ids"][None].long()))[0].log_softmax(-1)
        for t in range(1, len(row["ids"])):
            if row["loss_mask"][t]:
                total -= float(logprobs[t - 1, row["ids"][t]].detach())
                count += 1
    assert gradient(model, rows, 500)[0]["loss"] == pytest.approx(total / count, rel=1e-10)
    assert float(sft.validation_loss(model, rows, ONE, 500)) == pytest.approx(total / count, rel=1e-10)


def test_observations_and_prompts_get_no_gradient(world):
    """Whatever stands at an untrained place, as a target, does not matter for the loss of the token before it."""
    model = load_model(world / "base", torch.float64)
    row = {"ids": torch.tensor([5, 6, 7, 8]), "loss_mask": torch.tensor([False, True, False, False])}
    other = {**row, "ids": torch.tensor([5, 6, 9, 10])}
    assert torch.equal(gradient(model, [row], 100)[1], gradient(model, [other], 100)[1])


# ---------------------------------------------------------------- the script

OPTIONS = ["--tasks", "sft.jsonl", "--model", "base", "--steps", 12, "--batch", 8, "--eval-every", 5, "--lr", 3e-3, "--checkpoint-seconds", 0]


def test_script_trains_exports_and_names_what_changed(world):
    output = run(world, "sft.py", *OPTIONS, "--out", "smoke")
    log = read_jsonl(world / "smoke" / "metrics.jsonl")
    assert [row["step"] for row in log] == list(range(1, 13)) and log[-1]["loss"] < log[0]["loss"]
    assert "validation_loss" in log[4] and "validation_loss" in log[-1] and "held out" in output
    assert load_tokenizer(world / "smoke" / "model").eos_token
    assert load_model(world / "smoke" / "model").config.hidden_size == 32
    assert "no rows to train on (" in (line := run(world, "sft.py", *OPTIONS, "--out", "short", "--max-len", 20, expect=2)) and "dropped: no trained token" in line
    assert "rows are longer than --max-len 60 and were cut" in run(world, "sft.py", *OPTIONS, "--steps", 1, "--out", "cut", "--max-len", 60)
    assert "error: smoke was made with other options: lr (0.003 -> 0.1)" in run(world, "sft.py", *OPTIONS, "--out", "smoke", "--lr", 0.1, expect=2)


def test_a_missing_input_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="sft.jsonl: no such file; `python distill.py` makes it"):
        sft.read_texts(sft.parse_arguments([]).tasks[0])


# Code that kills the process at a chosen moment.
KILL_IN_SAVE = """
import os, signal, parallel
save, calls = parallel.dcp.save, [0]
def dying(*args, **options):
    calls[0] += 1
    if calls[0] == {call}:
        {before}os.kill(os.getpid(), signal.SIGKILL)
    return save(*args, **options)
parallel.dcp.save = dying
"""
KILL_IN_LOG = """
import os, signal, parallel
log = parallel.MetricLog.log
def dying(self, *rows):
    if rows[0]["step"] == {step}:
        self.file.write('{{"step": {step}, "lo')
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, *rows)
parallel.MetricLog.log = dying
"""
KILLS = {"before a save": KILL_IN_SAVE.format(call=2, before=""), "half-way through a save": KILL_IN_SAVE.format(call=3, before="save(*args, **options); "),
         "while logging": KILL_IN_LOG.format(step=8)}


@pytest.mark.long
def test_killed_at_any_moment_the_same_command_gives_the_same_bits(world):
    run(world, "sft.py", *OPTIONS, "--out", "straight")
    for code in KILLS.values():
        run(world, "sft.py", *OPTIONS, "--out", "killed", code=code, expect=-9)
    run(world, "sft.py", *OPTIONS, "--out", "killed", kill_after=random.uniform(1, 8))
    run(world, "sft.py", *OPTIONS, "--out", "killed")
    assert "done, --fresh to redo" in run(world, "sft.py", *OPTIONS, "--out", "killed")
    assert timeless(world / "straight" / "metrics.jsonl") == timeless(world / "killed" / "metrics.jsonl")
    a, b = (load_model(world / name / "model").state_dict() for name in ("straight", "killed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def same(world, name, other, loss, weights):
    """Metric logs and final weights of two runs agree to these tolerances (relative, absolute)."""
    log = zip(read_jsonl(world / name / "metrics.jsonl"), read_jsonl(world / other / "metrics.jsonl"), strict=True)
    assert all(a["step"] == b["step"] and a["loss"] == pytest.approx(b["loss"], rel=loss) for a, b in log)
    a, b = (load_model(world / folder / "model").state_dict() for folder in (name, other))
    assert all((a[key] - b[key]).abs().max() <= weights for key in a)


@pytest.mark.long
def test_two_ranks_train_as_one_resume_and_export(world):
    from transformers import AutoModelForCausalLM
    run(world, "sft.py", *OPTIONS, "--out", "one")
    run(world, "sft.py", *OPTIONS, "--out", "two", ranks=2)
    same(world, "one", "two", 1e-5, 1e-4)                                                   # Adam divides by small numbers: 1e-7 in a gradient grows
    dying = KILL_IN_SAVE.format(call=6, before="")
    run(world, "sft.py", *OPTIONS, "--out", "killed two", code=dying, ranks=2, expect=1)
    run(world, "sft.py", *OPTIONS, "--out", "killed two", ranks=2)
    same(world, "two", "killed two", 1e-6, 1e-6)
    run(world, "sft.py", *OPTIONS, "--out", "moved", code=dying, expect=-9)
    run(world, "sft.py", *OPTIONS, "--out", "moved", ranks=2)                                # two ranks go on with what one began
    same(world, "one", "moved", 1e-5, 1e-4)
    ids = torch.arange(20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(world / "two" / "model", dtype=torch.float32)
    with torch.no_grad():
        ours = load_model(world / "two" / "model")
        assert (theirs(ids).logits - ours.logits(ours(ids))).abs().max() < 1e-4
