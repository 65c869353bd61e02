"""Tool agents and the tool box that runs them while other episodes decode (Chain-of-Agents, arXiv 2508.13167, section 2).

A tool takes the text between its tags and returns the text of an observation: `tool.run(argument, context) -> str`. It never
raises: an error is an observation (a `Failure`) that helps the model to try something else. The layouts are AFM's, because its
checkpoints were trained on them.

* wiki_search: passages. Embedded: BM25 over a corpus JSONL (corpus.py). At scale: a Search-R1/AFM retriever server (POST
  /retrieve).
* web_search: pages with URLs and snippets. Embedded: the same store; real: Serper (key in SERPER_API_KEY).
* crawl_page: whole pages by URL, several separated by `|`. Embedded: the same store; with --web real HTTP (fetch.py).
* code: Python in `sandbox.py`. visual_inspector: an image URL and a question for a vision model, through `llm.py`.
* your own: any object with name, description and run; `register_tool` in coa_format.py adds the tag.

`ToolBox` owns threads, deadlines and counters; a `Session` is one episode: it refuses exact repeats with a hint (AFM's duplicate
guard) and remembers the last query and thought, which crawling with a summary uses. Left out: Jina, SearXNG, local image files,
JavaScript pages.

    python tools.py wiki_search "Nepal currency"          # one call, printed as the model would see it
"""
import argparse
import base64
import heapq
import json
import os
import queue
import re
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import sandbox
from coa_format import PROFILES, code_blocks
from corpus import Store
from fetch import BLOCKED, PAGE_SECONDS, FetchError, Web, fetch, page_text
from llm import LLM, Cache, LLMError, http_session, post_json, valid_text
from hf import InputError, exit_on_input_error


class Failure(str):
    """An observation that reports that the call failed: counted as an error, and the same call may be tried again."""


@dataclass
class Context:
    """What a tool may know besides its argument. deadline: time.monotonic() value by which it should have answered."""
    question: str = ""
    last_query: str = ""
    last_thought: str = ""
    deadline: float = float("inf")
    cached: bool = False                                  # set by the tool: the answer came from its cache

    def seconds_left(self, at_most: float) -> float:
        return max(0.05, min(at_most, self.deadline - time.monotonic()))


# --------------------------------------------------------------------------------------------------------------------------------
# Tools

class WikiSearch:
    """Passages for a query: from the embedded store, or, with url, from a Search-R1/AFM retriever (POST url {queries, topk,
    return_scores})."""
    name, description, guard = "wiki_search", "Search an encyclopedia with a short query; returns the best passages.", "search"

    def __init__(self, store: Store | None = None, topk: int = 2, url: str | None = None, attempts: int = 10, backoff: float = 0.5):
        self.store, self.topk, self.url, self.attempts, self.backoff = store, topk, url, attempts, backoff
        self.http = http_session(64) if url else None

    def run(self, argument: str, context: Context) -> str:
        if self.store and not self.url:
            return passages_text([(title, body) for title, _, body, _ in self.store.search(argument, self.topk)], argument)
        try:
            hits = post_json(self.http, self.url, {"queries": [argument], "topk": self.topk, "return_scores": True}, {}, retrieved,
                             context.seconds_left(30.0), self.attempts, self.backoff, context.deadline)
        except LLMError as error:
            return Failure(f"Search error: {error}. Try again or use another query.")
        return passages_text(hits[:self.topk], argument)

    def close(self):
        close_all(self.store, self.http)


def retrieved(reply) -> list:
    """[(title, body)] of a /retrieve reply: result[0] holds {"document": {"contents"}, "score"} or the bare documents. ValueError
    if it is something else."""
    try:
        documents = [hit.get("document", hit) for hit in reply["result"][0]]
        return [(title, body) for title, _, body in (document["contents"].partition("\n") for document in documents)]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError(f"unexpected reply {str(reply)[:100]}") from None


def passages_text(hits: list, query: str) -> str:
    """AFM's layout of passages."""
    if not hits:
        return f"No results found for '{query}'. Try a less specific query."
    return "\n\n".join(f"Doc {i} (Title: {title})\n{body}" for i, (title, body) in enumerate(hits, 1)).strip()


SERPER = "https://google.serper.dev/search"


class WebSearch:
    """Pages with URL and snippet for a query: from the embedded store, or, with url, from Serper or a server that speaks like it;
    replies are cached."""
    name, description, guard = "web_search", "Search the web with a query; returns titles, URLs and snippets.", "search"

    def __init__(self, store: Store | None = None, topk: int = 2, url: str | None = None, cache: Cache | None = None,
                 blocked: tuple = BLOCKED, snippet: int = 300):
        self.store, self.topk, self.url, self.cache, self.snippet = store, topk, url, cache, snippet
        self.web, self.http = Web(blocked), http_session(64) if url else None

    def run(self, argument: str, context: Context) -> str:
        if self.store and not self.url:
            pages = {}
            for title, url, _, page in self.store.search(argument, 8 * self.topk):
                snippet = self.store.page(url)[1].split("\n\n")[0][:self.snippet]
                pages.setdefault(page, dict(title=title, link=url, snippet=snippet))
            return web_results_text(list(pages.values())[:self.topk], argument)
        request = {"url": self.url, "q": argument, "num": self.topk}
        hits = self.cache.get(request) if self.cache else None
        context.cached = hits is not None
        if hits is None:
            key = os.environ.get("SERPER_API_KEY") or os.environ.get("WEB_SEARCH_SERPER_API_KEY")
            try:
                hits = post_json(self.http, self.url, {"q": argument, "num": self.topk}, {"X-API-KEY": key} if key else {}, organic,
                                 context.seconds_left(20.0), 4, 0.5, context.deadline)
            except LLMError as error:
                return Failure(f"Search error: {error}. Try again or use another query.")
            if self.cache:
                self.cache.put(request, hits)
        return web_results_text([hit for hit in hits if self.permitted(hit.get("link", ""))][:self.topk], argument)

    def permitted(self, url: str) -> bool:
        try:
            return bool(self.web.check(url))
        except FetchError:
            return False

    def close(self):
        close_all(self.store, self.http, self.cache)


def organic(reply) -> list:
    """The hits of a Serper reply; ValueError if it is something else."""
    hits = reply.get("organic", []) if isinstance(reply, dict) else None
    if not isinstance(hits, list) or not all(isinstance(hit, dict) for hit in hits):
        raise ValueError(f"unexpected reply {str(reply)[:100]}")
    return hits


def web_results_text(hits: list, query: str) -> str:
    """AFM's layout of Serper's `organic` list."""
    if not hits:
        return f"No results found for '{query}'. Try a less specific query."
    parts = []
    for i, hit in enumerate(hits, 1):
        lines = [f"{i}. [{hit.get('title', '')}]({hit.get('link', '')})"]
        lines += [f"{label}: {hit[key]}" for label, key in (("Date published", "date"), ("Source", "source")) if hit.get(key)]
        snippet = hit.get("snippet", "").replace("Your browser can't play this video.", "")
        parts.append("\n".join([*lines, hit.get("link", ""), snippet]).strip())
    return f"Found {len(hits)} results:\n\n## Web Results\n" + "\n\n".join(parts)


EXTRACT = """From the web page below, write down everything that helps with this goal, as short points: facts for the query, clues, \
and links worth opening (with their address). Add nothing of your own. If nothing helps, say so.
Question: {question}
Query: {query}
Thought: {thought}
Page {url}:
{text}"""


class CrawlPage:
    """The text of pages by URL, several separated by `|` and read at once: from the embedded store, and with web from the real
    one. page_chars: length of one page; with llm a page is first condensed to what serves the last query and thought, as AFM's
    crawl server does."""
    name, description, guard = "crawl_page", "Read web pages by URL; several URLs are separated by |.", "crawl"

    def __init__(self, store: Store | None = None, web: Web | None = None, llm: LLM | None = None, cache: Cache | None = None,
                 page_chars: int = 4000, most: int = 8):
        self.store, self.web, self.llm, self.cache, self.page_chars, self.most = store, web, llm, cache, page_chars, most

    def run(self, argument: str, context: Context) -> str:
        urls = clean_urls(argument)
        if not urls:
            return Failure("No valid URL in the call. Write full URLs, several separated by |.")
        urls = urls[:self.most]
        with ThreadPoolExecutor(len(urls)) if self.web or self.llm else nullcontext() as pool:
            texts = list((pool.map if pool else map)(lambda url: self.read(url, context), urls))
        pages = [type(text)(f"Page {i} [{url}]{text}") for i, (url, text) in enumerate(zip(urls, texts, strict=True), 1)]
        return (Failure if all(isinstance(page, Failure) for page in pages) else str)("\n\n".join(pages))

    def read(self, url: str, context: Context) -> str:
        """What follows the URL in the observation; a Failure begins with a colon."""
        found = self.store.page(url) if self.store else None
        title, text, links = (*found, []) if found else ("", "", [])
        if found is None:
            if self.web is None:
                return Failure(": not found. Use a URL from the search results.")
            try:
                title, text, links = self.download(url, context)
            except FetchError as error:
                return Failure(f": {error}.")
        if self.llm:
            text = f"{title}\n{text[:40_000]}\n" + "\n".join(f"[{name}]({link})" for name, link in links[:100])
            request = EXTRACT.format(question=context.question, query=context.last_query or "(none)", thought=context.last_thought or "(none)",
                                     url=url, text=text)
            try:
                return " Summary:\n" + self.llm.chat([{"role": "user", "content": request}], temperature=0.0, max_tokens=1000)
            except LLMError as error:
                return Failure(f": could not be summarised ({error}).")
        cut_text = text[:self.page_chars] + "..." * (len(text) > self.page_chars)
        return f" {title}\n{cut_text}" + "".join(f"\n[{name}]({link})" for name, link in links[:10])

    def download(self, url: str, context: Context):
        key = {"crawl": url, "blocked": sorted(self.web.blocked), "allowed": sorted(self.web.allowed)}      # what one run may read another may not
        page = self.cache.get(key) if self.cache else None
        context.cached = page is not None
        if page is None:
            page = page_text(*fetch(url, self.web, min(context.deadline - 0.5, time.monotonic() + PAGE_SECONDS)), url)
            if self.cache:
                self.cache.put(key, page)
        return page

    def close(self):
        close_all(self.store, self.llm, self.cache)


def clean_urls(argument: str) -> list:
    """URLs from AFM's argument: each part a plain URL, a markdown link, or text around one; others are dropped, repeats too."""
    urls = []
    for part in argument.split("|"):
        link = re.search(r"\]\(\s*(https?://[^\s)]+)", part, re.I) or re.search(r"(https?://[^\s\])>\"']+)", part, re.I)
        if link:
            urls.append(link.group(1))
    return list(dict.fromkeys(urls))


class VisualInspector:
    """A question about an image by URL, answered by a vision model. The image is fetched here, under the same rules as pages, and
    sent along."""
    name, description, guard = "visual_inspector", 'Look at an image: a json fence with "file_path" (its URL) and "question".', None

    def __init__(self, llm: LLM, web: Web, max_bytes: int = 10_000_000):
        self.llm, self.web, self.max_bytes = llm, web, max_bytes

    def run(self, argument: str, context: Context) -> str:
        try:
            request = json.loads(re.sub(r"^```\w*\s*|\s*```$", "", argument.strip()))
            url, question = request["file_path"].strip(), request.get("question") or "Describe the image in detail."
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return Failure('Write the call as a json fence: {"file_path": "https://...", "question": "..."}.')
        try:
            deadline = min(context.deadline - 0.5, time.monotonic() + PAGE_SECONDS)
            image, kind, _ = fetch(url, self.web, deadline, re.compile("image/"), self.max_bytes + 1)
            if len(image) > self.max_bytes:
                raise FetchError(f"the image is larger than {self.max_bytes} bytes")
            data = f"data:{kind};base64,{base64.b64encode(image).decode()}"
            content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": data}}]
            return self.llm.chat([{"role": "user", "content": content}], max_tokens=1000, top_p=0.1)
        except (FetchError, LLMError) as error:
            return Failure(f"The image cannot be inspected: {error}.")

    def close(self):
        self.llm.close()


def close_all(*things):
    for thing in things:
        if thing is not None:
            thing.close()


class Code:
    """A Python program, its output in AFM's layout, cut to output_chars (AFM: 1,536: the first and the last half)."""
    name, guard = "code", None
    description = "Run a Python program (fence py, optional stdin in a fence sh); print what you want to see."

    def __init__(self, limits: sandbox.Limits = sandbox.Limits(), output_chars: int = 1536):
        self.limits, self.output_chars, self.concurrency = limits, output_chars, sandbox.SLOTS

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
        reasons = {"timeout": "Time out. Check for an infinite loop or blocked input.\n", "memory": "MEMORY_LIMIT_EXCEEDED\n"}
        reason, end = reasons.get(result.status, ""), ""
        if result.exit_code is not None:
            end = f" killed by signal {-result.exit_code}" if result.exit_code < 0 else f" exit status {result.exit_code}"
        return "\n".join(["[FAILED]" + end, *blocks, *[f"[STDERR:BEGIN]\n{reason}{errors}\n[STDERR:END]"] * bool(reason + errors)])


def cut(text: str, chars: int) -> str:
    """At most chars characters of text: its two ends around a notice."""
    if len(text) <= chars:
        return text
    return f"{text[:chars // 2]}\n... ({len(text) - chars} characters left out) ...\n{text[-(chars // 2):]}"


# --------------------------------------------------------------------------------------------------------------------------------
# The tool box

COUNTS = ("calls", "errors", "timeouts", "cache_hits", "repeats", "seconds")


class ToolBox:
    """Runs calls of many episodes, at most `workers` of one tool at a time (fewer where the tool says so: `concurrency`), each
    within timeout seconds from its start; output longer than output_chars is cut with a notice. unavailable: every call is
    answered "tool unavailable" (--no-tools). A call that overstays is answered for it; its thread is given up and replaced."""

    def __init__(self, tools, timeout: float = 30.0, workers: int = 32, output_chars: int = 20_000, unavailable: bool = False):
        self.tools = {tool.name: tool for tool in tools}
        self.timeout, self.output_chars, self.unavailable, self.closed = timeout, output_chars, unavailable, False
        self.counts = {name: dict(calls=0, errors=0, timeouts=0, cache_hits=0, repeats=0, seconds=0.0) for name in self.tools}
        self.crews = {name: Crew(min(workers, getattr(tool, "concurrency", workers))) for name, tool in self.tools.items()}
        self.lock, self.changed = threading.Lock(), threading.Condition()
        self.running = []                                 # heap of (deadline, id, job) for the watcher
        self.watcher = threading.Thread(target=self._watch, daemon=True, name="toolbox")
        self.watcher.start()

    def session(self, question: str) -> "Session":
        return Session(self, question)

    def counters(self) -> dict:
        """{tool: {calls, errors, timeouts, cache_hits, repeats, seconds}} since the start."""
        with self.lock:
            return {name: dict(counts) for name, counts in self.counts.items()}

    def count(self, name: str, **amounts):
        with self.lock:
            for key, amount in amounts.items():
                self.counts[name][key] += amount

    def submit(self, tool, argument: str, context: Context, on_failure=lambda: None) -> Future:
        if self.closed:
            raise RuntimeError("the tool box is closed")
        job, crew = Job(tool, argument, context, on_failure, Future()), self.crews[tool.name]
        job.future.set_running_or_notify_cancel()         # cannot be cancelled from here on
        with self.lock:
            crew.unfinished += 1
            self._hire(crew)
        crew.jobs.put(job)
        return job.future

    def _hire(self, crew: "Crew"):
        """Starts a thread if there are more calls than threads; the lock is held."""
        if len(crew.threads) < min(crew.limit, crew.unfinished):
            thread = threading.Thread(target=self._work, args=[crew], daemon=True, name="toolbox")
            crew.threads.add(thread)
            thread.start()

    def _work(self, crew: "Crew"):
        while (job := crew.jobs.get()) is not None:
            job.context.deadline, job.thread = time.monotonic() + self.timeout, threading.current_thread()
            with self.changed:
                heapq.heappush(self.running, (job.context.deadline, id(job), job))
                self.changed.notify()
            try:
                text = job.tool.run(job.argument, job.context)
                text = text if isinstance(text, str) else str(text)
            except Exception as error:                    # a user's own tool may raise anything: one call must not end a long run
                print(f"tool {job.tool.name} raised {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                text = Failure(f"The tool failed: {type(error).__name__}.")
            if not self._finish(job, text):
                return                                    # overstayed: answered and replaced by the watcher

    def _finish(self, job: "Job", text: str, overstayed: bool = False) -> bool:
        """Answers the job unless the other side (worker or watcher) has."""
        crew = self.crews[job.tool.name]
        with self.lock:
            if job.done:
                return False
            job.done = True
            crew.unfinished -= 1
            if overstayed:
                crew.threads.discard(job.thread)
                self._hire(crew)
        self.count(job.tool.name, calls=1, errors=int(isinstance(text, Failure) and not overstayed), timeouts=int(overstayed),
                   cache_hits=int(job.context.cached), seconds=time.monotonic() - job.context.deadline + self.timeout)
        if isinstance(text, Failure):
            job.on_failure()                              # before anyone can see the result
        job.future.set_result(type(text)(valid_text(cut(text, self.output_chars))))
        return True

    def _watch(self):
        """Answers calls that are a second past their deadline: a tool's own word about its time should come first."""
        while True:
            with self.changed:
                while self.running and self.running[0][2].done:
                    heapq.heappop(self.running)
                if self.closed and not any(crew.unfinished for crew in self.crews.values()):
                    return
                wait = self.running[0][0] + 1.0 - time.monotonic() if self.running else 1.0
                if wait > 0:
                    self.changed.wait(min(wait, 1.0))
                    continue
                job = heapq.heappop(self.running)[2]
            text = f"Time out: {job.tool.name} did not answer within {self.timeout:g} seconds."
            self._finish(job, Failure(text), overstayed=True)

    def close(self):
        """Lets queued and running calls end, each by its deadline, then ends the threads and closes the tools."""
        if self.closed:
            return
        self.closed = True
        while any(crew.unfinished for crew in self.crews.values()):
            time.sleep(0.005)
        with self.changed:
            self.changed.notify()
        self.watcher.join()
        for crew in self.crews.values():
            for _ in crew.threads:
                crew.jobs.put(None)
            for thread in crew.threads:
                thread.join()
        for tool in self.tools.values():
            getattr(tool, "close", lambda: None)()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Crew:
    """The threads of one tool, hired as needed up to limit, and the calls waiting for them."""

    def __init__(self, limit: int):
        self.limit, self.unfinished, self.threads, self.jobs = limit, 0, set(), queue.SimpleQueue()


@dataclass
class Job:
    tool: object
    argument: str
    context: Context
    on_failure: object
    future: Future
    done: bool = False
    thread: threading.Thread | None = None


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
        if box.unavailable:
            if tool is not None:
                box.count(name, calls=1)
            return answered("Tool unavailable. Answer from what you know.")
        if tool is None:
            return answered(f"There is no tool '{name}'. Tools: {', '.join(box.tools) or 'none'}.")
        if not argument:
            box.count(name, calls=1, errors=1)
            return answered(f"Empty call: write the input between <{name}> and </{name}>.")
        key = (getattr(tool, "guard", None), argument)
        if key[0] and key in self.seen:
            box.count(name, repeats=1)
            return answered({"search": "You have done this search before. Use another query."}.get(
                key[0], "You have read these pages before. Use other URLs."))
        self.seen.add(key)
        if key[0] == "search":
            self.last_query = argument
        context = Context(self.question, self.last_query, self.last_thought)
        return box.submit(tool, argument, context, on_failure=lambda: self.seen.discard(key))

    def run(self, name: str, argument: str, thought: str = "") -> str:
        return self.submit(name, argument, thought).result()


def answered(text: str) -> Future:
    future = Future()
    future.set_result(text)
    return future


# --------------------------------------------------------------------------------------------------------------------------------
# Options that all scripts share

def add_tool_arguments(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("tools (keys come from the environment: SERPER_API_KEY, COA_API_KEY or OPENAI_API_KEY)")

    def repeatable(name, text):
        group.add_argument(name, metavar="HOST", type=host_name, action="append", default=[], help=text + "; repeatable")
    group.add_argument("--corpus", default="data/encyclopedia.jsonl", help="JSONL of pages for wiki_search, web_search, crawl_page")
    group.add_argument("--topk", type=int, default=2, help="passages a wiki_search returns (AFM: 3)")
    group.add_argument("--web-topk", type=int, default=2, help="hits a web_search returns (AFM: 10)")
    group.add_argument("--page-chars", type=int, default=4000, help="characters of a page that crawl_page returns")
    group.add_argument("--retriever", metavar="URL", help="wiki_search asks this Search-R1/AFM server (http://127.0.0.1:8000/retrieve)")
    group.add_argument("--serper", metavar="URL", nargs="?", const=SERPER, help="web_search asks Serper, or a server like it at URL")
    group.add_argument("--web", action="store_true", help="crawl_page reads the real web")
    repeatable("--allow-host", "a private host (or host:port) of your own that may be read")
    repeatable("--block-host", "a further host that may not be searched or read")
    group.add_argument("--summary", metavar=("URL", "MODEL"), nargs=2, help="OpenAI-compatible server that condenses crawled pages")
    group.add_argument("--vision", metavar=("URL", "MODEL"), nargs=2, help="OpenAI-compatible vision server for visual_inspector")
    group.add_argument("--tool-cache", metavar="FILE", default="runs/tool_cache.sqlite",
                       help="answers of paid services and fetched pages; delete it to ask again")
    group.add_argument("--code-memory-mb", type=int, default=sandbox.Limits.memory_mb, help="memory of one code call (AFM: 5000)")
    group.add_argument("--tool-timeout", type=float, default=30.0, help="seconds until a call is answered for the tool")
    group.add_argument("--unsafe-code", action="store_true", help="run model-written code even where this machine gives no isolation")
    group.add_argument("--no-tools", action="store_true", help="answer every call with 'tool unavailable'")


def host_name(text: str) -> str:
    """A host (or host:port) as Web.check writes it, from any spelling or an address that begins with it; ValueError if it is none."""
    name = re.sub(r"^\w+://|[/?#].*", "", text.strip()).strip(".").encode("idna").decode().lower()
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ValueError(f"no host: {text}")
    return name


def make_toolbox(args, agents=(), extra=()) -> ToolBox:
    """The tool box that the options describe, for tasks of these agent profiles, with extra tools of one's own. InputError for a missing
    corpus or key, and where one of the profiles runs programs but nothing isolates them here."""
    if args.no_tools:
        return ToolBox([WikiSearch(), WebSearch(), CrawlPage(), Code()], workers=1, unavailable=True)
    if args.unsafe_code:
        sandbox.allow_unsafe()
    if any("code" in PROFILES[agent].tools for agent in agents):
        if sandbox.isolation() == "none":
            raise InputError(sandbox.remedy())
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"isolation of model-written code: {sandbox.isolation()}", file=sys.stderr)
    if args.serper == SERPER and not (os.environ.get("SERPER_API_KEY") or os.environ.get("WEB_SEARCH_SERPER_API_KEY")):
        raise InputError("--serper: set SERPER_API_KEY in the environment")
    web = Web(BLOCKED + tuple(args.block_host), tuple(args.allow_host))
    store = None if args.retriever and args.serper and args.web else Store(args.corpus)
    cache = Cache(args.tool_cache) if args.serper or args.web else None
    summary = LLM(*args.summary, cache_path=args.tool_cache) if args.summary else None
    tools = [WikiSearch(store, args.topk, args.retriever), WebSearch(store, args.web_topk, args.serper, cache, web.blocked),
             CrawlPage(store, web if args.web else None, summary, cache, args.page_chars),
             Code(sandbox.Limits(memory_mb=args.code_memory_mb))]
    if args.vision:
        tools.append(VisualInspector(LLM(*args.vision, cache_path=args.tool_cache), web))
    return ToolBox([*tools, *extra], timeout=args.tool_timeout)


if __name__ == "__main__":
    # ----------------------------------------------------------------------------------------------------------------------------
    # one call
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("argument")
    add_tool_arguments(parser)
    args = parser.parse_args()
    with make_toolbox(args) as toolbox:
        print(toolbox.session("").run(args.tool, args.argument))
