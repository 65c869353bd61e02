"""One client for every OpenAI-compatible server: the distillation teacher, the LLM judge, page summaries, vision, and served
models to evaluate.

`LLM(base_url, model)` has two calls: `chat(messages) -> str` (POST /chat/completions) and `complete(prompt, stop) -> Completion`
(POST /completions, the raw form that a chain of agents needs: an AFM trajectory is ONE assistant turn, and most servers close an
assistant turn that they are given).

What a run of hours needs from a client, and what is here: retries with exponential back-off and jitter on 429, 5xx, timeouts and
refused connections, a server's Retry-After obeyed; at most `concurrency` requests at a time; a response cache in SQLite, shared
by processes (a distillation run that stops at row 900 starts again at row 900, for nothing); tokens and cost counted. Keys come
only from the environment (COA_API_KEY, then OPENAI_API_KEY), are sent only to this server, and stand in no cache, log or error
text. Left out: streaming and asynchronous calls; threads do as well for 8 to 64 requests.

    python llm.py http://127.0.0.1:8000/v1 my-model "Say hello"
"""
import argparse
import hashlib
import json
import os
import random
import sqlite3
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import requests

from hf import exit_on_input_error


class LLMError(RuntimeError):
    """The server could not be made to answer; the message says what it said last. Not a user's error: the caller decides what a
    failed request means."""


@dataclass(frozen=True)
class Completion:
    """stop_reason is the stop string that ended the text, where the server names it (vLLM, SGLang), else None; it is not part of
    text."""
    text: str
    finish_reason: str
    stop_reason: str | None
    usage: dict


class Cache:
    """A key-value table in a SQLite file that many threads and processes share. Values are JSON. Only answers worth money are put
    here, never errors."""

    def __init__(self, path: str | Path):
        self.path, self.local = str(path), threading.local()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.connections, self.lock = [], threading.Lock()
        with self._database() as db:
            db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def _database(self) -> sqlite3.Connection:
        if not hasattr(self.local, "db"):                 # a connection a thread
            self.local.db = sqlite3.connect(self.path, timeout=60, check_same_thread=False)
            self.local.db.execute("PRAGMA journal_mode=WAL")
            self.local.db.execute("PRAGMA synchronous=NORMAL")
            with self.lock:
                self.connections.append(self.local.db)
        return self.local.db

    @staticmethod
    def key(request: dict) -> str:
        return hashlib.sha256(json.dumps(request, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()

    def get(self, request: dict):
        row = self._database().execute("SELECT value FROM answers WHERE key = ?", (self.key(request),)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, request: dict, value):
        with self._database() as db:
            db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (self.key(request), json.dumps(value)))

    def close(self):
        with self.lock:
            for db in self.connections:
                db.close()
            self.connections, self.local = [], threading.local()


class LLM:
    """A model on a server. base_url ends in /v1. timeout: seconds a request; attempts: tries per call; prices: dollars per
    million (prompt, completion) tokens. `usage` counts over the object's life: prompt_tokens, completion_tokens (paid, i.e. not
    from the cache), calls, cache_hits, retries, errors, cost."""

    def __init__(self, base_url: str, model: str, cache_path=None, concurrency: int = 8, timeout: float = 120.0, attempts: int = 6,
                 prices=(0.0, 0.0), backoff: float = 1.0):
        self.base_url, self.model, self.prices = base_url.rstrip("/"), model, prices
        self.timeout, self.attempts, self.backoff = timeout, attempts, backoff
        self.cache = Cache(cache_path) if cache_path else None
        self.slots, self.lock = threading.BoundedSemaphore(concurrency), threading.Lock()
        self.session = http_session(concurrency)
        self.usage = dict(prompt_tokens=0, completion_tokens=0, calls=0, cache_hits=0, retries=0, errors=0, cost=0.0)

    def chat(self, messages: list, **sampling) -> str:
        """The assistant's text for OpenAI-style messages; sampling: temperature, max_tokens, top_p, stop, seed, ... Raises
        LLMError."""
        answer = self._post("/chat/completions", {"messages": messages, **sampling})
        return valid_text(answer["choices"][0]["message"].get("content") or "")

    def complete(self, prompt: str, stop=(), **sampling) -> Completion:
        """Raw continuation of prompt up to one of the stop strings. Raises LLMError."""
        answer = self._post("/completions", {"prompt": prompt, **({"stop": list(stop)} if stop else {}), **sampling})
        choice = answer["choices"][0]
        reason = choice.get("stop_reason", choice.get("matched_stop"))
        reason = reason if isinstance(reason, str) else None
        return Completion(valid_text(choice["text"]), choice.get("finish_reason") or "", reason, answer.get("usage") or {})

    def _post(self, path: str, body: dict) -> dict:
        request = {"model": self.model, **body}
        # a sampled answer (temperature > 0) is cached too: resuming a run must not pay twice; ask for another one with another seed
        key = {"url": self.base_url + path, **request}
        cached = self.cache.get(key) if self.cache else None
        if cached is not None:
            self._count(calls=1, cache_hits=1)
            return cached
        with self.slots:
            answer = self._request(path, request)
        usage = answer.get("usage") or {}
        read, written = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        cost = (read * self.prices[0] + written * self.prices[1]) / 1e6
        self._count(calls=1, prompt_tokens=read, completion_tokens=written, cost=cost)
        if self.cache:
            self.cache.put(key, answer)
        return answer

    def _request(self, path: str, request: dict) -> dict:
        api_key = os.environ.get("COA_API_KEY") or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            return post_json(self.session, self.base_url + path, request, headers, check_answer, self.timeout, self.attempts,
                             self.backoff, on_retry=lambda: self._count(retries=1))
        except LLMError as error:
            self._count(errors=1)
            raise LLMError(f"{error} (model {self.model})") from None

    def _count(self, **amounts):
        with self.lock:
            for name, amount in amounts.items():
                self.usage[name] += amount

    def close(self):
        self.session.close()
        if self.cache:
            self.cache.close()


def http_session(connections: int) -> requests.Session:
    """A session for that many simultaneous requests. Its auth hook does nothing: without one, requests lets ~/.netrc replace the
    key."""
    session = requests.Session()
    session.auth = lambda request: request
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=connections))
    return session


def post_json(session: requests.Session, url: str, body: dict, headers: dict, check, timeout: float, attempts: int, backoff: float,
              deadline: float = float("inf"), on_retry=lambda: None):
    """check(reply's JSON) of a POST, tried up to `attempts` times: after 408, 409, 425, 429, 5xx, a timeout, a lost connection or
    a reply that check (or the JSON parser) refuses with ValueError. Waits backoff * 2^n seconds with jitter, or what the server
    asks, never past deadline (time.monotonic()). Raises LLMError."""
    for attempt in range(1, attempts + 1):
        wait = min(60.0, backoff * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        try:
            seconds = max(0.05, min(timeout, deadline - time.monotonic()))
            reply = session.post(url, json=body, headers=headers, timeout=seconds, allow_redirects=False)
            if reply.status_code == 200:
                return check(reply.json())
            problem = f"HTTP {reply.status_code}: {' '.join(reply.text[:300].split())}"
            if reply.status_code not in (408, 409, 425, 429) and reply.status_code < 500:
                break                                     # our mistake: asking again cannot help
            wait = max(wait, retry_after(reply.headers.get("Retry-After")))
        except (requests.RequestException, ValueError, RecursionError) as error:          # ValueError: not JSON, or not an answer
            problem = f"{type(error).__name__}: {error}"
        if attempt == attempts or time.monotonic() + wait >= deadline:
            break
        on_retry()
        time.sleep(wait)
    for secret in filter(None, (value.removeprefix("Bearer ") for value in headers.values())):
        problem = problem.replace(secret, "***")          # some servers echo the key
    raise LLMError(f"{url}: {problem} (attempt {attempt} of {attempts})")


def retry_after(value) -> float:
    """Seconds to wait by a Retry-After header (the number form), at most 120."""
    try:
        return min(120.0, float(value or 0))
    except ValueError:
        return 0.0


def valid_text(text: str) -> str:
    """The text without lone surrogates: a server that cuts an emoji in two (JSON's "\\ud83d") gives what no file can hold."""
    return text.encode("utf-8", "replace").decode()


def check_answer(answer) -> dict:
    """A reply whose first choice has a message or a text; ValueError otherwise."""
    try:
        choice = answer["choices"][0]
        if isinstance(choice["message"] if "message" in choice else choice["text"], (dict, str)):
            return answer
    except (KeyError, IndexError, TypeError):
        pass
    raise ValueError(f"no completion in the answer: {str(answer)[:200]}")


if __name__ == "__main__":
    # ----------------------------------------------------------------------------------------------------------------------------
    # one question to a server
    exit_on_input_error()
    parser = argparse.ArgumentParser(description="Ask an OpenAI-compatible server one question.")
    parser.add_argument("base_url", help="http://HOST:PORT/v1")
    parser.add_argument("model")
    parser.add_argument("question")
    args = parser.parse_args()
    llm = LLM(args.base_url, args.model)
    try:
        print(llm.chat([{"role": "user", "content": args.question}]))
    except LLMError as error:
        sys.exit(f"error: {error}")
    print(llm.usage, file=sys.stderr)
