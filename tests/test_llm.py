"""The client against a local server that speaks the OpenAI protocol and fails in every way that servers do."""
import http.server
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llm import LLM, Cache, LLMError


class Server(http.server.ThreadingHTTPServer):
    """script: what to do with the next requests ("ok", a status, "hang", "broken", "empty", "close"); afterwards "ok"."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.requests, self.headers_seen, self.lock = [], [], [], threading.Lock()
        self.active = self.most = 0
        self.pause, self.finish = 0.0, threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append((self.path, body))
            server.headers_seen.append(dict(self.headers))
            action = server.script.pop(0) if server.script else "ok"
            server.active += 1
            server.most = max(server.most, server.active)
        time.sleep(server.pause)
        with server.lock:
            server.active -= 1
        if action == "hang":
            server.finish.wait(30)
        elif action == "close":
            self.close_connection = True
        elif action == "broken":
            self.reply(200, b"{not json")
        elif action == "empty":
            self.reply(200, b'{"choices": []}')
        elif action == "half":
            self.reply(200, b'{"choices": [{"message": {"content": "half \\ud83d"}, "text": "half \\ud83d"}]}')
        elif action == "odd":
            self.reply(200, b'{"choices": [{"delta": 1}]}')
        elif isinstance(action, tuple):
            self.reply(action[0], b"busy", **action[1])
        elif isinstance(action, int):
            self.reply(action, f"no:\n{self.headers.get('Authorization')}".encode())
        else:
            text = f"echo {len(server.requests)}"
            choice = {"message": {"role": "assistant", "content": text}} if self.path.endswith("chat/completions") else {"text": text, "stop_reason": "</answer>"}
            self.reply(200, json.dumps({"choices": [{**choice, "finish_reason": "stop"}], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}).encode())

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.finish.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def llm(server):
    llm = LLM(server.url, "m", backoff=0.01, timeout=0.5, attempts=4)
    yield llm
    llm.close()


MESSAGES = [{"role": "user", "content": "hé"}]


def test_chat_and_complete_send_what_the_protocol_wants(server, llm):
    assert llm.chat(MESSAGES, temperature=0.5, max_tokens=7) == "echo 1"
    done = llm.complete("<think>", stop=["</answer>"], seed=3)
    assert (done.text, done.finish_reason, done.stop_reason, done.usage["completion_tokens"]) == ("echo 2", "stop", "</answer>", 5)
    assert server.requests == [("/v1/chat/completions", {"model": "m", "messages": MESSAGES, "temperature": 0.5, "max_tokens": 7}),
                               ("/v1/completions", {"model": "m", "prompt": "<think>", "stop": ["</answer>"], "seed": 3})]
    assert llm.usage == dict(prompt_tokens=20, completion_tokens=10, calls=2, cache_hits=0, retries=0, errors=0, cost=0.0)


@pytest.mark.parametrize("failure", [429, 500, 502, 503, 504, "hang", "broken", "empty", "odd", "close"])
def test_passing_failures_are_tried_again(server, llm, failure):
    server.script = [failure, failure]
    assert llm.chat(MESSAGES) == "echo 3"
    assert llm.usage["retries"] == 2 and llm.usage["calls"] == 1


@pytest.mark.parametrize("failure", [400, 401, 404, 302])
def test_our_own_mistakes_are_not(server, llm, failure):
    server.script = [failure]
    with pytest.raises(LLMError, match=f"HTTP {failure}.*model m"):
        llm.chat(MESSAGES)
    assert len(server.requests) == 1 and llm.usage["errors"] == 1


def test_it_gives_up_after_the_given_attempts_and_says_why(server, llm):
    server.script = [500] * 9
    with pytest.raises(LLMError, match="HTTP 500.*attempt 4 of 4"):
        llm.chat(MESSAGES)
    assert len(server.requests) == 4


def test_lone_surrogates_are_replaced_in_cached_answers_too(server, tmp_path):
    llm = LLM(server.url, "m", cache_path=tmp_path / "c.sqlite")
    server.script = ["half", "half"]
    assert [llm.chat(MESSAGES), llm.chat(MESSAGES), llm.complete("x").text] == ["half ?"] * 3
    llm.close()


def test_script_says_in_one_line_what_a_server_refuses(server):
    server.script = [404]
    command = [sys.executable, Path(__file__).resolve().parent.parent / "llm.py", server.url, "m", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "HTTP 404" in done.stderr and done.stderr.count("\n") == 1


def test_absent_server_is_an_llm_error():
    with pytest.raises(LLMError, match="ConnectionError"):
        LLM("http://127.0.0.1:9/v1", "m", backoff=0.01, attempts=2).chat(MESSAGES)


def test_retry_after_is_obeyed(server, llm):
    server.script = [(429, {"Retry_After": "0.6"}), (429, {"Retry_After": "soon"})]
    started = time.monotonic()
    assert llm.chat(MESSAGES) == "echo 3"
    assert 0.6 <= time.monotonic() - started < 3


def test_cache_answers_equal_requests_only_and_counts_no_tokens_twice(server, tmp_path):
    llm = LLM(server.url, "m", cache_path=tmp_path / "cache.sqlite", prices=(1.0, 2.0))
    first = llm.chat(MESSAGES, seed=1)
    assert llm.chat(MESSAGES, seed=1) == first and llm.chat(MESSAGES, seed=2) != first
    assert llm.complete("x") == llm.complete("x")
    assert (llm.usage["calls"], llm.usage["cache_hits"], llm.usage["prompt_tokens"]) == (5, 2, 30)
    assert llm.usage["cost"] == pytest.approx(3 * (10 * 1.0 + 5 * 2.0) / 1e6)
    again = LLM(server.url, "m", cache_path=tmp_path / "cache.sqlite")
    assert again.chat(MESSAGES, seed=1) == first and again.usage["cache_hits"] == 1
    assert LLM(server.url, "other", cache_path=tmp_path / "cache.sqlite").chat(MESSAGES, seed=1) != first
    llm.close()
    again.close()


def test_failures_are_never_cached(server, tmp_path):
    llm = LLM(server.url, "m", cache_path=tmp_path / "cache.sqlite", attempts=1)
    server.script = [500]
    with pytest.raises(LLMError):
        llm.chat(MESSAGES)
    assert llm.chat(MESSAGES) == "echo 2"
    llm.close()


def write_many(path, worker):
    cache = Cache(path)
    for i in range(60):
        cache.put({"i": i}, {"worker": worker})
        assert cache.get({"i": i})["worker"] in range(4)
    cache.close()


def test_cache_is_shared_by_processes_and_threads(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_many, args=(tmp_path / "c.sqlite", n)) for n in range(2)]
    for worker in workers:
        worker.start()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: write_many(tmp_path / "c.sqlite", n), (2, 3)))
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


def test_at_most_so_many_requests_at_a_time(server):
    server.pause = 0.05
    llm = LLM(server.url, "m", concurrency=3)
    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(lambda i: llm.chat([{"role": "user", "content": str(i)}]), range(12)))
    assert len(texts) == 12 and 2 <= server.most <= 3 and llm.usage["prompt_tokens"] == 120
    llm.close()


def test_key_comes_from_the_environment_and_appears_nowhere_else(server, tmp_path, monkeypatch, capfd):
    key = "sk-" + "very-secret"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("COA_API_KEY", key)
    llm = LLM(server.url, "m", cache_path=tmp_path / "c.sqlite", attempts=1)
    llm.chat(MESSAGES)
    assert server.headers_seen[-1]["Authorization"] == f"Bearer {key}"
    server.script = [401]                                 # this server echoes the key
    with pytest.raises(LLMError) as error:
        llm.chat(MESSAGES, seed=9)
    assert key not in str(error.value) and "***" in str(error.value)
    llm.close()
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.iterdir())
    assert key not in "".join(capfd.readouterr()) and key not in repr(vars(llm))
    monkeypatch.delenv("COA_API_KEY")
    monkeypatch.delenv("OPENAI_API_KEY")
    LLM(server.url, "m").chat(MESSAGES)
    assert "Authorization" not in server.headers_seen[-1]


def test_no_descriptor_leaks(server, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    llm = LLM(server.url, "m", cache_path=tmp_path / "c.sqlite", attempts=2, backoff=0.01, timeout=0.3)
    server.script = ["ok", "hang", "ok", "close", "ok", 500, "ok"]
    for i in range(4):
        llm.chat(MESSAGES, seed=i)
    llm.close()
    server.finish.set()
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.05)                                  # the server's ends close a moment later
    assert len(os.listdir("/proc/self/fd")) <= before
