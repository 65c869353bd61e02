"""parallel.py: files are whole or absent, runs resume or refuse, batches are balanced, sharded equals plain."""
import dataclasses
import itertools
import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch

import parallel
from conftest import ROOT
from hf import InputError, read_jsonl
from model import PRESETS, ModelConfig, Transformer, load_model
from parallel import (MetricLog, Ranks, clip_gradients, collate, export_model, fingerprint, latest_checkpoint, load_checkpoint, make_optimizer,
                      micro_batches, save_checkpoint, shard_model, start_run, write_atomic, write_jsonl)

ONE = Ranks(0, 1, 1, torch.device("cpu"))
SMALL = dataclasses.replace(PRESETS["tiny-1m"], vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)


def small_model(seed=0):
    torch.manual_seed(seed)
    return Transformer(SMALL)


def train(model, optimizer, steps, first=0):
    """A few real updates, the batch of each a function of the step."""
    for step in range(first, first + steps):
        ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(step))
        hidden = model(ids[:, :-1])
        (-model.token_logprobs(hidden, ids[:, 1:], torch.ones(3, 8, dtype=torch.bool)).mean()).backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- files


def test_write_atomic_leaves_the_old_file_when_the_writer_dies(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    monkeypatch.setattr(parallel.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_jsonl_comes_back_and_a_bad_line_is_named(tmp_path):
    rows = [{"id": "é", "n": 1}, {"id": "\u2028", "n": 2}]
    write_jsonl(tmp_path / "r.jsonl", rows)
    assert read_jsonl(tmp_path / "r.jsonl") == rows
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(InputError, match=r"bad.jsonl:3: not valid JSON"):
        read_jsonl(tmp_path / "bad.jsonl")
    (tmp_path / "list.jsonl").write_text('[{}, 1]')
    with pytest.raises(InputError, match=r"list.jsonl:2: expected a JSON object"):
        read_jsonl(tmp_path / "list.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}\n')
    with pytest.raises(InputError, match="latin.jsonl:1: not valid JSON.*: .utf-8. codec"):
        read_jsonl(tmp_path / "latin.jsonl")
    for name, message in (("absent.jsonl", "no such file"), ("r.jsonl/x", "no such file"), ("x" * 300, "cannot be read"), (".", "a folder, not a file")):
        with pytest.raises(InputError, match=message):
            read_jsonl(tmp_path / name)
    for start in ("\ufeff", " " * 200, "\ufeff\n"):                               # what editors put before a list
        (tmp_path / "list.json").write_text(start + json.dumps(rows, indent=1))
        assert read_jsonl(tmp_path / "list.json") == rows
    (tmp_path / "object.json").write_text(json.dumps({"rows": rows}, indent=1))
    with pytest.raises(InputError, match="object.json:1: not valid JSON .one object a line, or one list"):
        read_jsonl(tmp_path / "object.json")


def test_fingerprint_follows_contents_and_names(tmp_path):
    folder = tmp_path / "m"
    write_atomic(folder / "a", "1")
    write_atomic(folder / "b", "2")
    first = fingerprint(folder)
    assert first == fingerprint(folder) and len(first) == 64
    os.replace(folder / "b", folder / "c")
    assert fingerprint(folder) != first
    with pytest.raises(InputError):
        fingerprint(tmp_path / "absent")


def test_metric_log_is_cut_back_to_the_checkpoint(tmp_path):
    log = MetricLog(tmp_path / "m.jsonl")
    for step in range(1, 6):
        log.log({"step": step, "loss": math.nan}, {"step": step, "text": "a\u2028b\x85c"})      # lines for str.splitlines, not for JSON
    with open(tmp_path / "m.jsonl", "a") as file:
        file.write('{"step": 6, "lo')                            # killed in the middle of a line
    log = MetricLog(tmp_path / "m.jsonl", keep=3)
    log.log({"step": 4, "again": True})
    assert [row["step"] for row in read_jsonl(tmp_path / "m.jsonl")] == [1, 1, 2, 2, 3, 3, 4] and "NaN" not in (tmp_path / "m.jsonl").read_text()
    MetricLog(tmp_path / "m.jsonl")
    assert read_jsonl(tmp_path / "m.jsonl") == []


# ---------------------------------------------------------------- run folders


def test_same_config_resumes_changed_config_is_named_fresh_starts_over(tmp_path):
    out, config = tmp_path / "run", {"lr": 0.1, "tasks": ["a"], "sha256": {"a": "x"}}
    assert start_run(out, config, False, "model") == "new"
    assert start_run(out, {**config, "lr": 0.2}, False, "model") == "new"      # nothing made yet: a corrected command is no conflict
    write_atomic(out / "metrics.jsonl", "{}")
    write_atomic(out / "my_notes.txt", "mine")
    assert start_run(out, {**config, "lr": 0.2}, False, "model") == "resume"
    with pytest.raises(InputError, match=r"lr \(0.2 -> 0.3\).*--fresh"):
        start_run(out, {**config, "lr": 0.3}, False, "model")
    (out / "model").mkdir()
    assert start_run(out, {**config, "lr": 0.2}, False, "model") == "done"
    assert start_run(out, config, True, "model") == "new"
    assert sorted(p.name for p in out.iterdir()) == [".lock", "config.json", "my_notes.txt"]


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    program = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from parallel import start_run; print(start_run({str(tmp_path / 'out')!r}, {{}}, False, 'model'), flush=True); "
               "input()")
    first = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "new\n"
    with pytest.raises(InputError, match="out is in use by another run"):
        start_run(tmp_path / "out", {}, False, "model")
    first.kill()
    first.communicate()
    assert start_run(tmp_path / "out", {}, False, "model") == "new"                       # a killed run holds nothing


def test_a_changed_input_is_named_and_a_file_is_no_folder(tmp_path):
    start_run(tmp_path / "out", {"sha256": {"my.jsonl": "1", "base": "2"}}, False, "model", owns=("checkpoint",))
    (tmp_path / "out" / "checkpoint").mkdir()
    with pytest.raises(InputError, match=r"made with other options: my.jsonl \(the contents\)\. Use"):
        start_run(tmp_path / "out", {"sha256": {"my.jsonl": "3", "base": "2"}}, False, "model", owns=("checkpoint",))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file: a file; expected a folder for --out"):
        start_run(tmp_path / "file", {}, True, "model")
    with pytest.raises(InputError, match="--out .*Not a directory"):
        start_run(tmp_path / "file" / "base", {}, False, "model")
    for content in ("5", "{", "[1]"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(content)
        with pytest.raises(InputError, match="holds files that no run made"):
            start_run(tmp_path / "other", {}, True, "model")
        assert (tmp_path / "other" / "config.json").read_text() == content


def test_a_folder_that_no_run_made_is_never_touched(tmp_path):
    write_atomic(tmp_path / "config.json", '{"model_type": "llama"}')           # --out given a model directory by mistake
    for fresh in (False, True):
        with pytest.raises(InputError, match="no run made"):
            start_run(tmp_path, {"lr": 1}, fresh, "model")
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "llama"}


# ---------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", [[5], [7, 7, 7], [300, 2, 40, 41, 39, 3, 2, 2], list(range(1, 40))])
def test_every_row_is_in_one_micro_batch_and_every_rank_has_as_many(world, lengths):
    shares = micro_batches(lengths, 100, world)
    assert len(shares) == world and len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= 1 or len(batch) * max(lengths[row] for row in batch) <= 100
    assert len(shares[0]) <= len(micro_batches(lengths, 100)[0]) // world + len(lengths)
    if len(lengths) >= world:
        assert all(batch for share in shares for batch in share) or len(lengths) % world


def test_rows_of_like_length_stand_together_unless_a_cut_costs_more_than_padding():
    (share,) = micro_batches([10, 300] * 8, 10_000)
    assert sorted(len(batch) for batch in share) == [8, 8]                                  # 16 x 300 would hold 2,320 tokens of padding
    assert len(micro_batches([300, 290, 280, 270], 10_000)[0]) == 1                         # 60 tokens of padding are cheaper than a cut


def test_the_cut_is_the_best_of_all():
    def price(batches):
        return sum(len(batch) * max(lengths[row] for row in batch) + parallel.MICRO_BATCH_COST for batch in batches)

    rng = random.Random(0)
    for _ in range(20):
        lengths = sorted((rng.randint(1, 600) for _ in range(8)), reverse=True)
        best = min((cuts for n in range(8) for cuts in itertools.combinations(range(1, 8), n)
                    if all((b - a) * lengths[a] <= 1500 for a, b in zip((0, *cuts), (*cuts, 8)))),
                   key=lambda cuts: price([range(a, b) for a, b in zip((0, *cuts), (*cuts, 8))]))
        assert price(micro_batches(lengths, 1500)[0]) == price([range(a, b) for a, b in zip((0, *best), (*best, 8))])


def test_collate_pads_on_the_right():
    batch = collate([{"ids": torch.tensor([1, 2, 3]), "m": torch.tensor([True, True, True])},
                     {"ids": torch.tensor([4]), "m": torch.tensor([True])}], "cpu")
    assert batch["ids"].tolist() == [[1, 2, 3], [4, 0, 0]] and batch["lengths"].tolist() == [3, 1]
    assert batch["m"].tolist() == [[True] * 3, [True, False, False]]


# ---------------------------------------------------------------- checkpoints


def test_stop_and_resume_equals_going_on_bit_for_bit(tmp_path):
    model = small_model()
    optimizer = make_optimizer(model, 1e-2, 0.95, 0.1)
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, 3, model, optimizer, {"cursor": 48})
    train(model, optimizer, 3, first=3)

    other = small_model(seed=1)
    optimizer = make_optimizer(other, 1e-2, 0.95, 0.1)
    assert load_checkpoint(tmp_path, other, optimizer) == {"step": 3, "cursor": 48}
    train(other, optimizer, 3, first=3)
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(a, b), name


def test_a_checkpoint_changes_nothing_even_before_the_first_step(tmp_path):
    models = small_model(), small_model()
    for model, saves in zip(models, (True, False)):
        optimizer = make_optimizer(model, 1e-2, 0.95, 0.1)
        save_checkpoint(tmp_path, 0, model, optimizer, {}) if saves else None
        train(model, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models)))


def test_only_the_newest_complete_checkpoint_counts(tmp_path):
    model = small_model()
    optimizer = make_optimizer(model, 1e-2, 0.95, 0.0)
    assert load_checkpoint(tmp_path, model, optimizer) is None
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 9, model, optimizer, {})
    save_checkpoint(tmp_path, 10, model, optimizer, {})
    (tmp_path / "step-000011.tmp").mkdir()                        # a save that was killed
    assert latest_checkpoint(tmp_path).name == "step-000010"
    save_checkpoint(tmp_path, 11, model, optimizer, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000011"]


def test_export_is_read_back_by_load_model(tmp_path):
    model = small_model()
    export_model(model, None, tmp_path / "model")
    export_model(model, None, tmp_path / "model")                 # over an older one
    ids = torch.arange(10)[None]
    assert torch.equal(load_model(tmp_path / "model")(ids), model(ids))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


# ---------------------------------------------------------------- several ranks

def test_a_finished_rank_is_never_aborted_while_python_finalises():
    """A Gloo thread that drops a tensor during finalisation aborts the process, so a finished run failed now and then: one that had a
    process group ends in teardown, after what atexit holds, and is never finalised."""
    program = f"""
import atexit, sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from parallel import teardown
class Finalised:
    def __del__(self): print("finalised")
kept = Finalised()
atexit.register(print, "cleaned up")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
teardown()
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "cleaned up\n"), done.stderr


WORKER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from parallel import *
from test_parallel import gradients, small_model
ranks = setup()
if ranks.is_main:
    model = small_model()
    model.generation_config = {{"eos_token_id": [1, 2]}}
    save_model(model, None, "{out}/model")
from_rank_0(None)
assert load_trainable("{out}/model", ranks).generation_config == {{"eos_token_id": [1, 2]}}
for dtype in ("float64", "float32"):
    for shards in (1, 2):                      # 1: whole copies, as DDP; 2: FSDP2
        found = gradients(dtype, ranks, shards)
        if ranks.is_main:
            torch.save(found, "{out}/" + dtype + str(shards))
teardown()
"""


def gradients(dtype, ranks, shards=0):
    """The whole gradient of an SFT batch and of an RL minibatch of very unequal rows, seven of them: no even split over two ranks."""
    import rl
    import sft
    from test_rl import random_rows
    dtype = getattr(torch, dtype)
    model = small_model().to(dtype)
    rows = random_rows(model, dtype, lengths=(3, 90, 5, 41, 4, 7, 60))
    model = shard_model(model, ranks, shards)
    args, found = rl.parse_arguments(["--kl", "0.1", "--micro-tokens", "200"]), {}
    for name, backward in (("sft", lambda: sft.backward(model, rows, ranks, 200)), ("rl", lambda: rl.policy_backward(model, rows, ranks, args))):
        model.zero_grad()
        backward()
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        found[name] = torch.cat([grad.flatten() for grad in whole])
    return found


@pytest.mark.long
def test_gradients_do_not_depend_on_the_number_of_ranks_nor_on_sharding(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER.format(root=str(ROOT), tests=str(ROOT / "tests"), out=tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "worker.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    for dtype, tolerance in (("float64", 1e-9), ("float32", 1e-5)):
        alone = gradients(dtype, ONE)
        for shards in (1, 2):
            together = torch.load(tmp_path / f"{dtype}{shards}")
            for name in ("sft", "rl"):
                assert (alone[name] - together[name]).norm() <= tolerance * alone[name].norm(), (dtype, shards, name)


# ---------------------------------------------------------------- the memory plan

QWEN_7B = ModelConfig(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                      num_key_value_heads=4, head_dim=128, attention_bias=True, model_type="qwen2")


def test_plan_counts_what_is_known_exactly():
    facts = parallel.measure(QWEN_7B, 4096, 4096, on_gpu=True)
    assert facts["parameters"] == 7_615_616_512                                             # the published 7.62 B
    parts = parallel.memory_plan(QWEN_7B, facts, 4096, slots=16, shards=8)
    assert parts["weights"] == parts["gradients"] == parts["optimiser"] / 2 == 4 * facts["parameters"] / 8
    assert parts["KV cache"] == 16 * 4097 * 2 * 28 * 4 * 128 * 2                            # 56 KiB a token
    lean = parallel.memory_plan(QWEN_7B, facts, 4096, slots=16, shards=8, checkpointing=True, swap=True)
    assert lean["activations"] < parts["activations"] / 10 and lean["training"] < parts["training"] and lean["rollout"] < parts["rollout"]


def test_plan_finds_what_fits_or_says_that_nothing_does():
    options, parts = parallel.find_plan(QWEN_7B, 8, 4096, 70e9)
    assert options["shards"] == 8 and not options["offload"] and max(parts["training"], parts["rollout"]) <= 70e9
    assert parallel.find_plan(QWEN_7B, 1, 4096, 70e9)[0]["offload"]
    options, parts = parallel.find_plan(QWEN_7B, 1, 4096, 10e9)
    assert options is None and parts["training"] > 10e9


def test_plan_script_prints_the_parts_and_the_options(tmp_path):
    write_atomic(tmp_path / "config.json", json.dumps(SMALL.to_hf()))
    command = [sys.executable, str(ROOT / "parallel.py"), "--plan", str(tmp_path), "--gpus", "8", "--seq", "256"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "KV cache" in done.stdout and "fits with --micro-tokens 256 --shards 8 --slots 64" in done.stdout, done
    for wrong, line in ((__file__, "not valid JSON"), (ROOT / "data", "data/config.json: no such file")):
        with pytest.raises(InputError, match=line):
            parallel.read_config(wrong)
    for kind, wrong, least in ((parallel.positive, "0", 1), (parallel.natural, "-1", 0), (parallel.natural, "x", 0)):
        with pytest.raises(parallel.argparse.ArgumentTypeError, match=f"expected a whole number from {least} on, got '{wrong}'"):
            kind(wrong)
    assert (parallel.positive("1"), parallel.natural("0")) == (1, 0)
    done = subprocess.run([*command, "--memory", "1"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: nothing fits"), done


def test_activations_are_those_that_autograd_really_keeps():
    """The measure on tensors without memory against the same forward pass on real ones."""
    config, kept = dataclasses.replace(SMALL, num_hidden_layers=2), {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model = Transformer(config)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(3, 50, dtype=torch.long))
    for parameter in model.parameters():
        kept.pop(parameter.data_ptr(), None)
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert parallel.saved_for_backward(config, 2, 3, 50, torch.float32) == pytest.approx(real, rel=0.01)
