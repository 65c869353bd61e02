"""The embedded corpus: building, opening, ranking, and that no query text can break it."""
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus import Store, corpus_rows, split_passages, split_words, url_key
from hf import InputError
from hf import read_jsonl
from tasks import load_tasks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    {"id": "1", "title": "Nepal", "url": "https://wiki.example/Nepal", "text": "Nepal is a country in Asia. Its capital is Kathmandu.\n\nThe currency of Nepal is the Nepalese rupee."},
    {"id": "2", "title": "Kathmandu", "url": "https://wiki.example/Kathmandu", "text": "Kathmandu is a city of 1.4 million inhabitants, founded in 723."},
    {"id": "3", "title": "Currency", "url": "https://wiki.example/Currency", "text": "A currency is a standard of money. A currency may be pegged to another currency."},
    {"id": "4", "title": "Zürich", "url": "https://www.wiki.example/Z%C3%BCrich/", "text": "Zürich lies on the Limmat."},
    *({"id": f"t{i}", "title": f"Town {i} ({land})", "url": f"https://wiki.example/t{i}", "text": f"Town {i} lies in {land}, {land}, and has {i} inhabitants."}
      for i in range(400) for land in [["Nepal", "Chad", "Peru", "Laos", "Togo"][i % 5]]),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def store(folder):
    store = Store(write(folder / "pages.jsonl", PAGES), folder / "index")
    yield store
    store.close()


def titles(store, query, topk=3):
    return [hit[0] for hit in store.search(query, topk)]


def test_page_named_in_the_query_comes_before_pages_that_only_mention_it(store):
    assert titles(store, "Nepal currency")[0] == "Nepal" and "rupee" in store.search("Nepal currency", 1)[0][2]
    assert titles(store, "Nepal money", 2) == ["Nepal", "Nepal"]
    assert titles(store, "what is the capital of nepal?", 1) == ["Nepal"]
    assert titles(store, "ZURICH", 1) == ["Zürich"]


def test_unknown_words_find_nothing(store):
    assert store.search("xyzzy plugh", 3) == [] and store.search("", 3) == [] and store.search(" \n?!", 3) == []


def test_passages_are_paragraphs_and_long_ones_are_cut():
    assert split_passages("a b\n\n c \n\n\n") == ["a b", "c"]
    assert [len(p.split()) for p in split_passages(" ".join(map(str, range(350))))] == [100, 100, 100, 50]
    assert split_passages("") == [""]


def test_page_is_found_under_any_spelling_of_its_url(store):
    for url in ("https://wiki.example/Nepal", "http://www.wiki.example/Nepal/", "wiki.example/nepal#Economy"):
        assert store.page(url)[0] == "Nepal"
    assert store.page("https://elsewhere.example/Nepal") is None
    assert url_key("HTTPS://Www.Example.org/A/") == "example.org/a"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.one_of(st.text(max_size=200), st.text(alphabet="\"'*^:()-+{}[]~\\ \0NEARORANDTnepal.,;<>/", max_size=80),
                       st.lists(st.sampled_from(["Nepal", "NEAR(", "OR", "AND", "NOT", '"', "*", "-Nepal", "title:", "^", "nepal*", "ﬁ", "İ", "ß", "\ud800", "東京", "1.4"]), max_size=12).map(" ".join)))
def test_no_query_text_breaks_the_search(store, query):
    """Operators, quotes, NEAR, prefixes, column filters, lone surrogates: query text is data, and what it finds has a word of it."""
    for title, _, passage, _ in store.search(query, 3):
        assert set(split_words(query)) & set(split_words(title + " " + passage))


def test_every_word_of_the_index_can_be_asked_for(store):
    """split_words and FTS5's tokenizer must agree, or words would be unfindable."""
    for page in PAGES[:4]:
        for word in split_words(page["title"] + " " + page["text"]):
            assert store.telling_words(word) == [word]


def test_search_r1_rows_and_gzip(folder):
    path = folder / "wiki.jsonl.gz"
    with gzip.open(path, "wt") as f:
        f.write(json.dumps({"id": "7", "contents": '"Ada Lovelace"\nAda Lovelace wrote the first program.'}) + "\n")
    store = Store(path, folder / "index")
    assert store.search("first program", 3) == [('"Ada Lovelace"', "https://corpus.local/7", "Ada Lovelace wrote the first program.", 1)]
    store.close()


def test_changed_corpus_gets_a_new_index_and_an_unchanged_one_is_reopened(folder):
    path = write(folder / "changing.jsonl", PAGES[:2])
    first = Store(path, folder / "index")
    built = os.stat(first.path).st_mtime_ns
    assert Store(path, folder / "index").path == first.path and os.stat(first.path).st_mtime_ns == built
    write(path, PAGES[:3])
    assert Store(path, folder / "index").passages == first.passages + 1


@pytest.mark.parametrize("line, expected", [
    ("{not json", ":2: not valid JSON"), ("[" * 200_000, ":2: not valid JSON"), ("[1]", ":2: expected a JSON object"), ('{"title": "x"}', ":2: field 'text'"), ('{"title": 3, "text": "x"}', ":2: field 'title'"),
    ('{"contents": null}', ":2: field 'contents'"), ('{"title": "x", "text": "y", "url": 5}', ":2: field 'url'"), ('{"title": "x", "text": "\\ud83d"}', ":2: field 'text'"),
    ('{"id": "\\ud83d", "contents": "x\\ny"}', ":2: field 'url'")])
def test_bad_row_names_file_line_and_field_and_leaves_nothing(folder, tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(PAGES[0]) + "\n" + line + "\n")
    with pytest.raises(InputError, match="bad.jsonl" + expected):
        Store(path, tmp_path / "index")
    assert [p.suffix for p in (tmp_path / "index").iterdir()] == [".lock"]


@pytest.mark.parametrize("content", [b"no gzip at all", gzip.compress(b'{"title": "x", "text": "y"}\n' * 1000)[:-20], gzip.compress(b"x")[:10] + b"\xff" * 30])
def test_broken_gzip_is_named(tmp_path, content):
    (tmp_path / "pages.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"pages\.jsonl\.gz: cannot be read"):
        Store(tmp_path / "pages.jsonl.gz", tmp_path / "index")


def test_empty_lines_are_no_rows(tmp_path):
    (tmp_path / "pages.jsonl").write_text("\n" + json.dumps(PAGES[0]) + "\n  \n\n")
    assert len(list(corpus_rows(tmp_path / "pages.jsonl"))) == 1


@pytest.mark.skipif(not os.path.isfile("/proc/self/mem"), reason="needs a file that cannot be read, root or not")
def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for read in (lambda path: Store(path, tmp_path / "index"), read_jsonl, load_tasks):
        with pytest.raises(InputError, match="/proc/self/mem: cannot be read"):
            read("/proc/self/mem")


def test_missing_corpus_names_the_command(tmp_path):
    with pytest.raises(InputError, match="no such corpus file"):
        Store(tmp_path / "none.jsonl")


def search_in_process(path, index, queue):
    store = Store(path, index)
    queue.put([titles(store, "Nepal currency", 1) for _ in range(20)])


def test_many_processes_build_and_read_at_once(folder):
    context = multiprocessing.get_context("fork")                 # a fresh interpreter would import torch for seconds
    path, queue = write(folder / "shared.jsonl", PAGES), context.Queue()
    workers = [context.Process(target=search_in_process, args=(path, folder / "index2", queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=60) for _ in workers] == [[["Nepal"]] * 20] * 3
    for worker in workers:
        worker.join()
    assert len(list((folder / "index2").glob("*.sqlite"))) == 1


def test_many_threads_search_at_once(store):
    found, threads = [], []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: found.extend(titles(store, "Nepal currency", 1) for _ in range(50))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert found == [["Nepal"]] * 400


def test_script_answers_one_query(folder):
    path = write(folder / "pages.jsonl", PAGES)
    done = subprocess.run([sys.executable, str(ROOT / "corpus.py"), str(path), "Nepal currency"], cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "Nepal (https://wiki.example/Nepal)" in done.stdout


def test_a_corpus_that_is_no_text_is_named_with_its_line(tmp_path):
    (tmp_path / "pages.jsonl").write_bytes(b'{"title": "A", "text": "b"}\n\xff\xfe\x00\n')
    with pytest.raises(InputError, match=r"pages\.jsonl:2: not valid JSON"):
        list(corpus_rows(tmp_path / "pages.jsonl"))
