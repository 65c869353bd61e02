"""Agentic reinforcement learning: GRPO with DAPO's parts on episodes that use tools (paper sections 3.3 and 4, equations 8 to 11).

One step, for a batch of questions, each answered n times (a group) with live tools:

    reward      R_i = score of the final answer, from 0 to 1 (eq. 10); x format, in {0, 1}, where asked (eq. 11)
    groups      a group whose rewards are all equal says nothing: dropped, and other questions are tried, at most --refills times
    advantage   A_i = (R_i - mean R) / std R         over the group
    ratio       r_t = pi_theta(x_t | x_<t) / pi_old(x_t | x_<t)            pi_old: the probability the token was sampled with
    loss        L = - 1/N  sum_i sum_t  m_t min( r_t A_i,  clip(r_t, 1 - eps_low, 1 + eps_high) A_i )   [ + beta k3 ]

m_t = 1 where the model wrote x_t (observations are read, never trained); N = sum of m_t over the minibatch on all ranks, so the loss does
not depend on micro-batches or the number of GPUs. eps_high > eps_low lets unlikely tokens grow (DAPO, arXiv 2503.14476). No critic, no KL
by default, as in the paper. The ids that were sampled are the ids that are trained: no text is encoded again. On the first minibatch r_t is
1 up to rounding, and the loss near 0: its gradient is not. How far it is from 1 is logged as `gap`.

Left out on purpose: PPO's critic (AFM's MHQA script has one; its paper does not), LLM judges as rewards, asynchronous rollouts.

    python rl.py                                                      the demo on a CPU, from runs/demo/sft/model
    python rl.py --tasks my.jsonl --corpus my_pages.jsonl             your questions over your pages
    torchrun --standalone --nproc_per_node=8 rl.py --preset mhqa --model MODEL --tasks train.parquet --dev dev.parquet --retriever URL
    torchrun --nnodes=8 --nproc_per_node=8 --rdzv_endpoint=HOST:29500 rl.py --preset web ...

The same command again goes on from the last checkpoint. A step is a function of (weights, step number, data position) alone: it does not
matter how often the run was stopped.
"""
import argparse
import math
import shutil
import statistics
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

from coa_format import SAMPLED, check, parse, prompt, prompt_ids
from hf import InputError, exit_on_input_error, read_jsonl
from model import load_tokenizer
from parallel import (MetricLog, add_common_arguments, add_scale_arguments, all_sum, amount, checkpoint_due, clean, clip_gradients, collate, export_model,
                      gather, gather_lists, load_checkpoint, load_trainable, make_optimizer, micro_batches, natural, positive, refresh,
                      replace_directory, rollout_copy, run_config, save_checkpoint, setup, start_run, swap, teardown)
from sampler import Limits, Request, Sampler
from sft import learning_rate, stream
from tasks import grade, load_tasks
from tools import add_tool_arguments, make_toolbox

# The paper's settings (sections 4.1.1, 4.2.1; dual clip, warm-up and weight decay from the official scripts).
COMMON = dict(samples=8, temperature=1.0, refills=2, lr=1e-6, schedule="constant", beta2=0.999, prompt="full", micro_tokens=32768, checkpointing=True,
              checkpoint_seconds=900.0)
PRESETS = {
    "mhqa": dict(COMMON, prompts=64, minibatches=1, turns=8, new_tokens=2048, total_tokens=10240, warmup_steps=3, weight_decay=0.01, topk=3),
    "web": dict(COMMON, prompts=64, minibatches=1, turns=25, new_tokens=8192, total_tokens=32768, warmup_steps=3, weight_decay=0.1,
                dual_clip=10.0, steps=60, web_topk=10),
    "code": dict(COMMON, prompts=256, minibatches=8, turns=9, new_tokens=16384, total_tokens=20480, curriculum=[(40, 36864)], warmup_steps=10,
                 weight_decay=0.01, dual_clip=3.0, overlong_buffer=0.125, format_reward=True, steps=150, code_memory_mb=5000),
}

# ----------------------------------------------------------------------------------------------------------------------
# The objective: pure functions


def advantages(rewards, groups, standardise=True, eps=1e-6):
    """Group-relative advantages. rewards: (N,) numbers; groups: (N,) group ids -> (N,) float64.

        A_i = R_i - mean(R_g)   [ / (std(R_g) + eps), the unbiased std ]

    Without the division hard and easy questions are not weighted up (Dr. GRPO). NaN stands for "no verdict": such an episode has
    advantage 0 and is left out of its group's mean and std. Equal rewards, or a single one, give 0. ValueError for infinite rewards."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards.isinf().any():
        raise ValueError("advantages: infinite reward")
    result, members = torch.zeros_like(rewards), defaultdict(list)
    for i, group in enumerate(groups):
        if not rewards[i].isnan():
            members[group].append(i)
    for index in members.values():
        values = rewards[index]
        if values.max() - values.min() > 1e-9:
            centred = values - values.mean()
            result[index] = centred / (values.std() + eps) if standardise else centred
    return result


def informative(rewards, groups):
    """The ids of the groups whose rewards (NaN apart) are not all equal, in order of first appearance."""
    found = defaultdict(set)
    for reward, group in zip(rewards, groups):
        if not math.isnan(reward):
            found[group].add(reward)
    return [group for group in dict.fromkeys(groups) if len(found[group]) > 1 and max(found[group]) - min(found[group]) > 1e-9]


def policy_loss(logprobs, old_logprobs, advantages, mask, tokens, clip_low=0.2, clip_high=0.28, dual_clip=None, ref_logprobs=None, kl=0.0,
                weights=None):
    """The clipped, token-mean loss of one micro-batch -> (loss, figures).

    All of shape (B, T): logprobs log pi_theta, with gradient; old_logprobs log pi_old; advantages, the episode's at each of its tokens;
    mask True on trained tokens; ref_logprobs of the reference; weights, truncated importance weights. tokens: trained tokens of the
    whole minibatch over all ranks.

        L = - 1/tokens sum m w min(r A, clip(r, 1-clip_low, 1+clip_high) A)          r = exp(logprobs - old_logprobs)
            + kl/tokens sum m (exp(d) - d - 1)                                        d = ref_logprobs - logprobs:  k3, E k3 = KL(pi || ref)

    dual_clip c: where A < 0 a token counts at least c A, so that one with a huge ratio cannot tear the step. figures: sums over the
    micro-batch of ratio, clipped_low, clipped_high and k3, (4,), without gradient."""
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    if weights is not None:
        objective = objective * weights
    loss = -(objective * mask).sum() / tokens
    k3 = torch.zeros_like(ratio)
    if ref_logprobs is not None:
        difference = (ref_logprobs - logprobs).masked_fill(~mask, 0.0)
        k3 = difference.exp() - difference - 1
        loss = loss + kl * (k3 * mask).sum() / tokens
    with torch.no_grad():
        clipped_low = (ratio < 1 - clip_low) & (advantages < 0)
        clipped_high = (ratio > 1 + clip_high) & (advantages > 0)
        figures = torch.stack([(value * mask).sum() for value in (ratio, clipped_low, clipped_high, k3)])
    return loss, figures


def importance_weights(old_logprobs, sampler_logprobs, cap):
    """Truncated importance sampling: min(pi_old / pi_sampler, cap), for an engine whose probabilities differ from the trainer's.
    pi_old is then the trainer's own, before the update."""
    return (old_logprobs - sampler_logprobs).exp().clamp(max=cap)


def overlong_penalty(length, limit, buffer):
    """DAPO's soft punishment of length: 0 up to (1 - buffer) limit, then linear down to -1 at the limit. Tokens; buffer a share."""
    start = (1 - buffer) * limit
    return -min(1.0, max(0.0, (length - start) / (limit - start)))


def reward(task, episode, limit, format_reward, overlong_buffer, overlong_filter):
    """(reward, score) of one episode: the score of its answer, times the format where asked, plus the length penalty. NaN, no verdict,
    for an episode that a cap cut off, with overlong_filter."""
    score = value = grade(task, episode.text).score
    if format_reward:
        value *= not check(parse(episode.text), task.agent)
    if overlong_buffer:
        value += overlong_penalty(len(episode.ids), limit, overlong_buffer)
    if overlong_filter and episode.end_reason in ("token_cap", "turn_cap", "deadline"):
        value = math.nan
    return value, score


# ----------------------------------------------------------------------------------------------------------------------
# Rollout


def token_cap(step, total_tokens, curriculum):
    """Tokens an episode may have in this step: that of the last (step, tokens) of the curriculum that has begun."""
    return [total_tokens, *(tokens for begin, tokens in sorted(curriculum) if step >= begin)][-1]


def make_request(task, sample, tokenizer, args, cap):
    text = task.prompt or prompt(task.agent, task.question, brief=args.prompt == "brief")
    limits = Limits(turns=args.turns, new_tokens=args.new_tokens, total_tokens=cap, seconds=args.episode_seconds)
    return Request(prompt_ids(text, tokenizer), task.agent, task.id, sample, limits, task.question)


def rollout(chosen, sampler, tokenizer, ranks, args, step):
    """Sample and reward args.samples episodes for each (group, task, first sample) -> list of dicts by group and sample, on every rank.
    A group stays on one rank, where its prompt is computed once. No rank waits for another before all its episodes have ended."""
    cap = token_cap(step, args.total_tokens, args.curriculum)
    mine = [(group, task, first + j) for group, task, first in chosen[ranks.rank::ranks.world] for j in range(args.samples)]
    episodes = sampler.rollout([make_request(task, sample, tokenizer, args, cap) for _, task, sample in mine],
                               temperature=args.temperature, step=step, training=True)
    rewards = judged((reward, task, episode, cap, args.format_reward, args.overlong_buffer, args.overlong_filter)
                     for (_, task, _), episode in zip(mine, episodes))
    rows = []
    for (group, task, sample), episode, (value, score) in zip(mine, episodes, rewards):
        rows.append({"group": group, "task_id": task.id, "sample": sample, "suite": task.data_source, "reward": value, "score": score,
                     "end_reason": episode.end_reason, "turns": episode.turns, "tool_calls": episode.tool_calls,
                     "violations": episode.violations, "text": episode.text, "ids": torch.tensor(episode.ids, dtype=torch.int32),
                     "loss_mask": torch.tensor(episode.source) == SAMPLED, "sampler_logprobs": torch.tensor(episode.logprobs)})
    return sorted(gather_lists(rows), key=lambda row: (row["group"], row["sample"]))


def judged(calls):
    """The results of calls (function, *arguments), in order, eight at a time: a program under test may take minutes."""
    with ThreadPoolExecutor(8) as pool:
        return [future.result() for future in [pool.submit(*call) for call in calls]]


def collect(tasks, cursor, sampler, tokenizer, ranks, args, step):
    """Dynamic sampling: roll out args.prompts groups and, while some have no spread, others in their place, at most args.refills times
    -> (all rows, ids of the informative groups, new cursor, refills)."""
    rows, kept, uses = [], [], Counter()
    for refill in range(args.refills + 1):
        wanted = args.prompts - len(kept)
        chosen = []
        for place, number in enumerate(stream(cursor, cursor + wanted, len(tasks), args.seed), cursor):
            chosen.append((place, tasks[number], uses[number] * args.samples))
            uses[number] += 1                                    # the same question twice in one step: other samples of it
        cursor += wanted
        new = rollout(chosen, sampler, tokenizer, ranks, args, step)
        rows += new
        kept += informative([row["reward"] for row in new], [row["group"] for row in new])
        if len(kept) == args.prompts:
            break
    return rows, kept, cursor, refill


def to_rollout(copy, model, optimizer, args):
    """Bring the sampler's copy of the weights up to date, after making room for it where asked."""
    if args.swap:
        swap(copy, model, optimizer, rollout=True, offload=args.offload)
    refresh(copy, model)


def to_training(copy, model, optimizer, args):
    if args.swap:
        swap(copy, model, optimizer, rollout=False, offload=args.offload)


def dev_scores(tasks, sampler, tokenizer, ranks, args, step):
    """Greedy answers to held-out tasks -> {"dev": mean score, "dev_by_suite": {...}}."""
    mine = tasks[ranks.rank::ranks.world]
    cap = token_cap(step, args.total_tokens, args.curriculum)
    episodes = sampler.rollout([make_request(task, 0, tokenizer, args, cap) for task in mine], temperature=0.0)
    grades = judged((grade, task, episode.text) for task, episode in zip(mine, episodes))
    scores = gather_lists([(task.data_source, result.score) for task, result in zip(mine, grades)])
    return {"dev": mean(score for _, score in scores), "dev_by_suite": by_suite(scores)}


def pick_dev(tasks, count):
    """`count` tasks spread evenly over the suites, the first of each in file order."""
    places, order = Counter(), {}
    for task in tasks:
        places[task.data_source] += 1
        order[task.id] = places[task.data_source]
    return sorted(tasks, key=lambda task: (order[task.id], task.data_source))[:count]


def mean(values):
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan


def by_suite(pairs):
    values = defaultdict(list)
    for suite, value in pairs:
        values[suite].append(value)
    return {suite: mean(values[suite]) for suite in sorted(values)}


# ----------------------------------------------------------------------------------------------------------------------
# Update


def training_row(row, advantage):
    """A rollout row -> tensors (T,), cut after the last sampled token: what follows it, an observation, is neither trained nor context."""
    end = int(row["loss_mask"].nonzero()[-1]) + 1
    mask = row["loss_mask"][:end]
    return {"ids": row["ids"][:end], "loss_mask": mask, "sampler_logprobs": row["sampler_logprobs"][:end],
            "advantages": torch.where(mask, float(advantage), 0.0)}


def split_minibatches(rows, count, seed):
    """Whole groups, shuffled by `seed`, dealt into `count` minibatches of rows (fewer when there are fewer groups)."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    groups = list(groups.values())
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(count, len(groups))
    return [[row for i in order[part::count] for row in groups[i]] for part in range(count)]


def forward_logprobs(model, batch, temperature, entropy=False):
    """log pi(x_t | x_<t) at the sampler's temperature -> (B, T-1), for the tokens from the second on; with entropy a pair of these."""
    hidden = model(batch["ids"][:, :-1], lengths=batch["lengths"] - 1)
    return model.token_logprobs(hidden, batch["ids"][:, 1:], batch["loss_mask"][:, 1:], temperature, entropy)


ZERO_WEIGHT_ROW = {"ids": torch.zeros(2, dtype=torch.long), "loss_mask": torch.tensor([False, True]), "sampler_logprobs": torch.zeros(2),
                   "advantages": torch.zeros(2), "old_logprobs": torch.zeros(2), "ref_logprobs": torch.zeros(2)}


def zero_weight_row(keys):
    return {key: ZERO_WEIGHT_ROW[key] for key in keys if key in ZERO_WEIGHT_ROW}


@torch.no_grad()
def add_logprobs(model, rows, key, ranks, args):
    """Store log pi(x_t | x_<t) of `model` under `key` in this rank's share of `rows`."""
    for numbers in micro_batches([len(row["ids"]) for row in rows], args.micro_tokens, ranks.world)[ranks.rank]:
        part = [rows[i] for i in numbers] or [zero_weight_row(["ids", "loss_mask"])]
        logprobs = forward_logprobs(model, collate([{k: row[k] for k in ("ids", "loss_mask")} for row in part], ranks.device), args.temperature)
        for row, values in zip(part if numbers else [], logprobs.cpu()):
            row[key] = torch.nn.functional.pad(values[:len(row["ids"]) - 1], (1, 0))


FIGURES = ("ratio", "clipped_low", "clipped_high", "k3", "entropy", "gap")


def policy_backward(model, rows, ranks, args):
    """Accumulate the gradient of one minibatch -> (loss, figures (6,): sums over this rank's tokens, largest gap). As sft.backward."""
    tokens = sum(int(row["loss_mask"][1:].sum()) for row in rows)
    total, widest = 0.0, torch.zeros((), device=ranks.device)
    figures = torch.zeros(len(FIGURES), dtype=torch.float64, device=ranks.device)
    for numbers in micro_batches([len(row["ids"]) for row in rows], args.micro_tokens, ranks.world)[ranks.rank]:
        batch = collate([rows[i] for i in numbers] or [zero_weight_row([*rows[0], *(["ref_logprobs"] if args.kl else [])])], ranks.device)
        logprobs, entropy = forward_logprobs(model, batch, args.temperature, entropy=True)      # (B, T-1) each
        old = sampler = batch["sampler_logprobs"][:, 1:]
        weights = None
        if args.tis:
            old = batch["old_logprobs"][:, 1:] if "old_logprobs" in batch else logprobs.detach()
            weights = importance_weights(old, sampler, args.tis)
        mask, ref = batch["loss_mask"][:, 1:], batch["ref_logprobs"][:, 1:] if args.kl else None
        loss, sums = policy_loss(logprobs, old, batch["advantages"][:, 1:], mask, tokens, args.clip_low, args.clip_high, args.dual_clip, ref,
                                 args.kl, weights)
        (loss * ranks.world if numbers else 0 * loss).backward()
        if numbers:
            gap = ((logprobs.detach() - sampler) * mask).abs()
            figures += torch.cat([sums, torch.stack([entropy.detach().sum(), gap.sum()])])
            widest = torch.maximum(widest, gap.max())
            total += loss.detach()
    return float(total), figures.tolist(), float(widest)


def update(model, reference, optimizer, minibatches, ranks, args):
    """One optimiser step a minibatch -> dict of figures, means per trained token; `gap` from the first minibatch, before any update."""
    for rows in minibatches:
        if args.tis and len(minibatches) > 1:
            add_logprobs(model, rows, "old_logprobs", ranks, args)
        if args.kl:
            add_logprobs(reference, rows, "ref_logprobs", ranks, args)
    metrics = Counter(trained_tokens=sum(int(row["loss_mask"][1:].sum()) for rows in minibatches for row in rows))
    norms = []
    for number, rows in enumerate(minibatches):
        loss, figures, widest = policy_backward(model, rows, ranks, args)
        loss, *figures = all_sum(loss, *figures)
        norms.append(clip_gradients(model, args.clip))
        if math.isfinite(norms[-1]):
            optimizer.step()
        else:
            metrics["skipped_updates"] += 1
        optimizer.zero_grad(set_to_none=True)
        metrics["loss"] += loss / len(minibatches)
        for name, value in zip(FIGURES[:-1], figures):
            metrics[name] += value / metrics["trained_tokens"]
        if number == 0:
            metrics["gap"] = figures[-1] / sum(int(row["loss_mask"][1:].sum()) for row in rows)
            metrics["gap_max"] = max(gather(widest))
    return {**metrics, "grad_norm": max(norms), "updates": len(norms)}


TRACE_KEYS = ("task_id", "sample", "suite", "reward", "score", "end_reason", "turns", "tool_calls", "violations", "text")


def rollout_metrics(rows, kept, refills):
    """Figures of all episodes of a round. groups: how many, informative, and those that were right or wrong throughout."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row["score"])
    ends = Counter(row["end_reason"] for row in rows)
    return {
        "reward": mean(row["reward"] for row in rows), "score": mean(row["score"] for row in rows),
        "score_by_suite": by_suite((row["suite"], row["score"]) for row in rows), "episodes": len(rows), "groups": len(groups),
        "informative": len(kept), "all_right": sum(min(scores) >= 1 for scores in groups.values()),
        "all_wrong": sum(max(scores) <= 0 for scores in groups.values()), "refills": refills, "end_reasons": dict(sorted(ends.items())),
        "cut_off": sum(ends[reason] for reason in ("token_cap", "turn_cap", "deadline")) / len(rows),
        **{key: mean(row[key] for row in rows) for key in ("turns", "tool_calls", "violations")},
        "episode_tokens": mean(len(row["ids"]) for row in rows), "sampled_tokens": mean(int(row["loss_mask"].sum()) for row in rows)}


def summary(metrics, state):
    """The figures that matter, for the progress bar."""
    shown = {"reward": ".2f", "informative": "d", "entropy": ".3f", "gap": ".1e", "grad_norm": ".2f", "sampled_per_second": ".0f"}
    names = {"informative": "groups", "sampled_per_second": "tok/s", "grad_norm": "grad"}
    parts = [f"{names.get(key, key)} {metrics[key]:{form}}" for key, form in shown.items() if metrics.get(key) is not None]
    return ", ".join(parts + ([f"best dev {state['best']:.2f}"] if state["best_step"] is not None else []))


def warnings(metrics, history):
    """What left a sane range, and why it matters -> list of lines. history: metrics of earlier steps, oldest first; all as `clean` left them."""
    found, rewards = [], [row["reward"] for row in history[-20:] if row["reward"] is not None]
    best = max((mean(rewards[i:i + 5]) for i in range(len(rewards) - 4)), default=0.0)
    if len(rewards) >= 10 and (metrics["reward"] or 0.0) < 0.5 * best:
        found.append(f"reward {metrics['reward'] or 0.0:.2f} is below half of its best: the policy may be collapsing; lower --lr, go back to best/")
    if metrics["cut_off"] > 0.2:
        found.append(f"{metrics['cut_off']:.0%} of the episodes hit a cap: they score 0 however good they were; raise --total-tokens or --turns")
    if not metrics["informative"]:
        found.append("no group had unequal rewards: nothing to learn from, no update; take easier or harder questions, or more --samples")
    if "entropy" not in metrics:
        return found
    if metrics.get("skipped_updates") or None in (metrics["entropy"], metrics["grad_norm"], metrics["gap"]):
        return found + ["the loss or its gradient is not finite: no update; if it comes again go back to best/ and lower --lr"]
    usual = [row for row in history if row.get("entropy") is not None and row["grad_norm"] is not None]
    if usual and not 0.2 < metrics["entropy"] / max(1e-9, usual[0]["entropy"]) < 3:
        found.append(f"entropy {metrics['entropy']:.3f} against {usual[0]['entropy']:.3f} at the start: too low, all samples are alike and groups "
                     "lose their spread; too high, the text falls apart")
    if len(usual) >= 10 and metrics["grad_norm"] > 10 * statistics.median(row["grad_norm"] for row in usual[-20:]):
        found.append(f"gradient norm {metrics['grad_norm']:.2f} is ten times the usual: one batch is pulling hard; it was clipped")
    if metrics["gap"] > 0.05:
        found.append(f"log-probs of sampler and trainer differ by {metrics['gap']:.3f} nats a token: training is off-policy; see --tis")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Options


def curriculum_step(text):
    step, tokens = map(int, text.split(":"))
    return step, tokens


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "runs/demo/rl", tasks=["data/tasks/rl.jsonl"], model="runs/demo/sft/model")
    group = parser.add_argument_group("rollout")
    group.add_argument("--preset", choices=PRESETS, help="the paper's values for this agent; options given beside it win")
    group.add_argument("--prompts", type=positive, default=16, help="questions a step (default %(default)s)")
    group.add_argument("--samples", type=positive, default=8, help="episodes a question, 2 at least (default %(default)s)")
    group.add_argument("--refills", type=natural, default=1, help="further rounds for groups without spread (default %(default)s)")
    group.add_argument("--temperature", type=amount, default=0.7, help="of sampling and of the loss (default %(default)s)")
    group.add_argument("--prompt", choices=["brief", "full"], default="brief", help="brief for tiny models (default %(default)s)")
    group.add_argument("--turns", type=positive, default=8, help="generations an episode may have (default %(default)s)")
    group.add_argument("--new-tokens", type=positive, default=128, help="tokens in one generation (default %(default)s)")
    group.add_argument("--total-tokens", type=positive, default=1024, help="tokens of an episode, prompt included (default %(default)s)")
    group.add_argument("--curriculum", type=curriculum_step, nargs="*", default=[], metavar="STEP:TOKENS", help="from a step on, another cap")
    group.add_argument("--episode-seconds", type=amount, default=3600.0, help="longest episode (default %(default)s)")
    group.add_argument("--force-answer", action="store_true", help="the last turn begins with <answer>")
    group.add_argument("--slots", type=positive, default=128, help="episodes that run at once on a rank (default %(default)s)")
    group.add_argument("--deterministic", action=argparse.BooleanOptionalAction, help="rows rejoin by decode steps, not by the clock (default: on a CPU)")
    group = parser.add_argument_group("reward")
    group.add_argument("--format-reward", action="store_true", help="times 1 if the episode is grammatical, else 0")
    group.add_argument("--overlong-buffer", type=amount, default=0.0, help="share of the cap over which length is punished, 0 to -1")
    group.add_argument("--overlong-filter", action="store_true", help="leave out episodes that a cap cut off")
    group = parser.add_argument_group("update")
    group.add_argument("--steps", type=positive, default=110, help="rollout-update rounds (default %(default)s)")
    group.add_argument("--minibatches", type=positive, default=1, help="optimiser steps a round (default %(default)s)")
    group.add_argument("--lr", type=amount, default=4e-4, help="learning rate (default %(default)s)")
    group.add_argument("--warmup-steps", type=natural, default=3, help="rounds of linear warm-up (default %(default)s)")
    group.add_argument("--schedule", choices=["constant", "linear", "cosine"], default="linear", help="after it (default %(default)s)")
    group.add_argument("--beta2", type=amount, default=0.95, help="AdamW's second decay (default %(default)s)")
    group.add_argument("--weight-decay", type=amount, default=0.0, help="AdamW's weight decay (default %(default)s)")
    group.add_argument("--clip", type=amount, default=1.0, help="largest gradient norm (default %(default)s)")
    group.add_argument("--clip-low", type=amount, default=0.2, help="ratio clip below 1 (default %(default)s)")
    group.add_argument("--clip-high", type=amount, default=0.28, help="ratio clip above 1 (default %(default)s)")
    group.add_argument("--dual-clip", type=amount, help="for A < 0 a token counts at least this times A")
    group.add_argument("--no-std", action="store_true", help="advantages without division by the group's std")
    group.add_argument("--kl", type=amount, default=0.0, help="weight of the k3 KL to the starting model (default: none)")
    group.add_argument("--tis", type=amount, default=0.0, help="old log-probs from the trainer, times importance weights cut at this")
    group = parser.add_argument_group("evaluation")
    group.add_argument("--dev", nargs="+", help="held-out tasks (default: data/tasks/dev.jsonl with the built-in --tasks, else none)")
    group.add_argument("--eval-tasks", type=positive, default=240, help="how many of them (default %(default)s)")
    group.add_argument("--eval-every", type=natural, default=20, help="rounds between evaluations; 0: none, model/ is the last (default %(default)s)")
    add_tool_arguments(parser)
    scale = add_scale_arguments(parser, micro_tokens=4096)
    scale.add_argument("--swap", action="store_true", help="while sampling keep the trainer in CPU memory, while training the sampler's copy")
    parser.set_defaults(**PRESETS.get(parser.parse_known_args(argv)[0].preset, {}))
    args = parser.parse_args(argv)
    if args.samples < 2:
        parser.error("argument --samples: expected 2 at least: an advantage is a difference within a group")
    if args.dev is None:
        args.dev = ["data/tasks/dev.jsonl"] if args.tasks == parser.get_default("tasks") else []
    return args


if __name__ == "__main__":
    exit_on_input_error()
    args = parse_arguments()
    ranks = setup()
    out = Path(args.out)

    # ------------------------------------------------------------------------------------------------------------------
    # The run folder: new, to be resumed, or done
    if not Path(args.model).exists() and args.model == "runs/demo/sft/model":
        raise InputError(f"{args.model}: no such directory; `python sft.py` makes it")
    tasks = load_tasks(args.tasks)
    dev = pick_dev(load_tasks(args.dev), args.eval_tasks) if args.eval_every and args.dev else []
    toolbox = make_toolbox(args, {task.agent for task in tasks + dev})    # before the folder: a corpus that cannot be read leaves nothing behind
    config = run_config(args, [*args.tasks, *(args.dev if dev else []), args.model, args.corpus], ignore=["swap", "slots"])
    owns = ("checkpoint", "best", "last", "metrics.jsonl", "traces.jsonl")
    if start_run(out, config, args.fresh, result="model", owns=owns) == "done":
        print(f"{out}/model is there: done, --fresh to redo") if ranks.is_main else None
        toolbox.close()
        teardown()
        raise SystemExit(0)

    # ------------------------------------------------------------------------------------------------------------------
    # Model, optimiser, sampler, tools, and where we stand
    tokenizer = load_tokenizer(args.model)
    model = load_trainable(args.model, ranks, args.shards, args.offload, args.checkpointing)
    reference = load_trainable(args.model, ranks, args.shards, args.offload) if args.kl else None
    optimizer = make_optimizer(model, args.lr, args.beta2, args.weight_decay)
    loaded = load_checkpoint(out / "checkpoint", model, optimizer)
    state = loaded or {"step": 0, "cursor": 0, "best_step": None, "best": -1.0}
    if loaded and state["best_step"] == state["step"]:               # killed before best/ was written, perhaps: these are its weights
        export_model(model, tokenizer, out / "best")
    log, traces = (MetricLog(out / name, keep=state["step"] if loaded else None) for name in ("metrics.jsonl", "traces.jsonl"))
    history = [row for row in read_jsonl(out / "metrics.jsonl") if row["step"]] if ranks.is_main else []
    copy = rollout_copy(model, ranks)
    longest = max([args.total_tokens, *(tokens for _, tokens in args.curriculum)])
    sampler = Sampler(copy, tokenizer, toolbox, slots=args.slots, max_len=longest, seed=args.seed, deterministic=args.deterministic,
                      force_answer=args.force_answer)
    if ranks.is_main:
        print(f"{len(tasks)} tasks, {len(dev)} held out for evaluation; rounds {state['step']} to {args.steps} of {args.prompts} x {args.samples} "
              f"episodes on {ranks.world} x {ranks.device.type}")

    # ------------------------------------------------------------------------------------------------------------------
    # The loop. Round 0 is the evaluation of the starting point.
    progress = tqdm(total=args.steps, initial=state["step"], desc="rl", unit="round", disable=not ranks.is_main)
    saved_at = time.monotonic()
    for step in range(state["step"] + 1 if loaded or not dev else 0, args.steps + 1):
        metrics = {"step": step}
        if step > 0:
            # 1 rollout, 2 reward, 3 groups
            started = time.monotonic()
            to_rollout(copy, model, optimizer, args)
            rows, kept, state["cursor"], refills = collect(tasks, state["cursor"], sampler, tokenizer, ranks, args, step)
            to_training(copy, model, optimizer, args)
            rollout_seconds = time.monotonic() - started

            # 4 advantages, 5 update
            started = time.monotonic()
            values = advantages([row["reward"] for row in rows], [row["group"] for row in rows], standardise=not args.no_std)
            batch = [{"group": row["group"], **training_row(row, advantage)} for row, advantage in zip(rows, values.tolist())
                     if row["group"] in set(kept) and not math.isnan(row["reward"])]
            minibatches = split_minibatches(batch, args.minibatches, seed=args.seed * 1_000_003 + step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, args.steps, args.lr, args.warmup_steps / args.steps, args.schedule)
            figures = update(model, reference, optimizer, minibatches, ranks, args) if minibatches else {}
            update_seconds = time.monotonic() - started

            # What happened
            metrics |= rollout_metrics(rows, kept, refills) | figures | {
                "lr": optimizer.param_groups[0]["lr"], "rollout_seconds": rollout_seconds, "update_seconds": update_seconds,
                "sampled_per_second": sum(int(row["loss_mask"].sum()) for row in rows) / rollout_seconds}
            traces.log(*({"step": step, "advantage": value, **{key: row[key] for key in TRACE_KEYS}} for row, value in zip(rows, values.tolist())))

        # Evaluation
        better = False
        if dev and (step % args.eval_every == 0 or step == args.steps):
            to_rollout(copy, model, optimizer, args)
            metrics |= dev_scores(dev, sampler, tokenizer, ranks, args, step)
            to_training(copy, model, optimizer, args)
            better = metrics["dev"] > state["best"]
            if better:
                state.update(best=metrics["dev"], best_step=step)
        metrics = clean(metrics)
        if step > 0:
            metrics["warnings"] = warnings(metrics, history)
            history.append(metrics)
            progress.update()
        log.log(metrics)
        if ranks.is_main:
            for line in metrics.get("warnings", []):
                tqdm.write(f"round {step}: {line}")
            progress.set_postfix_str(summary(metrics, state))
        state["step"] = step
        if better or checkpoint_due(saved_at, args.checkpoint_seconds) or step == args.steps:
            save_checkpoint(out / "checkpoint", step, model, optimizer, {key: value for key, value in state.items() if key != "step"})
            saved_at = time.monotonic()
        if better:                                                  # after the checkpoint that says so
            export_model(model, tokenizer, out / "best")
    progress.close()
    toolbox.close()

    # ------------------------------------------------------------------------------------------------------------------
    # Hugging Face directories: last/, and model/, which is the best on the held-out tasks
    export_model(model, tokenizer, out / "last")
    if ranks.is_main:
        replace_directory(out / "model", lambda temporary: shutil.copytree(out / ("best" if dev else "last"), temporary))
        if dev:
            print(f"best on {len(dev)} held-out tasks: {state['best']:.3f} after round {state['best_step']}")
        signal, asked = (sum(row[key] for row in history) for key in ("informative", "groups"))
        print(f"{signal} of {asked} groups carried signal (unequal rewards); the others were right or wrong throughout")
        print(f"wrote {out / 'model'}")
    teardown()
