"""Build data/tasks/{sft,rl,dev,test}.jsonl: questions about the encyclopedia and word problems, each with the graph of its solution.

    mhqa   1 to 3 hops with wiki_search, and comparisons            agent "mhqa"
    web    web_search, then a detail that only crawl_page shows     agent "web"
    math   word problems (agent "math"), and computing with looked-up numbers (agent "all")

The facts are read back out of the sentences of encyclopedia.jsonl, nothing else is needed. Pages are grouped in families (a country with its cities
and currency, a state with its cities and counties, a discoverer with his elements) and every family belongs to one split: a task is
kept only if each page title that occurs anywhere in it (question, answer, solution) is of its own split's families. Word problems share templates, but
no names, things or numbers. Of seven phrasings a template, two are shown by SFT tasks, five by RL and dev tasks, and two by the test alone.

Every search argument of a solution is tried on the live tools: it has to bring the paragraph that holds the fact. Where the natural
first query (the entity and the question's own word, "Nepal phone prefix") does not bring it, the step says so in `failing_first`.

    python data/build_tasks.py        # half a minute; the same encyclopedia gives the same bytes
"""
import argparse
import contextlib
import json
import os
import random
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import tools                                                                     # noqa: E402
from templates import BY, CHAINS, COMPARE, KEYED, LOOKED_UP, NAMES, ODD_CHAINS, ONE, RELATIONS, STORIES, THINGS, UNIT      # noqa: E402

SIZES = {"sft": 1200, "rl": 2800, "dev": 500, "test": 900}                       # a third for each suite
SHARES = [("test", 0.28), ("rl", 0.42), ("sft", 0.20), ("dev", 0.10)]            # of the families
TOP_K = {"wiki_search": 2, "web_search": 2}          # the tools' defaults: a right query finds its fact among so many, a failing one does not
SHOWN, TRAINED, HELD_OUT = 2, 5, 2                   # phrasings of a template: in SFT tasks, in all training, in the test alone


# ---------------------------------------------------------------- facts, families, splits

def read_facts(pages: list[dict]) -> dict[str, dict[str, tuple[str, int]]]:
    """title -> relation -> (value, index of its paragraph), read out of the pages' own sentences."""
    facts = {}
    for page in pages:
        own = facts[page["title"]] = {}
        for i, paragraph in enumerate(page["text"].split("\n\n")):
            for relation, (pattern, _, _) in RELATIONS.items():
                found = re.search(pattern, paragraph)
                if found and found[1] == page["title"] and relation not in own:
                    own[relation] = (found[2], i)
        if "state" in own:
            own.pop("country", None)
    return facts


def families(facts: dict) -> dict[str, str]:
    """title -> the title that names its family: the country of a city or currency, the state of a county or city, the discoverer of an element."""
    head = {}
    for title, own in facts.items():
        above = next((own[relation][0] for relation in ("state", "country", "discoverer") if relation in own), title)
        head[title] = above if above in facts else title
    return head


def assign_splits(head: dict[str, str], facts: dict, seed: int) -> dict[str, str]:
    """title -> split. Families of a kind are dealt out in random order, the next to the split that lacks most pages."""
    members = defaultdict(list)
    for title, family in head.items():
        members[family].append(title)
    kinds = defaultdict(list)
    for family, titles in members.items():
        kinds["element" if any("symbol" in facts[t] for t in titles) else "state" if "postal code" in facts[family] else "country"].append(family)
    split_of = {}
    for kind in sorted(kinds):
        rng, dealt = random.Random(f"{seed}|{kind}"), Counter()
        order = sorted(kinds[kind])
        rng.shuffle(order)
        for family in sorted(order, key=lambda f: -len(members[f])):
            split = max(SHARES, key=lambda s: s[1] * (sum(dealt.values()) + len(members[family])) - dealt[s[0]])[0]
            dealt[split] += len(members[family])
            split_of |= {title: split for title in members[family]}
    return split_of


class Titles:
    """Finds page titles in a text: whole words, the longest title first, so that "Niger" is not found in "Nigeria" nor "Guinea" in "Papua New Guinea"."""

    def __init__(self, titles):
        self.by_word = defaultdict(list)
        for title in sorted(titles, key=lambda t: (-len(t), t)):
            self.by_word[re.match(r"\w+", title)[0]].append(title)

    def find(self, text: str) -> list[str]:
        found, end = [], 0
        for word in re.finditer(r"\w+", text):
            if word.start() >= end:
                title = next((t for t in self.by_word[word[0]] if text.startswith(t, word.start())
                              and not re.match(r"\w", text[word.start() + len(t):])), None) if word[0] in self.by_word else None
                if title:
                    found.append(title)
                    end = word.start() + len(title)
        return found


def task_text(task: dict) -> str:
    """Everything a task shows or leads to, for the search for titles: question, answers, plan, and all that its steps say."""
    answers = task["answer"] if isinstance(task["answer"], list) else [task["answer"]]
    steps = [str(step.get(key) or "") for step in task["solution"]["steps"] for key in ("about", "argument", "page", "finds", "fact", "failing_first")]
    return "\n".join([task["question"], *answers, *task["solution"]["plan"], *steps])


def fold(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def answers(value: str) -> str | list[str]:
    """The accepted spellings of a value: as it stands, without accents, without the place in brackets."""
    forms = list(dict.fromkeys([value, fold(value), re.sub(r" \(.*\)$", "", value), fold(re.sub(r" \(.*\)$", "", value))]))
    return forms if len(forms) > 1 else value


# ---------------------------------------------------------------- steps, tried on the live tools

class Live:
    """The tools as the episodes will use them, with every answer kept."""

    def __init__(self, corpus: Path):
        self.pages = {page["title"]: page for page in map(json.loads, corpus.read_text("utf8").splitlines())}
        self.store, self.kept = tools.Store(corpus), {}

    def __call__(self, tool: str, argument: str) -> str:
        if (tool, argument) not in self.kept:
            made = tools.WikiSearch(self.store, TOP_K[tool]) if tool == "wiki_search" else tools.WebSearch(self.store, TOP_K[tool])
            self.kept[tool, argument] = made.run(argument, tools.Context())
        return self.kept[tool, argument]


class Unfit(Exception):
    """This draw makes no task; the next one may."""


def says(text: str, value: str) -> bool:
    """Does a text hold a value as a whole word or number?"""
    return bool(re.search(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)", text))


def search(live, facts, tool, about, relation, word, page, finds=None, own_word=None, natural=None):
    """A search step. `about` and `word` are the question's own: the natural first query joins them. If it does not bring what is needed (for
    wiki_search the paragraph with the fact, for web_search the page's URL), it is kept as `failing_first`."""
    value, paragraph = facts[page].get(relation, (finds, 0))
    value = finds or value
    text = live.pages[page]["text"].split("\n\n")[paragraph]
    needed = text if tool == "wiki_search" else live.pages[page]["url"]
    own_word = own_word or (RELATIONS[relation][1] if relation in RELATIONS else "")
    natural = natural or f"{about} {word}".strip()
    tries = list(dict.fromkeys([natural, f"{about} {word}".strip(), f"{about} {own_word}".strip(), about]))
    right = next((query for query in tries if needed in live(tool, query) and says(live(tool, query), value)), None)
    if right is None or right != natural and says(live(tool, natural), value):
        raise Unfit(f"no query finds {relation} of {about}, or the failing one finds it by chance")
    step = {"tool": tool, "about": about, "wants": relation, "argument": right, "page": page, "finds": value, "fact": f"The {relation} of {about} is {value}."}
    if right != natural:
        step["failing_first"] = natural
    return step


def chain(live, facts, start, relations, words, tool="wiki_search"):
    """Steps from page `start` along `relations`, each value being the next page; the last relation is read by wiki_search or, for the web, by crawl_page
    after a search for the page. `start` may be (noun, description, natural first query or None, page) for a page found by a number or symbol."""
    steps, page = [], start
    if isinstance(start, tuple):
        noun, about, natural, page = start
        steps = [search(live, facts, tool, about, noun, noun, page, finds=page, natural=natural) | {"fact": f"The {noun} with {about} is {page}."}]
    for i, (relation, word) in enumerate(zip(relations, words)):
        value, paragraph = facts[page].get(relation, (None, 0))
        last = i == len(relations) - 1
        if value is None or tool == "web_search" and last != (paragraph > 0):
            raise Unfit("no such fact, or not where a search result (a crawl) shows it")
        if tool == "web_search" and last:
            url = live.pages[page]["url"]
            if not isinstance(start, tuple):
                steps.append(search(live, facts, tool, page, "page", word, page, finds=url, own_word=RELATIONS[relation][1]) | {"fact": f"{page} has a page."})
            steps.append({"tool": "crawl_page", "about": page, "wants": relation, "argument": url, "page": page, "finds": value,
                          "fact": f"The {relation} of {page} is {value}."})
        else:
            steps.append(search(live, facts, tool, page, relation, word if last else RELATIONS[relation][1], page))
        if not last:
            page = value if value in facts else next((title for title in facts if fold(title) == fold(value)), None)
            if page in (None, steps[-1]["page"]):
                raise Unfit("the next page is missing or the same")
    return steps


def code_step(wants: str, source: str) -> dict:
    value = str(eval(source, {"__builtins__": {"round": round}}))                      # our own arithmetic
    return {"tool": "code", "about": "", "wants": wants, "argument": f"print({source})", "page": None, "finds": value, "fact": f"The {wants} is {value}."}


def graph(template, phrasings, plan, steps, derive=None) -> dict:
    """The `solution` of a task. `wording` says who shows its phrasings first: the SFT tasks, the RL tasks, or the test alone."""
    wording = "sft" if max(phrasings) < SHOWN else "rl" if max(phrasings) < TRAINED else "test"
    entities = list(dict.fromkeys(step["page"] for step in steps if step["page"]))
    solution = {"template": template, "phrasing": phrasings, "wording": wording, "plan": plan, "entities": entities, "steps": steps}
    return solution | ({"answer_step": None, "derive": derive} if derive else {"answer_step": len(steps) - 1})


# ---------------------------------------------------------------- questions

class Writer:
    """Makes tasks for one split from that split's pages, names, things and numbers."""

    def __init__(self, split, live, facts, split_of, seed):
        self.split, self.live, self.facts = split, live, facts
        self.rng = random.Random(f"{seed}|{split}")
        self.pools = defaultdict(list)
        for title in sorted(t for t, s in split_of.items() if s == split):
            own = facts[title]
            for kind, mark in (("country", "ISO code"), ("city", "country"), ("currency", "currency code"), ("us city", "state"), ("county", "FIPS code"),
                               ("state", "postal code"), ("element", "symbol")):
                if mark in own:
                    self.pools[kind].append(title)
        for kind, also in (("city", "inhabitants"), ("us city", "inhabitants"), ("county", "state")):       # currencies have countries too, states FIPS codes
            self.pools[kind] = [title for title in self.pools[kind] if also in facts[title]]
        share, names, things = dict(SHARES), NAMES[:], THINGS[:]
        random.Random(seed).shuffle(names), random.Random(seed).shuffle(things)
        low = sum(share[s] for s, _ in SHARES[:[s for s, _ in SHARES].index(split)])
        self.names = names[round(low * len(names)):round((low + share[split]) * len(names))]
        self.things = things[round(low * len(things)):round((low + share[split]) * len(things))]

    def phrasing(self, held_out):
        return self.rng.randrange(TRAINED, TRAINED + HELD_OUT) if held_out else self.rng.randrange(SHOWN if self.split == "sft" else TRAINED)

    def word(self, relation, odd):
        return self.rng.choice(RELATIONS[relation][2][1:] or RELATIONS[relation][2]) if odd else RELATIONS[relation][2][0]

    def start(self, kind):
        """(start of the chain, what the question calls it) for a random page of a kind."""
        if kind in KEYED:
            noun, relation, own_words = KEYED[kind]
            page = self.rng.choice(self.pools[noun])
            value = self.facts[page].get(relation, (None,))[0]
            if value is None or sum(own.get(relation, (None,))[0] == value for own in self.facts.values()) > 1:
                raise Unfit("no such number, or not the only one")
            return (noun, f"{relation} {value}", own_words and own_words.format(x=value), page), value
        page = self.rng.choice(self.pools[kind])
        return page, page

    def look_up(self, suite, kind, relations, held_out, odd):
        """A chain question: the last relation of the page at the end of `relations`."""
        start, name = self.start(kind)
        words = [RELATIONS[r][2][0] for r in relations[:-1]] + [self.word(relations[-1], odd)]
        steps = chain(self.live, self.facts, start, relations, words, "wiki_search" if suite == "mhqa" else "web_search")
        frame = self.phrasing(held_out)
        numbers = [frame]
        subject, inner = name, relations[:-1]
        if inner or isinstance(start, tuple):
            numbers.append(self.phrasing(held_out))
            subject = BY["county" if kind == "us city" else kind][numbers[1]].format(x=name)
            inner = inner if isinstance(start, tuple) else inner[1:]
        for relation in inner:
            subject = f"the {RELATIONS[relation][2][0]} of {subject}"
        unit = UNIT.get(relations[-1])
        question = ONE[frame].format(n=words[-1] + (f" in {unit}" if unit and "in " not in words[-1] else ""), x=subject)
        plan = [f"find the {start[0]} with {start[1]}" if isinstance(start, tuple) else f"find the {relations[0]} of {name}"]
        plan += [f"find its {relation}" for relation in (relations if isinstance(start, tuple) else relations[1:])]
        hops = len(relations) + isinstance(start, tuple)
        template = f"{suite}: {kind} > {' > '.join(relations)}"
        return {"question": question, "answer": answers(steps[-1]["finds"]), "data_source": suite, "agent": suite, "hops": hops,
                "solution": graph(template, numbers, plan, steps)}

    def compare(self, relation, op, held_out):
        """Which of two pages has the larger (or smaller) number?"""
        kind = {"population": "country", "area": "country", "inhabitants": "city", "discovery year": "element"}[relation]
        pages = self.rng.sample(self.pools[kind], 2)
        if any(relation not in self.facts[page] for page in pages):
            raise Unfit("no such number")
        steps = [search(self.live, self.facts, "wiki_search", page, relation, RELATIONS[relation][1], page) for page in pages]
        numbers = [float(step["finds"]) for step in steps]
        if max(numbers) < (1.3 if op == "max" else 1.001) * min(numbers):
            raise Unfit("too close")
        number = self.phrasing(held_out)
        best = numbers.index(max(numbers) if op == "max" else min(numbers))
        plan = [f"find the {relation} of {page}" for page in pages] + ["compare"]
        return {"question": COMPARE[relation, op][number].format(x=pages[0], y=pages[1]), "answer": answers(pages[best]), "data_source": "mhqa",
                "agent": "mhqa", "hops": 2, "solution": graph(f"mhqa: compare {relation}", [number], plan, steps, derive={"op": op, "of": [0, 1]})}

    def compute(self, name, held_out):
        """Look numbers up, then compute with them."""
        relation, source, result, phrasings = LOOKED_UP[name]
        relations = relation.split(" ") if name == "density" else [relation]
        kind = {"inhabitants": "city", "area": "country", "population": "country", "counties": "state"}.get(relations[0], "element")
        pages = self.rng.sample(self.pools[kind], 2 if "{y}" in phrasings[0] else 1)
        if any(r not in self.facts[page] for page in pages for r in relations):
            raise Unfit("no such number")
        values = [self.facts[page][r][0] for page in pages for r in relations]
        if "-" in source and float(values[0]) <= float(values[1]) or max(map(len, values)) > 8:
            raise Unfit("nothing left, or long numbers")
        k = self.rng.randint(3, 29)
        steps = [search(self.live, self.facts, "wiki_search", page, r, RELATIONS[r][1], page) for page in pages for r in relations]
        if name == "density":                                       # both numbers stand in one paragraph
            steps = steps[:1]
            steps[0]["fact"] = f"The population of {pages[0]} is {values[0]}, its area {values[1]}."
        steps.append(code_step(result, source.format(a=values[0], b=values[-1], k=k)))
        number = self.phrasing(held_out)
        plan = [f"find the {relation if name != 'density' else 'population and area'} of {page}" for page in pages] + [f"compute the {result}"]
        question = phrasings[number].format(x=pages[0], y=pages[-1], k=k)
        return {"question": question, "answer": steps[-1]["finds"], "data_source": "math", "agent": "all", "hops": len(steps),
                "solution": graph(f"math: {name}", [number], plan, steps)}

    def story(self, name, held_out):
        """A word problem, solved in one expression or in two steps."""
        work, phrasings = STORIES[name]
        numbers = draw(name, self.rng)
        number = self.phrasing(held_out)
        question = phrasings[number].format(n=self.rng.choice(self.names), t=self.rng.choice(self.things), **numbers)
        (first, one), (second, two) = work
        if self.rng.random() < 0.4:
            steps = [code_step(first, one.format(**numbers))]
            steps.append(code_step(second, two.format(r=steps[0]["finds"], **numbers)))
        else:
            inner = f"({one})" if "+" in one and "(" not in one and re.search(r"\{r\}[*/]", two) else one
            steps = [code_step(second, two.replace("{r}", inner).format(**numbers))]
        plan = [f"compute the {step['wants']}" for step in steps]
        return {"question": question, "answer": steps[-1]["finds"], "data_source": "math", "agent": "math", "hops": len(steps),
                "solution": graph(f"math: {name}", [number], plan, steps)}


def draw(name: str, rng: random.Random) -> dict:
    """The numbers of a word problem, whole (but for averages and speeds) and positive at every step."""
    r = rng.randint
    a, b, c, d = {
        "change": lambda: (r(3, 60), r(12, 99), r(100, 9000), 0), "boxes": lambda: (r(12, 90), r(12, 99), r(15, 4000), 0),
        "share": lambda: (r(20, 900), r(20, 900), r(3, 19), 0), "trip": lambda: (r(20, 480), r(3, 40), r(11, 900), 0),
        "wages": lambda: (r(11, 80), r(11, 60), r(11, 80), r(11, 60)), "fence": lambda: (r(12, 300), r(12, 300), r(3, 45), 0),
        "discount": lambda: (r(3, 300) * 20, r(1, 15) * 5, 0, 0), "average": lambda: (r(10, 900), r(10, 900), r(10, 900), r(10, 900)),
        "tank": lambda: (r(500, 9000), r(11, 99), r(3, 40), r(20, 900)), "savings": lambda: (r(20, 900), r(11, 99), r(4, 52), r(50, 4000)),
        "seats": lambda: (r(3, 12), r(11, 40), r(11, 40), r(100, 9000)), "minutes": lambda: (r(2, 30), r(11, 59), r(30, 900), 0),
        "recipe": lambda: (r(3, 25), r(20, 95), r(13, 60), 0), "two_shops": lambda: (r(11, 90), r(11, 90), r(11, 90), r(11, 90)),
        "doubling": lambda: (r(11, 90), r(3, 7), r(20, 4000), 0), "speed": lambda: (r(20, 900), r(20, 900), r(3, 19), 0)}[name]()
    b = a * b if name == "recipe" else b
    left = {"change": c - a * b, "boxes": a * b - c, "tank": a - b * c, "savings": a + b * c - d, "seats": a * b * c - d, "minutes": a * 60 + b - c,
            "two_shops": a * b - c * d, "doubling": a * 2 ** b - c}.get(name, 1)
    whole = {"share": (a + b) % (c or 1) == 0, "average": (a + b + c + d) % 4 != 0, "speed": (a + b) % (c or 1) != 0, "recipe": c != a}.get(name, True)
    if left <= 0 or not whole:
        raise Unfit("not positive or not whole")
    return {"a": a, "b": b, "c": c, "d": d}


# ---------------------------------------------------------------- the files

def choose(writer: Writer, suite: str, held_out: bool, odd: bool) -> dict:
    """One draw of a task of a suite."""
    rng = writer.rng
    if suite == "math":
        name = rng.choice(sorted(STORIES) if rng.random() < 0.6 else sorted(LOOKED_UP))
        return writer.story(name, held_out) if name in STORIES else writer.compute(name, held_out)
    if suite == "mhqa" and not odd and rng.random() < 0.2:
        return writer.compare(*rng.choice(sorted(COMPARE)), held_out)
    weights, kinds, paths, lasts = zip(*(ODD_CHAINS if odd and rng.random() < (0.2 if suite == "mhqa" else 0.5) else CHAINS[suite]))
    odd = odd and kinds[0] not in KEYED
    i = rng.choices(range(len(kinds)), weights)[0]
    return writer.look_up(suite, kinds[i], paths[i] + [rng.choice(lasts[i])], held_out, odd)


def fails_first(task: dict) -> bool:
    return any("failing_first" in step for step in task["solution"]["steps"])


def numbers_of(task: dict) -> tuple:
    """What makes a word problem the same as another one: its template and its numbers."""
    return task["solution"]["template"], *sorted(re.findall(r"\d+", task["question"]))


def good(task: dict, split: str, titles: Titles, split_of: dict, asked: set) -> bool:
    """Short, new, and about pages of its own split alone; the answer must not stand in the question (but for comparisons)."""
    given = task["answer"] if isinstance(task["answer"], list) else [task["answer"]]
    told = not task["solution"].get("derive") and re.search(rf"(?<!\w){re.escape(given[0])}(?!\w)", task["question"])
    return (len(task["question"]) <= 120 and len(given[0]) <= 24 and not told and task["question"] not in asked
            and not (task["agent"] == "math" and numbers_of(task) in asked) and all(split_of[title] == split for title in titles.find(task_text(task))))


def make_split(split, size, live, facts, split_of, titles, seed, asked) -> list[dict]:
    """The tasks of a split, suites in turn. A third of the test is in held-out phrasings; where searches are natural, two of nine tasks fail at first."""
    writer, rows = Writer(split, live, facts, split_of, seed), []
    for i in range(size):
        suite, turn = ("mhqa", "web", "math")[i % 3], i // 3
        held_out, odd = split == "test" and turn % 3 == 0, suite != "math" and turn % 9 in (1, 3)
        for _ in range(5000):
            with contextlib.suppress(Unfit):
                task = choose(writer, suite, held_out, odd)
                if good(task, split, titles, split_of, asked) and (suite == "math" or fails_first(task) == odd):
                    break
        else:
            raise RuntimeError(f"{split} {suite} {turn}: no new task in 5000 draws (held out: {held_out}, first query fails: {odd})")
        asked |= {task["question"], numbers_of(task)}
        rows.append({"id": f"{split}-{suite}-{turn + 1:04}"} | task)
    return rows


def distractors(rows: list[dict], live: Live, split_of: dict) -> dict:
    """How often searches of a split's solutions (right and failing ones) show pages that are not on the path, and pages of the test."""
    shown, counts = set(), Counter()
    for task in rows:
        for step in task["solution"]["steps"]:
            for query in [step["argument"], step.get("failing_first")] if step["tool"].endswith("search") else []:
                if query:
                    hits = set(re.findall(r"\(Title: (.+)\)\n|\d\. \[(.+)\]\(http", live(step["tool"], query)))
                    pages = {one or other for one, other in hits} - set(task["solution"]["entities"])
                    tested = {page for page in pages if split_of[page] == "test"}
                    shown |= tested
                    counts += Counter(searches=1, with_other_pages=bool(pages), with_test_pages=bool(tested))
    return {**counts, "test_pages_seen": len(shown)}


def write(path: Path, text: str):
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, "utf8")
    os.replace(temporary, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=HERE / "encyclopedia.jsonl", help="the encyclopedia")
    parser.add_argument("--out", type=Path, default=HERE / "tasks", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="another partition and other questions")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of tasks")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    # ---- facts and partition
    live = Live(args.corpus)
    facts = read_facts(list(live.pages.values()))
    split_of = assign_splits(families(facts), facts, args.seed)
    titles, asked, stats = Titles(facts), set(), {}

    # ---- tasks
    for split, size in SIZES.items():
        rows = make_split(split, round(size * args.scale), live, facts, split_of, titles, args.seed, asked)
        write(args.out / f"{split}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        stats[split] = {"tasks": len(rows), "pages_on_paths": len({title for row in rows for title in row["solution"]["entities"]}),
                        "hops": {suite: dict(sorted(Counter(row["hops"] for row in rows if row["data_source"] == suite).items())) for suite in ("mhqa", "web", "math")},
                        "templates": dict(sorted(Counter(row["solution"]["template"] for row in rows).items())), "distractors": distractors(rows, live, split_of)}
        print(f"{split}: {len(rows)} tasks, {stats[split]['pages_on_paths']} pages on solution paths; {stats[split]['distractors']}")
    write(args.out / "stats.json", json.dumps(stats, indent=1, ensure_ascii=False) + "\n")
