"""What torchrun needs: ranks, sharding, checkpoints; files that are never half written; `--plan`.

Files first, because every script uses them even on one laptop: a file appears whole or not at all, a metric log can be cut back to the
last checkpoint, and a run that is started again with the same command goes on where it stopped.
"""
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from model import InputError

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


def read_jsonl(path):
    """Read a JSON-lines file -> list of dicts. InputError names file and line of the first bad one."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    rows = []
    with open(path, encoding="utf-8", errors="strict") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(json.loads(line))
                    if not isinstance(rows[-1], dict):
                        raise InputError(f"{path}:{number}: expected a JSON object, found {type(rows[-1]).__name__}")
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not valid JSON: {error}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path}: not UTF-8 text (after line {len(rows)})") from None
    return rows


def fingerprint(path):
    """sha256 of a file, or of all files below a directory (their names and contents), as hex. InputError when it is not there."""
    path, digest = Path(path), hashlib.sha256()
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        digest.update(str(file.relative_to(path)).encode() + b"\0")
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


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
            for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n") and json.loads(line)["step"] <= keep:
                    rows.append(line)
        write_atomic(self.path, "".join(rows))
        self.file = open(self.path, "a", encoding="utf-8")

    def log(self, *rows):
        """Append rows and see them onto the disk, so that no checkpoint is ever ahead of its log."""
        if self.file is not None:
            self.file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
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


def _open_folder(out, config, fresh, result, owns):
    names, config_file = [result, *(name for name in owns if name != result)], out / "config.json"
    present = [name for name in names if (out / name).exists()]
    if present and not config_file.exists():
        raise InputError(f"{out} holds {', '.join(present)} but no config.json of a run: choose another --out")
    if fresh:
        for name in [*names, "config.json"]:                     # config.json last: a kill in between leaves a folder that is still ours
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)
    if not config_file.exists():
        write_atomic(config_file, json.dumps(config, indent=1) + "\n")
        return "new"
    old = json.loads(config_file.read_text())
    differing = sorted(key for key in {**old, **config} if old.get(key) != config.get(key))
    if differing:
        changes = ", ".join(f"{key} ({json.dumps(old.get(key))} -> {json.dumps(config.get(key))})" for key in differing)
        raise InputError(f"{out} was made with other options: {changes}. Use another --out, or --fresh to start over")
    for leftover in out.glob(".*.tmp"):
        leftover.unlink()
    return "done" if (out / result).exists() else "resume"


def run_config(args, inputs=(), ignore=()):
    """The config for start_run: every option but --fresh, --out and those in `ignore`, and the sha256 of each input file or folder."""
    config = {key: value for key, value in vars(args).items() if key not in ("fresh", "out", *ignore)}
    return {**config, "sha256": {str(path): fingerprint(path) for path in inputs}}


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
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def from_rank_0(value):
    """The value that rank 0 passes in, on every rank; an exception is raised on every rank."""
    if dist.is_initialized():
        box = [value]
        dist.broadcast_object_list(box, src=0)
        value = box[0]
    if isinstance(value, Exception):
        raise value
    return value


def gather_lists(rows):
    """Concatenate the lists of all ranks, in rank order, on every rank."""
    if not dist.is_initialized():
        return list(rows)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(rows))
    return [row for part in parts for row in part]


def all_sum(*numbers):
    """Sum python numbers over ranks (fp64) -> list of floats."""
    total = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()
