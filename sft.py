"""Supervised fine-tuning on chains of agents (paper section 3.2, equation 7).

A chain is one text in which a single model plays every agent: it thinks, plans, calls tools, reads observations, reflects and answers. The
model learns to write its own tokens and only reads the rest:

    L(theta) = - 1/N * sum over t with m_t = 1 of  log pi_theta(x_t | x_<t)            m_t = 1 where the model wrote x_t, 0 for the prompt
                                                                                       and for observations; N = sum of m over the batch
N counts the trained tokens of the whole batch over all ranks. So a batch means the same however it is cut into micro-batches, in whatever
order its rows stand, and on any number of GPUs. (The mean of micro-batch means, which many loops take, is none of these.)

Left out on purpose: packing (rows of like length share a micro-batch instead, see the padding share), LoRA, mixing of data sets.

    python sft.py                                                     the demo on a CPU: 8 minutes, validation loss below 0.1
    python sft.py --preset mhqa --model Qwen/Qwen2.5-3B --tasks AFM.json         one GPU
    torchrun --standalone --nproc_per_node=8 sft.py --preset web --model Qwen/Qwen2.5-7B-Instruct --tasks AFM.json    one node
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_endpoint=HOST:29500 sft.py ...                                      several nodes

The same command again goes on from the last checkpoint, on any number of ranks.
"""
import argparse
import math
import time
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from coa_format import encode, observation, prompt_ids, reject_reason, truncate
from hf import InputError, exit_on_input_error, read_rows
from model import load_tokenizer
from parallel import (MetricLog, add_common_arguments, add_scale_arguments, all_sum, amount, checkpoint_due, clip_gradients, collate, export_model,
                      gather, load_checkpoint, load_trainable, make_optimizer, micro_batches, natural, positive, run_config, save_checkpoint,
                      setup, start_run, teardown)

# The paper's hyper-parameters (section 4.1.1 and 4.2.1; warm-up of mhqa from the official script). Batch and epochs are the paper's.
COMMON = dict(max_len=32768, micro_tokens=32768, beta2=0.999, checkpointing=True, checkpoint_seconds=900.0)
PRESETS = {
    "mhqa": dict(COMMON, lr=1.4e-5, batch=256, epochs=2.5, warmup=0.03),
    "web": dict(COMMON, lr=1.4e-5, batch=256, epochs=2.5, warmup=0.1),
    "code": dict(COMMON, lr=3e-5, batch=32, epochs=2.0, warmup=0.1),
}

# ----------------------------------------------------------------------------------------------------------------------
# Rows: text -> ids and loss mask


def read_texts(path):
    """A data file -> list of (prompt, response, place). Three kinds of row are known by their fields: ours and AFM's alpaca columns
    `instruction, input, output`; `messages`, one user message, then assistant messages with tool messages between them.
    JSON lines, or one JSON list. Errors: InputError naming file, row and field."""
    if not Path(path).exists() and Path(path).name == "sft.jsonl":
        raise InputError(f"{path}: no such file; `python distill.py` makes it")
    return [(*row_texts(row, place), place) for place, row in read_rows(path)]


def row_texts(row, place):
    """One row -> (prompt text, response text)."""
    if "messages" in row:
        return message_texts(row["messages"], place)
    for field in ("instruction", "input", "output"):
        value = row.get(field) or ""
        if not isinstance(value, str) or field != "input" and not value.strip():
            raise InputError(f"{place}: field '{field}': expected text (rows have instruction, input, output, or messages)")
    return row["instruction"] + ("\n" + row["input"] if row.get("input") else ""), row["output"]


def message_texts(messages, place):
    """Chat messages -> (prompt, response): [system,] user, assistant, (tool, assistant)*. Tool messages become observation blocks."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
        raise InputError(f"{place}: field 'messages': expected a list of messages with role and content, both text")
    roles = [message.get("role") for message in messages]
    start = 1 if roles[:1] == ["system"] else 0
    if roles[start:start + 1] != ["user"] or roles[start + 1:] != (["assistant", "tool"] * len(roles))[:len(roles) - start - 1] \
            or roles[-1] != "assistant":
        raise InputError(f"{place}: field 'messages': expected roles [system,] user, assistant, (tool, assistant)*, found {roles}")
    prompt = "\n\n".join(message["content"] for message in messages[:start + 1])
    response = ""
    for message in messages[start + 1:]:
        block = observation(message["content"]) if message["role"] == "tool" else message["content"]
        response += block[1:] if message["role"] == "tool" and response.endswith("\n") else block
    return prompt, response


def encode_rows(texts, tokenizer, max_len):
    """[(prompt, response, place)] -> (rows, counts). A row: ids (T,) int32 of prompt and response, loss_mask (T,) bool, False on the
    prompt and on observations. Rows longer than max_len are cut; those with broken observations, or with nothing left to train, become
    None; counts says how many and why. Errors: InputError for a row whose text has no trained token, cut or not."""
    rows, counts = [], Counter()
    for prompt, response, place in texts:
        prefix, whole = prompt_ids(prompt, tokenizer), encode(response, tokenizer)
        if not any(whole.loss_mask):
            raise InputError(f"{place}: field 'output': no text that the model wrote, only observations")
        encoded, cut = truncate(whole, max_len, len(prefix))
        counts["cut"] += cut["cut_tokens"] > 0
        if reason := reject_reason(response, encoded, len(prefix)):
            counts[f"dropped: {reason}"] += 1
            rows.append(None)
            continue
        loss_mask = [False] * len(prefix) + encoded.loss_mask
        rows.append({"ids": torch.tensor(prefix + encoded.ids, dtype=torch.int32), "loss_mask": torch.tensor(loss_mask)})
        counts["tokens"] += len(loss_mask)
        counts["trained"] += sum(loss_mask)
    return rows, counts


# ----------------------------------------------------------------------------------------------------------------------
# Order, schedule, loss


def stream(start, stop, count, seed):
    """Places start ... stop of an endless stream of the numbers 0 ... count-1: one permutation an epoch, keyed by (seed, epoch)."""
    numbers, orders = [], {}
    for position in range(start, stop):
        epoch = position // count
        if epoch not in orders:
            orders[epoch] = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        numbers.append(orders[epoch][position % count])
    return numbers


def learning_rate(step, steps, peak, warmup, schedule):
    """Linear warm-up over the first warmup*steps steps, then constant, or down to zero along half a cosine or a line."""
    warmup_steps = round(warmup * steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)                        # 0 ... 1
    return peak * {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]


def sum_loss(model, rows, device):
    """- sum of log pi over the trained tokens of these rows (a scalar with gradient)."""
    batch = collate(rows, device)
    hidden = model(batch["ids"][:, :-1], lengths=batch["lengths"] - 1)                     # (B, T-1, D)
    logprobs = model.token_logprobs(hidden, batch["ids"][:, 1:], batch["loss_mask"][:, 1:])  # (B, T-1), zero where untrained
    return -logprobs.sum()


ZERO_WEIGHT_ROW = {"ids": torch.zeros(2, dtype=torch.long), "loss_mask": torch.tensor([False, True])}


def backward(model, rows, ranks, micro_tokens):
    """Accumulate the gradient of equation 7 for one batch -> dict of its figures. Every rank gets the whole batch and does its share.

    The loss of a micro-batch is its sum divided by the trained tokens of all ranks. FSDP averages gradients over ranks, hence the
    factor `world`."""
    trained = sum(int(row["loss_mask"][1:].sum()) for row in rows)
    shares = micro_batches([len(row["ids"]) for row in rows], micro_tokens, ranks.world)
    padded = sum(len(numbers) * len(rows[numbers[0]]["ids"]) for share in shares for numbers in share if numbers)
    total = 0.0
    for numbers in shares[ranks.rank]:
        loss = sum_loss(model, [rows[i] for i in numbers] or [ZERO_WEIGHT_ROW], ranks.device) / trained
        loss = loss if numbers else 0 * loss
        (loss * ranks.world).backward()
        total += loss.detach()                                                             # stays on the device: no wait in the loop
    tokens = sum(len(row["ids"]) for row in rows)
    return {"loss": all_sum(float(total))[0], "tokens": tokens, "trained_tokens": trained, "padding": 1 - tokens / padded}


@torch.no_grad()
def validation_loss(model, rows, ranks, micro_tokens):
    """Equation 7 on rows that are not trained on."""
    total = 0.0
    for numbers in micro_batches([len(row["ids"]) for row in rows], micro_tokens, ranks.world)[ranks.rank]:
        loss = sum_loss(model, [rows[i] for i in numbers] or [ZERO_WEIGHT_ROW], ranks.device)
        total += float(loss) if numbers else 0.0
    return all_sum(total)[0] / sum(int(row["loss_mask"][1:].sum()) for row in rows)


# ----------------------------------------------------------------------------------------------------------------------
# Options


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "runs/demo/sft", tasks=["runs/demo/distill/sft.jsonl"], model="data/base")
    group = parser.add_argument_group("training")
    group.add_argument("--preset", choices=PRESETS, help="the paper's values for this agent; options given beside it win")
    group.add_argument("--epochs", type=amount, default=3.0, help="passes over the rows (default %(default)s)")
    group.add_argument("--steps", type=positive, help="stop after this many optimiser steps instead")
    group.add_argument("--batch", type=positive, default=8, help="rows in an optimiser step, over all ranks (default %(default)s)")
    group.add_argument("--lr", type=amount, default=3e-3, help="peak learning rate (default %(default)s)")
    group.add_argument("--warmup", type=amount, default=0.05, help="share of the steps that warm up (default %(default)s)")
    group.add_argument("--schedule", choices=["cosine", "linear"], default="cosine", help="after warm-up (default %(default)s)")
    group.add_argument("--beta2", type=amount, default=0.95, help="AdamW's second decay (default %(default)s)")
    group.add_argument("--weight-decay", type=amount, default=0.0, help="AdamW's weight decay (default %(default)s)")
    group.add_argument("--clip", type=amount, default=1.0, help="largest gradient norm (default %(default)s)")
    group.add_argument("--max-len", type=positive, default=1024, help="longest row in tokens; longer ones are cut (default %(default)s)")
    group.add_argument("--validation-rows", type=natural, default=64, help="rows held out, at most a tenth (default %(default)s)")
    group.add_argument("--eval-every", type=natural, default=100, help="steps between validations; 0: only at the end (default %(default)s)")
    add_scale_arguments(parser, micro_tokens=4096)
    preset = parser.parse_known_args(argv)[0].preset
    parser.set_defaults(**PRESETS.get(preset, {}))
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_input_error()
    args = parse_arguments()
    ranks = setup()
    out = Path(args.out)

    # ------------------------------------------------------------------------------------------------------------------
    # The run folder: new, to be resumed, or done
    texts = [row for path in args.tasks for row in read_texts(path)]
    outcome = start_run(out, run_config(args, [*args.tasks, args.model]), args.fresh, result="model")
    if outcome == "done":
        print(f"{out}/model is there: done, --fresh to redo") if ranks.is_main else None
        teardown()
        raise SystemExit(0)

    # ------------------------------------------------------------------------------------------------------------------
    # Data
    tokenizer = load_tokenizer(args.model)
    parts = gather(encode_rows(texts[ranks.rank::ranks.world], tokenizer, args.max_len))            # every rank encodes its share
    rows = [parts[i % ranks.world][0][i // ranks.world] for i in range(len(texts))]
    rows = [row for row in rows if row is not None]
    counts = sum((part[1] for part in parts), Counter())
    held_out = set(stream(0, min(args.validation_rows, len(rows) // 10), len(rows), args.seed))
    validation = [rows[i] for i in sorted(held_out)]
    rows = [row for i, row in enumerate(rows) if i not in held_out]
    kept = f"{len(rows) + len(validation)} rows, {len(validation)} of them held out; " + ", ".join(f"{name} {count:,}" for name, count in counts.items())
    if not rows:
        raise InputError(f"{', '.join(args.tasks)}: no rows to train on ({kept}; --max-len {args.max_len})")
    steps = args.steps or math.ceil(args.epochs * len(rows) / args.batch)
    if ranks.is_main:
        print(kept)
        if counts["cut"] > 0.2 * len(texts):
            print(f"warning: {counts['cut']} of {len(texts)} rows are longer than --max-len {args.max_len} and were cut: their answers are not trained")

    # ------------------------------------------------------------------------------------------------------------------
    # Model, optimiser, and where we stand
    model = load_trainable(args.model, ranks, args.shards, args.offload, args.checkpointing)
    optimizer = make_optimizer(model, args.lr, args.beta2, args.weight_decay)
    state = load_checkpoint(out / "checkpoint", model, optimizer) or {"step": 0}
    log = MetricLog(out / "metrics.jsonl", keep=state["step"])
    if ranks.is_main:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size / 1e6:.2f}M parameters on {ranks.world} x {ranks.device.type}; steps {state['step']} to {steps}")

    # ------------------------------------------------------------------------------------------------------------------
    # The loop
    progress = tqdm(total=steps, initial=state["step"], desc="sft", unit="step", disable=not ranks.is_main)
    saved_at = time.monotonic()
    for step in range(state["step"] + 1, steps + 1):
        started = time.monotonic()
        lr = learning_rate(step - 1, steps, args.lr, args.warmup, args.schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        numbers = stream((step - 1) * args.batch, step * args.batch, len(rows), args.seed)
        metrics = backward(model, [rows[i] for i in numbers], ranks, args.micro_tokens)
        norm = clip_gradients(model, args.clip)
        if math.isfinite(norm):
            optimizer.step()
        elif ranks.is_main:
            tqdm.write(f"step {step}: the gradient norm is {norm}; no update. Lower --lr if this comes again")
        optimizer.zero_grad(set_to_none=True)

        # The step is done: log, validate, keep
        seconds = time.monotonic() - started
        metrics = {"step": step, "epoch": round(step * args.batch / len(rows), 4), **metrics, "lr": lr, "grad_norm": norm,
                   "step_seconds": seconds, "tokens_per_second": metrics["tokens"] / seconds}
        if validation and (args.eval_every and step % args.eval_every == 0 or step == steps):
            metrics["validation_loss"] = validation_loss(model, validation, ranks, args.micro_tokens)
        log.log(metrics)
        progress.set_postfix(loss=f"{metrics['loss']:.3f}", tok_s=f"{metrics['tokens_per_second']:.0f}", pad=f"{metrics['padding']:.0%}",
                             **({"val": f"{metrics['validation_loss']:.3f}"} if "validation_loss" in metrics else {}))
        progress.update()
        if checkpoint_due(saved_at, args.checkpoint_seconds) or step == steps:
            save_checkpoint(out / "checkpoint", step, model, optimizer, {})
            saved_at = time.monotonic()
    progress.close()

    # ------------------------------------------------------------------------------------------------------------------
    # A Hugging Face directory
    export_model(model, tokenizer, out / "model")
    if ranks.is_main:
        print(f"wrote {out / 'model'}")
    teardown()
