"""The quick speedrun with a SIGKILL at a random moment of each step gives the report of an undisturbed one. Too long for the test suite.

    python tests/kill_speedrun.py [SEED]          # two quick speedruns, about 10 minutes on 2 cores; exit 1 where the numbers differ
"""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("distill", "sft", "rl", "evaluate")


def start(run):
    log = open(run.with_suffix(".log"), "ab")
    return subprocess.Popen(["bash", "speedrun.sh"], cwd=ROOT, env={**os.environ, "SPEEDRUN": "quick", "RUN": str(run)}, stdout=log, stderr=log,
                            start_new_session=True)


def kill_in(step, run, delay):
    """Starts the speedrun and kills all of it `delay` seconds after `step` began."""
    log = run.with_suffix(".log")
    seen = log.stat().st_size if log.exists() else 0
    process = start(run)
    while f"== {step}:".encode() not in log.read_bytes()[seen:]:
        assert process.poll() is None, f"ended before {step}, see {log}"
        time.sleep(0.1)
    time.sleep(delay)
    assert process.poll() is None, f"over before it could be killed, see {log}"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    last = re.findall(rb"^== (\w+)", log.read_bytes()[seen:], re.M)[-1].decode()
    print(f"{step}: killed after {delay:.1f} s" + ("" if last == step else f", already in {last}"), flush=True)


def numbers(run):
    """The report without times, machine and commit."""
    def strip(x):
        if isinstance(x, dict):
            return {key: strip(value) for key, value in x.items() if key not in ("seconds", "machine", "commit") and not key.endswith(("_seconds", "_per_second"))}
        return [strip(y) for y in x] if isinstance(x, list) else x
    return strip(json.loads((run / "report.json").read_text()))


if __name__ == "__main__":
    rng = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    whole, killed = ROOT / "runs" / "kill" / "whole", ROOT / "runs" / "kill" / "killed"
    shutil.rmtree(whole.parent, ignore_errors=True)
    whole.parent.mkdir(parents=True)
    assert start(whole).wait() == 0, f"failed, see {whole}.log"
    seconds = json.loads((whole / "seconds.json").read_text())
    print(f"undisturbed: {seconds}", flush=True)
    for step in STEPS:
        kill_in(step, killed, rng.uniform(0.02, 0.7) * seconds[step])
    assert start(killed).wait() == 0, f"failed, see {killed}.log"
    same = numbers(whole) == numbers(killed)
    print({name: [numbers(run)["stages"][name]["mean"] for run in (whole, killed)] for name in ("base", "sft", "rl")}, "the same report" if same else "the reports differ")
    sys.exit(not same)
