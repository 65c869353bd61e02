"""sampler.py: what is sampled is what is recorded, whatever row, batch, tool or neighbour an episode has."""
import dataclasses
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from coa_format import ENVIRONMENT, PROMPT, SAMPLED, TOOLS, encode_text, tags
from model import InputError, PRESETS, Transformer, train_tokenizer
from sampler import Limits, Request, Sampler

TEXT = ["Kathmandu is the capital of Nepal. The currency of Nepal is the rupee. 12 345 print(a*b) été 日本\n"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 340, [f"<{s}{tag}>" for tag in sorted(tags()) for s in ("", "/")])


class Chatty(Transformer):
    """A random model that likes to search: enough calls for episodes of many turns."""
    def logits(self, hidden):
        return super().logits(hidden) + self.bias


@pytest.fixture(scope="module")
def chatty(tokenizer):
    torch.manual_seed(0)
    model = Chatty(dataclasses.replace(PRESETS["tiny-1m"], vocab_size=len(tokenizer), num_hidden_layers=2, hidden_size=64, head_dim=16))
    model.bias = torch.zeros(len(tokenizer))
    ids = tokenizer.convert_tokens_to_ids
    model.bias[[ids("<wiki_search>"), ids("</wiki_search>")]] = torch.tensor([3.5, 3.2])
    rare = ["</answer>", "<observation>", "<|endoftext|>", "<code>", "<answer>", *[f"</{tool}>" for tool in TOOLS if tool != "wiki_search"]]
    model.bias[ids(rare)] = -5.0
    return model


class Box:
    """A tool box of one tool: `answer(argument) -> text`, run in a pool of threads."""
    def __init__(self, answer=lambda argument: f"About {argument}: the capital of Nepal is Kathmandu.", workers=64):
        self.tools, self.answer, self.pool = {"wiki_search": None}, answer, ThreadPoolExecutor(workers)

    def session(self, question):
        return self

    def submit(self, name, argument, thought=""):
        return self.pool.submit(self.answer, argument)


def requests(count, seed=0, group=4, vocabulary=300, **limits):
    """`count` requests in groups that share a random prompt of 3 to 60 ids."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(3, 60))] for _ in range(-(-count // group))]
    limits = Limits(**({"turns": 4, "new_tokens": 40} | limits))
    return [Request(prompts[i // group], "mhqa", f"task{i // group}", i % group, limits) for i in range(count)]


def fresh_logprobs(model, ids, temperature=1.0):
    """log p of ids[1:] in one full forward without a cache -> (len(ids) - 1,)."""
    ids = torch.tensor([ids])
    with torch.no_grad():
        return (model.logits(model(ids))[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("deterministic", [True, False])
def test_sampled_logprobs_equal_a_fresh_full_forward(chatty, tokenizer, deterministic):
    sampler = Sampler(chatty, tokenizer, Box(), slots=6, max_len=300, deterministic=deterministic)
    episodes = sampler.rollout(requests(24), temperature=0.8, training=True)
    assert sampler.stats["tool_calls"] > 20 and max(e.turns for e in episodes) == 4
    for episode in episodes:
        sampled = np.array(episode.source)[1:] == SAMPLED
        expected = fresh_logprobs(chatty, episode.ids, 0.8)
        np.testing.assert_allclose(np.array(episode.logprobs)[1:][sampled], expected[sampled], atol=1e-4)
        assert not np.array(episode.logprobs)[1:][~sampled].any()
