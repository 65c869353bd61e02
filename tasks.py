"""Tasks: questions with checkable answers, and how an answer is graded. The reward is the metric.

A task comes from a JSONL, JSON or parquet file; the kind of file is recognised from its columns, so the benchmark files of AFM, Search-R1
and their original publishers are read as they are. `grade(task, response)` reads only what the model wrote (never an observation) and gives
a score from 0 to 1: the same function is the reward of reinforcement learning (paper section 3.3.2) and the metric of the evaluation.

    grader   tasks                    right when
    em       look-up questions        every `|` part equals one of the golds after SQuAD normalisation (AFM reports the first part only)
    math     agent "math"             exact text, else equal numbers, else Math-Verify in a killable worker process
    code     tasks that carry tests   the program in the answer passes all tests in the sandbox
    judge    any, given an LLM        a language model finds prediction and gold equivalent (AFM's JSON verdict)

Departures from SQuAD's rule, each against a false verdict: text is compared in Unicode NFC; two numbers are compared as numbers (SQuAD drops
the point, so 1.5 would equal 15); a gold that normalises to nothing ("A", "the", "`") is compared as it stands. An empty answer is never right.

Left out: checkers for problems with several valid outputs, interactive problems, proofs.
"""
import json
import os
import queue
import re
import selectors
import string
import subprocess
import sys
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from coa_format import PROFILES, find_answer
from model import InputError


@dataclass
class Task:
    """One question. `answer`: gold text, or several texts of which any one is right. `hops`: 0 when unknown. `prompt`: the row's own
    prompt (AFM rows), which already holds the question. `tests`: {"scope": "public"|"all", "cases": [...]} for code. `meta`: all else."""
    id: str
    question: str
    answer: str | list
    data_source: str
    agent: str
    hops: int = 0
    prompt: str | None = None
    tests: dict | None = None
    meta: dict = field(default_factory=dict)


@dataclass
class Grade:
    """`score` from 0 to 1 (the reward); `detail`: grader, answer, and what else was measured (em, f1, cover_em, passed, error ...)."""
    score: float
    detail: dict


# ---------------------------------------------------------------------------------------------------------------------------------
# Look-up questions: exact match, F1, cover

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")


def normalise(text):
    """SQuAD's answer normalisation (Rajpurkar et al. 2016): lower case, no ASCII punctuation, no articles, single spaces."""
    text = unicodedata.normalize("NFC", text).lower().translate(PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", text).split())


def as_number(text):
    """The exact value of a plain decimal ("1,000", "-2.50", ".5") as a Fraction, None for anything else."""
    text = text.strip()
    if len(text) > 40 or not any(c.isdigit() for c in text) or not NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", ""))


def exact_match(prediction, golds):
    """True when `prediction` equals one of `golds` (list of str) under the rules in the opening docstring."""
    predicted, number = normalise(prediction), as_number(prediction)
    for gold in golds:
        wanted = normalise(gold)
        if not wanted:
            if prediction.strip().lower() == gold.strip().lower() != "":
                return True
        elif predicted == wanted:
            value = as_number(gold)
            if number is None or value is None or number == value:
                return True
    return False


def f1_score(prediction, golds):
    """Best token F1 against any gold, on normalised words; 0 to 1."""
    words, best = Counter(normalise(prediction).split()), 0.0
    for gold in golds:
        wanted = Counter(normalise(gold).split())
        common = (words & wanted).total()
        if common:
            best = max(best, 2 * common / (words.total() + wanted.total()))
    return best


def cover_match(prediction, golds):
    """True when some gold stands, as whole words, inside the prediction."""
    text = f" {normalise(prediction)} "
    return any(normalise(gold) and f" {normalise(gold)} " in text for gold in golds)


def split_parts(answer):
    """The non-empty `|` parts of an answer, stripped."""
    return [part.strip() for part in answer.split("|") if part.strip()]


def grade_match(answer, golds, parts):
    """em score and detail of an answer. parts: "all" (the reward: every part is right) or "first" (AFM's metric)."""
    pieces = split_parts(answer)
    hits = [exact_match(piece, golds) for piece in pieces]
    em = {"all": bool(hits) and all(hits), "first": bool(hits) and hits[0]}
    if not em["all"] and exact_match(answer, golds):                    # a gold that itself holds a bar
        em = {"all": True, "first": True}
    joined = " ".join(pieces)
    return float(em[parts]), {"em": em["all"], "em_first": em["first"], "f1": f1_score(joined, golds), "cover_em": cover_match(joined, golds)}


# ---------------------------------------------------------------------------------------------------------------------------------
# Mathematics: text and numbers in microseconds, the rest by Math-Verify in processes that can be killed

MATH_WORKER = r"""
import json, logging, resource, sys
logging.disable(logging.CRITICAL)
limit = 2 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from math_verify import parse, verify
for line in sys.stdin:
    gold, answer, seconds = json.loads(line)
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, resource.RLIM_INFINITY))
    try:
        golds, answers = (parse("\\boxed{%s}" % text, parsing_timeout=None) for text in (gold, answer))
        reply = {"equal": bool(golds and answers and verify(golds, answers, timeout_seconds=None)), "parsed": bool(golds and answers)}
    except (Exception, RecursionError, MemoryError) as error:
        reply = {"equal": False, "parsed": False, "error": type(error).__name__}
    print(json.dumps(reply), flush=True)
"""
MATH_WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
idle_workers = queue.LifoQueue()                                        # of Popen or None (not started yet)
for _ in range(MATH_WORKERS):
    idle_workers.put(None)


def start_math_worker():
    environment = {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-I", "-c", MATH_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, env=environment, text=True, bufsize=1)


def math_verify_equal(gold, answer, seconds=5.0):
    """Math-Verify's verdict in a worker process: {"equal", "parsed", "error" when it failed}. Never longer than about `seconds`."""
    worker = idle_workers.get()
    if worker is None or worker.poll() is not None:
        worker = start_math_worker()
        seconds += 20                                                   # the first answer waits for sympy's import
    reply = None
    try:
        worker.stdin.write(json.dumps([gold, answer, seconds]) + "\n")
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            ready = selector.select(seconds)
        line = worker.stdout.readline() if ready else ""
        reply = json.loads(line) if line else {"equal": False, "parsed": False, "error": "died" if ready else "timeout"}
    except BrokenPipeError:
        reply = {"equal": False, "parsed": False, "error": "died"}
    finally:
        if reply is None or reply.get("error") in ("died", "timeout"):
            worker.kill()
            worker.communicate()
            worker = None
        idle_workers.put(worker)
    return reply


def boxed(text):
    """The content of the last balanced \\boxed{...} or \\fbox{...} of `text`, None when there is none."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))):
        depth = 1
        for i in range(match.end(), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[match.end():i]
    return None


LATEX_NOISE = re.compile(r"\\[!,;: ]|\\left(?![a-z])|\\right(?![a-z])|\\(displaystyle|quad|qquad)(?![a-z])|[$]")
LATEX_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")


def tidy_math(text):
    """A math answer without box, dollar signs, spacing commands, text wrappers and a final full stop."""
    inner = boxed(text)
    text = (text if inner is None else inner).replace("\\$", "").replace("\\%", "%").replace("−", "-")
    text = LATEX_TEXT.sub(r"\1", LATEX_NOISE.sub("", text)).replace("{,}", ",")
    return " ".join(text.split()).rstrip(".")


def math_equal(gold, answer):
    """(equal, how): how is "text", "number", or "math-verify", with ": what went wrong" when it failed. Strings in, as written."""
    wanted, given = tidy_math(gold), tidy_math(answer)
    if not given or len(given) > 2000:
        return False, "text"
    if given.replace(" ", "").lower() == wanted.replace(" ", "").lower():
        return True, "text"
    number, value = as_number(given), as_number(wanted)
    if number is not None and value is not None:
        return number == value, "number"
    if wanted.replace(" ", "").isalpha() and len(wanted) > 1:           # "east", "Evelyn": a word, not a product of letters
        return normalise(given) == normalise(wanted), "text"
    reply = math_verify_equal(wanted, given)
    return reply["equal"], "math-verify" + (f": {reply['error']}" if "error" in reply else "")


# ---------------------------------------------------------------------------------------------------------------------------------
# The grade of a response

MATH_SOURCES = {"math", "math500", "aime24", "aime25", "amc23", "olympiadbench", "math_dapo", "gsm8k", "skywork_math"}
AGENT_OF = {**dict.fromkeys(("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"), "mhqa"),
            **dict.fromkeys(("gaia", "webwalker", "browsecomp", "hle"), "web"), **dict.fromkeys(MATH_SOURCES, "math")}


def grader_of(task):
    """"code" for tasks with tests, "math" for mathematics, else "em"; a row's own "grader" column wins."""
    if "grader" in task.meta:
        return task.meta["grader"]
    if task.tests:
        return "code"
    return "math" if task.agent == "math" or task.data_source.lower() in MATH_SOURCES else "em"


def grade(task, response, parts="all"):
    """Grade of a response (the model's text with observations, without the prompt). Only the model's own last answer counts."""
    golds = [task.answer] if isinstance(task.answer, str) else task.answer
    answer = find_answer(response) or ""
    grader = grader_of(task)
    if not answer:
        return Grade(0.0, {"grader": grader, "answer": ""})
    if grader == "math":
        verdicts = [math_equal(gold, answer) for gold in golds]
        equal, how = next((v for v in verdicts if v[0]), verdicts[0])
        return Grade(float(equal), {"grader": grader, "answer": answer, "how": how})
    score, detail = grade_match(answer, golds, parts)
    return Grade(score, {"grader": grader, "answer": answer, **detail})


# ---------------------------------------------------------------------------------------------------------------------------------
# Reading task files

FIELDS = ("id", "question", "answer", "data_source", "agent", "hops", "prompt", "tests")


def read_rows(path):
    """(place, row) of every row of a .jsonl, .json (a list) or .parquet file; place is "file:line" or "file:row" for messages."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such task file")
    if path.suffix == ".parquet":
        import pyarrow.parquet
        rows = pyarrow.parquet.read_table(path).to_pylist()
        return [(f"{path}:{i}", row) for i, row in enumerate(rows, 1)]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
        if not isinstance(rows, list):
            raise InputError(f"{path}: expected a JSON list of rows")
        return [(f"{path}:{i}", row) for i, row in enumerate(rows, 1)]
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((f"{path}:{number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise InputError(f"{path}:{number}: not JSON: {error.msg}") from None
    return rows


def read_gold(place, name, value):
    """A gold answer: text, number, or a list of these, as str or list of str. InputError otherwise."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in value):
        return [str(v) for v in value]
    raise InputError(f"{place}: field '{name}': expected a text or a list of texts")


def load_tasks(path, agent=None):
    """Tasks of a file, in order. agent: profile for rows that name none (by default that of the row's data source, else "mhqa").

    Raises InputError naming file, line and field. Ids must be unique; a row without one gets "<file stem>-<position>".
    """
    tasks, seen = [], {}
    for i, (place, row) in enumerate(read_rows(path)):
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected an object with columns")
        question, source = row.get("question"), row.get("data_source") or Path(path).stem
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"{place}: field 'question': expected a text")
        profile = row.get("agent") or agent or AGENT_OF.get(source, "mhqa")
        if profile not in PROFILES:
            raise InputError(f"{place}: field 'agent': expected one of {', '.join(PROFILES)}, got {profile!r}")
        task = Task(str(row.get("id", f"{Path(path).stem}-{i}")), question, read_gold(place, "answer", row.get("answer")), source, profile,
                    row.get("hops", 0), row.get("prompt"), row.get("tests"), {k: v for k, v in row.items() if k not in FIELDS})
        if task.id in seen:
            raise InputError(f"{place}: field 'id': {task.id!r} stands already at {seen[task.id]}")
        seen[task.id] = place
        tasks.append(task)
    if not tasks:
        raise InputError(f"{path}: no tasks in this file")
    return tasks
