"""Tool agents and the tool box that runs them while other episodes decode (Chain-of-Agents, arXiv 2508.13167, section 2).

A tool takes the text between its tags and returns the text of an observation: `tool.run(argument, context) -> str`. It never raises: an error is an observation
(a `Failure`) that helps the model to try something else. The layouts are AFM's, because its checkpoints were trained on them.

* wiki_search: passages. Embedded: SQLite FTS5 with BM25 over a corpus JSONL, an index built once and then read by any number of processes.
  At scale: a Search-R1/AFM retriever server (POST /retrieve).
* web_search: pages with URLs and snippets. Embedded: the same store; real: Serper (key in SERPER_API_KEY).
* crawl_page: whole pages by URL, several separated by `|`. Embedded: the same store; with --web real HTTP, through the guards of `fetch`.
* code: Python in `sandbox.py`. visual_inspector: an image URL and a question for a vision model, through `llm.py`.
* your own: any object with name, description and run; `register_tool` in coa_format.py adds the tag.

`ToolBox` owns threads, deadlines and counters; a `Session` is one episode: it refuses exact repeats with a hint (AFM's duplicate guard) and remembers
the last query and thought, which crawling with a summary uses. Left out: Jina, SearXNG, local image files, JavaScript pages.

    python tools.py wiki_search "Nepal currency"          # one call, printed as the model would see it
"""
import argparse
import fcntl
import gzip
import hashlib
import heapq
import json
import os
import queue
import re
import sqlite3
import sys
import threading
import time
import unicodedata
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import sandbox
from coa_format import code_blocks
from model import InputError, exit_on_input_error


class Failure(str):
    """An observation that reports that the call failed: counted as an error, and the same call may be tried again."""


@dataclass
class Context:
    """What a tool may know besides its argument. deadline: time.monotonic() value by which it should have answered."""
    question: str = ""
    last_query: str = ""
    last_thought: str = ""
    deadline: float = float("inf")

    def seconds_left(self, at_most: float) -> float:
        return max(0.05, min(at_most, self.deadline - time.monotonic()))


# ---------------------------------------------------------------------------------------------------------------------------------------------
# The embedded store: one SQLite file with pages, passages, and a full-text index over (title, passage).

STOP_WORDS = set("""a about after all also an and any are as at be been before but by can could did do does for from had has have he her him his how i if in into is it its
    me my no not of on or our she so than that the their them then there these they this those to under up was we were what when where which who whom whose why will
    with would you your""".split())
COMMON = 0.1                                              # a word in more than this share of the passages says little and costs much


class Store:
    """A corpus, searchable. corpus: JSONL (or .gz) with rows {"id", "title", "url", "text"}, or Search-R1's {"id", "contents"} (first line: title).
    Built on first use under index_dir as <stem>-<fingerprint>.sqlite, atomically; opened at once after that. Raises InputError for a bad row."""

    def __init__(self, corpus, index_dir="runs/index"):
        self.corpus = Path(corpus)
        if not self.corpus.is_file():
            raise InputError(f"{corpus}: no such corpus file (JSONL rows with id, title, url, text); build the built-in one with: python data/build.py")
        self.path = Path(index_dir) / f"{self.corpus.name.split('.')[0]}-{content_hash(self.corpus)}.sqlite"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)          # of several processes one builds
                if not self.path.exists():
                    build_index(self.corpus, self.path)
        self.connections, self.lock, self.local = [], threading.Lock(), threading.local()
        self.passages = self.db().execute("SELECT count(*) FROM passages").fetchone()[0]

    def db(self) -> sqlite3.Connection:
        """This thread's connection; read-only and immutable, so readers never wait for each other."""
        if getattr(self.local, "db", None) is None:
            self.local.db = sqlite3.connect(f"file:{self.path}?mode=ro&immutable=1", uri=True, check_same_thread=False)
            self.local.db.execute("PRAGMA mmap_size = 1073741824")
            with self.lock:
                self.connections.append(self.local.db)
        return self.local.db

    def match(self, query: str) -> str | None:
        """An FTS5 expression from any text: its words, quoted, joined by OR, without the very common ones. None if no word is left. Query text is data: only
        letters and digits survive, so no operator of FTS5 can."""
        words = list(dict.fromkeys(re.findall(r"[^\W_]+", fold(query))))[:64]
        rare = [w for w in words if w not in STOP_WORDS] or words
        counts = {w: row[0] for w in rare if (row := self.db().execute("SELECT doc FROM words WHERE term = ?", (w,)).fetchone())}
        telling = [w for w in counts if counts[w] <= max(1000, COMMON * self.passages)] or sorted(counts, key=counts.get)[:1]
        return " OR ".join(f'"{w}"' for w in telling) or None

    def search(self, query: str, topk: int) -> list:
        """The best topk passages by BM25, a match in the title weighing ten times: [(title, url, passage, page id)]."""
        match = self.match(query)
        if match is None:
            return []
        return self.db().execute("""SELECT p.title, p.url, s.body, p.id FROM (SELECT rowid, rank FROM passage_index WHERE passage_index MATCH ? ORDER BY rank LIMIT ?) AS hit
                                    JOIN passages AS s ON s.id = hit.rowid JOIN pages AS p ON p.id = s.page ORDER BY hit.rank, s.id""", (match, topk)).fetchall()

    def page(self, url: str):
        """(title, text) of the page at url, or None."""
        row = self.db().execute("SELECT title, text FROM pages WHERE url_key = ?", (url_key(url),)).fetchone()
        return row or None

    def close(self):
        with self.lock:
            for db in self.connections:
                db.close()
            self.connections, self.local = [], threading.local()


def fold(text: str) -> str:
    """Lower case without accents, as FTS5's unicode61 tokenizer with remove_diacritics folds."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(c))


def content_hash(path: Path) -> str:
    """A fingerprint of a file that costs milliseconds: its size and up to 64 samples of 64 KB (all of it below 4 MB), beyond that also its time of change."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(repr((1, size, path.stat().st_mtime_ns if size > 1 << 22 else 0)).encode())      # 1: version of the index layout
    with open(path, "rb") as f:
        for i in range(64):
            f.seek(i * max(1 << 16, size // 64))
            digest.update(f.read(1 << 16))
    return digest.hexdigest()[:12]


def url_key(url: str) -> str:
    """What two spellings of one address share: no scheme, no www., no fragment, no trailing slash."""
    return re.sub(r"^(https?://)?(www\.)?", "", url.strip(), flags=re.I).split("#")[0].rstrip("/").casefold()


def corpus_rows(corpus: Path):
    """Yields (title, url, text, passages) for each row; InputError names file, line and field."""
    with (gzip.open if corpus.suffix == ".gz" else open)(corpus, "rt", encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                row = json.loads(line)
            except ValueError:
                raise InputError(f"{corpus}:{number}: expected one JSON object a line") from None
            if not isinstance(row, dict):
                raise InputError(f"{corpus}:{number}: expected a JSON object, found {type(row).__name__}")
            text_field = "contents" if "contents" in row else "text"
            for field in ("title", text_field) if text_field == "text" else (text_field,):
                if not isinstance(row.get(field), str):
                    raise InputError(f"{corpus}:{number}: field '{field}': expected a string, found {row.get(field)!r:.40}")
            if text_field == "contents":
                title, _, text = row["contents"].partition("\n")
                passages = [text]
            else:
                title, text = row["title"], row["text"]
                passages = split_passages(text)
            yield title, row.get("url") or f"https://corpus.local/{row.get('id', number)}", text, passages


def split_passages(text: str, words: int = 100) -> list:
    """Paragraphs (blank line between), those of more than `words` words cut in pieces of that length."""
    passages = []
    for paragraph in filter(None, (p.strip() for p in text.split("\n\n"))):
        tokens = paragraph.split(" ")
        passages += [paragraph] if len(tokens) <= words * 1.5 else [" ".join(tokens[i:i + words]) for i in range(0, len(tokens), words)]
    return passages or [text]


def build_index(corpus: Path, path: Path):
    """Writes the SQLite file: about 40,000 passages a second on one core."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    db = sqlite3.connect(temporary)
    db.executescript("""PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA page_size = 8192;
        CREATE TABLE pages (id INTEGER PRIMARY KEY, title TEXT, url TEXT, url_key TEXT, text TEXT);
        CREATE TABLE passages (id INTEGER PRIMARY KEY, page INTEGER, body TEXT);
        CREATE VIRTUAL TABLE passage_index USING fts5(title, body, content='', tokenize="unicode61 remove_diacritics 2");
        INSERT INTO passage_index(passage_index, rank) VALUES ('rank', 'bm25(10.0, 1.0)');
        CREATE VIRTUAL TABLE words USING fts5vocab(passage_index, row);""")
    try:
        number = 0
        for page, (title, url, text, passages) in enumerate(corpus_rows(corpus), 1):
            db.execute("INSERT INTO pages VALUES (?, ?, ?, ?, ?)", (page, title, url, url_key(url), text))
            for body in passages:
                number += 1
                db.execute("INSERT INTO passages VALUES (?, ?, ?)", (number, page, body))
                db.execute("INSERT INTO passage_index(rowid, title, body) VALUES (?, ?, ?)", (number, title, body))
        db.execute("INSERT INTO passage_index(passage_index) VALUES ('optimize')")
        db.execute("CREATE INDEX by_url ON pages (url_key)")
        db.commit()
        db.close()
        os.replace(temporary, path)
    finally:
        db.close()
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Tools

class WikiSearch:
    """Passages for a query. store: the embedded corpus."""
    name, description, guard = "wiki_search", "Search an encyclopedia with a short query; returns the best passages.", "search"

    def __init__(self, store: Store, topk: int = 2):
        self.store, self.topk = store, topk

    def run(self, argument: str, context: Context) -> str:
        hits = [(title, body) for title, _, body, _ in self.store.search(argument, self.topk)]
        return passages_text(hits, argument)


def passages_text(hits: list, query: str) -> str:
    """AFM's layout of passages."""
    if not hits:
        return f"No results found for '{query}'. Try a less specific query."
    return "\n\n".join(f"Doc {i} (Title: {title})\n{body}" for i, (title, body) in enumerate(hits, 1)).strip()


class WebSearch:
    """Pages with URL and snippet for a query, in the layout of Serper results."""
    name, description, guard = "web_search", "Search the web with a query; returns titles, URLs and snippets.", "search"

    def __init__(self, store: Store, topk: int = 3, snippet: int = 300):
        self.store, self.topk, self.snippet = store, topk, snippet

    def run(self, argument: str, context: Context) -> str:
        pages = {}
        for title, url, _, page in self.store.search(argument, 8 * self.topk):
            pages.setdefault(page, (title, url))
        hits = [dict(title=title, link=url, snippet=split_passages(self.store.page(url)[1])[0][:self.snippet]) for title, url in list(pages.values())[:self.topk]]
        return web_results_text(hits, argument)


def web_results_text(hits: list, query: str) -> str:
    """AFM's layout of Serper's `organic` list."""
    if not hits:
        return f"No results found for '{query}'. Try with a more general query."
    parts = []
    for i, hit in enumerate(hits, 1):
        lines = [f"{i}. [{hit.get('title', '')}]({hit.get('link', '')})"]
        lines += [f"{label}: {hit[key]}" for label, key in (("Date published", "date"), ("Source", "source")) if hit.get(key)]
        parts.append("\n".join([*lines, hit.get("link", ""), hit.get("snippet", "")]).strip())
    return f"Found {len(hits)} results:\n\n## Web Results\n" + "\n\n".join(parts)


class CrawlPage:
    """The text of pages by URL, several separated by `|`."""
    name, description, guard = "crawl_page", "Read web pages by URL; several URLs are separated by |.", "crawl"

    def __init__(self, store: Store, page_chars: int = 4000):
        self.store, self.page_chars = store, page_chars

    def run(self, argument: str, context: Context) -> str:
        urls = clean_urls(argument)
        if not urls:
            return Failure("No valid URL in the call. Write full URLs, several separated by |.")
        return "\n\n".join(f"Page {i} [{url}]{self.read(url)}" for i, url in enumerate(urls, 1))

    def read(self, url: str) -> str:
        page = self.store.page(url)
        return ": not found. Use a URL from the search results." if page is None else f" {page[0]}\n{page[1][:self.page_chars]}"


def clean_urls(argument: str) -> list:
    """URLs from AFM's argument: each part a plain URL, a markdown link, or text around one; others are dropped, repeats too."""
    urls = []
    for part in argument.split("|"):
        link = re.search(r"\]\(\s*(https?://[^\s)]+)", part) or re.search(r"(https?://[^\s\])>\"']+)", part)
        if link:
            urls.append(link.group(1))
    return list(dict.fromkeys(urls))


class Code:
    """A Python program, its output in AFM's layout, cut to output_chars (AFM: 1,536: the first and the last half)."""
    name, description, guard = "code", "Run a Python program (fence py, optional stdin in a fence sh); print what you want to see.", None

    def __init__(self, limits: sandbox.Limits = sandbox.Limits(), output_chars: int = 1536):
        self.limits, self.output_chars = limits, output_chars

    def run(self, argument: str, context: Context) -> str:
        code, stdin = code_blocks(argument)
        if not code.strip():
            return Failure("[FAILED]\nNo code. Write a fence ```py ... ``` inside the call.")
        result = sandbox.run_python(code, stdin, self.limits)
        return (str if result.status == "ok" else Failure)(self.layout(result))

    def layout(self, result: sandbox.Result) -> str:
        output, errors = cut(result.stdout.rstrip("\n"), self.output_chars), cut(result.stderr.strip(), self.output_chars)
        blocks = [f"[STDOUT:BEGIN]\n{output}\n[STDOUT:END]"] * bool(output)
        if result.status == "ok":
            return "\n".join(["[EXECUTED]"] + blocks) if blocks else "[EXECUTED] exit status 0 (no output)"
        reason = {"timeout": "Time out. Check for an infinite loop or blocked input.\n", "memory": "MEMORY_LIMIT_EXCEEDED\n"}.get(result.status, "")
        end = "" if result.exit_code is None else f" killed by signal {-result.exit_code}" if result.exit_code < 0 else f" exit status {result.exit_code}"
        return "\n".join(["[FAILED]" + end, *blocks, *[f"[STDERR:BEGIN]\n{reason}{errors}\n[STDERR:END]"] * bool(reason + errors)])


def cut(text: str, chars: int) -> str:
    """At most chars characters of text: its two ends around a notice."""
    return text if len(text) <= chars else f"{text[:chars // 2]}\n... ({len(text) - chars} characters left out) ...\n{text[-(chars // 2):]}"


# ---------------------------------------------------------------------------------------------------------------------------------------------
# The tool box

COUNTS = ("calls", "errors", "timeouts", "cache_hits", "repeats", "seconds")


class ToolBox:
    """Runs calls of many episodes on `workers` threads, each within timeout seconds; output longer than output_chars is cut with a notice. unavailable: every
    call is answered "tool unavailable" (--no-tools). A call that overstays is answered for it, its thread abandoned and replaced."""

    def __init__(self, tools, timeout: float = 30.0, workers: int = 16, output_chars: int = 20_000, unavailable: bool = False):
        self.tools = {tool.name: tool for tool in tools}
        self.timeout, self.output_chars, self.unavailable = timeout, output_chars, unavailable
        self.counts = {name: dict.fromkeys(COUNTS, 0) for name in self.tools}
        self.lock, self.jobs, self.threads, self.closed = threading.Lock(), queue.SimpleQueue(), set(), False
        self.running, self.changed = [], threading.Condition()                        # heap of (deadline, number, job) for the watcher
        self.number = 0
        for _ in range(workers):
            self._start(self._work)
        self._start(self._watch)

    def session(self, question: str) -> "Session":
        return Session(self, question)

    def counters(self) -> dict:
        """{tool: {calls, errors, timeouts, cache_hits, repeats, seconds}} since the start."""
        with self.lock:
            return {name: dict(counts, cache_hits=counts["cache_hits"] + getattr(self.tools[name], "cache_hits", 0)) for name, counts in self.counts.items()}

    def count(self, name: str, **amounts):
        with self.lock:
            for key, amount in amounts.items():
                self.counts[name][key] += amount

    def _start(self, target):
        thread = threading.Thread(target=target, daemon=True, name=f"toolbox-{target.__name__}")
        with self.lock:
            self.threads.add(thread)
        thread.start()

    def _submit(self, tool, argument: str, context: Context) -> "Job":
        if self.closed:
            raise RuntimeError("the tool box is closed")
        job = Job(tool, argument, context, Future())
        self.jobs.put(job)
        return job

    def _work(self):
        while (job := self.jobs.get()) is not None:
            started = time.monotonic()
            job.context.deadline = started + self.timeout
            with self.changed:
                self.number += 1
                heapq.heappush(self.running, (job.context.deadline, self.number, job))
                self.changed.notify()
            try:
                text = job.tool.run(job.argument, job.context)
            except Exception as error:                    # a user's own tool may raise anything: one call must not end a run of hours
                print(f"tool {job.tool.name} raised {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                text = Failure(f"The tool failed: {type(error).__name__}.")
            if not self._finish(job, text, started):
                break                                     # it overstayed: the watcher has answered and started another thread
        with self.lock:
            self.threads.discard(threading.current_thread())

    def _finish(self, job: "Job", text: str, started: float, timeouts: int = 0) -> bool:
        with self.lock:
            if job.done:
                return False
            job.done = True
        self.count(job.tool.name, calls=1, errors=int(isinstance(text, Failure) and not timeouts), timeouts=timeouts, seconds=time.monotonic() - started)
        job.future.set_result(type(text)(cut(text, self.output_chars)))
        return True

    def _watch(self):
        """Answers calls whose deadline has passed; one second of grace, so that a tool's own word about its time comes first."""
        while True:
            with self.changed:
                while self.running and self.running[0][2].done:
                    heapq.heappop(self.running)
                if self.closed and not self.running:
                    return
                wait = self.running[0][0] + 1.0 - time.monotonic() if self.running else None
                if wait is None or wait > 0:
                    self.changed.wait(min(wait, 1.0) if wait is not None else None)
                    continue
                _, _, job = heapq.heappop(self.running)
            if self._finish(job, Failure(f"Time out: {job.tool.name} did not answer within {self.timeout:g} seconds."), job.context.deadline - self.timeout, timeouts=1):
                self._start(self._work)

    def close(self):
        """Waits for calls in progress (at most their deadline), ends the threads, closes the tools' stores."""
        if self.closed:
            return
        self.closed = True
        with self.lock:
            workers = [t for t in self.threads if t.name.endswith("_work")]
        for _ in range(len(workers) + 1):
            self.jobs.put(None)
        with self.changed:
            self.changed.notify()
        for tool in self.tools.values():
            getattr(tool, "close", lambda: None)()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@dataclass
class Job:
    tool: object
    argument: str
    context: Context
    future: Future
    done: bool = False


class Session:
    """One episode's view of the tool box."""

    def __init__(self, toolbox: ToolBox, question: str):
        self.toolbox, self.question, self.last_query, self.last_thought = toolbox, question, "", ""
        self.seen = set()                                 # (guard, argument) of what was asked, failed calls excepted

    def submit(self, name: str, argument: str, thought: str = "") -> Future:
        """Starts the call; the future's result is the observation text, and it never holds an exception."""
        box, argument = self.toolbox, argument.strip()
        self.last_thought = thought or self.last_thought
        tool = box.tools.get(name)
        if tool is None:
            return answered(f"There is no tool '{name}'. Tools: {', '.join(box.tools) or 'none'}.")
        if box.unavailable:
            box.count(name, calls=1)
            return answered("Tool unavailable. Answer from what you know.")
        if not argument:
            box.count(name, calls=1, errors=1)
            return answered(f"Empty call: write the input between <{name}> and </{name}>.")
        key = (getattr(tool, "guard", None), argument)
        if key[0] and key in self.seen:
            box.count(name, repeats=1)
            return answered("You have done this search before. Use another query." if key[0] == "search" else "You have read these pages before. Use other URLs.")
        self.seen.add(key)
        if key[0] == "search":
            self.last_query = argument
        job = box._submit(tool, argument, Context(self.question, self.last_query, self.last_thought))
        job.future.add_done_callback(lambda future: self.seen.discard(key) if isinstance(future.result(), Failure) else None)
        return job.future

    def run(self, name: str, argument: str, thought: str = "") -> str:
        return self.submit(name, argument, thought).result()


def answered(text: str) -> Future:
    future = Future()
    future.set_result(text)
    return future


# ---------------------------------------------------------------------------------------------------------------------------------------------
# Options that all scripts share

def add_tool_arguments(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("tools")
    group.add_argument("--corpus", default="data/encyclopedia.jsonl", help="JSONL of pages for wiki_search, web_search and crawl_page")
    group.add_argument("--topk", type=int, default=2, help="passages a wiki_search returns (AFM: 3)")
    group.add_argument("--web-topk", type=int, default=3, help="hits a web_search returns (AFM: 10)")
    group.add_argument("--unsafe-code", action="store_true", help="run model-written code even where this machine gives no isolation")
    group.add_argument("--no-tools", action="store_true", help="answer every call with 'tool unavailable'")


def make_toolbox(args) -> ToolBox:
    """The tool box that the options describe."""
    if args.unsafe_code:
        sandbox.allow_unsafe()
    store = Store(args.corpus)
    return ToolBox([WikiSearch(store, args.topk), WebSearch(store, args.web_topk), CrawlPage(store), Code()], unavailable=args.no_tools)


if __name__ == "__main__":
    # -----------------------------------------------------------------------------------------------------------------------------------------
    # one call
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("argument")
    add_tool_arguments(parser)
    args = parser.parse_args()
    with make_toolbox(args) as toolbox:
        print(toolbox.session("").run(args.tool, args.argument))
