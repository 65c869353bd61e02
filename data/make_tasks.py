"""New tasks from a corpus, the TaskCraft way (paper section 4.1.1): an atomic question from a page, then harder ones by extension.

Depth: the entity of a question is replaced by a fact that leads to it, so that one more step is needed. Width: two questions are joined. Every answer
stands in a page and every step is tried live: a task stays only if each search of its solution really returns the fact.

By rule for pages in the style of the embedded encyclopedia ("Its capital is V.", "T has the calling code V and ..."), or for any pages with a
language model that writes and rewrites the questions; what it writes is checked by rule (names the right page, answer copied from it and
not in the question, the bridge entity no longer named).

    python data/make_tasks.py 200 --corpus data/encyclopedia.jsonl --out runs/new_tasks.jsonl
    python data/make_tasks.py 200 --corpus my_pages.jsonl --teacher http://127.0.0.1:8000/v1 --teacher-model NAME --out my_tasks.jsonl
"""
import argparse
import random
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from corpus import corpus_rows  # noqa: E402
from distill import read_reply  # noqa: E402
from llm import LLM, LLMError  # noqa: E402
from hf import InputError, exit_on_input_error  # noqa: E402
from parallel import write_jsonl  # noqa: E402
from tools import add_tool_arguments, make_toolbox  # noqa: E402

RELATION, VALUE = r"(?:[A-Z]{2,5} )?[a-z][a-z ]*?", r"[A-Z0-9.+][\w./+-]*(?: [A-Z][\w'-]*)*"            # "ISO code", "Los Angeles"
FACT = re.compile(rf"(?:\bIts|\b(?:has|with|and|,) (?:the|an?)) ({RELATION})(?: of| is(?: the)?)? ({VALUE})(?=[,. ])")


def read_facts(page):
    """{relation: (value, sentence)} of a page, from sentences like "Its capital is V." and "T has the calling code V and the area V."."""
    facts = {}
    for sentence in re.split(r"(?<=\.)\s+", page["text"]):
        for relation, value in FACT.findall(sentence):
            facts.setdefault(relation, (value.rstrip("."), sentence.replace("Its ", f"{page['title']}: its ")))
    return facts


def search_step(title, relation, value, sentence):
    return {"tool": "wiki_search", "about": title, "wants": relation, "argument": f"{title} {relation}", "page": title, "finds": value,
            "fact": sentence}


def rule_task(pages, facts, rng):
    """(question, answer, steps, kind) by rule from the facts of {title: page}: atomic, depth or width."""
    title = rng.choice(sorted(facts))
    relation, (value, sentence) = rng.choice(sorted(facts[title].items()))
    step = search_step(title, relation, value, sentence)
    if value in facts and rng.random() < 0.7:
        further, (last, said) = rng.choice(sorted(facts[value].items()))
        return f"What is the {further} of the {relation} of {title}?", last, [step, search_step(value, further, last, said)], "depth"
    others = [name for name in facts if name != title and relation in facts[name]]
    if value.replace(".", "", 1).isdigit() and others and rng.random() < 0.7:
        other = rng.choice(others)
        rival = facts[other][relation]
        if rival[0].replace(".", "", 1).isdigit() and float(rival[0]) != float(value):
            return (f"Which has the larger {relation}, {title} or {other}?", title if float(value) > float(rival[0]) else other,
                    [step, search_step(other, relation, *rival)], "width")
    return f"What is the {relation} of {title}?", value, [step], "atomic"


def llm_task(pages, facts, rng, llm):
    """The same with a language model: it writes the atomic question and rewrites it for depth; width joins two. None when a check fails."""
    def ask(text, seed):
        return read_reply(llm.chat([{"role": "user", "content": text}], temperature=0.7, max_tokens=120, seed=seed), "question")

    def atomic(title):
        reply = ask(f"Page: {title}\n{pages[title]['text'][:1500]}\n\nWrite one question about {title} that this page answers, and its short answer "
                    "copied from the page, as two lines:\nQuestion: ...\nAnswer: ...", rng.randrange(1 << 30))
        question, answer = reply.get("question", ""), reply.get("answer", "").rstrip(".")
        sound = title in question and answer and answer in pages[title]["text"] and answer not in question
        return (question, answer, search_step(title, "answer", answer, answer)) if sound else None

    title = rng.choice(sorted(pages))
    first = atomic(title)
    if first is None:
        return None
    question, answer, step = first
    linking = [(name, s) for name, page in pages.items() if name != title for s in page["text"].split(". ") if title in s]
    if linking and rng.random() < 0.5:
        name, sentence = rng.choice(sorted(linking))
        harder = ask(f"Fact: {sentence}\nQuestion: {question}\n\nRewrite the question so that it does not name {title} but describes it by the fact "
                     f"and names {name}, as one line:\nQuestion: ...", rng.randrange(1 << 30)).get("question", "")
        if title in harder or name not in harder or answer in harder:
            return None
        return harder, answer, [search_step(name, title, title, sentence), step], "depth"
    second = atomic(rng.choice(sorted(pages))) if rng.random() < 0.5 else None
    if second and second[1] not in question and answer not in second[0] and second[1] != answer:
        return f"Give two answers separated by |. First: {question} Second: {second[0]}", f"{answer} | {second[1]}", [step, second[2]], "width"
    return question, answer, [step], "atomic"


def make_tasks(pages, number, toolbox, seed, llm=None):
    """(task rows, Counter of what was made and why the rest was dropped). A task stays when each step's live search returns its fact."""
    rng, rows, counts = random.Random(seed), {}, Counter()
    facts = {title: found for title, page in pages.items() if (found := read_facts(page))}
    if not (pages if llm else facts):
        raise InputError("the corpus has nothing to ask for: by rule it takes sentences like 'Its capital is V.'; else give --teacher URL")
    for _ in range(20 * number):
        if len(rows) == number:
            break
        made = llm_task(pages, facts, rng, llm) if llm else rule_task(pages, facts, rng)
        if made is None or made[0] in rows:
            counts["dropped: repeated" if made else "dropped: a check of question and answer failed"] += 1
            continue
        question, answer, steps, kind = made
        with_tools = toolbox.session(question)
        if not all(step["finds"] in with_tools.run("wiki_search", step["argument"]) for step in steps):
            counts["dropped: live search does not return the fact"] += 1
            continue
        counts[kind] += 1
        solution = {"template": kind, "plan": [f"find the {s['wants']} of {s['about']}" for s in steps], "entities": [s["page"] for s in steps],
                    "steps": steps, "answer_step": None if kind == "width" else len(steps) - 1}
        if kind == "width":
            solution["derive"] = {"op": "max", "of": [0, 1]}
        rows[question] = {"id": f"made-{len(rows):05d}", "question": question, "answer": answer, "data_source": "mhqa", "agent": "mhqa",
                          "hops": len(steps), "solution": solution}
    return list(rows.values()), counts


if __name__ == "__main__":
    exit_on_input_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="tasks to make")
    parser.add_argument("--out", required=True, help="task file to write (JSONL)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", help="URL of an OpenAI-compatible server that writes the questions (default: by rule)")
    parser.add_argument("--teacher-model", default="", help="name of the model on the server")
    add_tool_arguments(parser)
    args = parser.parse_args()
    llm = LLM(args.teacher, args.teacher_model, cache_path=args.out + ".cache.sqlite") if args.teacher else None
    with make_toolbox(args) as toolbox:
        pages = {}
        for title, _, passages in corpus_rows(Path(args.corpus)):
            title = title.strip('"')                       # Search-R1 writes them in quotes
            pages[title] = {"title": title, "text": "\n\n".join(passages)}
        try:
            rows, counts = make_tasks(pages, args.number, toolbox, args.seed, llm)
        except LLMError as error:
            sys.exit(f"error: {error}")
    write_jsonl(args.out, rows)
    print(f"{len(rows)} tasks in {args.out}: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
