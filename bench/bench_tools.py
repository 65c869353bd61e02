"""Tools: `code` by kind of isolation, full-text search over a million passages, and a soak of many episodes with failing
services.

    python bench/bench_tools.py code          # latency and throughput of a call, next to a plain subprocess (2 min)
    python bench/bench_tools.py search        # index and query 1,000,000 generated passages (3 min, 2 GB of disk); --passages N for fewer
    python bench/bench_tools.py soak          # 64 episodes, all tools, injected failures, 60 s; exit code 1 if anything leaked
    python bench/bench_tools.py all --quick   # all three in seconds

Each prints a table, then one JSON line for each measured setting. The peer of `code` is what most RL code bases do: a new Python
process a call with rlimits and no isolation. The peer of `search` is bm25s where it is installed (pip install bm25s), which holds
the whole index in memory. """
import argparse
import http.server
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sandbox  # noqa: E402
from corpus import Store  # noqa: E402
from fetch import Web  # noqa: E402
from tools import Code, CrawlPage, ToolBox, WebSearch, WikiSearch  # noqa: E402


def report(bench, ours, peer, unit, setting):
    """The JSON line of one measured setting."""
    ratio = round(ours / peer, 3) if peer else None
    print(json.dumps({"bench": bench, "ours": ours, "peer": peer, "ratio": ratio, "unit": unit, "setting": setting}), flush=True)


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --------------------------------------------------------------------------------------------------------------------------------
# code

PROGRAMS = {"print(1)": "print(1)", "import numpy": "import numpy as np\nprint(np.arange(10).sum())",
            "200 KB output": "print('x' * 200_000)"}


def bench_code(calls, seconds):
    def plain(program):
        subprocess.run([sys.executable, "-I", "-c", program], capture_output=True,
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (5, 5)))

    def ours(program):
        result = sandbox.run_python(program)
        assert result.status == "ok", result
    kinds = [kind for kind in ("namespaces", "bubblewrap") if works(kind)]
    print(f"{2 * os.cpu_count()} at a time on {os.cpu_count()} cores")
    print(f"{'isolation':32} {'program':16} {'p50 ms':>8} {'p99 ms':>8} {'calls/s':>8}")
    for name, program in PROGRAMS.items():
        peer = measure(plain, program, calls, seconds)
        print(f"{'none (a process and rlimits)':32} {name:16} {peer[0]:8.1f} {peer[1]:8.1f} {peer[2]:8.1f}")
        for kind in kinds:
            sandbox.state["kind"] = kind
            own = measure(ours, program, calls, seconds)
            print(f"{kind:32} {name:16} {own[0]:8.1f} {own[1]:8.1f} {own[2]:8.1f}")
            for i, unit in enumerate(("ms p50", "ms p99", "calls/s")):
                report("code", round(own[i], 2), round(peer[i], 2), unit, f"{kind}, {name}, peer: a process with rlimits")
    sandbox.state["kind"] = None


def works(kind):
    try:
        return (sandbox.run_once(kind, "print(1)", "", sandbox.Limits())[0] or {}).get("exit") == 0
    except OSError:
        return False


def measure(call, program, calls, seconds):
    """(p50 ms, p99 ms of calls one after the other, calls a second with two a core at a time)."""
    call(program)
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call(program)
        times.append(1000 * (time.perf_counter() - started))
    end, workers = time.perf_counter() + seconds, 2 * os.cpu_count()

    def work(_):
        done = 0
        while time.perf_counter() < end:
            call(program)
            done += 1
        return done
    started = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        done = sum(pool.map(work, range(workers)))
    return percentile(times, 0.5), percentile(times, 0.99), done / (time.perf_counter() - started)


# --------------------------------------------------------------------------------------------------------------------------------
# search

def generate(path, passages, rng):
    """Pages of four passages of 60 words from a Zipf vocabulary of 200,000 words, titles of two rare words; returns queries:
    "title and one of the page's words"."""
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 10))) for _ in range(200_000)]
    weights = [1 / (rank + 10) for rank in range(len(vocabulary))]
    pool = rng.choices(vocabulary, weights, k=4_000_000)
    queries = []
    with open(path, "w") as f:
        for page in range(passages // 4):
            start = rng.randrange(len(pool) - 240)
            title = f"{rng.choice(vocabulary)} {rng.choice(vocabulary)}"
            texts = [" ".join(pool[start + 60 * i:start + 60 * i + 60]) for i in range(4)]
            f.write(json.dumps({"id": page, "title": title, "text": "\n\n".join(texts)}) + "\n")
            if page % max(1, passages // 4 // 1000) == 0:
                queries.append((f"{title} {pool[start + rng.randrange(240)]}", title))
    return queries


def bench_search(passages):
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "pages.jsonl"
        queries = generate(corpus, passages, rng)
        started = time.perf_counter()
        store = Store(corpus, folder)
        built = time.perf_counter() - started
        started = time.perf_counter()
        Store(corpus, folder).close()
        opened = 1000 * (time.perf_counter() - started)
        words = [" ".join(rng.choice(queries)[0].split()[-1] for _ in range(4)) for _ in range(len(queries))]
        rows = {"title + 1 word": [q for q, _ in queries], "4 words of the text": words}
        megabytes, source = store.path.stat().st_size / 1e6, corpus.stat().st_size / 1e6
        print(f"{store.passages:,} passages: index built in {built:.1f} s ({store.passages / built:,.0f}/s), "
              f"{megabytes:,.0f} MB (corpus {source:,.0f} MB), reopened in {opened:.1f} ms")
        print(f"{'query':24} {'p50 ms':>8} {'p99 ms':>8} {'queries':>8}")
        report("search", round(built, 1), None, "s to index", f"{store.passages} passages, FTS5")
        report("search", round(megabytes), None, "MB on disk", f"{store.passages} passages, FTS5")
        peer = bm25s_search(corpus)
        for name, texts in rows.items():
            times, peer_times = timed(lambda text: store.search(text, 3), texts), timed(peer, texts[:200]) if peer else None
            print(f"{name:24} {percentile(times, 0.5):8.2f} {percentile(times, 0.99):8.2f} {len(times):8}")
            for share in (0.5, 0.99):
                theirs = round(percentile(peer_times, share), 3) if peer else None
                report("search", round(percentile(times, share), 3), theirs, f"ms p{round(100 * share)}", f"{store.passages} passages, {name}")
        right = sum((store.search(query, 1) or [("",)])[0][0] == title for query, title in queries) / len(queries)
        print(f"the page named in the query comes first in {100 * right:.1f} % of {len(queries)} queries")
        store.close()


def timed(call, texts):
    times = []
    for text in texts:
        started = time.perf_counter()
        call(text)
        times.append(1000 * (time.perf_counter() - started))
    return times


def bm25s_search(corpus):
    """bm25s over the same passages as a function of a query; None where it is not installed."""
    try:
        import bm25s
    except ImportError:
        print("peer bm25s: not installed, skipped")
        return None
    passages = [f"{row['title']} {text}" for row in map(json.loads, open(corpus)) for text in row["text"].split("\n\n")]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    return lambda text: index.retrieve(bm25s.tokenize(text, show_progress=False), k=3, show_progress=False)


# --------------------------------------------------------------------------------------------------------------------------------
# soak

class Failing(http.server.BaseHTTPRequestHandler):
    """A search service and a web site that fail in turn: errors, broken JSON, dropped connections, slow and hanging answers."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'{"organic": [{"title": "T", "link": "http://a.example/", "snippet": "s"}]}', "application/json")

    def do_GET(self):
        self.answer(b"<title>T</title><p>text</p>", "text/html")

    def answer(self, body, kind):
        mood = random.random()
        if mood < 0.1:
            body, status = b"{broken", 200
        elif mood < 0.2:
            status = 500
        elif mood < 0.25:
            return                                        # drops the connection
        else:
            status = 200
            time.sleep(5.0 if mood > 0.98 else 0.2 if mood > 0.9 else 0)
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:                                   # the client has given up
            pass


class Moody:
    """A user's tool that raises, hangs beyond its deadline, or answers."""
    name, description = "moody", "Fails often."

    def run(self, argument, context):
        if random.random() < 0.02:
            time.sleep(4)
        if random.random() < 0.2:
            raise ValueError("as injected")
        return "fine"


DAEMONS = "import os\nfor i in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        import time; time.sleep(100)\nprint({n})"
CALLS = [("wiki_search", "alpha page{n}"), ("wiki_search", 'NEAR("{n}* OR'), ("wiki_search", " "), ("web_search", "question {n}"),
         ("crawl_page", "{site}/{n}|https://wiki.example/{n}"), ("crawl_page", "http://169.254.169.254/{n}"),
         ("code", "print({n})"), ("code", "1/0 # {n}"), ("code", "while True: pass # {n}"), ("code", DAEMONS),
         ("code", "print('x' * 300_000)"), ("moody", "{n}"), ("unknown", "{n}")]


def soak(seconds, episodes):
    """Runs `episodes` sessions side by side, each with one call in progress, for some seconds; {calls, errors, timeouts, unanswered, leaked_*, ...}."""
    sandbox.run_python("pass")
    folder, before = tempfile.mkdtemp(), held()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w")                # the injected exceptions are reported there
    box = soak_toolbox(Path(folder), f"127.0.0.1:{server.server_address[1]}")
    try:
        result = run_episodes(box, f"http://127.0.0.1:{server.server_address[1]}", seconds, episodes)
    finally:
        box.close()
        server.shutdown()
        server.server_close()
        thread.join()
        sys.stderr.close()
        sys.stderr = stderr
        shutil.rmtree(folder)
    deadline = time.monotonic() + 10
    while any(now > then for now, then in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.1)                                   # what a hanging tool of the user's own holds ends with it
    leaked = [max(0, now - then) for now, then in zip(held(), before, strict=True)]
    counters = box.counters()
    return dict(seconds=seconds, **result, errors=sum(c["errors"] for c in counters.values()), timeouts=sum(c["timeouts"] for c in counters.values()),
                counters=counters, leaked_processes=leaked[0], leaked_threads=leaked[1], leaked_descriptors=leaked[2])


def soak_toolbox(folder, site):
    corpus = folder / "pages.jsonl"
    pages = [{"id": i, "title": f"page{i}", "url": f"https://wiki.example/{i}", "text": f"alpha beta {i}"} for i in range(500)]
    corpus.write_text("".join(json.dumps(page) + "\n" for page in pages))
    store = Store(corpus, folder)
    return ToolBox([WikiSearch(store), WebSearch(url=f"http://{site}/search"), CrawlPage(store, Web(allowed=(site,))),
                    Code(sandbox.Limits(cpu_seconds=1, wall_seconds=0.5)), Moody()], timeout=3.0)


def run_episodes(box, site, seconds, episodes):
    """{calls, unanswered, slowest_call_seconds, slowest_submit_ms}; one thread serves all episodes, as the sampler does."""
    rng, number, latencies, slowest_submit, unanswered = random.Random(0), 0, [0.0], 0.0, 0
    sessions, calls = [box.session("q") for _ in range(episodes)], [None] * episodes
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for i, call in enumerate(calls):
            if call is None or call[0].done():
                if call is not None:
                    latencies.append(time.monotonic() - call[1])
                name, argument = rng.choice(CALLS)
                number += 1
                started = time.monotonic()
                calls[i] = sessions[i].submit(name, argument.replace("{n}", str(number)).replace("{site}", site)), started
                slowest_submit = max(slowest_submit, time.monotonic() - started)
                if number % 20 == 0:
                    sessions[i] = box.session("q")
        time.sleep(0.001)
    for future, _ in calls:
        try:
            future.result(timeout=60)
        except TimeoutError:
            unanswered += 1
    return dict(calls=number, unanswered=unanswered, slowest_call_seconds=round(max(latencies), 2), slowest_submit_ms=round(1000 * slowest_submit, 1))


def held():
    """(processes below this one, threads, descriptors)."""
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    below = [os.getpid()]
    for pid in below:
        below += children.get(pid, [])
    return len(below) - 1, threading.active_count(), len(os.listdir("/proc/self/fd"))


if __name__ == "__main__":
    # ----------------------------------------------------------------------------------------------------------------------------
    # which bench
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?", default="all", choices=["code", "search", "soak", "all"])
    parser.add_argument("--passages", type=int, default=1_000_000, help="passages to generate for search")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the soak")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, to see that it runs")
    args = parser.parse_args()
    if args.bench in ("code", "all"):
        bench_code(*(5, 0.5) if args.quick else (200, 5.0))
    if args.bench in ("search", "all"):
        bench_search(4000 if args.quick else args.passages)
    if args.bench in ("soak", "all"):
        result = soak(3.0 if args.quick else args.seconds, 64)
        for name, counts in result.pop("counters").items():
            print(f"{name:12} {counts}")
        print(result)
        report("soak", round(result["calls"] / result["seconds"], 1), None, "calls/s", "64 episodes, all tools, injected failures")
        leaked = {name: count for name, count in result.items() if name.startswith("leaked") or name == "unanswered"}
        sys.exit(f"leaked: {leaked}" if any(leaked.values()) else 0)
