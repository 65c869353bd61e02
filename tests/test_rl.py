"""rl.py: the objective against brute force, what is trained, invariances, and runs that can be killed."""
import dataclasses
import itertools
import math
import random

import pytest
import torch

import rl
import sft
from model import PRESETS, Transformer, load_model
from hf import read_jsonl
from parallel import Ranks
from sampler import Episode
from tasks import Task
from test_sft import KILL_IN_SAVE, KILLS, make_world, run, timeless

ONE = Ranks(0, 1, 1, torch.device("cpu"))
NAN = math.nan


def options(*argv, micro_tokens=10_000):
    args = rl.parse_arguments(["--temperature", "1", *(str(word) for word in argv)])              # a later --temperature wins
    args.micro_tokens = micro_tokens
    return args


def enumerable_model(vocab=4, dtype=torch.float64, seed=0):
    """A transformer whose texts of two tokens can all be listed."""
    torch.manual_seed(seed)
    config = dataclasses.replace(PRESETS["tiny-1m"], vocab_size=vocab, hidden_size=8, intermediate_size=12, num_hidden_layers=1, head_dim=4,
                                 num_attention_heads=2, num_key_value_heads=1)
    model = Transformer(config).to(dtype)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(30)                                                  # so that probabilities are far from uniform
    return model


def flat_gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# ---------------------------------------------------------------- advantages


def test_advantages_stay_inside_their_group():
    rewards, groups = [1.0, 0.0, 0.0, 5.0, 7.0], ["a", "a", "a", "b", "b"]
    found = rl.advantages(rewards, groups)
    a = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert torch.allclose(found[:3], (a - a.mean()) / (a.std() + 1e-6))
    assert torch.allclose(found[3:], torch.tensor([-1.0, 1.0]).double() / 2 ** 0.5, atol=1e-5)
    assert rl.advantages(rewards, groups, standardise=False).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1, 1])
    mixed = [0, 3, 1, 4, 2]                                                                 # rows in any order
    assert torch.allclose(rl.advantages([rewards[i] for i in mixed], [groups[i] for i in mixed]), found[mixed])


def test_no_spread_one_element_and_nan_rewards_have_defined_results():
    assert rl.advantages([1, 1, 1], [0, 0, 0]).tolist() == [0, 0, 0]
    assert rl.advantages([0.1 + 0.2, 0.3], [0, 0]).tolist() == [0, 0]                       # equal but for rounding
    assert rl.advantages([1], [0]).tolist() == [0]
    assert rl.advantages([NAN, NAN], [0, 0]).tolist() == [0, 0]
    assert rl.advantages([], []).tolist() == []
    with_nan = rl.advantages([1, NAN, 0], [0, 0, 0])
    assert with_nan[1] == 0 and with_nan[[0, 2]].tolist() == rl.advantages([1, 0], [0, 0]).tolist()
    assert rl.advantages([1, NAN], [0, 0]).tolist() == [0, 0]
    with pytest.raises(ValueError):
        rl.advantages([math.inf, 0], [0, 0])


def test_groups_without_spread_are_not_informative():
    assert rl.informative([1, 0, 1, 1, NAN, 1, NAN, NAN], ["a", "a", "b", "b", "c", "c", "d", "d"]) == ["a"]


# ---------------------------------------------------------------- the loss against brute force


def random_rows(model, dtype=torch.float64, seed=1, lengths=(3, 9, 5, 12, 4, 7)):
    """Rows of two groups with observations in between; old log-probs lie on both sides of the clip range."""
    rng = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate(lengths):
        mask = torch.rand(length, generator=rng) < 0.6
        mask[0], mask[-1] = False, True
        ids = torch.randint(0, model.config.vocab_size, (length,), generator=rng)
        with torch.no_grad():
            logprobs = model.logits(model(ids[None]))[0].log_softmax(-1)
        true = torch.cat([torch.zeros(1, dtype=logprobs.dtype), logprobs[:-1].gather(1, ids[1:, None])[:, 0]])
        noise = 0.5 * torch.randn(length, generator=rng, dtype=torch.float64)
        rows.append({"group": i % 2, "ids": ids, "loss_mask": mask, "sampler_logprobs": ((true + noise) * mask).to(dtype),
                     "ref_logprobs": ((true + 0.3 * noise.flip(0)) * mask).to(dtype)})
    values = rl.advantages([float(i % 3) for i in range(len(rows))], [row["group"] for row in rows])
    return [{**row, "advantages": torch.where(row["loss_mask"], value.to(dtype), 0.0)} for row, value in zip(rows, values)]


def written_formula(model, rows, args, frozen=None):
    """The loss of rl.py's docstring with loops and the full softmax. frozen: the trainer's old log-probs, for --tis."""
    count = sum(int(row["loss_mask"].sum()) for row in rows)
    total = 0.0
    for i, row in enumerate(rows):
        logits = model.logits(model(row["ids"][None]))[0] / args.temperature
        for t in range(1, len(row["ids"])):
            if not row["loss_mask"][t]:
                continue
            logprob = logits[t - 1].log_softmax(-1)[row["ids"][t]]
            old, weight = row["sampler_logprobs"][t], 1.0
            if args.tis:
                weight = min(math.exp(frozen[i][t] - old), args.tis)
                old = frozen[i][t]
            r, A = math.exp(logprob - old), float(row["advantages"][t])
            gain = min(r * A, min(max(r, 1 - args.clip_low), 1 + args.clip_high) * A)
            if args.dual_clip and A < 0:
                gain = max(gain, args.dual_clip * A)
            total -= weight * gain
            if args.kl:
                d = float(row["ref_logprobs"][t] - logprob)
                total += args.kl * (math.exp(d) - d - 1)
    return total / count


@pytest.mark.parametrize("argv", [(), ("--clip-low", 0.1, "--clip-high", 0.5), ("--dual-clip", 1.2), ("--kl", 0.3), ("--tis", 1.1),
                                  ("--temperature", 0.7), ("--kl", 0.1, "--dual-clip", 1.5, "--temperature", 1.3)])
def test_gradient_equals_finite_differences_of_the_written_formula(argv):
    model, args = enumerable_model(), options(*argv)
    rows = random_rows(model)
    frozen = []
    with torch.no_grad():
        for row in rows:
            logprobs = (model.logits(model(row["ids"][None]))[0] / args.temperature).log_softmax(-1)
            frozen.append([0.0] + [float(logprobs[t - 1, row["ids"][t]]) for t in range(1, len(row["ids"]))])
        loss, figures, _ = rl_backward(model, rows, args)
        found = flat_gradient(model)
        assert loss == pytest.approx(written_formula(model, rows, args, frozen), rel=1e-9)
        parameters, rng = [p for p in model.parameters()], random.Random(0)
        offsets = list(itertools.accumulate([0] + [p.numel() for p in parameters]))
        for _ in range(12):
            which = rng.randrange(len(parameters))
            place = rng.randrange(parameters[which].numel())
            weight, step = parameters[which].view(-1), 1e-6
            weight[place] += step
            above = written_formula(model, rows, args, frozen)
            weight[place] -= 2 * step
            below = written_formula(model, rows, args, frozen)
            weight[place] += step
            assert found[offsets[which] + place] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-7)
    if not argv:
        assert figures[1] > 0 and figures[2] > 0                                            # both clips were at work


def rl_backward(model, rows, args):
    model.zero_grad()
    with torch.enable_grad():
        return rl.policy_backward(model, rows, ONE, args)


def every_text(model, length=2):
    """All texts of `length` tokens after token 0, with their log-probs (N,), with gradient."""
    texts = torch.tensor([(0, *text) for text in itertools.product(range(model.config.vocab_size), repeat=length)])
    logprobs = model.token_logprobs(model(texts[:, :-1]), texts[:, 1:], torch.ones(len(texts), length, dtype=torch.bool))
    return texts, logprobs                                                                  # (N, length)


def test_expected_gradient_is_the_gradient_of_the_expected_reward():
    """On-policy, summed over all texts with their probabilities, the surrogate's gradient is that of E[R]; any baseline leaves it so."""
    model = enumerable_model()
    texts, logprobs = every_text(model)
    rewards = torch.randn(len(texts), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    probability = logprobs.sum(1).exp()
    assert float(probability.detach().sum()) == pytest.approx(1)
    (-(probability * rewards).sum()).backward()
    expected = flat_gradient(model)
    for baseline in (0.0, float(rewards.mean())):
        model.zero_grad()
        logprobs = every_text(model)[1]
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        weights = probability.detach()[:, None].expand_as(logprobs)                         # in place of sampling
        loss, _ = rl.policy_loss(logprobs, logprobs.detach(), (rewards - baseline)[:, None].expand_as(logprobs), mask, 1, weights=weights)
        loss.backward()
        assert (flat_gradient(model) - expected).norm() < 1e-9 * expected.norm()


def test_k1_and_k3_are_the_exact_kl_in_expectation():
    """KL(pi || ref) with pi the policy: k3 = exp(ref - pi) - (ref - pi) - 1. The other way round it would be E[pi/ref] - 1 - KL."""
    model, reference = enumerable_model(), enumerable_model(seed=5)
    _, logprobs = every_text(model, 1)
    with torch.no_grad():
        _, ref = every_text(reference, 1)
        p = logprobs.exp()
        exact = float((p * (logprobs - ref)).sum())
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        k3 = sum(float(p[i]) * float(rl.policy_loss(logprobs[i:i + 1], logprobs[i:i + 1], torch.zeros(1, 1), mask[i:i + 1], 1,
                                                    ref_logprobs=ref[i:i + 1], kl=1.0)[0]) for i in range(len(p)))
    assert exact > 0.05 and k3 == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_rewarded_samples_logprob_rises_and_a_punished_ones_falls(advantage):
    model = enumerable_model()
    for row in random_rows(model):
        row["advantages"] = torch.where(row["loss_mask"], advantage, 0.0)
        rl.add_logprobs(model, [row], "sampler_logprobs", ONE, options())                   # on-policy
        before, weights = row["sampler_logprobs"].clone(), [parameter.clone() for parameter in model.parameters()]
        rl_backward(model, [row], options())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
        rl.add_logprobs(model, [row], "sampler_logprobs", ONE, options())
        assert advantage * float((row["sampler_logprobs"] - before)[row["loss_mask"]].sum()) > 0
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights):
                parameter.copy_(weight)


def test_minibatches_of_tis_take_the_trainers_own_old_logprobs():
    model, args = enumerable_model(), options("--tis", 2.0)
    rows = random_rows(model)
    on_policy = rl_backward(model, rows, args)[1]
    gradient = flat_gradient(model)
    rl.add_logprobs(model, rows, "old_logprobs", ONE, args)
    assert rl_backward(model, rows, args)[1] == pytest.approx(on_policy) and torch.allclose(flat_gradient(model), gradient)


# ---------------------------------------------------------------- invariance


def test_with_kl_an_idle_rank_takes_part():
    """Three rows that each fill a micro-batch, two ranks, one after the other: rank 1 enters its second micro-batch with a row of weight zero."""
    model, args, gradients = enumerable_model(), options("--kl", 0.3, micro_tokens=1), []
    for world in (1, 2):
        model.zero_grad()
        for rank in range(world):
            ranks = Ranks(rank, world, world, torch.device("cpu"))
            rows = [{key: value for key, value in row.items() if key != "ref_logprobs"} for row in random_rows(model, lengths=(5, 4, 3))]
            rl.add_logprobs(enumerable_model(seed=1), rows, "ref_logprobs", ranks, args)
            rl.policy_backward(model, rows, ranks, args)
        gradients.append(flat_gradient(model) / world)                                          # FSDP takes the mean over ranks
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12) and gradients[0].norm() > 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_gradient_does_not_depend_on_micro_batches_order_or_padding(dtype, tolerance):
    model = enumerable_model(vocab=30, dtype=dtype)
    rows = random_rows(model, dtype, lengths=(3, 90, 5, 41, 4, 7, 60, 2))
    loss, figures, widest = rl_backward(model, rows, options("--kl", 0.1, micro_tokens=8 * 90))
    expected = flat_gradient(model)
    for order, micro_tokens in ((rows, 180), (rows, 1), (rows[::-1], 720), (rows[3:] + rows[:3], 200)):
        again = rl_backward(model, order, options("--kl", 0.1, micro_tokens=micro_tokens))
        assert again[0] == pytest.approx(loss, rel=tolerance, abs=tolerance) and again[1] == pytest.approx(figures, rel=100 * tolerance)
        assert again[2] == pytest.approx(widest, rel=100 * tolerance)
        assert (flat_gradient(model) - expected).norm() <= tolerance * expected.norm()


def test_rows_are_cut_after_the_last_sampled_token_and_train_the_same():
    row = {"ids": torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32), "loss_mask": torch.tensor([False, True, False, True, False]),
           "sampler_logprobs": torch.tensor([0.0, -1.0, 0.0, -2.0, 0.0])}
    found = rl.training_row(row, 0.5)
    assert found["ids"].tolist() == [1, 2, 3, 4] and found["advantages"].tolist() == [0, 0.5, 0, 0.5]
    assert found["sampler_logprobs"].tolist() == [0, -1, 0, -2]


def test_minibatches_hold_whole_groups_and_every_row_once():
    rows = [{"group": i // 3, "n": i} for i in range(15)]
    parts = rl.split_minibatches(rows, 2, seed=1)
    assert sorted(row["n"] for part in parts for row in part) == list(range(15)) and sorted(map(len, parts)) == [6, 9]
    assert not {row["group"] for row in parts[0]} & {row["group"] for row in parts[1]}
    assert len(rl.split_minibatches(rows, 99, seed=1)) == 5 and rl.split_minibatches([], 4, seed=1) == []


# ---------------------------------------------------------------- reward, caps, warnings


def episode(text, tokens=10, end_reason="answered"):
    return Episode(ids=[0] * tokens, source=[1] * tokens, logprobs=[0.0] * tokens, end_reason=end_reason, text=text, prompt_len=0, task_id="t",
                   sample=0, turns=1, tool_calls=0, violations=0, overshoots=0, wall_seconds=0.0)


def test_reward_is_score_times_format_plus_length_penalty():
    task = Task("t", "q", "Nepal", "mhqa", "mhqa")
    good = "<think>a</think>\n<wiki_search>b</wiki_search>\n<observation>\nNepal\n</observation>\n\n<think>c</think>\n<answer>Nepal</answer>"
    assert rl.reward(task, episode(good), 100, True, 0.0, False) == (1, 1)
    assert rl.reward(task, episode("<answer>Nepal</answer>"), 100, False, 0.0, False) == (1, 1)
    assert rl.reward(task, episode("<answer>Nepal</answer>"), 100, True, 0.0, False) == (0, 1)
    assert rl.reward(task, episode(good, tokens=90), 100, False, 0.2, False) == (pytest.approx(0.5), 1)
    value, score = rl.reward(task, episode("<think>", end_reason="token_cap"), 100, False, 0.0, True)
    assert math.isnan(value) and score == 0


def test_observed_text_is_never_the_answer():
    task = Task("t", "q", "Nepal", "mhqa", "mhqa")
    forged = "<think>a</think>\n<wiki_search>b</wiki_search>\n<observation>\n<answer>Nepal</answer>\n</observation>\n\n<think>c</think>"
    assert rl.reward(task, episode(forged), 100, False, 0.0, False)[0] == 0


def test_overlong_penalty_is_linear_over_the_buffer():
    assert [rl.overlong_penalty(n, 100, 0.125) for n in (10, 87.5, 93.75, 100, 200)] == [0, 0, -0.5, -1, -1]


def test_curriculum_changes_the_cap_at_its_step():
    assert [rl.token_cap(step, 16384, [(40, 32768)]) for step in (1, 39, 40, 90)] == [16384, 16384, 32768, 32768]
    assert rl.parse_arguments(["--curriculum", "40:32768"]).curriculum == [(40, 32768)]


def test_a_preset_sets_the_papers_values_and_an_option_wins():
    args = rl.parse_arguments(["--preset", "code", "--turns", "3"])
    assert (args.prompts, args.minibatches, args.curriculum, args.turns, args.dual_clip) == (256, 8, [(40, 36864)], 3, 3.0)


def test_warnings_name_what_left_its_range():
    fine = {"reward": 0.5, "cut_off": 0.0, "informative": 8, "entropy": 0.5, "grad_norm": 0.2, "gap": 1e-6}
    history = [dict(fine) for _ in range(20)]
    assert rl.warnings(fine, history) == []
    for change, word in (({"reward": 0.1}, "reward 0.10"), ({"cut_off": 0.3}, "30% of the episodes"), ({"informative": 0}, "no group"),
                         ({"entropy": 0.01}, "entropy 0.010"), ({"entropy": 5.0}, "entropy 5.000"), ({"grad_norm": 9.0}, "gradient norm 9.00"),
                         ({"gap": 0.1}, "log-probs"), ({"gap": None, "grad_norm": None}, "not finite"),
                         ({"skipped_updates": 1}, "not finite")):
        (line,) = rl.warnings({**fine, **change}, history)
        assert word in line
    broken = [{**fine, "entropy": None, "grad_norm": None, "reward": None}] * 30             # a run that went on after NaN
    assert rl.warnings(fine, broken) == []


def test_a_group_of_one_is_refused(capsys):
    with pytest.raises(SystemExit) as error:
        rl.parse_arguments(["--samples", "1"])
    assert error.value.code == 2 and "--samples: expected 2 at least" in capsys.readouterr().err


def test_dev_tasks_are_spread_over_the_suites():
    tasks = [Task(f"{suite}{i}", "q", "a", suite, "mhqa") for suite, n in (("mhqa", 50), ("web", 3), ("math", 20)) for i in range(n)]
    suites = [task.data_source for task in rl.pick_dev(tasks, 15)]
    assert {suite: suites.count(suite) for suite in set(suites)} == {"mhqa": 6, "web": 3, "math": 6}


# ---------------------------------------------------------------- dynamic sampling


def test_refills_are_capped_and_take_new_questions(monkeypatch):
    calls = []

    def fake_rollout(chosen, sampler, tokenizer, ranks, args, step):
        calls.append([task for _, task, _ in chosen])
        return [{"group": group, "reward": float(sample == 0 and task % 2), "sample": first + sample, "task": task}
                for group, task, first in chosen for sample in range(args.samples)]

    monkeypatch.setattr(rl, "rollout", fake_rollout)
    args = options("--prompts", 8, "--samples", 2, "--refills", 2)
    rows, kept, cursor, refills = rl.collect(list(range(100)), 40, None, None, ONE, args, 1)
    assert [len(call) for call in calls][0] == 8 and len(calls) == refills + 1 <= 3 and cursor == 40 + sum(map(len, calls))
    assert sum(calls, []) == [range(100)[i] for i in sft.stream(40, cursor, 100, 0)]         # the stream, in order, nothing twice
    assert len(kept) <= 8 and set(kept) == {row["group"] for row in rows if row["task"] % 2}
    calls.clear()
    rows, kept, _, refills = rl.collect([0, 2], 0, None, None, ONE, args, 1)                 # none will ever be informative
    assert refills == 2 and kept == [] and len(calls) == 3
    keys = [(row["task"], row["sample"]) for row in rows]
    assert len(keys) == len(set(keys))                                                      # a question drawn again gets new samples


# ---------------------------------------------------------------- the script

OPTIONS = ["--tasks", "tasks.jsonl", "--dev", "tasks.jsonl", "--corpus", "corpus.jsonl", "--model", "sft/model", "--steps", 5, "--prompts", 3,
           "--samples", 4, "--eval-every", 2, "--eval-tasks", 4, "--total-tokens", 220, "--new-tokens", 60, "--lr", 1e-3, "--checkpoint-seconds", 0]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"), hidden=64)
    run(folder, "sft.py", "--tasks", "sft.jsonl", "--model", "base", "--out", "sft", "--steps", 150, "--batch", 8, "--lr", 4e-3)
    return folder


@pytest.mark.long
def test_script_improves_the_reward_keeps_traces_and_exports(world):
    options = [*OPTIONS, "--steps", 12, "--prompts", 6, "--checkpoint-seconds", 30, "--out", "smoke"]
    run(world, "rl.py", *options)
    log, traces = read_jsonl(world / "smoke" / "metrics.jsonl"), read_jsonl(world / "smoke" / "traces.jsonl")
    assert [row["step"] for row in log] == list(range(13)) and "dev" in log[0] and "dev" in log[-1]
    assert sum(row["score"] for row in log[-3:]) > sum(row["score"] for row in log[1:4]) + 0.3          # a third of 1 at first
    assert all(row["gap_max"] < 1e-3 for row in log if "gap_max" in row)                    # sampler and trainer agree in fp32
    assert len(traces) == sum(row["episodes"] for row in log[1:]) and any("<observation>" in row["text"] for row in traces)
    best = max(row["dev"] for row in log if "dev" in row)
    assert best > log[0]["dev"]
    for name in ("best", "last", "model"):
        load_model(world / "smoke" / name)
    assert "done, --fresh to redo" in run(world, "rl.py", *options)


KILL_BEFORE_BEST = """
import os, signal, parallel
replace = parallel.replace_directory
def dying(path, write):
    if path.name == "best":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(path, write)
parallel.replace_directory = dying
"""


@pytest.mark.long
def test_killed_at_any_moment_the_same_command_gives_the_same_bits(world):
    run(world, "rl.py", *OPTIONS, "--steps", 8, "--out", "straight")
    for code in (KILL_BEFORE_BEST, *KILLS.values()):                       # the first: best/ of round 0 is not there yet
        run(world, "rl.py", *OPTIONS, "--steps", 8, "--out", "killed", code=code, expect=-9)
    run(world, "rl.py", *OPTIONS, "--steps", 8, "--out", "killed", kill_after=random.uniform(2, 10))
    run(world, "rl.py", *OPTIONS, "--steps", 8, "--out", "killed")
    for name in ("metrics.jsonl", "traces.jsonl"):
        assert timeless(world / "straight" / name) == timeless(world / "killed" / name)
    assert sum(row.get("updates", 0) for row in read_jsonl(world / "straight" / "metrics.jsonl")) > 3
    for name in ("model", "last", "best"):
        a, b = (load_model(world / folder / name).state_dict() for folder in ("straight", "killed"))
        assert all(torch.equal(a[key], b[key]) for key in a)


def same(world, name, other, tolerance):
    """Metric logs and last weights of two runs agree, relatively or absolutely."""
    for a, b in zip(*(timeless(world / folder / "metrics.jsonl") for folder in (name, other)), strict=True):
        assert a.keys() == b.keys() and a.get("end_reasons") == b.get("end_reasons")
        for key in ("loss", "reward", "entropy", "grad_norm", "dev"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=tolerance, abs=tolerance), key
    a, b = (load_model(world / folder / "last").state_dict() for folder in (name, other))
    assert all((a[key] - b[key]).abs().max() <= tolerance for key in a)


@pytest.mark.long
def test_two_ranks_train_as_one_and_resume(world):
    run(world, "rl.py", *OPTIONS, "--out", "one")
    run(world, "rl.py", *OPTIONS, "--out", "two", ranks=2)
    same(world, "one", "two", 1e-4)
    run(world, "rl.py", *OPTIONS, "--out", "killed two", ranks=2, code=KILL_IN_SAVE.format(call=3, before=""), expect=1)
    run(world, "rl.py", *OPTIONS, "--out", "killed two", ranks=2)
    same(world, "two", "killed two", 1e-6)


@pytest.mark.long
def test_a_round_without_any_informative_group_is_logged_and_changes_nothing(world):
    (world / "hopeless.jsonl").write_text('{"id": "a", "question": "What?", "answer": "no such thing", "agent": "mhqa", "data_source": "mhqa"}\n')
    output = run(world, "rl.py", *OPTIONS, "--tasks", "hopeless.jsonl", "--steps", 1, "--eval-every", 0, "--out", "none")
    (row,) = read_jsonl(world / "none" / "metrics.jsonl")
    assert row["informative"] == 0 and row["refills"] == rl.parse_arguments([]).refills and "updates" not in row and "nothing to learn from" in output
    a, b = load_model(world / "sft" / "model").state_dict(), load_model(world / "none" / "last").state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)
