"""Rollouts: many chain-of-agents episodes at once over one KV cache, ids in, ids out.

An episode is one growing list of token ids. The model samples until it closes a tool call; the tool's result is appended as an
observation and the model goes on (arXiv 2508.13167, eq. 4: one model plays every agent, the environment only writes o_t). Beside each id
stand who wrote it (`source`: prompt, sampled, environment) and the log-probability it was sampled with: training reads no text again.

The cache has `slots` rows. Each is live (decoding), parked (waiting for a tool) or free (the heart of the file):

* Decode: ONE forward over the live rows, one new token each, and one host sync to see what was sampled.
* Park: a row that closed a call is live no more. Its KV stays where it is; the tool runs while the others decode.
* Join: rows whose result has come, and new requests, get what the cache lacks by right-padded prefill, several rows at once, and are live.
  A new prompt first copies the longest prefix that any row holds: what a group or all tasks have in common is computed once.
* Leave: a finished row is given up at once, and the next request takes it.

Rows that lie side by side attend in one call. So live rows swap to the front of the cache: on a GPU at once, elsewhere when others join and
may take the place of those that parked or left. Until then a gap costs one call more in every layer.

Every row keeps one id that the cache has not seen, its newest; the next decode step feeds it. So prefill never samples, and no token is
computed twice.

Noise is one uniform number a token, a pure function of (seed, step, task id, sample, position). With `deterministic` (default on CPU)
scheduling too is a function of the seed: a parked row rejoins `delay` decode steps after its call, or at the next step at which rows
join, the sampler waiting if the tool is later. Otherwise it rejoins when its tool is done. (Log-probs differ by rounding, about 1e-7,
between batches of different shape; a run that repeats has the same batches.)

Left out on purpose: CUDA graphs (`decode` is the place to capture: on a GPU its shapes are the number of live rows and the longest row's bucket),
paged KV (rows of equal size: memory is known before the run starts), tensor parallelism, speculative decoding.

    sampler = Sampler(model, tokenizer, make_toolbox(args), slots=64)
    episodes = sampler.rollout([Request(ids, "mhqa", task_id, sample) for sample in range(8)])

On two CPU cores the 1M-parameter demo model samples some thousand tokens a second; bench/bench_sampler.py compares with transformers.
"""
import codecs
import functools
import hashlib
import json
import math
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch

from coa_format import ENVIRONMENT, PROFILES, PROMPT, SAMPLED, TOOLS, encode_text, eos_id, find_answer, find_calls, observation, parse
from hf import InputError
from model import KVCache

JOIN_EVERY = 4  # while others decode, rows join only every so many steps: several are prefilled in one batch
END_REASONS = ("answered", "eos", "turn_cap", "token_cap", "deadline", "violation")


@dataclass
class Limits:
    """Caps of one episode: generations, ids sampled in each, ids in all with the prompt (None: the sampler's max_len), seconds from its start."""
    turns: int = 8
    new_tokens: int = 512
    total_tokens: int | None = None
    seconds: float = 3600.0


@dataclass
class Request:
    """One episode to sample. (task_id, sample) keys its noise; requests with equal prompt_ids share the prompt's KV."""
    prompt_ids: list[int]
    profile: str
    task_id: str
    sample: int = 0
    limits: Limits = field(default_factory=Limits)
    question: str = ""


@dataclass
class Episode:
    """ids = prompt + response, with source (PROMPT, SAMPLED, ENVIRONMENT) and logprobs (0.0 where not sampled) parallel to it.
    text: the response alone, a final EOS left out, invalid bytes as U+FFFD. turns: generations. tool_calls: calls executed. violations:
    malformed and unknown calls, stray closing tags, forged observations. overshoots: closing tokens that held more text than the tag.
    pending: the observation of the last call where it no longer fitted (it ended the episode and is not in ids)."""
    ids: list[int]
    source: list[int]
    logprobs: list[float]
    end_reason: str
    text: str
    prompt_len: int
    task_id: str
    sample: int
    turns: int
    tool_calls: int
    violations: int
    overshoots: int
    wall_seconds: float
    pending: str = ""


@dataclass
class Running:
    """What the host knows about an episode that holds a row, beside the arrays."""
    index: int  # its place among the requests
    request: Request
    session: object  # None: plain generation
    started: float
    total: int  # cap on its ids
    turn: int = 1
    turn_start: int = 0  # position of the turn's first id
    future: Future | None = None  # the call it waits for
    call_step: int = 0
    tool_calls: int = 0
    violations: int = 0
    overshoots: int = 0
    pending: str = ""  # the observation that is being written


def sample(logits, uniforms, temperature=1.0, top_p=1.0, top_k=0):
    """logits (n, V) fp32, uniforms (n,) fp64 in [0, 1) -> tokens (n,) int64 and logprobs (n,) fp32 under the distribution sampled from:
    softmax(logits / temperature), cut to the top_k likeliest, then to the smallest set of mass top_p, renormalised.
    temperature 0 is greedy; its logprobs are those of temperature 1."""
    if temperature == 0:
        logprobs, tokens = logits.log_softmax(-1).max(-1)
        return tokens, logprobs
    logits = logits / temperature  # (n, V)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the mass before this token is enough; never true of the first
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), float("-inf"))
    logprobs = logits.log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)  # fp64: in fp32 the tail of a large vocabulary would be lost
    tokens = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def noise(seed, step, task_id, sample, count):
    """(count,) fp64 uniforms in [0, 1), one for each position of an episode: Philox keyed by these four, so by neither rank nor row."""
    key = hashlib.sha256(json.dumps([seed, step, task_id, sample]).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little"))).random(count)


def token_bytes(tokenizer, vocab_size):
    """list[bytes], one for each id of the model's vocabulary: what the token adds to the text; b"" for ids that the tokenizer lacks.
    Byte-level BPE (GPT-2, Qwen, Llama 3, SmolLM) and SentencePiece-like with byte fallback (Llama 2); InputError for other kinds."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"type": None}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if not steps.keys() & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise InputError(f"tokenizer: decoder {sorted(map(str, steps))}: expected byte-level BPE or SentencePiece with byte fallback")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's alphabet: these bytes stand for themselves,
    others = [b for b in range(256) if b not in printable]             # the others for the characters from U+0100 on
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    table = [b""] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        if i >= vocab_size:
            continue
        if i in added:
            table[i] = added[i].encode()
        elif "ByteLevel" in steps:
            table[i] = bytes(byte_of[c] for c in token)
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table[i] = bytes([int(token[3:5], 16)])
        else:
            table[i] = token.replace("\u2581", " ").encode()
    return table


def may_complete(table, stops):
    """(V,) bool: could this token be the last of one of the stop strings? It holds the string, or begins with an end of it."""
    return np.array([any(stop[-1] in token and (stop in token or any(token.startswith(stop[-k:]) for k in range(1, len(stop))))
                         for stop in stops) for token in table], bool)


def completed(text, newest, stops):
    """The stop string that ends first within the last `newest` bytes of text, and where it ends; (b"", len(text)) if none does."""
    ends = [(at + len(stop), stop) for stop in stops if (at := text.find(stop, max(0, len(text) - newest - len(stop) + 1))) >= 0]
    end, stop = min(ends, default=(len(text), b""))
    return stop, end


@functools.cache
def measured_peaks(device, dtype):
    """(FLOP/s of a large matmul, bytes/s of a large copy) on this device, measured once, in about a quarter of a second."""
    def best(work, operation):
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            operation()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        return work / min(seconds)
    n, size = (1024, 1 << 24) if device.type == "cpu" else (8192, 1 << 28)
    square, line = (torch.ones(shape, dtype=dtype, device=device) for shape in ((n, n), size))
    return best(2 * n ** 3, lambda: square @ square), best(2 * line.nbytes, line.clone)


def common_prefix(rows, ids):
    """rows (n, T), ids (>= T,) -> (n,) how many leading ids each row has in common with ids."""
    same = rows == ids[:rows.shape[1]]
    return np.where(same.all(1), same.shape[1], same.argmin(1)) if same.size else np.zeros(len(rows), np.int64)


class Sampler:
    """Rollouts and plain generation with one model. Weights may be changed in place between calls; the cache lives only during a call.

    slots: rows of the cache = episodes at once. max_len: ids of one row (prompt included). So the cache takes
    slots * max_len * 2 * layers * kv_heads * head_dim * bytes of the weights' dtype.
    deterministic: None = on CPU. delay: decode steps between a call and its row's return. force_answer: the last allowed turn starts with
    `<answer>`. prefill_tokens: ids of one prefill forward, padding included.
    After a call `stats` says what happened: tokens, steps, seconds, end reasons."""

    def __init__(self, model, tokenizer, toolbox=None, slots=64, max_len=2048, seed=0, deterministic=None, delay=4, force_answer=False,
                 prefill_tokens=None):
        weight = next(model.parameters())
        self.model, self.tokenizer, self.toolbox = model, tokenizer, toolbox
        self.slots, self.max_len, self.seed, self.delay, self.force_answer = slots, max_len, seed, delay, force_answer
        self.device, self.dtype = weight.device, weight.dtype
        self.deterministic = self.device.type == "cpu" if deterministic is None else deterministic
        self.prefill_tokens = prefill_tokens or (2048 if self.device.type == "cpu" else 16384)
        embeddings = model.config.vocab_size * model.config.hidden_size * (1 if model.config.tie_word_embeddings else 2)
        self.body = sum(p.numel() for p in model.parameters()) - embeddings  # weights that every token meets
        self.table = token_bytes(tokenizer, model.config.vocab_size)
        self.specials = list(tokenizer.all_special_tokens)
        ends = model.generation_config.get("eos_token_id") or []
        self.eos = {eos_id(tokenizer), *(ends if isinstance(ends, list) else [ends])}
        tags = dict.fromkeys([*TOOLS, *(toolbox.tools if toolbox else ())])
        self.stops = [f"</{tag}>".encode() for tag in tags] + [b"</answer>", b"<observation>"]
        self.stats = {}

    # -----------------------------------------------------------------------------
    # the two ways in

    def rollout(self, requests, temperature=1.0, top_p=1.0, top_k=0, step=0, training=False, on_text=None, progress=False):
        """list[Request] -> list[Episode] in the same order. step: the training step, part of the noise's key. training=True refuses what
        the trainer could not reproduce (top_p, top_k, greedy). on_text(request, text, source) hears text as it is written. progress: one
        line on stderr. InputError for a bad request; a tool's failure is an observation, not an error."""
        if training and (top_p < 1 or top_k > 0 or temperature <= 0):
            raise InputError("training rollouts sample from softmax(logits / temperature): expected top_p 1, top_k 0, temperature > 0")
        for request in requests:
            if request.profile not in PROFILES:
                raise InputError(f"request {request.task_id}: profile {request.profile!r}: expected one of {', '.join(PROFILES)}")
        return self._run(requests, self.stops, (temperature, top_p, top_k), step, on_text, progress)

    def generate(self, prompts_ids, max_new_tokens=256, temperature=0.0, top_p=1.0, top_k=0, stops=(), step=0, progress=False):
        """Plain text without tools: list of prompts' ids -> list[Episode]. Ends at EOS ("eos"), at a stop string, kept in the text
        ("answered"), or after max_new_tokens ids (an int, or a list of one a prompt: "token_cap")."""
        caps = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts_ids)
        requests = [Request(ids, "", str(i), 0, Limits(turns=1, new_tokens=cap)) for i, (ids, cap) in enumerate(zip(prompts_ids, caps))]
        return self._run(requests, [stop.encode() for stop in stops], (temperature, top_p, top_k), step, None, progress)

    @torch.inference_mode()
    def _run(self, requests, stops, sampling, step, on_text, progress):
        self._start(requests, stops, sampling, step, on_text)
        while self.waiting or self.used:
            for lane in np.flatnonzero(self.deadline < time.monotonic()):
                self._finish(lane, "deadline")
            join = not self.live or self.step % JOIN_EVERY == 0
            if join:
                self._prefill([lane for lane in self._due() if self._observe(lane)])
                self._prefill_new(self._admit())
            if join or self.device.type != "cpu" or not (self.parked or self.waiting):  # the last: nobody comes who could fill a gap
                self._close_gaps()
            if self.live:
                self._decode_live()
            if progress:
                self._report()
        self._report(last=True, show=progress)
        self.cache = None  # its memory belongs to the trainer now
        return self.episodes

    def _start(self, requests, stops, sampling, step, on_text):
        """A fresh cache and empty tables for these requests."""
        bound = 1  # the longest that any of them can become
        for request in requests:
            limits = request.limits
            if not request.prompt_ids:
                raise InputError(f"request {request.task_id}: the prompt is empty")
            if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= len(self.table):
                raise InputError(f"request {request.task_id}: prompt ids from {min(request.prompt_ids)} to {max(request.prompt_ids)}: expected 0 to {len(self.table) - 1}")
            if min(limits.turns, limits.new_tokens, 1 if limits.total_tokens is None else limits.total_tokens) < 1 or math.isnan(limits.seconds):
                raise InputError(f"request {request.task_id}: {limits}: expected counts from 1 on, and seconds")
            total = min(limits.total_tokens or self.max_len, self.max_len)
            bound = max(bound, total if request.profile else min(total, len(request.prompt_ids) + limits.new_tokens))
        self.rows = max(1, min(self.slots, len(requests)))
        self.cache = KVCache(self.model.config, self.rows, bound, self.dtype, self.device)
        self.run_stops, self.sampling, self.step_key, self.on_text = stops, sampling, step, on_text
        self.ending = may_complete(self.table, stops)
        self.ending[list(self.eos)] = True
        # An episode's numbers stay in one lane of these arrays; only the row of the cache that it holds moves.
        self.ids = np.zeros((self.rows, bound), np.int64)
        self.source = np.zeros((self.rows, bound), np.int8)
        self.logprobs = np.zeros((self.rows, bound), np.float32)
        self.uniforms = np.zeros((self.rows, bound))
        self.pos = np.zeros(self.rows, np.int64)     # ids written
        self.held = np.zeros(self.rows, np.int64)    # ids whose keys and values the row holds: pos - 1 where live
        self.stop_at = np.zeros(self.rows, np.int64)  # position at which a turn or the episode runs out
        self.deadline = np.full(self.rows, np.inf)
        self.row_of = list(range(self.rows))  # lane -> row
        self.running = [None] * self.rows    # by lane; None: free
        self.live = []  # lanes, when decoding in the order of their rows
        self.parked = deque()  # lanes in the order of their calls
        self.used, self.step = 0, 0  # lanes that are not free; decode steps
        self.waiting = deque(enumerate(requests))
        self.episodes = [None] * len(requests)
        self.decoders = {}
        self.began = self.reported = time.monotonic()
        self.stats = {"sampled_tokens": 0, "decode_steps": 0, "prefill_tokens": 0, "prefills": 0, "padded_tokens": 0, "shared_tokens": 0,
                      "tool_calls": 0, "tool_wait_seconds": 0.0, "flop": 0, "bytes_read": 0, "cache_bytes": self.cache.bytes,
                      "ends": Counter()}

    # -----------------------------------------------------------------------------
    # one decode step

    def decode(self, last, uniforms, rows):
        """One new token for each of these rows of the cache. last (live, 1) int64, uniforms (live,) fp64, both on the device
        -> (2, live) fp64: tokens and logprobs. Nothing in it waits for the device, as long as the rows are neighbours."""
        hidden = self.model(last, cache=self.cache.select(rows))  # (live, 1, D)
        tokens, logprobs = sample(self.model.logits(hidden[:, -1]), uniforms, *self.sampling)
        return torch.stack((tokens.double(), logprobs.double()))

    def _decode_live(self):
        lanes = np.array(self.live)
        pos = self.pos[lanes]
        last = torch.from_numpy(self.ids[lanes, pos - 1])[:, None].to(self.device)
        out = self.decode(last, torch.from_numpy(self.uniforms[lanes, pos]).to(self.device), [self.row_of[lane] for lane in lanes])
        tokens, logprobs = out.cpu().numpy()  # the one host sync of the step
        tokens = tokens.astype(np.int64)
        self.ids[lanes, pos], self.source[lanes, pos], self.logprobs[lanes, pos] = tokens, SAMPLED, logprobs
        self._count(lanes, np.ones(len(lanes), np.int64), sampled=True)
        self.pos[lanes] = pos + 1
        self.held[lanes] = pos
        self.step += 1
        if self.on_text:
            for lane, token in zip(lanes, tokens):
                self._stream(lane, self.table[token], SAMPLED)
        for lane in lanes[self.ending[tokens] | (pos + 1 >= self.stop_at[lanes])].tolist():
            self._react(lane)

    def _react(self, lane):
        """The newest id of this row may end its turn: a stop string, EOS, or a cap."""
        run, newest = self.running[lane], int(self.ids[lane, self.pos[lane] - 1])
        said = self._bytes(self.ids[lane, run.turn_start:self.pos[lane]])
        stop, end = completed(said, len(self.table[newest]), self.run_stops)
        turn = said[:end].decode("utf-8", errors="replace")
        call, answered = None, False
        if stop and run.session:  # the language decides what the tag means where it stands
            block = parse(turn)[-1]
            call = next((call for call in find_calls(turn)[-1:] if call.end == len(turn)), None)
            answered = stop == b"</answer>" and find_answer(turn) is not None
            if block.problem == "unclosed" and block.tag in ("code", "answer"):
                stop = b""  # as in print("</code>"): text of a program
        run.overshoots += bool(stop and said[end:].strip())
        if newest in self.eos:
            self._finish(lane, "eos")
        elif stop and (answered or not run.session):
            self._finish(lane, "answered")
        elif stop in (b"<observation>", b"</answer>"):  # only the environment observes; an answer that was never opened
            run.violations += 1
            self._finish(lane, "violation")
        elif stop:
            self._call(lane, stop[2:-1].decode(), call, turn)
        elif self.pos[lane] >= self.stop_at[lane]:
            self._finish(lane, "token_cap")

    def _bytes(self, ids):
        return b"".join(map(self.table.__getitem__, ids))

    def _stream(self, lane, text, source):
        decoder = self.decoders.setdefault(self.running[lane].index, codecs.getincrementaldecoder("utf-8")("replace"))
        self.on_text(self.running[lane].request, decoder.decode(text), source)

    # -----------------------------------------------------------------------------
    # calls and observations

    def _call(self, lane, tag, call, turn):
        """The turn's text ends with </tag>: park the row and let the tool run, or say what is wrong with the call."""
        run = self.running[lane]
        if run.turn >= run.request.limits.turns:
            return self._finish(lane, "turn_cap")
        offered = PROFILES[run.request.profile].tools
        run.future, run.call_step = Future(), self.step
        if call is None:
            run.violations += 1
            run.future.set_result(f"Malformed call: </{tag}> closes nothing. A call is <{tag}>argument</{tag}>.")
        elif tag not in offered:
            run.violations += 1
            run.future.set_result(f"Unknown tool {tag}. The tools are: {', '.join(offered)}.")
        else:
            run.violations += not call.argument  # the tool box says so to the model
            thoughts = [segment.text.strip() for segment in parse(turn) if segment.tag == "think"]
            run.future = run.session.submit(tag, call.argument, thoughts[-1] if thoughts else "")
            run.tool_calls += 1
            self.stats["tool_calls"] += 1
        self.live.remove(lane)
        self.parked.append(lane)

    def _observe(self, lane):
        """Append the result of the row's call to its ids and begin a turn. False if it does not fit, which ends the episode."""
        run = self.running[lane]
        block = observation(run.future.result(), self.specials)
        if self.table[self.ids[lane, self.pos[lane] - 1]].endswith(b"\n"):
            block = block.removeprefix("\n")
        run.future, run.pending = None, block
        if not self._write(lane, encode_text(block, self.tokenizer), ENVIRONMENT):
            return False
        run.pending, run.turn = "", run.turn + 1
        return self._begin_turn(lane)

    def _begin_turn(self, lane):
        """The next ids are the model's; with force_answer its last allowed turn can only be an answer. False if there is no room."""
        run = self.running[lane]
        run.turn_start = int(self.pos[lane])
        if self.force_answer and run.session and run.turn >= run.request.limits.turns:
            if not self._write(lane, encode_text("<answer>", self.tokenizer), ENVIRONMENT):
                return False
        self.stop_at[lane] = min(self.pos[lane] + run.request.limits.new_tokens, run.total)
        return True

    def _write(self, lane, ids, source):
        """Append ids that were not sampled. False, and the episode ends, if they leave no room for another."""
        pos, end = self.pos[lane], self.pos[lane] + len(ids)
        if end >= self.running[lane].total:
            self._finish(lane, "token_cap")
            return False
        self.ids[lane, pos:end], self.source[lane, pos:end], self.logprobs[lane, pos:end] = ids, source, 0
        self.pos[lane] = end
        if self.on_text and source == ENVIRONMENT:
            self._stream(lane, self._bytes(ids), source)
        return True

    # -----------------------------------------------------------------------------
    # who gets a row, and when

    def _due(self):
        """Parked lanes that return now, in the order of their calls."""
        idle = not self.live and not (self.waiting and self.used < self.rows)
        due, began = [], time.monotonic()
        if self.deterministic:
            if idle and self.parked:  # nothing to decode meanwhile: the step counter jumps
                self.step = max(self.step, self.running[self.parked[0]].call_step + self.delay)
            while self.parked and self.step >= self.running[self.parked[0]].call_step + self.delay:
                lane = self.parked[0]
                wait([self.running[lane].future], timeout=self._seconds_until(self.deadline[lane]))
                if self.running[lane].future.done():
                    due.append(self.parked.popleft())
                else:
                    self._finish(lane, "deadline")
        else:
            if idle and self.parked:
                futures = [self.running[lane].future for lane in self.parked]
                wait(futures, timeout=self._seconds_until(self.deadline.min()), return_when=FIRST_COMPLETED)
            due = [lane for lane in self.parked if self.running[lane].future.done()]
            self.parked = deque(lane for lane in self.parked if lane not in due)
        self.stats["tool_wait_seconds"] += time.monotonic() - began
        return due

    def _seconds_until(self, deadline):
        return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)

    def _admit(self):
        """Give free rows to waiting requests; what the row's last tenant left of the same prompt stays. -> new lanes"""
        new = []
        while self.waiting and self.used < self.rows:
            index, request = self.waiting.popleft()
            lane, prompt, limits = self.running.index(None), np.asarray(request.prompt_ids, np.int64), request.limits
            self.held[lane] = common_prefix(self.ids[[lane], :min(self.held[lane], len(prompt) - 1)], prompt)[0]
            self.cache.set_length(self.row_of[lane], int(self.held[lane]))
            session, now = self.toolbox.session(request.question) if request.profile else None, time.monotonic()
            self.running[lane] = Running(index, request, session, now, min(limits.total_tokens or self.max_len, self.max_len))
            self.pos[lane], self.deadline[lane] = 0, now + limits.seconds
            self.used += 1
            if self._write(lane, prompt, PROMPT) and self._begin_turn(lane):
                new.append(lane)
                if self.sampling[0] > 0:
                    self.uniforms[lane] = noise(self.seed, self.step_key, request.task_id, request.sample, self.uniforms.shape[1])
        return new

    def _prefill_new(self, new):
        """Prefill new rows in waves: one that would repeat most of what another new row computes waits, and copies it then."""
        while new:
            wave, later = [], []
            for lane in new:
                ids = self.ids[lane, :self.pos[lane] - 1]
                common = common_prefix(self.ids[:, :len(ids)], ids)     # (lanes,)
                have, coming = np.minimum(common, self.held), np.minimum(common, self.pos - 1)[wave].max(initial=0)
                donor = have.argmax()
                if coming - have[donor] > (len(ids) - have[donor]) // 2:
                    later.append(lane)
                    continue
                if have[donor] > self.held[lane]:
                    self.cache.copy_row(self.row_of[donor], self.row_of[lane], int(have[donor]))
                    self.held[lane] = have[donor]
                self.stats["shared_tokens"] += int(self.held[lane])
                wave.append(lane)
            self._prefill(wave)
            new = later

    def _prefill(self, lanes):
        """Bring what these rows hold up to all but their newest id, in right-padded batches of like length, and make them live."""
        need = self.pos - 1 - self.held  # by lane
        order = sorted((lane for lane in lanes if need[lane]), key=need.__getitem__)
        i = 0
        while i < len(order):
            j = i + 1
            while j < len(order) and (j + 1 - i) * need[order[j]] <= min(self.prefill_tokens, 1.1 * need[order[i:j + 1]].sum() + 64):
                j += 1
            batch = sorted(order[i:j], key=self.row_of.__getitem__)
            for at in range(0, need[batch].max(), self.prefill_tokens):  # more than one piece only where one row alone is longer than that
                self._forward(batch, np.minimum(need[batch] - at, self.prefill_tokens))
            i = j
        self.live += lanes

    def _close_gaps(self):
        """Move the live rows to the front of the cache: those beyond swap places with the parked and free ones there."""
        n, live = len(self.live), set(self.live)
        beyond = [lane for lane in self.live if self.row_of[lane] >= n]
        within = [lane for lane, row in enumerate(self.row_of) if row < n and lane not in live]
        for lane, other in zip(beyond, within):
            self.cache.swap_rows(self.row_of[lane], self.row_of[other])
            self.row_of[lane], self.row_of[other] = self.row_of[other], self.row_of[lane]
        self.live.sort(key=self.row_of.__getitem__)

    def _forward(self, lanes, lengths):
        """Append the next lengths[i] ids of each lane to the cache."""
        batch = np.zeros((len(lanes), lengths.max()), np.int64)  # (rows, T)
        for i, (lane, n) in enumerate(zip(lanes, lengths)):
            batch[i, :n] = self.ids[lane, self.held[lane]:self.held[lane] + n]
        cache = self.cache.select([self.row_of[lane] for lane in lanes])
        self.model(torch.from_numpy(batch).to(self.device), cache=cache, lengths=lengths.tolist())
        self._count(lanes, lengths, sampled=False)
        self.held[lanes] += lengths
        self.stats["padded_tokens"] += batch.size - int(lengths.sum())

    def _finish(self, lane, reason):
        """Record the episode and free its lane."""
        run, n = self.running[lane], int(self.pos[lane])
        request, start = run.request, len(run.request.prompt_ids)
        ids, source, logprobs = (array[lane, :n].tolist() for array in (self.ids, self.source, self.logprobs))
        if n == 0:  # a prompt that does not fit was not written
            ids, source, logprobs = list(request.prompt_ids), [PROMPT] * start, [0.0] * start
        text = self._bytes(ids[start:n - (reason == "eos")]).decode("utf-8", errors="replace")
        self.episodes[run.index] = Episode(ids, source, logprobs, reason, text, start, request.task_id, request.sample, run.turn,
                                           run.tool_calls, run.violations, run.overshoots, time.monotonic() - run.started, run.pending)
        for lanes in (self.live, self.parked):
            if lane in lanes:
                lanes.remove(lane)
        self.stats["ends"][reason] += 1
        self.used -= 1
        self.running[lane], self.deadline[lane] = None, np.inf

    # -----------------------------------------------------------------------------
    # what it cost

    def _count(self, lanes, new, sampled):
        """Account for one forward that appends new (lanes,) ids: useful FLOP, and bytes that must be read at least."""
        c, stats, seen = self.model.config, self.stats, self.held[lanes] + new
        head, heads = c.vocab_size * c.hidden_size, 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
        values_per_id = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        stats["flop"] += 2 * self.body * int(new.sum()) + 2 * head * len(lanes) * sampled + heads * float((new * (seen - new / 2)).sum())
        stats["bytes_read"] += (self.body + head + values_per_id * int(seen.sum())) * self.dtype.itemsize
        stats["decode_steps" if sampled else "prefills"] += 1
        stats["sampled_tokens" if sampled else "prefill_tokens"] += int(new.sum())

    def limit_share(self):
        """How much of the device the last call used (0 to 1): its FLOP or its bytes at the measured peak, the slower, over its seconds."""
        flops, bandwidth = measured_peaks(self.device, self.dtype)
        return max(self.stats["flop"] / flops, self.stats["bytes_read"] / bandwidth) / max(self.stats["rollout_seconds"], 1e-9)

    def _report(self, last=False, show=True):
        """Bring the rates of `stats` up to date; show: one line on stderr, twice a second on a terminal, and at the end everywhere."""
        now, stats = time.monotonic(), self.stats
        stats["rollout_seconds"] = now - self.began
        stats["tokens_per_second"] = stats["sampled_tokens"] / max(stats["rollout_seconds"], 1e-9)
        if show and (last or sys.stderr.isatty() and now > self.reported + 0.5):
            self.reported = now
            tools = sum(tool["seconds"] for tool in self.toolbox.counters().values()) if self.toolbox else 0
            print(f"\r{stats['ends'].total()}/{len(self.episodes)} episodes | {stats['tokens_per_second']:,.0f} tokens/s | "
                  f"live {len(self.live)} parked {len(self.parked)} | tools {tools:.1f} s, waited {stats['tool_wait_seconds']:.1f} s | "
                  f"{self.limit_share():.0%} of the hardware's limit | cache {stats['cache_bytes'] / 1e6:,.0f} MB",
                  end="\n" if last else "", file=sys.stderr, flush=True)
