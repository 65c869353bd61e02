"""How fast sft.py and rl.py train next to transformers' Trainer and TRL, and whether `parallel.py --plan` tells the truth about memory.

    pip install -r bench/requirements.txt                the peers; one that is absent is named and skipped
    python bench/bench_train.py                          tiny-1m and a 135M shape on a CPU, bf16 0.5B where there is a GPU: 30 minutes
    python bench/bench_train.py --quick                  tiny sizes, to see that it runs; the numbers mean nothing

sft     tokens/s of real (not padding) tokens: whole optimiser steps of 16 rows of 100 to 1000 tokens (lognormal, as chains of agents are),
        40 % of them trained. Peers on the same rows, weights, precision and threads: Trainer with its defaults (8 rows x 2 accumulation,
        random order, loss over the full head), SFTTrainer with chunked loss and rows grouped by length.
        `peak_share`: useful floating-point operations, without padding and recomputation, over the measured matmul peak.
grpo    seconds of one step, rollout and update, on episodes of the same turns and tokens, with a tool and without. Peer: GRPOTrainer with
        transformers' generate and its own tool loop. Without a tool all episodes are equally long, which suits the peer best.
memory  the plan against the peak: of RSS above that after the imports, or of the GPU's allocator. On a CPU measured twice: with glibc handing
        freed tensors back (MALLOC_MMAP_THRESHOLD_), which is what the plan counts, and as it is, with what its heap keeps in fragments.
"""
import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
import torch

import rl
import sft
from bench_sampler import ScriptedSampler, Tools
from coa_format import ROLES, TOOLS
from hf import train_tokenizer
from model import PRESETS, ModelConfig, Transformer, load_tokenizer, save_model
from parallel import (clip_gradients, find_plan, load_trainable, make_optimizer, measure, memory_plan, refresh, rollout_copy, setup, teardown,
                      usable_memory)
from sampler import Limits, Request, Sampler

SHAPES = {
    "tiny-1m": dataclasses.replace(PRESETS["tiny-1m"], vocab_size=600),
    "30m": ModelConfig(vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
                       num_key_value_heads=4, head_dim=64, tie_word_embeddings=True),
    "135m": ModelConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, model_type="llama"),
    "0.5b": ModelConfig(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, attention_bias=True, model_type="qwen2"),
    "1.5b": ModelConfig(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                        num_key_value_heads=2, head_dim=128, tie_word_embeddings=True, attention_bias=True, model_type="qwen2"),
}
QWEN = dict(vocab_size=152064, head_dim=128, attention_bias=True, model_type="qwen2")
SHAPES |= {
    "3b": ModelConfig(**QWEN | {"vocab_size": 151936}, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
                      num_key_value_heads=2, tie_word_embeddings=True),
    "7b": ModelConfig(**QWEN, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4),
    "14b": ModelConfig(**QWEN, hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8),
    "32b": ModelConfig(**QWEN, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8),
}
RESULTS = []


def record(bench, ours, peer, unit, setting):
    ratio = None if peer is None else ours / peer if unit.endswith("/s") else peer / ours
    RESULTS.append({"bench": bench, "ours": ours, "peer": peer, "ratio": ratio, "unit": unit, "setting": setting})
    peer_text = "           -" if peer is None else f"{peer:12.4g}"
    print(f"{bench:12} ours {ours:12.4g}  peer {peer_text} {unit:9} ratio {'-' if ratio is None else f'{ratio:.2f}'}  {setting}", flush=True)


def absent(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: {', '.join(missing)} not installed")
    return bool(missing)


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_model(shape, folder):
    """Random weights of a shape with a byte tokenizer, as a Hugging Face directory (made once)."""
    if not (folder / shape / "config.json").exists():
        torch.manual_seed(0)
        tags = [tag for name in [*ROLES, *TOOLS, "observation", "answer"] for tag in (f"<{name}>", f"</{name}>")]
        save_model(Transformer(SHAPES[shape]), train_tokenizer(["a b"], 400, tags), folder / shape)
    return folder / shape


def make_rows(count, shortest, longest, vocab, seed=0):
    rng = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(count, generator=rng) * 0.6 + 5.7).exp().clamp(shortest, longest).long()
    rows = []
    for length in lengths.tolist():
        mask = torch.rand(length // 20 + 1, generator=rng).repeat_interleave(20)[:length] < 0.4         # spans of 20 tokens
        mask[0], mask[-1] = False, True
        rows.append({"ids": torch.randint(0, min(vocab, 256), (length,), generator=rng), "loss_mask": mask})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# SFT


def sft_ours(path, ranks, rows, batch, micro_tokens, warmup):
    """Real tokens per second of sft.py's steps."""
    model = load_trainable(path, ranks)
    optimizer = make_optimizer(model, 1e-4, 0.95, 0.0)
    tokens = 0
    for start in range(0, len(rows), batch):
        if start == warmup * batch:
            synchronize()
            began, tokens = time.perf_counter(), 0
        tokens += sft.backward(model, rows[start:start + batch], ranks, micro_tokens)["tokens"]
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronize()
    return tokens / (time.perf_counter() - began)


def sft_peer(kind, path, rows, batch, micro_batches, warmup, folder):
    """Real tokens per second of Trainer ("trainer") or TRL's SFTTrainer ("trl") on the same rows, a batch in so many micro-batches."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
    gpu = torch.cuda.is_available()
    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    data = Dataset.from_list([{"input_ids": row["ids"].tolist(), "attention_mask": [1] * len(row["ids"]),
                               "labels": torch.where(row["loss_mask"], row["ids"], -100).tolist()} for row in rows])
    common = dict(output_dir=str(folder), num_train_epochs=1, gradient_accumulation_steps=micro_batches, per_device_train_batch_size=batch // micro_batches,
                  learning_rate=1e-4, report_to=[], save_strategy="no", logging_strategy="no", bf16=gpu, use_cpu=not gpu,
                  gradient_checkpointing=False, disable_tqdm=True)

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == warmup:
                synchronize()
                self.began = time.perf_counter()

        def on_train_end(self, args, state, control, **_):
            synchronize()
            self.seconds = time.perf_counter() - self.began

    clock = Clock()
    if kind == "trainer":
        trainer = Trainer(model, TrainingArguments(**common), DataCollatorForSeq2Seq(tokenizer), data, callbacks=[clock])
    else:
        from trl import SFTConfig, SFTTrainer
        args = SFTConfig(**common, max_length=None, packing=False, train_sampling_strategy="group_by_length")
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
    collate, tokens = trainer.data_collator, []

    def counting(features):
        tokens.append(sum(len(row["input_ids"]) for row in features))
        return collate(features)
    trainer.data_collator = counting
    trainer.train()
    return sum(tokens[warmup * micro_batches:]) / clock.seconds


def useful_flops(config, rows):
    """Multiplications and additions of forward and backward: 6 a weight and token, the head on trained tokens only, causal attention."""
    with torch.device("meta"):
        block = sum(p.numel() for p in Transformer(config).layers.parameters())
    tokens, trained = sum(len(row["ids"]) for row in rows), sum(int(row["loss_mask"].sum()) for row in rows)
    attention = sum(6 * len(row["ids"]) ** 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers for row in rows)
    return 6 * tokens * block + 6 * trained * config.vocab_size * config.hidden_size + attention


def matmul_peak(device):
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1536, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        synchronize()
        began = time.perf_counter()
        a @ b
        synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size ** 3 / best


def bench_sft(shape, ranks, folder, args):
    slow = shape != "tiny-1m" and ranks.device.type == "cpu"
    config, batch, steps = SHAPES[shape], *((4, 3) if args.quick else (8, 3) if slow else (16, 20))
    path, warmup = make_model(shape, folder), 1
    rows = make_rows(batch * steps, 20 if args.quick else 100, 60 if args.quick else 1000, config.vocab_size)
    setting = f"{shape}, {ranks.device.type}, {batch} rows a step of {sum(len(r['ids']) for r in rows) // len(rows)} tokens"
    peaks, speeds = [matmul_peak(ranks.device)], []
    for size in args.micro_tokens or ([2048, 4096] if slow else [1024, 4096]):
        speeds.append(sft_ours(path, ranks, rows, batch, size, warmup))
        peaks.append(matmul_peak(ranks.device))
    ours, timed = max(speeds), rows[batch * warmup:]
    share = useful_flops(config, timed) / sum(len(row["ids"]) for row in timed) * ours / max(peaks)
    record("sft_peak", share, None, "share", f"{setting}; peak {max(peaks) / 1e9:.0f} GFLOP/s ({min(peaks) / 1e9:.0f} at another moment)")
    if not absent("accelerate", "datasets"):
        record("sft_trainer", ours, max(sft_peer("trainer", path, rows, batch, n, warmup, folder) for n in (2, 4)), "tokens/s", setting)
    if not absent("accelerate", "datasets", "trl"):
        record("sft_trl", ours, max(sft_peer("trl", path, rows, batch, n, warmup, folder) for n in (2, 4)), "tokens/s", setting)


# ---------------------------------------------------------------------------------------------------------------------
# GRPO: episode i has turns[i] turns of `sampled` tokens, with `observed` tokens of tool text between two of them; no tool where all have one.
# Random weights call no tool, so the tokens that open and close a call are dictated to both sides (see bench_sampler.py).


class UnequalSampler(ScriptedSampler):
    """Dictates a call in every turn but the episode's last, and there an answer."""

    def decode(self, last, uniforms, rows):
        out = Sampler.decode(self, last, uniforms, rows)
        for i, lane in enumerate(self.live):
            run = self.running[lane]
            out[0][i] = int(self.turns[-1 if run.turn == self.turns_of[run.index] else 0][self.pos[lane] - run.turn_start])
        return out


def grpo_ours(path, ranks, prompts, samples, turns, sampled, observed, steps):
    """Seconds of a step: rollout, advantages from random rewards, one update."""
    args, tools = rl.parse_arguments([]), max(turns) > 1
    model, tokenizer = load_trainable(path, ranks), load_tokenizer(path)
    optimizer, copy = make_optimizer(model, 1e-6, 0.95, 0.0), rollout_copy(model, ranks)
    options = dict(slots=len(turns), max_len=len(prompts[0]) + max(turns) * (sampled + observed) + 8)
    sampler = UnequalSampler(copy, tokenizer, Tools(tokenizer, observed), **options) if tools else Sampler(copy, tokenizer, **options)
    sampler.eos, sampler.turns_of, limits = set(), turns, Limits(turns=max(turns), new_tokens=sampled)
    if tools:
        sampler.script(sampled, 2)
    rng, seconds = torch.Generator().manual_seed(0), []
    for step in range(steps + 1):
        synchronize()
        began = time.perf_counter()
        refresh(copy, model)
        if tools:
            requests = [Request(ids, "mhqa", str(i), j, limits) for i, ids in enumerate(prompts) for j in range(samples)]
            episodes = sampler.rollout(requests, step=step, training=True)
        else:
            episodes = sampler.generate([ids for ids in prompts for _ in range(samples)], sampled, temperature=1.0, step=step)
        values = rl.advantages(torch.rand(len(episodes), generator=rng), [i // samples for i in range(len(episodes))]).tolist()
        batch = [rl.training_row({"ids": torch.tensor(e.ids, dtype=torch.int32), "loss_mask": torch.tensor(e.source) == rl.SAMPLED,
                                  "sampler_logprobs": torch.tensor(e.logprobs)}, value) for e, value in zip(episodes, values)]
        rl.update(model, None, optimizer, [batch], ranks, args)
        synchronize()
        seconds.append(time.perf_counter() - began)
    assert [e.source.count(rl.SAMPLED) for e in episodes] == [n * sampled for n in turns], "an episode ended early"
    return min(seconds[1:])


def grpo_peer(path, prompts, samples, turns, sampled, observed, steps, folder):
    """The same of TRL's GRPOTrainer with transformers' generate and its own tool loop."""
    import trl.trainer.grpo_trainer as module
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    tokenizer, gpu, longest = load_tokenizer(path), torch.cuda.is_available(), max(turns)
    tokenizer.chat_template = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
                               "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")
    tokenizer.response_schema, tokenizer.padding_side = {}, "left"
    marks, lengths, calling, rng = [], [], [], torch.Generator().manual_seed(0)

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            synchronize()
            marks.append(time.perf_counter())
            calling[:] = [turn < count for turn in range(1, longest + 1) for count in turns if turn <= count]  # in the order of parsing

        on_train_end = on_step_begin

    def reward(completions, completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return torch.rand(len(completions), generator=rng).tolist()

    def look_up() -> str:
        """Look something up."""
        return "x"

    def parse_response(*_, **__):                                                          # every turn but an episode's last holds a call
        calls = [{"type": "function", "function": {"name": "look_up", "arguments": {}}}] if calling.pop(0) else None
        return {"role": "assistant", "content": "", "tool_calls": calls}

    config = GRPOConfig(output_dir=str(folder), max_steps=steps + 1, per_device_train_batch_size=len(turns), num_generations=samples, beta=0.0,
                        max_completion_length=longest * (sampled + observed), generation_kwargs={"max_new_tokens": sampled, "min_new_tokens": sampled},
                        learning_rate=1e-6, report_to=[], save_strategy="no", logging_strategy="no", bf16=gpu, use_cpu=not gpu,
                        gradient_checkpointing=False, disable_tqdm=True, temperature=1.0, top_k=0)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": str(i)}]} for i in range(len(prompts))] * (steps + 2))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = GRPOTrainer(model, reward, config, data, processing_class=tokenizer, callbacks=[Clock()], tools=[look_up] if longest > 1 else None)
    trainer._tokenize_prompts = lambda messages: ([list(prompts[int(m[0]["content"])]) for m in messages], None, {})
    trainer._get_tool_suffix_ids = lambda messages: [1] * observed
    original, module.parse_response = module.parse_response, parse_response
    trainer.train()
    module.parse_response = original
    wanted = [count * sampled + (count - 1) * observed for count in turns]
    assert sorted(lengths[-len(turns):]) == sorted(wanted), (sorted(lengths[-len(turns):]), sorted(wanted))
    return min(b - a for a, b in zip(marks[1:], marks[2:]))


def bench_grpo(shape, ranks, folder, args):
    path, steps, rng = make_model(shape, folder), 1 if args.quick else 3, torch.Generator().manual_seed(1)
    # prompts, samples, prompt length, least and most turns, sampled and observed tokens of a turn: the built-in demo, a long search (within the 4,096
    # positions beyond which TRL runs no tool), plain text
    settings = [(8, 8, 60, 2, 6, 40, 60), (2, 8, 1000, 5, 14, 30, 200), (8, 8, 60, 1, 1, 160, 0)]
    for prompts, samples, length, least, most, sampled, observed in [(2, 4, 20, 1, 3, 8, 10), (2, 4, 20, 1, 1, 12, 0)] if args.quick else settings:
        texts = [torch.randint(33, 120, (length,), generator=rng).tolist() for _ in range(prompts)]
        turns = torch.randint(least, most + 1, (prompts * samples,), generator=rng).tolist()
        ours = grpo_ours(path, ranks, texts, samples, turns, sampled, observed, steps)
        kind = f"{least} to {most} turns of {sampled} + {observed} tokens, dictated calls of an instant tool" if most > 1 else f"no tools, {sampled} tokens each"
        peer = None if absent("accelerate", "datasets", "trl") else grpo_peer(path, texts, samples, turns, sampled, observed, steps, folder)
        record("grpo_step", ours, peer, "s", f"{shape}, {ranks.device.type}, {prompts} x {samples} episodes, prompt {length}, {kind}")


# ---------------------------------------------------------------------------------------------------------------------
# Memory: a fresh process makes two SFT steps, a short one that creates the optimiser's state, then one of two micro-batches

MEASURE = """
import resource, sys
sys.path.insert(0, {root!r})
import torch, sft
from model import PRESETS, Transformer
from parallel import *
ranks = setup()
def train(model, length):
    optimizer = make_optimizer(model, 1e-4, 0.95, 0.0)
    for length in (8, length):
        row = {{"ids": torch.arange(length) % 200, "loss_mask": torch.arange(length) % 5 < 2}}
        sft.backward(model, [row] * (2 * {rows}), ranks, {rows} * length)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
train(shard_model(Transformer(PRESETS["tiny-1m"]), ranks), 8)                               # imports that happen on first use
mark = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
model = load_trainable({path!r}, ranks, checkpointing={checkpointing})
train(model, {seq})
peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - mark
print("PEAK", peak)
teardown()
"""


def bench_memory(shape, ranks, folder, args, rows, seq, checkpointing):
    path, gpu = make_model(shape, folder), ranks.device.type == "cuda"
    code = MEASURE.format(root=str(Path(__file__).resolve().parent.parent), path=str(path), seq=seq, rows=rows, checkpointing=checkpointing)
    config = SHAPES[shape]
    plan = memory_plan(config, measure(config, seq, rows * seq, gpu), seq, 0, 1, checkpointing)["training"]
    for name, extra in (("memory", {"MALLOC_MMAP_THRESHOLD_": "262144"}), *([] if gpu else [("memory_heap", {})])):
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **extra}).stdout
        record(name, plan / 1e6, int(output.split("PEAK")[1]) / 1e6, "MB", f"{shape}, {ranks.device.type}, micro-batch {rows} x {seq}, "
               f"checkpointing {checkpointing}; ours = planned, peer = measured")


def plan_table(seq, memory):
    """Markdown: what `parallel.py --plan` says of the Qwen2.5 shapes on 1, 8 and 64 GPUs, for RL with 512 episodes a step."""
    print(f"\n| {seq} tokens, GB at the peak of {memory} | 1 GPU | 8 GPUs | 64 GPUs |\n|---|---|---|---|")
    for shape in ("0.5b", "1.5b", "3b", "7b", "14b", "32b"):
        cells = []
        for gpus in (1, 8, 64):
            options, parts = find_plan(SHAPES[shape], gpus, seq, usable_memory(memory))
            peak = max(parts["training"], parts["rollout"]) / 1e9
            flags = [name for name in ("checkpointing", "swap", "offload") if options and options[name]]
            split = f"shards {options['shards']}" if options else ""
            cells.append(f"{peak:.0f}: {', '.join([split, *flags, str(options['slots']) + ' slots'])}" if options else f"does not fit ({peak:.0f})")
        print(f"| {shape.upper()} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", nargs="+", choices=["sft", "grpo", "memory", "plan"], default=["sft", "grpo", "memory"],
                        help="plan prints the table of README.md (default: the others)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: tiny-1m and 135m on a CPU, 0.5b on a GPU")
    parser.add_argument("--micro-tokens", type=int, nargs="+", help="sizes of our micro-batches; the best counts")
    args = parser.parse_args()
    ranks = setup()
    gpu = ranks.device.type == "cuda"
    shapes = args.shapes or (["0.5b"] if gpu else ["tiny-1m"] if args.quick else ["tiny-1m", "135m"])
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            if "sft" in args.only:
                bench_sft(shape, ranks, Path(folder), args)
            if "grpo" in args.only:
                bench_grpo(shape, ranks, Path(folder), args)
        if "memory" in args.only:
            settings = [("0.5b", 4, 2048, False), ("0.5b", 1, 8192, True)] if gpu else [("tiny-1m", 2, 64, False)] if args.quick else \
                [("30m", 4, 512, False), ("135m", 2, 512, True)]
            for setting in settings:
                bench_memory(setting[0], ranks, Path(folder), args, *setting[1:])
    if "plan" in args.only:
        for memory in (80, 141):
            plan_table(8192 if args.quick else 32768, memory)
    for row in RESULTS:
        print(json.dumps(row))
    teardown()
