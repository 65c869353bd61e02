"""The embedded base model: what it was trained on, what it can do, and what it cannot know.  pytest tests/test_base.py"""
import json
import random
import re
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "data"))
import pretrain  # noqa: E402
from coa_format import ROLES, TOOLS, encode_text  # noqa: E402
from model import load_model, load_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ROOT / "data" / "base"))


@pytest.fixture(scope="module")
def model():
    return load_model(str(ROOT / "data" / "base"))


def test_base_is_tiny_and_every_tag_is_one_token(tokenizer, model):
    assert 0.9e6 < sum(p.numel() for p in model.parameters()) < 1.6e6
    assert len(tokenizer) <= 1024
    for tag in (*ROLES, *TOOLS, "observation", "answer"):
        assert len(encode_text(f"<{tag}>", tokenizer)) == len(encode_text(f"</{tag}>", tokenizer)) == 1


def held_out_names():
    """Names of all pages on the solution path of a test question, without the part in brackets."""
    with open(ROOT / "data" / "tasks" / "test.jsonl", encoding="utf-8") as file:
        return {re.sub(r" \(.*", "", title) for line in file for title in json.loads(line)["solution"]["entities"]}


def names_found(documents):
    """Held-out names that stand in the documents as whole words."""
    names = held_out_names()
    text = "\n".join(documents).replace("«", "").replace("»", "")
    words = set(re.findall(r"[^\W\d_]+", text))
    return {n for n in names if set(re.findall(r"[^\W\d_]+", n)) <= words and re.search(rf"(?<!\w){re.escape(n)}(?!\w)", text)}


PARTS = [(1, pretrain.KINDS, 48), (11, pretrain.SECOND_KINDS, 16)]      # seed, kinds, chunks: a little more than was trained on


def pretraining_text(seed, kinds, chunks):
    rng = random.Random(seed)
    name = pretrain.Names(rng, pretrain.real_names())
    for _ in range(chunks):
        yield [pretrain.document(rng, name, kinds) for _ in range(4000)]


@pytest.mark.parametrize("seed, kinds, chunks", PARTS)
def test_no_held_out_page_is_in_the_pretraining_text(seed, kinds, chunks):
    assert names_found(next(pretraining_text(seed, kinds, 1))) == set()


def test_the_search_for_held_out_names_finds_one():
    assert "Nowhere" not in held_out_names()
    name = sorted(held_out_names())[0]
    assert names_found([f"a text about «{name}.»"]) == {name}


@pytest.mark.long
@pytest.mark.parametrize("seed, kinds, chunks", PARTS)
def test_no_held_out_page_is_anywhere_in_the_pretraining_text(seed, kinds, chunks):
    for documents in pretraining_text(seed, kinds, chunks):
        assert names_found(documents) == set()


def test_base_copies_what_it_has_never_seen(tokenizer, model):
    rng = random.Random(1234)
    name = pretrain.Names(rng, pretrain.real_names())
    ids, weights = pretrain.token_stream(tokenizer, [pretrain.document(rng, name) for _ in range(120)])
    rows = 12
    length = (len(ids) - 1) // rows
    x, y, w = next(pretrain.batches(ids, weights, [(1, rows, min(length, 512))]))
    with torch.no_grad():
        predicted = model.logits(model(x)).argmax(-1)
    assert (predicted == y)[w == 1].float().mean() > 0.85


def test_text_is_the_same_for_the_same_seed():
    def texts():
        rng = random.Random(7)
        name = pretrain.Names(rng, frozenset())
        return [pretrain.document(rng, name) for _ in range(50)]
    assert texts() == texts()


@pytest.mark.parametrize("seed, kinds, chunks", PARTS)
def test_no_agent_tag_is_in_the_pretraining_text(seed, kinds, chunks):
    text = "\n".join(next(pretraining_text(seed, kinds, 1)))
    assert not re.search(r"</?(think|plan|wiki_search|web_search|crawl_page|code|observation|answer|reflection)>", text)
