"""How fast and how large model.py is, next to transformers with the same weights on the same machine, in one run.

    python bench/bench_model.py                          # tiny-1m, tiny-5m, data/smollm2 where it exists; memory: 10 to 15 minutes
    python bench/bench_model.py --model Qwen/Qwen3-0.6B --device cuda --dtype bfloat16
    python bench/bench_model.py --quick                  # tiny sizes, to see that it runs; the numbers mean nothing

forward         logits of a batch, no gradient                              tokens/s
train           forward, loss on every token, backward                      tokens/s
train_masked    the same with 30 % of the tokens trained: the head then sees only these, the peer's sees all
decode          one token for each row of a cache that holds a prefix       tokens/s; peer: DynamicCache
logprob_memory  value and gradient of token log-probabilities with a 152k vocabulary, peak MB of a process above what it held before
                (CPU, Linux); peer: logits of all positions and log_softmax

ours and peer take turns, and the best round of each counts. ratio > 1 means that ours is better.
"""
import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from hf import exit_on_input_error
from model import PRESETS, KVCache, ModelConfig, Transformer, load_model, save_model

ROWS = []


def record(bench, ours, peer, unit, setting):
    ratio = ours / peer if unit.endswith("/s") else peer / ours
    ROWS.append({"bench": bench, "ours": round(ours, 1), "peer": round(peer, 1), "ratio": round(ratio, 3), "unit": unit, "setting": setting})
    print(f"{bench:15} {setting:55} ours {ours:10.1f}  peer {peer:10.1f} {unit:9} ratio {ratio:.2f}", flush=True)


def seconds_of(ours, peer, rounds):
    """Best of `rounds` of each, taking turns after one warm-up."""
    best = [float("inf")] * 2
    for round_ in range(rounds + 1):
        for i, function in enumerate((ours, peer)):
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            began = time.perf_counter()
            function()
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            if round_:
                best[i] = min(best[i], time.perf_counter() - began)
    return best


def bench_speed(name, model, peer, args):
    vocab, device = model.config.vocab_size, args.device
    big = model.config.hidden_size >= 512
    B, T = (2, 32) if args.quick else (2, 256) if big and device == "cpu" else (8, 256)
    ids = torch.randint(0, vocab, (B, T), device=device)
    targets, every = ids.roll(-1, 1), torch.ones(B, T, dtype=torch.bool, device=device)
    some = torch.rand(B, T, device=device) < 0.3

    @torch.inference_mode()
    def forward():
        model.logits(model(ids))

    @torch.inference_mode()
    def peer_forward():
        peer(ids, use_cache=False)

    def train(mask):
        model.token_logprobs(model(ids), targets, mask).sum().neg().div(mask.sum()).backward()
        model.zero_grad()

    def peer_train(mask):
        peer(ids, labels=ids.masked_fill(~mask, -100), use_cache=False).loss.backward()
        peer.zero_grad()

    setting = f"{name}, {B} x {T}, {args.dtype}, {device}, {torch.get_num_threads()} threads"
    for bench, ours, theirs in (("forward", forward, peer_forward), ("train", lambda: train(every), lambda: peer_train(every)),
                                ("train_masked", lambda: train(some), lambda: peer_train(some))):
        record(bench, *(B * T / s for s in seconds_of(ours, theirs, 1 if args.quick else args.rounds)), "tokens/s", setting)


@torch.inference_mode()
def bench_decode(name, model, peer, rows, prefix, steps, args):
    from transformers import DynamicCache
    ids = torch.randint(0, model.config.vocab_size, (rows, prefix), device=args.device)
    new = ids[:, :1]
    dtype = getattr(torch, args.dtype)
    cache, theirs = KVCache(model.config, rows, prefix + steps * (args.rounds + 2), dtype, args.device), DynamicCache()
    model(ids, cache=cache)
    peer(ids, past_key_values=theirs)

    def ours():
        for _ in range(steps):
            model.logits(model(new, cache=cache))

    def peers():
        for _ in range(steps):
            peer(new, past_key_values=theirs)
    best = seconds_of(ours, peers, 1 if args.quick else args.rounds)
    record("decode", *(rows * steps / s for s in best), "tokens/s", f"{name}, {rows} rows after {prefix} tokens, {args.dtype}, {args.device}")


def megabytes(name):
    return int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def logprob_memory(kind, positions, vocab, width):
    """Peak MB that one side's value and gradient add; runs in a process of its own, because a peak never falls."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab, width, 8, 1, 1, 1, 8))
    hidden = torch.randn(1, positions, width, requires_grad=True)
    targets, mask = torch.randint(0, vocab, (1, positions)), torch.ones(1, positions, dtype=torch.bool)
    Path("/proc/self/clear_refs").write_text("5")     # the peak so far becomes the present size (Linux)
    before = megabytes("VmRSS")
    if kind == "ours":
        logprobs = model.token_logprobs(hidden, targets, mask)
    else:
        logprobs = (hidden @ model.head_weight.T).float().log_softmax(-1).gather(-1, targets[..., None])
    logprobs.sum().backward()
    return megabytes("VmHWM") - before


if __name__ == "__main__":
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["tiny-1m", "tiny-5m", "data/smollm2"], help="presets, directories or hub ids")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--memory-of", nargs=4, metavar=("KIND", "POSITIONS", "VOCAB", "WIDTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(logprob_memory(args.memory_of[0], *map(int, args.memory_of[1:])))
        sys.exit()
    from transformers import AutoModelForCausalLM
    dtype = getattr(torch, args.dtype)
    warnings.simplefilter("ignore", FutureWarning)    # transformers renames an argument

    # ------------------------------------------------------------ speed
    for name in args.model:
        if name == "data/smollm2" and not Path(name).is_dir():
            print("data/smollm2 is absent and skipped: python data/smollm2.py makes it")
            continue
        with tempfile.TemporaryDirectory() as folder:
            if name in PRESETS:
                torch.manual_seed(0)
                save_model(Transformer(dataclasses.replace(PRESETS[name], vocab_size=512)), None, folder)
            path = folder if name in PRESETS else name
            model = load_model(path, dtype, args.device)
            peer = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(args.device)
        bench_speed(name, model, peer, args)
        for rows in (1, 8, 32):
            prefix, steps = (8, 2) if args.quick else (256, 16 if model.config.hidden_size >= 512 else 64)
            bench_decode(name, model, peer, rows, prefix, steps, args)

    # ------------------------------------------------------------ memory
    for positions in ([2048] if args.quick else [1024, 2048, 4096]):
        size = [str(positions), "16000" if args.quick else "151936", "64" if args.quick else "128"]
        run = [sys.executable, __file__, "--memory-of"]
        ours, plain = (float(subprocess.run(run + [kind] + size, capture_output=True, text=True, check=True).stdout) for kind in ("ours", "plain"))
        record("logprob_memory", ours, plain, "MB", f"{positions} positions, vocabulary {size[1]}, width {size[2]}, fp32, cpu")

    print()
    for row in ROWS:
        print(json.dumps(row))
