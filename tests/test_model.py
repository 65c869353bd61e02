"""model.py against transformers, against itself (cached = uncached, chunked = plain), and against wrong input."""
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import hf
import model as model_file
from hf import InputError, local_directory, train_tokenizer
from model import CHUNK, PRESETS, KVCache, ModelConfig, Transformer, load_model, load_tokenizer, save_model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMOLLM2 = os.path.join(ROOT, "data", "smollm2")
needs_smollm2 = pytest.mark.skipif(not os.path.exists(SMOLLM2), reason="data/smollm2 is absent; `python data/smollm2.py` makes it")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def small_config(**changes):
    plain = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=16, max_position_embeddings=128)
    return ModelConfig(**plain | changes)


def random_model(config, seed=0, dtype=torch.float32):
    """Every parameter random, norms and biases too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * 0.15)
    return model.to(dtype)


def hf_model(path, **options):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def random_ids(*shape, vocab=97, seed=0):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def write_config(path, **changes):
    path.mkdir(exist_ok=True)
    config = {**small_config(model_type="llama").to_hf(), **changes}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return path


@pytest.fixture(scope="module")
def tiny():
    return random_model(small_config(tie_word_embeddings=True))


# ------------------------------------------------------------ the same numbers as transformers

FAMILY_CASES = [
    dict(model_type="llama", num_key_value_heads=1, rope_scaling=LLAMA3),
    dict(model_type="llama", num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True),
    dict(model_type="llama", head_dim=24, rope_scaling=YARN),
    dict(model_type="llama", rope_scaling=YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}),
    dict(model_type="qwen2", num_key_value_heads=1, attention_bias=True, rope_theta=1e6),
    dict(model_type="qwen2", num_key_value_heads=2, attention_bias=True, tie_word_embeddings=True, rope_scaling=YARN | {"attention_factor": 1.3}),
    dict(model_type="qwen2", num_key_value_heads=4, attention_bias=True, rope_scaling=LLAMA3),
    dict(model_type="qwen3", num_key_value_heads=2, rope_theta=1e6, tie_word_embeddings=True),
    dict(model_type="qwen3", num_key_value_heads=1, head_dim=32, attention_bias=True, rope_scaling=YARN),
    dict(model_type="qwen3", num_key_value_heads=4, rope_scaling=LLAMA3),
]


@pytest.mark.parametrize("changes", FAMILY_CASES, ids=lambda c: "-".join(str(v["rope_type"] if isinstance(v, dict) else v) for v in c.values()))
def test_logits_equal_transformers_both_ways(changes, tmp_path):
    ours = random_model(small_config(**changes))
    ids = random_ids(2, 120)                                                     # beyond the 32 positions that the scalings start from
    save_model(ours, None, tmp_path / "ours")
    theirs = hf_model(tmp_path / "ours")
    with torch.no_grad():
        logits = ours.logits(ours(ids))
        assert (theirs(ids).logits - logits).abs().max() <= 1e-4
    theirs.save_pretrained(tmp_path / "theirs")                                   # the newer rope_parameters spelling
    again = load_model(tmp_path / "theirs")
    assert "rope_parameters" in (tmp_path / "theirs" / "config.json").read_text()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), again.state_dict().values(), strict=True))
    with torch.no_grad():
        assert (again.logits(again(ids)) - logits).abs().max() <= 1e-6


@pytest.mark.parametrize("changes", [
    dict(model_type="qwen3", rope_theta=1e6, rope_scaling=YARN | {"original_max_position_embeddings": 64}),
    dict(model_type="qwen3", rope_theta=1e6),
    dict(model_type="llama", rope_theta=5e5, rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64}),
], ids=["qwen3-yarn", "qwen3", "llama3"])
def test_far_beyond_the_original_context(changes, tmp_path):
    ours = random_model(small_config(**changes, max_position_embeddings=64))
    save_model(ours, None, tmp_path)
    ids = random_ids(1, 1500)
    with torch.no_grad():
        reference = hf_model(tmp_path)(ids).logits
        assert (ours.logits(ours(ids)) - reference).abs().max() <= 1e-4
        cache = KVCache(ours.config, 1, 1500)
        chunks = [ours(ids[:, i:i + 700], cache=cache) for i in range(0, 1500, 700)]
        assert (ours.logits(torch.cat(chunks, 1)) - reference).abs().max() <= 1e-4


def test_config_reads_old_and_new_spellings_alike():
    old = small_config(model_type="llama", rope_theta=5e5, rope_scaling=LLAMA3).to_hf()
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA3 | {"rope_theta": 5e5}
    oldest = old | {"rope_scaling": {**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3"}}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new) == ModelConfig.from_hf(oldest)


def test_config_keeps_fields_it_does_not_use():
    hf = small_config(model_type="qwen2", attention_bias=True).to_hf() | {"eos_token_id": [1, 2], "sliding_window": 4096, "use_sliding_window": False}
    saved = ModelConfig.from_hf(hf).to_hf()
    assert saved["eos_token_id"] == [1, 2] and saved["sliding_window"] == 4096


# ------------------------------------------------------------ files in and out

def test_load_save_gives_byte_equal_tensors_and_keeps_the_rest(tmp_path):
    from safetensors.torch import load_file
    original = random_model(small_config(tie_word_embeddings=True), dtype=torch.bfloat16)
    original.generation_config = {"eos_token_id": [3, 5], "temperature": 0.6}
    tokenizer = train_tokenizer(["some text 12"] * 3, 280, ["<think>"])
    tokenizer.chat_template = {"default": "{% for m in messages %}{{ m['content'] }}{% endfor %}", "tool_use": "tools"}      # the second in a folder of its own
    save_model(original, None, tmp_path / "a")
    again = load_model(tmp_path / "a", torch.bfloat16)
    save_model(again, tokenizer, tmp_path / "b")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys() and "lm_head.weight" not in first
    assert all(first[name].dtype == torch.bfloat16 and torch.equal(first[name], second[name]) for name in first)
    assert again.lm_head is None and again.head_weight is again.embed_tokens.weight
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == original.generation_config
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    from transformers import AutoTokenizer
    assert AutoTokenizer.from_pretrained(tmp_path / "b").chat_template == tokenizer.chat_template
    assert not (tmp_path / "b" / ".writing").exists()


def test_sharded_weights_with_index_in_and_out(tmp_path, monkeypatch):
    ours, ids = random_model(small_config(model_type="llama")), random_ids(1, 9)
    monkeypatch.setattr(hf, "SHARD_SIZE", "30KB")
    save_model(ours, None, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    assert torch.equal(load_model(tmp_path)(ids), ours(ids))
    assert (hf_model(tmp_path)(ids).logits - ours.logits(ours(ids))).abs().max() <= 1e-4
    monkeypatch.setattr(hf, "SHARD_SIZE", "5GB")
    save_model(ours, None, tmp_path)                                              # over the old one: no stale shard is left to be read
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert torch.equal(load_model(tmp_path)(ids), ours(ids))


def test_saved_files_are_readable_by_others_and_replace_whole(tmp_path):
    ours = random_model(small_config())
    save_model(ours, None, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    save_model(ours, None, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_a_full_state_dict_can_be_saved_in_another_dtype(tmp_path, tiny):
    save_model(tiny, None, tmp_path, state_dict={name: tensor.bfloat16() for name, tensor in tiny.state_dict().items()})
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(load_model(tmp_path).embed_tokens.weight, tiny.embed_tokens.weight.bfloat16().float())


@pytest.mark.parametrize("changes, named", [
    ({"model_type": "mistral"}, "mistral"), ({"model_type": "absent"}, "model_type"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"), ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "factor"), ({"use_sliding_window": True}, "use_sliding_window"), ({"hidden_act": "gelu"}, "gelu"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq"), ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
    ({"hidden_size": "absent"}, "hidden_size"), ({"mlp_bias": True}, "mlp_bias"), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
])
def test_unsupported_architecture_is_refused_by_name_before_weights(changes, named, tmp_path):
    write_config(tmp_path, **changes)                                             # there are no weights to read
    with pytest.raises(InputError, match=named) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_tensors_that_do_not_fit_are_listed_in_one_error(tmp_path):
    from safetensors.torch import load_file, save_file
    save_model(random_model(small_config()), None, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.surplus.weight"] = torch.zeros(2)
    del weights["model.norm.weight"]
    weights["lm_head.weight"] = torch.zeros(5, 48)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as error:
        load_model(tmp_path)
    for part in ("model.norm.weight is missing, expected [48]", "model.surplus.weight is [2], expected no such tensor",
                 "lm_head.weight is [5, 48], expected [97, 48]"):
        assert part in str(error.value)


def test_spare_tensors_of_old_checkpoints_are_ignored(tmp_path, tiny):
    from safetensors.torch import load_file, save_file
    save_model(tiny, None, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()      # a tied head that was written out
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path)(random_ids(1, 5)), tiny(random_ids(1, 5)))


def test_missing_or_broken_files_are_named(tmp_path):
    with pytest.raises(InputError, match="config.json"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="model.safetensors"):
        load_model(write_config(tmp_path))
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match="model.safetensors: not a whole safetensors file"):
        load_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="tokenizer.json: not valid JSON"):
        load_tokenizer(tmp_path)
    for config, named in (("{", "not valid JSON"), ("[]", "expected a JSON object"), (json.dumps({**json.loads((tmp_path / "config.json").read_text()), "num_attention_heads": 0}),
                                                                                       "'num_attention_heads': expected a whole number from 1 on")):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(InputError, match=named):
            load_model(tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        local_directory("no/such/path/at/all")
    with pytest.raises(InputError, match=r"no such directory \(and no hub id"):
        local_directory("../somewhere")


def test_load_converts_dtype_and_never_initialises(tmp_path, tiny, monkeypatch):
    save_model(tiny, None, tmp_path)
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor, **_: pytest.fail("initialised") if tensor.device.type != "meta" else tensor)
    loaded = load_model(tmp_path, torch.float64)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_directory_may_lack_a_tokenizer(tmp_path, tiny):
    save_model(tiny, None, tmp_path)
    with pytest.raises(InputError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_tokenizer_larger_than_the_embedding_is_refused_and_padded_vocabularies_pass(tmp_path):
    tokenizer = train_tokenizer(["abc"] * 3, 270, ["<think>"])
    save_model(random_model(small_config(vocab_size=len(tokenizer) + 30)), tokenizer, tmp_path / "padded")
    assert len(load_tokenizer(tmp_path / "padded")) == len(tokenizer)
    save_model(random_model(small_config(vocab_size=len(tokenizer) - 1)), tokenizer, tmp_path / "short")
    with pytest.raises(InputError, match=f"ids up to {len(tokenizer) - 1}"):
        load_tokenizer(tmp_path / "short")


# ------------------------------------------------------------ the cache

@given(st.data())
@settings(max_examples=25, deadline=None)
def test_cached_equals_uncached_for_any_split_in_ragged_batches(tiny, data):
    """Rows join, take ragged chunks or single tokens in any order, are swapped, leave and are used again: always the logits of one full forward."""
    rows, texts = 4, random_ids(12, 90, seed=data.draw(st.integers(0, 99)))
    cache, owner, done = KVCache(tiny.config, rows, 80), [], {}                    # owner[row] = text; live rows at the front
    split = data.draw(st.sampled_from([0, 2 ** 9, 2 ** 16]))                       # every row attends alone, now and then several, all together
    fresh = iter(range(12))
    with torch.inference_mode(), mock.patch.object(model_file, "SPLIT", split):
        full = tiny.logits(tiny(texts))
        for _ in range(data.draw(st.integers(2, 9))):
            while len(owner) < rows and data.draw(st.booleans(), "join"):
                owner.append(next(fresh, 11))
                done[len(owner) - 1] = 0
            if not owner:
                continue
            n = [data.draw(st.sampled_from([0, 1, 1, 1, 2, 5, 17])) for _ in owner]
            n = [min(count, 80 - done[row]) for row, count in enumerate(n)]
            T = max(max(n), 1)
            ids = torch.stack([F.pad(texts[text, done[row]:done[row] + T], (0, max(0, done[row] + T - 90))) for row, text in enumerate(owner)])
            order = data.draw(st.permutations(range(len(owner))))
            out = tiny.logits(tiny(ids[order], cache=cache.select(order), lengths=None if n == [T] * len(owner) else [n[row] for row in order]))
            logits = torch.empty_like(out).index_copy_(0, torch.tensor(order), out)
            for row, text in enumerate(owner):
                if n[row]:
                    assert (logits[row, :n[row]] - full[text, done[row]:done[row] + n[row]]).abs().max() <= 1e-4
                done[row] += n[row]
            assert cache.lengths[:len(owner)].tolist() == cache.host_lengths[:len(owner)] == [done[row] for row in range(len(owner))]
            if data.draw(st.booleans(), "leave"):
                leaver = data.draw(st.integers(0, len(owner) - 1))
                last = len(owner) - 1
                cache.swap_rows(leaver, last)
                owner[leaver], done[leaver] = owner[last], done[last]
                cache.set_length(last, 0)
                owner.pop()


def test_prompt_prefilled_once_serves_several_rows(tiny):
    ids = random_ids(3, 30)
    ids[:, :12] = ids[0, :12]
    cache = KVCache(tiny.config, 3, 40)
    with torch.inference_mode():
        tiny(ids[:1, :12], cache=cache.select([0]))
        for row in (1, 2):
            cache.copy_row(0, row, 12)
        logits = tiny.logits(tiny(ids[:, 12:], cache=cache))
        assert (logits - tiny.logits(tiny(ids))[:, 12:]).abs().max() <= 1e-4
        cache.copy_row(0, 1, 5)                                                    # a shorter prefix over a longer row
        assert cache.host_lengths == [30, 5, 30] and cache.lengths.tolist() == [30, 5, 30]


def test_padding_never_overwrites_a_full_row(tiny):
    """Row 0 is at capacity while row 1 takes a chunk: row 0's padded writes must land nowhere."""
    ids = random_ids(2, 127)
    cache = KVCache(tiny.config, 2, 127)
    with torch.inference_mode():
        tiny(ids[:, :126], cache=cache, lengths=[126, 10])
        chunk = torch.stack((F.pad(ids[0, 126:], (0, 19)), ids[1, 10:30]))
        logits = tiny.logits(tiny(chunk, cache=cache, lengths=torch.tensor([1, 20])))
        full = tiny.logits(tiny(ids))
        assert (logits[0, 0] - full[0, 126]).abs().max() <= 1e-4 and (logits[1] - full[1, 10:30]).abs().max() <= 1e-4
        last = tiny.logits(tiny(torch.stack((ids[0, :1], ids[1, 30:31])), cache=cache, lengths=[0, 1]))
        assert (last[1, 0] - full[1, 30]).abs().max() <= 1e-4
        cache.set_length(1, 0)
        keys = cache.data[:, :, 0, :, :127].clone()
        tiny(ids[:1, :1], cache=cache.select([1]))
        assert torch.equal(keys, cache.data[:, :, 0, :, :127])                     # the other rows are not touched


def test_padding_beyond_the_cache_is_masked_as_a_late_position_and_spoils_nothing(tiny):
    """Row 0 is full: its padding has positions up to twice the cache's. A row of -inf there could become NaN, which the slot for padding would keep."""
    cache, ids = KVCache(tiny.config, 2, 31), random_ids(2, 31)
    with torch.inference_mode():
        tiny(ids[:1, :30], cache=cache.select([0]))
        _, positions = cache.begin(31, [1, 31])                                 # (2, 31)
        unseen = torch.arange(32) > positions[:, None, :, None]
        masks = torch.cat([mask for _, mask in cache.blocks])                   # (2, 1, group * 31, 32)
        assert torch.equal(masks, torch.where(unseen, -torch.inf, 0.0).repeat(1, 1, cache.group, 1))
        hidden = tiny(torch.stack((F.pad(ids[0, 30:], (0, 30)), ids[1])), cache=cache, lengths=[1, 31])
        assert (tiny.logits(hidden[0, :1]) - tiny.logits(tiny(ids[:1]))[0, 30:]).abs().max() <= 1e-4
        assert (tiny.logits(hidden[1]) - tiny.logits(tiny(ids[1:]))[0]).abs().max() <= 1e-4


def test_cache_refuses_more_than_it_holds(tiny):
    cache = KVCache(tiny.config, 2, 10)
    tiny(random_ids(2, 8), cache=cache)
    for lengths, rows in ((None, 2), ([1, 3], 2), ([2], 2), ([5, 1], 2)):
        with pytest.raises(ValueError, match="cannot take"):
            tiny(random_ids(rows, 4), cache=cache, lengths=lengths)
    assert cache.host_lengths == [8, 8]


def test_a_selection_shares_memory_and_attention_reads_a_bucket_only(tiny, monkeypatch):
    cache, seen = KVCache(tiny.config, 6, 1000), []
    two = cache.select([2, 3])
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *o, **m: seen.append((k.shape[2], k.data_ptr())) or attend(q, k, v, *o, **m))
    with torch.inference_mode():
        tiny(random_ids(2, 70), cache=two)
        tiny(random_ids(2, 2), cache=two)
    assert [length for length, _ in seen] == [70, 70, 80, 80]
    assert seen[2][1] == cache.data[0, 0, 2:].data_ptr()                           # no copy of the cache
    assert cache.host_lengths == cache.lengths.tolist() == [0, 0, 72, 72, 0, 0]


def test_rows_attend_in_blocks_of_neighbours_of_like_length(tiny, monkeypatch):
    """As far as the longest row of each block, not of all; and what the blocks are changes nothing."""
    held, ids = [100, 99, 20, 40, 90], random_ids(6, 101)
    reads, logits = {}, {}
    attend = F.scaled_dot_product_attention
    for split in (0, 2 ** 10, 2 ** 30):
        monkeypatch.setattr(model_file, "SPLIT", split)
        cache = KVCache(tiny.config, 6, 120)
        with torch.inference_mode():
            tiny(ids, cache=cache, lengths=[100, 99, 20, 40, 90, 90])
            seen = reads[split] = []
            monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *o, **m: seen.append((len(k), k.shape[2])) or attend(q, k, v, *o, **m))
            rows = [0, 1, 2, 3, 5]                                                  # row 4 is a gap
            logits[split] = tiny.logits(tiny(torch.stack([ids[row, n:n + 1] for row, n in zip(rows, held)]), cache=cache.select(rows)))
            monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    layers = tiny.config.num_hidden_layers
    assert reads[0] == [(1, 112), (1, 112), (1, 32), (1, 48), (1, 96)] * layers
    assert reads[2 ** 10] == [(2, 112), (2, 48), (1, 96)] * layers and reads[2 ** 30] == [(4, 112), (1, 96)] * layers
    with torch.inference_mode():
        alone = torch.cat([tiny.logits(tiny(ids[row:row + 1, :n + 1]))[:, -1:] for row, n in zip(rows, held)])
    assert all((found - alone).abs().max() <= 1e-4 for found in logits.values())


def test_sampling_first_does_not_spoil_training(tiny):
    """The table of rotations that a rollout grows in inference mode must be usable in the update."""
    model = random_model(small_config())
    with torch.inference_mode():
        model(random_ids(1, 20), cache=KVCache(model.config, 1, 20))
    model(random_ids(1, 20)).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "lm_head" not in name)
    hidden = model(random_ids(1, 20), cache=KVCache(model.config, 1, 20))
    assert not hidden.requires_grad and model.rope_table.is_inference() is False


# ------------------------------------------------------------ training forward

def test_a_row_gives_the_same_numbers_whatever_stands_beside_and_after_it(tiny):
    ids = random_ids(1, 11)
    batch = torch.cat((F.pad(ids, (0, 20)), random_ids(2, 31, seed=1)))
    assert (tiny(batch)[0, :11] - tiny(ids)[0]).abs().max() <= 1e-5
    assert torch.equal(tiny(batch), tiny(batch))


def test_segments_do_not_see_each_other_and_restart_positions(tiny):
    first, second, third = random_ids(1, 7), random_ids(1, 12, seed=1), random_ids(1, 5, seed=2)
    segments = torch.tensor([[4] * 7 + [9] * 12 + [0] * 5])
    packed = tiny(torch.cat((first, second, third), 1), segments=segments)
    assert (packed[:, :7] - tiny(first)).abs().max() <= 1e-5
    assert (packed[:, 7:19] - tiny(second)).abs().max() <= 1e-5
    assert (packed[:, 19:] - tiny(third)).abs().max() <= 1e-5


def test_checkpointing_gives_the_same_gradients():
    model, ids = random_model(small_config()), random_ids(2, 15)
    gradients = []
    for model.checkpointing in (False, True):
        model.zero_grad()
        model(ids).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.layers.parameters()])
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(*gradients))


@pytest.mark.parametrize("name, millions", [("tiny-1m", 1), ("tiny-5m", 5)])
def test_presets_have_the_size_of_their_name_and_start_at_uniform_loss(name, millions):
    torch.manual_seed(0)
    model = Transformer(PRESETS[name])
    assert 0.9 * millions <= sum(p.numel() for p in model.parameters()) / 1e6 <= 1.2 * millions
    ids = random_ids(2, 64, vocab=512)
    assert abs(F.cross_entropy(model.logits(model(ids))[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) - torch.log(torch.tensor(512.0))) < 0.2


# ------------------------------------------------------------ log-probabilities of trained tokens

def plain_logprobs(hidden, weight, targets, mask, temperature):
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    return (logp.gather(-1, targets[..., None])[..., 0] * mask, -(logp.exp() * logp).sum(-1) * mask)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_token_logprobs_equals_log_softmax_in_value_and_gradient(tied, entropy, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(model_file, "CHUNK", 16)                                   # several chunks and a remainder
    model = random_model(small_config(tie_word_embeddings=tied), dtype=dtype)
    ids, mask = random_ids(3, 25), torch.rand(3, 25, generator=torch.Generator().manual_seed(1)) < 0.6
    targets, weights = ids.roll(-1, 1), torch.randn(2, 3, 25, generator=torch.Generator().manual_seed(2), dtype=dtype)
    results = []
    for function in (model.token_logprobs, lambda h, t, m, temperature, **_: plain_logprobs(h, model.head_weight, t, m, temperature)):
        model.zero_grad()
        out = function(model(ids), targets, mask, temperature=0.7, entropy=entropy)
        out = out if isinstance(out, tuple) else (out,)
        sum((o * w).mean() for o, w in zip(out, weights[:1 + entropy])).backward()
        results.append((out[0], *out[1:1 + entropy], *(p.grad.clone() for p in model.parameters())))
    assert results[0][0].dtype == dtype and (results[0][0][~mask] == 0).all()
    assert all((a - b).abs().max() <= tolerance for a, b in zip(*results))


def test_token_logprobs_of_a_bf16_model_come_from_fp32_logits():
    model = random_model(small_config(), dtype=torch.bfloat16)
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.bool)
    hidden = model(ids)
    exact = plain_logprobs(hidden.double(), model.head_weight.double(), ids, mask, 1.0)[0]
    logprobs = model.token_logprobs(hidden, ids, mask)
    assert logprobs.dtype == model.logits(hidden).dtype == torch.float32 and (logprobs - exact).abs().max() <= 1e-5
    logprobs.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16


def test_token_logprobs_without_any_trained_token(tiny):
    tiny.zero_grad()
    logprobs = tiny.token_logprobs(tiny(random_ids(2, 6)), random_ids(2, 6), torch.zeros(2, 6, dtype=torch.bool))
    (logprobs.sum() * 0).backward()
    assert logprobs.shape == (2, 6) and all((p.grad == 0).all() for p in tiny.parameters())
    tiny.zero_grad()


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.elements = max([self.elements] + [t.numel() for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)])
        return out


def test_logits_of_all_tokens_never_exist_forward_or_backward():
    """The largest tensor holds CHUNK positions (or the head's own gradient), however many positions there are."""
    vocab, positions = 1000, 4 * CHUNK
    model = random_model(small_config(vocab_size=vocab, tie_word_embeddings=True))
    hidden = torch.randn(2, positions // 2, 48, requires_grad=True)
    with LargestTensor() as largest:
        model.token_logprobs(hidden, random_ids(2, positions // 2, vocab=vocab), torch.ones(2, positions // 2, dtype=torch.bool)).sum().backward()
    assert largest.elements == CHUNK * vocab and hidden.grad.abs().sum() > 0


@pytest.mark.long
def test_token_logprobs_under_fsdp2_gives_the_gradients_of_one_process(tmp_path):
    script = '''
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
sys.path.insert(0, sys.argv[1])
from hf import end_process
from model import *
dist.init_process_group("gloo")
rank = dist.get_rank()
for tied in (True, False):
    config = ModelConfig(97, 48, 80, 2, 4, 2, 16, tie_word_embeddings=tied)
    torch.manual_seed(0); model = Transformer(config)
    torch.manual_seed(0); plain = Transformer(config)
    for layer in model.layers: fully_shard(layer)
    fully_shard(model)
    register_fsdp_forward_method(model, "token_logprobs")
    ids = torch.randint(0, 97, (4, 20), generator=torch.Generator().manual_seed(1))
    mask = ids % 3 > 0
    plain.token_logprobs(plain(ids), ids.roll(-1, 1), mask).sum().backward()
    for half in (0, 1):         # two micro-batches of one row a rank
        rows = slice(2 * half + rank, 2 * half + rank + 1)
        model.token_logprobs(model(ids[rows]), ids[rows].roll(-1, 1), mask[rows]).sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        gap = (p.grad.full_tensor() * 2 - q.grad).abs().max().item()
        assert gap < 1e-4, (tied, name, gap)
print("rank", rank, "equal")
dist.destroy_process_group()
end_process(0)
'''
    (tmp_path / "run.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "run.py"), ROOT]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=110)
    assert run.returncode == 0 and run.stdout.count("equal") == 2, run.stderr[-2000:]


@pytest.mark.long
def test_the_same_weights_under_torch_compile(tiny):
    if not shutil.which("g++"):
        pytest.skip("torch.compile on a CPU needs a C++ compiler (g++)")
    compiled, ids = torch.compile(tiny), random_ids(2, 33)
    assert (compiled(ids) - tiny(ids)).abs().max() <= 1e-4
    mask = torch.ones(2, 33, dtype=torch.bool)
    gradients = []
    for forward in (tiny, compiled):
        tiny.zero_grad()
        tiny.token_logprobs(forward(ids), ids, mask).mean().backward()
        gradients.append([p.grad.clone() for p in tiny.parameters()])
    tiny.zero_grad()
    assert all((a - b).abs().max() <= 1e-4 for a, b in zip(*gradients))


# ------------------------------------------------------------ tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["<think>the capital of France is Paris</think><answer>Paris 1234</answer>"] * 20, 320, TAGS)


def test_a_name_has_the_same_tokens_after_a_space_and_after_a_tag(tokenizer):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    for name in ("Paris", "Suriname", "Åland", "New York"):
        assert ids(f"<think>{name}")[1:] == ids(f"is {name}")[-len(ids(name)):] == ids(name), name


def test_tags_are_atomic_digits_single_and_the_end_is_the_only_special(tokenizer):
    assert tokenizer.tokenize("<think>Paris is 1234</think>")[0] == "<think>" and tokenizer.tokenize("a</think>b")[1] == "</think>"
    assert [token for token in tokenizer.tokenize("in 1234") if token.isdigit()] == list("1234")
    assert tokenizer.all_special_tokens == ["<|endoftext|>"] and tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.decode(tokenizer("<think>x</think>").input_ids, skip_special_tokens=True) == "<think>x</think>"
    assert len(tokenizer) <= 320 and max(tokenizer.get_vocab().values()) == len(tokenizer) - 1
    assert len(tokenizer("Paris", add_special_tokens=True).input_ids) <= 2          # merges were learnt, nothing is added


def test_tokenizer_is_the_same_for_the_same_texts_and_survives_saving(tokenizer, tmp_path, tiny):
    again = train_tokenizer(["<think>the capital of France is Paris</think><answer>Paris 1234</answer>"] * 20, 320, TAGS)
    assert again.get_vocab() == tokenizer.get_vocab()
    save_model(random_model(small_config(vocab_size=320)), tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "<think>Zürich 99\n</think> <|endoftext|>"
    assert loaded(text).input_ids == tokenizer(text).input_ids and loaded.eos_token_id == tokenizer.eos_token_id
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"   # transformers 4 knows it


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text


# ------------------------------------------------------------ errors end a script with one line

@pytest.mark.parametrize("statement, code, line", [
    ("raise InputError('tasks.jsonl:3: field answer: expected a string')", 2, "error: tasks.jsonl:3: field answer: expected a string"),
    ("import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\nraise InputError('with ranks')", 2, "error: with ranks"),
    ("from torch.distributed.checkpoint.api import CheckpointException\nraise CheckpointException('saving', {0: (KeyboardInterrupt(), None)})", 130, ""),
    ("from torch.distributed.checkpoint.api import CheckpointException\nraise CheckpointException('saving', {0: (OSError('full'), None)})", 1, None),
    ("raise KeyboardInterrupt", 130, ""), ("raise RuntimeError('bug')", 1, None), ("print('fine')", 0, "")])
def test_exit_on_input_error(statement, code, line):
    program = (f"import sys; sys.path.insert(0, {ROOT!r}); from hf import exit_on_input_error, InputError\n"
               f"exit_on_input_error()\nimport atexit; atexit.register(print, 'cleaned up')\n{statement}")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == code and "cleaned up" in run.stdout
    assert run.stderr.strip() == line if line is not None else "Traceback" in run.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_process_ends_with_its_code_even_where_nothing_can_be_written():
    program = f"import sys; sys.path.insert(0, {ROOT!r}); from hf import *\nexit_on_input_error()\nprint('out')\n"
    for end, code in (("end_process(0)", 120), ("raise InputError('x')", 2), ("raise KeyboardInterrupt", 130)):
        with open("/dev/full", "w") as full:
            run = subprocess.run([sys.executable, "-c", program + end], stdout=full, stderr=full, env=os.environ | {"PYTHONUNBUFFERED": ""})
        assert run.returncode == code, end


def test_importing_the_model_has_no_effect(tmp_path):
    run = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {ROOT!r}); hook = sys.excepthook; import model; "
                          "assert sys.excepthook is hook and 'transformers' not in sys.modules"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0 and run.stdout == run.stderr == "" and not list(tmp_path.iterdir())


# ------------------------------------------------------------ a real checkpoint

@needs_smollm2
@pytest.mark.long
def test_smollm2_logits_equal_transformers_and_greedy_text_is_sensible():
    ours, theirs, tokenizer = load_model(SMOLLM2), hf_model(SMOLLM2), load_tokenizer(SMOLLM2)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    with torch.inference_mode():
        exact = hf_model(SMOLLM2).double()(ids).logits          # in fp32 transformers itself rounds by nearly the bound
        assert (ours.logits(ours(ids)) - exact).abs().max() <= 1e-4
        double = load_model(SMOLLM2, torch.float64)
        assert (double.logits(double(ids)) - exact).abs().max() <= 5e-5
        cache, new = KVCache(ours.config, 1, 100), ids
        for _ in range(9):
            logits = ours.logits(ours(new, cache=cache)[:, -1])
            new = logits.argmax(-1)[:, None]
            ids = torch.cat((ids, new), 1)
        assert (logits - theirs(ids[:, :-1]).logits[:, -1]).abs().max() <= 1e-4
    assert "The capital of France is Paris." in tokenizer.decode(ids[0])


@needs_smollm2
@pytest.mark.long
def test_smollm2_loads_and_saves_byte_equal(tmp_path):
    tokenizer = load_tokenizer(SMOLLM2)
    save_model(load_model(SMOLLM2, torch.bfloat16), tokenizer, tmp_path)
    with open(tmp_path / "model.safetensors", "rb") as a, open(os.path.join(SMOLLM2, "model.safetensors"), "rb") as b:
        assert a.read() == b.read()
    again = load_tokenizer(tmp_path)
    assert again.chat_template == tokenizer.chat_template and again.tokenize("12 <think>") == tokenizer.tokenize("12 <think>")


# ------------------------------------------------------------ data/smollm2.py, without its download

def test_smollm2_script_names_the_package_it_needs():
    program = f"import sys, runpy; sys.modules['gguf'] = None; runpy.run_path({os.path.join(ROOT, 'data', 'smollm2.py')!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr == "error: the package that reads GGUF files is missing: pip install gguf\n"


def test_smollm2_script_restores_the_order_of_q_and_k_rows(monkeypatch):
    quants = types.ModuleType("gguf.quants")
    quants.dequantize = lambda data, kind: data
    monkeypatch.setitem(sys.modules, "gguf.quants", quants)
    read_weights = runpy.run_path(os.path.join(ROOT, "data", "smollm2.py"))["read_weights"]
    model = random_model(small_config(model_type="llama", tie_word_embeddings=True), dtype=torch.bfloat16)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
             "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm"}
    tensors = []
    for name, weight in model.state_dict().items():
        *place, module = re.fullmatch(r"(?:layers\.(\d+)\.)?(.*)\.weight", name).groups()
        if module in ("self_attn.q_proj", "self_attn.k_proj"):                    # what llama.cpp's converter does
            heads = len(weight) // model.config.head_dim
            weight = weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        name = (f"blk.{place[0]}." if place[0] else "") + names[module] + ".weight"
        tensors.append(types.SimpleNamespace(name=name, data=weight.float().numpy(), tensor_type=None))
    state = read_weights(tensors, model.config)
    assert state.keys() == model.state_dict().keys() and all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
