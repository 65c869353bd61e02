"""What torchrun needs: ranks, sharding, checkpoints; files that are never half written; `--plan`.

Files first, because every script uses them even on one laptop: a file appears whole or not at all, a metric log can be cut back to the
last checkpoint, and a run that is started again with the same command goes on where it stopped.
"""
import argparse
import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict,
                                                    set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from hf import InputError, end_process, exit_on_input_error, read_json
from model import CHUNK, ModelConfig, Transformer, load_model, save_model

# ----------------------------------------------------------------------------------------------------------------------
# Files


def write_atomic(path, content):
    """Write text or bytes so that a reader (or a crash) sees the old file or the new one, never a part: write, fsync, rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_jsonl(path, rows):
    """Write dicts, one JSON object a line, atomically."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def fingerprint(path):
    """sha256 of a file, or of all files below a directory (their names and contents), as hex. InputError when it is not there."""
    path, digest = Path(path), hashlib.sha256()
    if not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: {'neither a file nor a directory' if path.exists() else 'no such file or directory'}")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        digest.update(str(file.relative_to(path)).encode() + b"\0")
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def clean(metrics):
    """JSON has neither NaN nor infinity: null in their place."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in metrics.items()}


class MetricLog:
    """An append-only JSON-lines log with a `step` in every row. `keep`: on resume drop the rows after that step (and a half-written
    last line); None starts an empty log. Ranks other than 0 hold a log that writes nothing."""

    def __init__(self, path, keep=None):
        self.path = Path(path)
        self.file = None
        if int(os.environ.get("RANK", 0)) != 0:
            return
        rows = []
        if keep is not None and self.path.exists():
            with open(self.path, encoding="utf-8", newline="\n") as file:         # (str.splitlines would cut a text at U+2028)
                rows = [line for line in file if line.endswith("\n") and json.loads(line)["step"] <= keep]
        write_atomic(self.path, "".join(rows))
        self.file = open(self.path, "a", encoding="utf-8")

    def log(self, *rows):
        """Append rows and see them onto the disk, so that no checkpoint is ever ahead of its log."""
        if self.file is not None:
            self.file.write("".join(json.dumps(clean(row), ensure_ascii=False) + "\n" for row in rows))
            self.file.flush()
            os.fsync(self.file.fileno())


def start_run(out, config, fresh, result, owns=("checkpoint", "model", "metrics.jsonl", "traces.jsonl")):
    """Open the folder of a run -> "new", "resume" (same config, not finished) or "done" (same config and `result` exists).

    out: folder. config: dict of JSON values that decide the outcome (options, sha256 of inputs), kept in out/config.json.
    result: file or folder in `out` that is written last. owns: the other names this script makes there; `fresh` deletes them and the
    result, and nothing else. With several ranks, rank 0 looks and all ranks get (or raise) the same.
    Errors: InputError that names the options that differ, or when `out` holds files of these names that no run of ours made."""
    if int(os.environ.get("RANK", 0)) != 0:
        return from_rank_0(None)
    try:
        outcome = _open_folder(Path(out), json.loads(json.dumps(config)), fresh, result, owns)
    except InputError as error:
        outcome = error
    return from_rank_0(outcome)


LOCKS = {}                                                       # folder -> its lock file, held until this process ends


def lock_folder(out):
    """One process a folder: a second one would delete what the first is writing. The system gives a killed process's lock back."""
    if out.resolve() not in LOCKS:
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = open(out / ".lock", "w")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out} is in use by another run: wait for it, or choose another --out") from None
        except OSError as error:                                 # below a file, a full disk, no permission
            raise InputError(f"--out {out}: {error}") from None
        LOCKS[out.resolve()] = file


def _open_folder(out, config, fresh, result, owns):
    """start_run on rank 0."""
    names, config_file = [result, *(name for name in owns if name != result)], out / "config.json"
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; expected a folder for --out")
    config = {"made_by": Path(sys.argv[0]).name, **config}
    try:
        old = dict(json.loads(config_file.read_text())) if config_file.is_file() else {}
    except (ValueError, TypeError):                              # of something else
        old = {}
    if "made_by" not in old and (config_file.exists() or any((out / name).exists() for name in names)):
        raise InputError(f"{out} holds files that no run made: choose another --out")
    lock_folder(out)
    if fresh:
        for path in [out / name for name in [*names, "config.json"]]:       # config.json last: killed in between, the folder is still ours
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not any((out / name).exists() for name in names):        # new, or stopped before it made anything: then a corrected command is new
        write_atomic(config_file, json.dumps(config, indent=1) + "\n")
        return "new"
    differing = sorted(key for key in {**old, **config} if old.get(key) != config.get(key))
    if differing:
        inputs = [path for path in config.get("sha256", {}) if old.get("sha256", {}).get(path) not in (None, config["sha256"][path])]
        changes = ", ".join(f"{', '.join(inputs)} (the contents)" if key == "sha256" and inputs else f"{key} ({json.dumps(old.get(key))} -> {json.dumps(config.get(key))})"
                            for key in differing)
        raise InputError(f"{out} was made with other options: {changes}. Use another --out, or --fresh to start over")
    for leftover in out.glob(".*.tmp"):
        leftover.unlink()
    return "done" if (out / result).exists() else "resume"


def run_config(args, inputs=(), ignore=()):
    """The config for start_run: every option but --fresh, --out, those of scale and those in `ignore`, and the sha256 of each input
    (file or folder; a name that is neither, such as a hub name, has none)."""
    config = {key: value for key, value in vars(args).items() if key not in ("fresh", "out", *SCALE_OPTIONS, *ignore)}
    return {**config, "sha256": {str(path): fingerprint(path) for path in inputs if Path(path).exists()}}


def positive(text, least=1):
    """An option that is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def natural(text):
    """An option that is a whole number from 0 on."""
    return positive(text, 0)


def amount(text):
    """An option that is a finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number from 0 on, got {text!r}")
    return value


def add_common_arguments(parser, out, tasks=None, model=None):
    """The options that every script has. `tasks`, `model`: the script's defaults; None leaves the option out."""
    group = parser.add_argument_group("run")
    group.add_argument("--out", default=out, help="folder of this run (default %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="decides every random choice (default %(default)s)")
    if tasks is not None:
        group.add_argument("--tasks", nargs="+", default=tasks, help="task or data files (default %(default)s)")
    if model is not None:
        group.add_argument("--model", default=model, help="Hugging Face directory or hub name (default %(default)s)")
    group.add_argument("--fresh", action="store_true", help="delete this run's own files in --out and start over")
    return group


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started. One process without torchrun is rank 0 of a world of 1."""
    rank: int
    world: int
    local_world: int               # ranks on this node
    device: torch.device

    @property
    def is_main(self):
        return self.rank == 0


def setup():
    """Join the process group that torchrun announces -> Ranks. Gloo carries CPU tensors and objects, NCCL those on a GPU. The timeout
    is long because between two collectives lies a whole rollout, as long as its longest episode."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1 or device.type == "cuda":                       # one GPU is a group of one: the same sharded code path, bf16 compute
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = None if world > 1 else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(hours=4))
    return Ranks(rank, world, local_world, device)


def teardown():
    """What a script does last. Where there is a process group: leave it and end the process, with exit code 0 (see end_process)."""
    if dist.is_initialized():
        dist.destroy_process_group()
        end_process(0)


def from_rank_0(value):
    """The value that rank 0 passes in, on every rank; an exception is raised on every rank."""
    if dist.is_initialized():
        box = [value]
        dist.broadcast_object_list(box, src=0)
        value = box[0]
    if isinstance(value, Exception):
        raise value
    return value


def gather(value):
    """The values of all ranks, in rank order, as a list on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_lists(rows):
    """The lists of all ranks, joined in rank order, on every rank."""
    return [row for part in gather(list(rows)) for row in part]


def all_sum(*numbers):
    """Sum python numbers over ranks (fp64) -> list of floats."""
    total = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Micro-batches


MICRO_BATCH_COST = 128     # what a micro-batch costs beside its tokens, in tokens: a few hundred small operations that take time of their own


def micro_batches(lengths, token_budget, world=1):
    """Split rows into micro-batches of like length whose padded size (rows x longest) stays within `token_budget`; a longer row goes alone.

    Of all ways to cut the rows, sorted by length, into runs, the one with the least padded tokens + MICRO_BATCH_COST a run (dynamic
    programming over the end of the last run). lengths: tokens of each row. Returns, for each of `world` ranks, a list of micro-batches
    (lists of row numbers). Every rank gets the same number of them, since every rank must enter every collective; an empty list stands
    for a row of weight zero."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    cost, start = [0.0], [0]                                     # of the best cut of the first `end` rows; where its last run starts
    for end in range(1, len(order) + 1):
        best = (math.inf, 0)
        for first in range(end - 1, -1, -1):
            padded = (end - first) * lengths[order[first]]
            if padded > token_budget and first < end - 1:
                break
            best = min(best, (cost[first] + padded + MICRO_BATCH_COST, first))
        cost.append(best[0])
        start.append(best[1])
    batches, end = [], len(order)
    while end:
        batches.insert(0, order[start[end]:end])
        end = start[end]
    while len(batches) % world:
        fullest = max(range(len(batches)), key=lambda i: len(batches[i]))
        batch = batches[fullest]
        if len(batch) == 1:
            batches.append([])
        else:
            batches[fullest:fullest + 1] = [batch[:len(batch) // 2], batch[len(batch) // 2:]]
    return [batches[rank::world] for rank in range(world)]


def collate(rows, device):
    """Rows (dicts whose tensors are 1-D, those of one row equally long; `ids` may be int32) -> their tensors as (B, T) on `device`, zeros
    on the right, and `lengths` (B,)."""
    keys = [key for key, value in rows[0].items() if torch.is_tensor(value)]
    batch = {key: torch.nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True).to(device) for key in keys}
    batch["ids"] = batch["ids"].long()
    batch["lengths"] = torch.tensor([len(row["ids"]) for row in rows], device=device)
    return batch


# ----------------------------------------------------------------------------------------------------------------------
# Sharding


def shard_model(model, ranks, shards=0, offload=False):
    """FSDP2: split every parameter over `shards` ranks (0: the ranks of one node) and replicate that over the rest (hybrid sharding).

    A block's parameters are gathered when it runs and dropped afterwards; gradients are summed into the owner's shard in fp32. The
    optimiser sees fp32 shards only; on a GPU the blocks compute in bf16. One CPU process: nothing to split, the model itself.
    offload: shards, gradients and optimiser live in CPU memory. Errors: InputError when the ranks do not divide into copies."""
    if not dist.is_initialized():
        return model.to(ranks.device)
    shards = shards or ranks.local_world
    if ranks.world % shards:
        raise InputError(f"--shards {shards}: expected a divisor of the number of ranks, {ranks.world}")
    mesh = init_device_mesh(ranks.device.type, (ranks.world // shards, shards), mesh_dim_names=("replicate", "shard"))
    on_gpu = ranks.device.type == "cuda"
    options = {
        "mesh": mesh if shards < ranks.world else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if on_gpu else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if offload and on_gpu else OffloadPolicy(),
    }
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "token_logprobs")        # it reads the head's weight, outside forward
    return model


def load_trainable(path, ranks, shards=0, offload=False, checkpointing=False):
    """The model to train, fp32 master weights. With several ranks only rank 0 reads the files and each rank is sent its shards, so that a
    node never holds a copy of the weights per GPU. Errors: those of load_model, and of shard_model."""
    if not dist.is_initialized():
        model = load_model(path, dtype=torch.float32, device=ranks.device)
    else:
        whole = load_model(path, dtype=torch.float32, device="cpu") if ranks.is_main else None
        config, generation_config = from_rank_0((whole.config, whole.generation_config) if whole else None)
        with torch.device("meta"):
            model = shard_model(Transformer(config), ranks, shards, offload)
        model.generation_config = generation_config
        model.to_empty(device="cpu" if offload else ranks.device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload)
        set_model_state_dict(model, whole.state_dict() if whole else {}, options=options)
    model.checkpointing = checkpointing
    return model


def make_optimizer(model, lr, beta2, weight_decay):
    """AdamW; weight decay on matrices only, as usual. Its moments exist from the start: torch's get_state_dict makes missing ones by a step with
    learning rate 0, which would count as a step, so that the first update would depend on when a checkpoint was written."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2), fused=True)
    for p in parameters:
        optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def add_scale_arguments(parser, micro_tokens):
    """The options that decide where and how fast, not what, is computed: a run may be resumed with other ones."""
    group = parser.add_argument_group("scale")
    group.add_argument("--micro-tokens", type=positive, default=micro_tokens, help="padded tokens of a micro-batch (default %(default)s)")
    group.add_argument("--checkpointing", action="store_true", help="keep block inputs only and compute the rest again in backward")
    group.add_argument("--shards", type=natural, default=0, help="ranks that share one copy of the weights (default: those of a node)")
    group.add_argument("--offload", action="store_true", help="keep shards and optimiser in CPU memory")
    group.add_argument("--checkpoint-seconds", type=amount, default=30.0, help="least time between checkpoints (default %(default)s)")
    return group


SCALE_OPTIONS = ("micro_tokens", "checkpointing", "shards", "offload", "checkpoint_seconds")


def clip_gradients(model, max_norm):
    """Scale the gradients so that their global norm is at most max_norm -> the norm before (float, the same on every rank)."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints: sharded, to go on from. No generator state is kept, since nothing draws from a global one: the order of the data is a
# function of (seed, epoch), sampling noise of (seed, step, task, sample), the learning rate of the step.


def latest_checkpoint(folder):
    """The newest complete checkpoint directory, or None. One that was being written when the process died has another name."""
    found = sorted(p for p in Path(folder).glob("step-*") if p.suffix != ".tmp")
    return found[-1] if found else None


def checkpoint_due(saved_at, seconds):
    """Whether `seconds` have passed since `saved_at` (time.monotonic()), as rank 0 sees it."""
    return from_rank_0(time.monotonic() - saved_at >= seconds)


def save_checkpoint(folder, step, model, optimizer, state):
    """Every rank writes its shards of model and optimiser; rank 0 adds `state` (JSON values: counters, data position) and renames the
    whole, then drops older ones. Every rank must call this."""
    folder, distributed = Path(folder), dist.is_initialized()
    target, temporary = folder / f"step-{step:06d}", folder / f"step-{step:06d}.tmp"
    is_main = not distributed or dist.get_rank() == 0
    if is_main:
        for leftover in folder.glob("*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    from_rank_0(None)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")                # one process is what was asked for
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary, no_dist=not distributed)
    if is_main:
        write_atomic(temporary / "state.json", json.dumps({"step": step, **state}))
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        for older in folder.glob("step-*"):
            if older != target:
                shutil.rmtree(older)
    from_rank_0(None)


def load_checkpoint(folder, model, optimizer):
    """Load the newest checkpoint into model and optimiser, whatever number of ranks wrote it -> its state dict (with `step`), or None
    when there is none."""
    newest = from_rank_0(latest_checkpoint(folder))
    if newest is None:
        return None
    model_state, optimizer_state = get_state_dict(model, optimizer)
    whole = {"model": model_state, "optimizer": optimizer_state}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(whole, checkpoint_id=newest, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    return json.loads((newest / "state.json").read_text())


def export_model(model, tokenizer, path):
    """Write a Hugging Face directory, whole or not at all: fp32 from a CPU, bf16 from a GPU. Every rank must call this (each helps to
    gather); rank 0 writes."""
    path = Path(path)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        if torch.cuda.is_available():
            weights = {name: weight.bfloat16() for name, weight in weights.items()}
        replace_directory(path, lambda temporary: save_model(model, tokenizer, temporary, weights))
    from_rank_0(None)


def replace_directory(path, write):
    """Make a directory by write(temporary) and put it in the place of `path` by renaming."""
    path = Path(path)
    temporary, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    write(temporary)
    if path.exists():
        os.replace(path, old)
    os.replace(temporary, path)
    shutil.rmtree(old, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------------------
# Rollout weights: one whole copy a rank, so that no rank has to wait for another while it samples


def rollout_copy(model, ranks):
    """A whole model for the sampler, bf16 on a GPU, to be filled by `refresh`. One CPU process samples from the trained model itself."""
    if not dist.is_initialized():
        return model
    with torch.device("meta"):
        copy = Transformer(model.config)
    copy.generation_config = model.generation_config
    return copy.to(torch.bfloat16 if ranks.device.type == "cuda" else torch.float32).to_empty(device=ranks.device)


@torch.no_grad()
def refresh(copy, model):
    """Write the trained weights into the rollout copy, in place, a tensor at a time. Every rank must call this."""
    if copy is model:
        return
    targets = dict(copy.named_parameters())
    for name, weight in model.state_dict().items():              # (state_dict, since the head may still be unsharded)
        weight = weight.to(targets[name].device, targets[name].dtype)
        targets[name].copy_(weight.full_tensor())


def swap(copy, model, optimizer, rollout, offload=False):
    """Make room on a GPU. rollout=True: shards and optimiser go to CPU memory and the copy gets its storage back (`refresh` fills it);
    False: the copy's storage is freed and the trainer comes back. offload: the trainer lives in CPU memory anyway."""
    device = next(copy.parameters()).device
    if copy is model or device.type != "cuda":
        return
    for parameter in copy.parameters():
        parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size() if rollout else 0)
    if not offload:
        place = "cpu" if rollout else device
        model.to(place)
        for state in optimizer.state.values():
            state.update({key: value.to(place) for key, value in state.items() if value.dim() > 0})
    torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------------------
# --plan: the memory of a training run, from config.json alone


def saved_for_backward(config, layers, rows, length, dtype):
    """Bytes that autograd keeps from one forward pass with `layers` blocks, found by running it on tensors without memory."""
    kept, default = {}, torch.get_default_dtype()

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            model = Transformer(replace(config, num_hidden_layers=layers))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model(torch.zeros(rows, length, dtype=torch.long))
            for parameter in model.parameters():
                kept.pop(parameter.untyped_storage()._cdata, None)
            return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    finally:
        torch.set_default_dtype(default)


def measure(config, seq, micro_tokens, on_gpu):
    """What memory_plan needs to know of a model: parameters of all and of a block, bytes kept by a block and outside the blocks."""
    with torch.device("meta"):
        model = Transformer(config)
    parameters, block = (sum(p.numel() for p in part.parameters()) for part in (model, model.layers[0]))
    rows, dtype = max(1, micro_tokens // seq), torch.bfloat16 if on_gpu else torch.float32
    one, two = (saved_for_backward(config, layers, rows, seq, dtype) for layers in (1, 2))
    return {"parameters": parameters, "block": block, "kept_by_block": two - one, "kept_outside": one - (two - one),
            "block_input": rows * seq * config.hidden_size * dtype.itemsize, "size": dtype.itemsize, "on_gpu": on_gpu}


def memory_plan(config, facts, seq, slots, shards, checkpointing=False, swap=False, offload=False):
    """Bytes per GPU (or of one CPU process) -> {part: bytes}, with the peaks "training" and "rollout".

    seq: longest row; slots: episodes at once, 0 for SFT. The trainer holds fp32 weights, gradients and two moments, split over `shards`;
    compute is in bf16 on a GPU, fp32 on a CPU."""
    layers, size, on_gpu = config.num_hidden_layers, facts["size"], facts["on_gpu"]
    state = 0 if offload else 4 * facts["parameters"] / shards
    root = facts["parameters"] - layers * facts["block"]                                    # embedding and head
    kept = (layers * facts["block_input"] if checkpointing else (layers - 1) * facts["kept_by_block"]) + facts["kept_by_block"]
    parts = {
        "weights": state, "gradients": state, "optimiser": 2 * state,
        # two blocks at a time in bf16, one with its gradient in bf16 and fp32; embedding and head throughout
        "gathered": (2 * size + size + 4) * facts["block"] + (2 * size + 4) * root if on_gpu else 0,
        "activations": facts["kept_outside"] + kept,
        "head": 3 * 4 * CHUNK * config.vocab_size + 4 * config.vocab_size * config.hidden_size + 2 * facts["block_input"],
        "rollout weights": size * facts["parameters"] if on_gpu and slots else 0,
        "KV cache": slots * (seq + 1) * 2 * layers * config.num_key_value_heads * config.head_dim * size,
        "in CPU memory": (16 if offload else 12 if swap else 0) * facts["parameters"] / shards}
    trainer = parts["weights"] + parts["optimiser"]
    training = trainer + parts["gradients"] + parts["gathered"] + parts["activations"] + parts["head"]
    return {**parts, "training": training + (0 if swap else parts["rollout weights"]),
            "rollout": (0 if swap else trainer) + parts["rollout weights"] + parts["KV cache"] if slots else 0}


def find_plan(config, gpus, seq, memory, episodes=512, per_node=8):
    """The fastest setting that fits into `memory` bytes a GPU -> (options, parts); options None, and the leanest parts, if none does.

    episodes: of one RL step over all GPUs, 0 for SFT. Micro-batches of one row of `seq` tokens."""
    facts, lean = measure(config, seq, seq, on_gpu=True), None
    for offload, shards, swap, checkpointing in itertools.product((False, True), dict.fromkeys([min(gpus, per_node), gpus]), (False, True), (False, True)):
        options = {"shards": shards, "checkpointing": checkpointing, "swap": swap and episodes > 0, "offload": offload}
        slots = -(-episodes // gpus)
        while True:
            parts = memory_plan(config, facts, seq, slots, **options)
            if max(parts["training"], parts["rollout"]) <= memory:
                return {**options, "slots": slots}, parts
            lean = parts if lean is None or parts["training"] <= lean["training"] else lean
            if parts["training"] > memory or slots <= 1:
                break
            slots //= 2
    return None, lean


def usable_memory(gigabytes):
    """Bytes of a GPU that tensors may take: less what CUDA and NCCL hold and what the allocator loses to fragments."""
    return gigabytes * 1e9 * 0.92 - 1.5e9


def read_config(model):
    """The config of a directory, of a config.json, or of a hub name (only that file is fetched)."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.exists() and not Path(model).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError
        try:
            path = Path(hf_hub_download(str(model), "config.json"))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"model {str(model)!r}: no such directory, and not to be had from the hub ({reason})") from None
    return ModelConfig.from_hf(read_json(path), path)


if __name__ == "__main__":
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", metavar="MODEL", required=True, help="directory, config.json or hub name of the model to train")
    parser.add_argument("--gpus", type=positive, default=1, help="GPUs over all nodes (default %(default)s)")
    parser.add_argument("--per-node", type=positive, default=8, help="GPUs of one node (default %(default)s)")
    parser.add_argument("--seq", type=positive, default=32768, help="longest row in tokens (default %(default)s)")
    parser.add_argument("--memory", type=amount, default=80.0, help="GB of one GPU (default %(default)s)")
    parser.add_argument("--episodes", type=natural, default=512, help="episodes of one RL step over all GPUs; 0: SFT (default %(default)s)")
    args = parser.parse_args()

    config = read_config(args.plan)
    usable = usable_memory(args.memory)
    options, parts = find_plan(config, args.gpus, args.seq, usable, args.episodes, args.per_node)
    print(f"{args.plan}, {args.gpus} GPUs of {args.memory:.0f} GB ({usable / 1e9:.0f} usable), rows of {args.seq} tokens; GB per GPU:")
    for name, size in parts.items():
        print(f"  {name:16}{size / 1e9:8.1f}" + ("   at the peak" if name in ("training", "rollout") else ""))
    if options is None:
        raise InputError("nothing fits, not even with all of --checkpointing --offload --swap (above): more GPUs, or a smaller --seq")
    flags = [f"--micro-tokens {args.seq}", f"--shards {options['shards']}", *([f"--slots {options['slots']}"] if args.episodes else [])]
    print("fits with " + " ".join(flags + [f"--{name}" for name in ("checkpointing", "swap", "offload") if options[name]]))
