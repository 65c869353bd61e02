"""The language model that plays every agent: one hand-written decoder for the Llama, Qwen2/2.5 and Qwen3 families.

Pre-norm RMSNorm (arXiv 1910.07467), rotary positions (2104.09864; Llama-3 scaling; YaRN, 2309.00071), grouped-query attention
(2305.13245), SwiGLU (2002.05202), optional QKV bias (Qwen2), QK-norm (Qwen3). Parameters carry the Hugging Face names, so
weights go in and out unchanged and what is saved here is read by `transformers` and vLLM as if those had written it.

Chain-of-Agents (arXiv 2508.13167) asks three things of a model that a plain decoder does not give:
- rows with their own lengths: a rollout appends an observation of 40 tokens to one row while another decodes a single one.
  Rows are right-padded and a token's position is its row's own length, so there is no left padding and no position argument;
- a key-value cache that outlives a tool call (`KVCache`): rows are copied, swapped and released without moving the others;
- log-probabilities of the trained tokens only (`token_logprobs`): [B, T, V] never exists, forward or backward.

Left out: sliding-window attention, mixture of experts, dropout, CUDA graphs. A checkpoint that needs one is refused by name.

    model = load_model("Qwen/Qwen2.5-7B-Instruct", torch.bfloat16, "cuda")     # or any directory; PRESETS for small new models
    logits = model.logits(model(ids))                                          # ids (B, T) -> fp32 (B, T, V)
"""
import copy
import json
import math
import os
import re
import shutil
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
BUCKET = 64          # a decode step attends to the longest row's length rounded up to this
CHUNK = 1024         # positions whose logits exist at one time in token_logprobs
SHARD_BYTES = 5e9    # save_model starts a new file beyond this


class InputError(ValueError):
    """Something the user gave is wrong. One line: file, line or field, and what was expected."""


def exit_on_input_error():
    """Let a script end with one line and exit code 2 on InputError, quietly with 130 on Ctrl-C; other errors keep their traceback."""
    def hook(kind, error, trace):
        if issubclass(kind, InputError):
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        if issubclass(kind, KeyboardInterrupt):
            os._exit(130)
        sys.__excepthook__(kind, error, trace)
    sys.excepthook = hook


@dataclass
class ModelConfig:
    """The fields of a Hugging Face config.json that shape the computation; `extra` keeps the others for saving."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None        # None, or {"rope_type": "llama3" | "yarn", "factor": ..., ...}
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    model_type: str = "qwen3"
    extra: dict = field(default_factory=dict)

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        """Read a config.json dict, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`). InputError names what is not supported."""
        if hf.get("model_type") not in FAMILIES:
            raise InputError(f"config.json: model_type {hf.get('model_type')!r} is not supported, expected one of {', '.join(FAMILIES)}")
        plain = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "attention_dropout": 0,
                 "partial_rotary_factor": 1, "quantization_config": None, "pretraining_tp": 1}
        for key, only in plain.items():
            if hf.get(key, only) not in (only, None):
                raise InputError(f"config.json: {key} = {hf[key]!r} is not supported, expected {only!r}")
        if set(hf.get("layer_types") or ()) - {"full_attention"}:
            raise InputError(f"config.json: layer_types {sorted(set(hf['layer_types']))} are not supported, expected full_attention only")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in needed if not isinstance(hf.get(key), int)]:
            raise InputError(f"config.json: {missing[0]} = {hf.get(missing[0])!r}, expected an integer")
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", hf.get("rope_theta", 10000.0))
        rope["rope_type"] = rope.pop("type", "default") if "rope_type" not in rope else rope["rope_type"]
        rope_frequencies(rope, theta, 8, hf.get("max_position_embeddings", 2048))   # refuses an unknown type
        own = {f.name for f in fields(cls)} | {"rope_parameters", "dtype", "torch_dtype", "architectures"}
        return cls(
            **{key: hf[key] for key in needed},
            num_key_value_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6), rope_theta=theta,
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            max_position_embeddings=hf.get("max_position_embeddings", 2048),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            attention_bias=hf["model_type"] == "qwen2" or hf.get("attention_bias", False),
            model_type=hf["model_type"], extra={key: value for key, value in hf.items() if key not in own})

    def to_hf(self) -> dict:
        """The config.json dict, in the spelling that transformers 4, transformers 5 and vLLM all read."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return {"architectures": [FAMILIES[self.model_type]], "hidden_act": "silu", "attention_dropout": 0.0, **self.extra, **own}


PRESETS = {   # for training from scratch: dataclasses.replace(PRESETS[name], vocab_size=len(tokenizer))
    "tiny-1m": ModelConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=5, num_attention_heads=4,
                           num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    "tiny-5m": ModelConfig(vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
                           num_key_value_heads=4, head_dim=32, tie_word_embeddings=True),
}


# ---------------------------------------------------------------- the model, from the whole to its parts

class Transformer(nn.Module):
    """ids in, final hidden states out; `logits` and `token_logprobs` are the two ways through the head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.generation_config: dict = {}        # generation_config.json, kept for saving
        self.checkpointing = False               # True: training recomputes each block in backward
        self.rope_table = torch.empty(0, 0)      # cos and sin, grown on demand; not a buffer, so that it survives meta init and .to(bf16)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module):
        """Variance-preserving: std 1/sqrt(fan_in), smaller by sqrt(2 L) where a block writes into the residual stream."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Block):
            for out in (module.self_attn.o_proj, module.mlp.down_proj):
                nn.init.normal_(out.weight, std=(2 * self.config.num_hidden_layers * out.in_features) ** -0.5)

    def forward(self, ids: Tensor, cache: "KVCache | None" = None, lengths=None, segments: Tensor | None = None) -> Tensor:
        """ids (B, T) -> hidden (B, T, D) after the final norm. Rows are right-padded; what stands at padded positions means nothing.

        cache: B rows (see `KVCache.view`); row b's new tokens are written and positioned after what it holds, no gradient.
        lengths: how many of the T tokens of each row are real, as a list or a CPU tensor (B,); None = all. Only a cache needs it:
            without one, causal attention already keeps real tokens from seeing the padding on their right.
        segments (B, T): several texts in a row; attention stays within equal ids, positions restart at each. Not with a cache.
        """
        B, T = ids.shape
        x = self.embed_tokens(ids)                                              # (B, T, D)
        mask = None                                                             # None = causal over the T new tokens
        if cache is not None:
            positions, mask = cache.begin(T, lengths, x.dtype)                  # (B, T), None or (B, 1, T, S)
            cos, sin = self.rope(cache.reach + T, x)[:, positions]              # (B, T, 1, head_dim) each
        elif segments is not None:
            column = torch.arange(T, device=ids.device)
            first = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0)) * column
            cos, sin = self.rope(T, x)[:, column - first.cummax(1).values]
            mask = ((segments[:, :, None] == segments[:, None, :]) & (column[:, None] >= column))[:, None]   # (B, 1, T, T)
        else:
            cos, sin = self.rope(T, x)[:, :T]                                   # (T, 1, head_dim) each
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            for layer in self.layers:
                if self.checkpointing and torch.is_grad_enabled():
                    x = checkpoint(layer, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = layer(x, cos, sin, mask, cache)
        if cache is not None:
            cache.advance(T, lengths)
        return self.norm(x)

    @property
    def head_weight(self) -> Tensor:                                            # (V, D)
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V), fp32 (float64 for a float64 model)."""
        return matmul_fp32(hidden.reshape(-1, hidden.shape[-1]), self.head_weight.T).view(*hidden.shape[:-1], -1)

    def token_logprobs(self, hidden: Tensor, targets: Tensor, mask: Tensor, temperature: float = 1.0, entropy: bool = False):
        """log p(targets[b, t] | hidden[b, t]) -> (B, T), fp32 or float64, 0 where mask is False; nats.

        hidden (B, T, D); targets (B, T): the token that follows position t (the caller shifts); mask (B, T) bool: trained positions.
        Logits are divided by temperature first. entropy=True: also the entropy of each distribution, (B, T), differentiable too.
        Under FSDP2: `register_fsdp_forward_method(model, "token_logprobs")`, because the head's weight is read here.
        """
        results = TokenLogprobs.apply(hidden[mask], self.head_weight, targets[mask], temperature, entropy)
        spread = [torch.zeros(mask.shape, dtype=r.dtype, device=r.device).masked_scatter(mask, r) for r in results if r is not None]
        return tuple(spread) if entropy else spread[0]

    def rope(self, length: int, like: Tensor) -> Tensor:
        """cos and signed sin of every position below `length`, at least: (2, length, 1, head_dim) in like's dtype and device."""
        if self.rope_table.device != like.device or self.rope_table.shape[1] < length:
            c, size = self.config, 1 << max(length - 1, 255).bit_length()
            with torch.inference_mode(False), torch.no_grad():
                frequencies, scale = rope_frequencies(c.rope_scaling or {}, c.rope_theta, c.head_dim, c.max_position_embeddings)
                angles = torch.outer(torch.arange(size, dtype=torch.float32), frequencies)     # (size, head_dim / 2)
                cos, sin = angles.cos() * scale, angles.sin() * scale
                table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))   # (2, size, head_dim)
                self.rope_table = table[:, :, None].to(like.device)
        return self.rope_table.to(like.dtype)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, mask=None, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        D, H, KV, bias = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(D, H * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(D, KV * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(D, KV * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(H * config.head_dim, D, bias=bias and config.model_type != "qwen2")
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, cos, sin, mask, cache):
        B, T, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)), cos, sin)     # (B, T, H, head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim)), cos, sin)     # (B, T, KV, head_dim)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)                                    # (B, T, KV, head_dim)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)                   # (B, heads, T, head_dim)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)                                           # (B, KV, S, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim/2]). x (B, T, heads, head_dim); sin carries the minus sign of its first half."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rope_frequencies(rope: dict, theta: float, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Radians per position of each pair, (head_dim / 2,) fp32, and the factor on cos and sin. rope: {} or a rope_scaling dict."""
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3", "yarn"):
        raise InputError(f"config.json: rope_type {kind!r} is not supported, expected default, llama3 or yarn")
    if absent := [key for key in {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}.get(kind, ()) if key not in rope]:
        raise InputError(f"config.json: rope_scaling of type {kind!r} lacks {absent[0]!r}")
    f = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "default":
        return f, 1.0
    factor, original = rope["factor"], rope.get("original_max_position_embeddings") or max_positions
    if kind == "llama3":        # long wavelengths are stretched by `factor`, short ones kept, a linear blend between
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((original * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return f / factor * (1 - keep) + f * keep, 1.0

    def pair_that_turns(times):   # YaRN eq. 17 f.: the (fractional) pair that makes `times` turns in the original context
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(by=1.0):
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0
    low, high = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    scale = rope.get("attention_factor")
    if scale is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        scale = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"]) if both else magnitude()
    return f / factor * (1 - keep) + f * keep, scale


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a (n, k) @ b (k, m), summed and returned in fp32 (float64 stays): half-precision inputs are exact, their products are not rounded."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype) @ b.to(dtype)


class TokenLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target], CHUNK positions at a time; backward recomputes each chunk's logits."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, entropy):     # (N, D), (V, D), (N,)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature = temperature
        logprobs, entropies = [], []
        for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            logits = matmul_fp32(h, weight.T).div_(temperature)          # (CHUNK, V)
            lse = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, t[:, None])[:, 0] - lse)
            if entropy:
                entropies.append(lse - (logits.sub(lse[:, None]).exp_().mul_(logits)).sum(-1))
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropies):                    # (N,), (N,) or None
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=grad_logprobs.dtype, device=weight.device)
        for i in range(0, len(hidden), CHUNK):
            rows = slice(i, i + CHUNK)
            h, t, g = hidden[rows], targets[rows, None], grad_logprobs[rows, None]
            logp = matmul_fp32(h, weight.T).div_(ctx.temperature)
            logp.sub_(logp.logsumexp(-1, keepdim=True))
            p = logp.exp()
            grad_logits = (p * -g).scatter_add_(1, t, g)                 # (CHUNK, V): one-hot minus p, times g
            if grad_entropies is not None:                               # dH/dlogit = -p (log p + H)
                H = -(p * logp).sum(-1, keepdim=True)
                grad_logits -= grad_entropies[rows, None] * p * (logp + H)
            grad_logits = grad_logits.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[rows] = matmul_fp32(grad_logits, weight).to(hidden.dtype)
            grad_weight += matmul_fp32(grad_logits.T, h)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


# ---------------------------------------------------------------- the key-value cache

class KVCache:
    """Keys and values of `rows` independent texts, each with its own length (at most max_len tokens).

    `lengths` (rows,) lives on the device; `host_lengths` mirrors it as a list, so that no step waits for the device.
    `view(a, b)` is rows a..b-1 as a cache of its own, sharing everything: keep the live rows at the front and decode on a view.
    """

    def __init__(self, config: ModelConfig, rows: int, max_len: int, dtype=torch.float32, device="cpu"):
        slots = -(-(max_len + 1) // BUCKET) * BUCKET      # at least one more than max_len: padding is written into the last
        self.data = torch.zeros(config.num_hidden_layers, 2, rows, config.num_key_value_heads, slots, config.head_dim,
                                dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.host_lengths, self.rows, self.max_len = [0] * rows, range(rows), max_len

    @property
    def bytes(self) -> int:
        return self.data.nbytes

    def view(self, start: int, stop: int) -> "KVCache":
        part = copy.copy(self)
        part.data, part.lengths, part.rows = self.data[:, :, start:stop], self.lengths[start:stop], self.rows[start:stop]
        return part

    def copy_row(self, src: int, dst: int, length: int):
        """Let row dst hold the first `length` tokens of row src (a prompt that several samples share)."""
        self.data[:, :, dst, :, :length] = self.data[:, :, src, :, :length]
        self.set_length(dst, length)

    def swap_rows(self, i: int, j: int):
        a, b = (self.host_lengths[self.rows[row]] for row in (i, j))
        held = self.data[:, :, i, :, :a].clone()
        self.data[:, :, i, :, :b] = self.data[:, :, j, :, :b]
        self.data[:, :, j, :, :a] = held
        self.set_length(i, b)
        self.set_length(j, a)

    def release(self, row: int):
        self.set_length(row, 0)

    def set_length(self, row: int, length: int):
        self.lengths[row] = length
        self.host_lengths[self.rows[row]] = length

    # The three steps of a forward pass: begin, append per layer, advance.

    def begin(self, T: int, lengths, dtype) -> tuple[Tensor, Tensor | None]:
        """Plan the writing of T new tokens a row: their positions (B, T), and the attention mask (B, 1, T, S) or None for plain causal."""
        held, device = [self.host_lengths[row] for row in self.rows], self.lengths.device
        new = [T] * len(held) if lengths is None else [int(n) for n in lengths]
        if len(new) != len(held) or max(map(sum, zip(held, new))) > self.max_len or max(new) > T:
            raise ValueError(f"cache of {len(held)} rows x {self.max_len} tokens cannot take {new} tokens onto {held}")
        self.reach = max(held)
        column = torch.arange(T, device=device)
        positions = self.lengths[:, None] + column                                        # (B, T)
        self.slots = positions
        if lengths is not None:
            real = column < torch.tensor(new, device=device)[:, None]
            self.slots = positions.where(real, self.data.shape[4] - 1)
        if self.reach == 0:
            return positions, None
        S = min(-(-(self.reach + T) // BUCKET) * BUCKET, self.data.shape[4])
        unseen = torch.arange(S, device=device) > positions[:, None, :, None]             # (B, 1, T, S)
        return positions, torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, -math.inf)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, KV, T, head_dim); return what attention reads, (B, KV, S, head_dim)."""
        keys, values = self.data[layer].unbind(0)                                         # (B, KV, slots, head_dim)
        row = torch.arange(len(k), device=k.device)[:, None]
        keys.transpose(1, 2)[row, self.slots] = k.transpose(1, 2)
        values.transpose(1, 2)[row, self.slots] = v.transpose(1, 2)
        if self.reach == 0:
            return k, v
        S = min(-(-(self.reach + k.shape[2]) // BUCKET) * BUCKET, self.data.shape[4])
        return keys[:, :, :S], values[:, :, :S]

    def advance(self, T: int, lengths):
        new = [T] * len(self.rows) if lengths is None else [int(n) for n in lengths]
        for row, n in zip(self.rows, new):
            self.host_lengths[row] += n
        self.lengths += T if lengths is None else torch.tensor(new, device=self.lengths.device)


# ---------------------------------------------------------------- Hugging Face directories in and out

def local_directory(path_or_name) -> Path:
    """A directory as it is; anything else is a hub id, fetched into the Hugging Face cache (weights as safetensors only)."""
    if Path(path_or_name).is_dir():
        return Path(path_or_name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(str(path_or_name), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"model {str(path_or_name)!r}: no such directory, and not to be had from the hub ({reason})") from error


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


def load_model(path_or_name, dtype: torch.dtype = torch.float32, device="cpu") -> Transformer:
    """Read a Hugging Face directory or hub id. Tensors go one by one to dtype and device; InputError lists all that do not fit."""
    from safetensors import safe_open
    path = local_directory(path_or_name)
    config = ModelConfig.from_hf(read_json(path / "config.json"))
    with torch.device("meta"):
        model = Transformer(config)
    expected = {hf_name(name): (name, list(tensor.shape)) for name, tensor in model.state_dict().items()}
    index = path / "model.safetensors.index.json"
    files = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    if absent := [name for name in files if not (path / name).exists()]:
        raise InputError(f"{path / absent[0]}: no such file")
    shapes = {}
    for file in files:
        with safe_open(path / file, "pt") as weights:
            shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}
    ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq")} | ({"lm_head.weight"} if config.tie_word_embeddings else set())
    wrong = [f"{name} is missing" for name in expected if name not in shapes]
    wrong += [f"{name} is not expected" for name in shapes if name not in expected and name not in ignored]
    wrong += [f"{name} is {shapes[name]}, expected {shape}" for name, (_, shape) in expected.items() if shapes.get(name, shape) != shape]
    if wrong:
        raise InputError(f"{path}: the weights do not fit config.json: {'; '.join(wrong)}")
    state = {}
    for file in files:
        with safe_open(path / file, "pt", device=str(device)) as weights:
            state |= {expected[name][0]: weights.get_tensor(name).to(dtype) for name in weights.keys() if name in expected}
    model.load_state_dict(state, assign=True)
    if (path / "generation_config.json").exists():
        model.generation_config = read_json(path / "generation_config.json")
    return model


def save_model(model: Transformer, tokenizer, path, state_dict: dict | None = None):
    """Write config, weights, generation config and tokenizer (may be None) as a Hugging Face directory, file by file atomically.

    state_dict: the full weights where the model's own are sharded over ranks (call it on one rank then).
    """
    from safetensors.torch import save_file
    state = {hf_name(name): tensor.detach().contiguous() for name, tensor in (state_dict or model.state_dict()).items()}
    shards, size = [{}], 0
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards, size = shards + [{}], 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    path = Path(path)
    new = path / ".writing"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))] if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards):
        save_file(shard, new / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        total = sum(tensor.nbytes for tensor in state.values())
        (new / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    generation = model.generation_config
    if tokenizer is not None:
        tokenizer.save_pretrained(new)
        generation = generation or {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (new / "generation_config.json").write_text(json.dumps(generation, indent=2))
    (new / "config.json").write_text(json.dumps({**model.config.to_hf(), "dtype": dtype, "torch_dtype": dtype}, indent=2))
    for stale in path.glob("model*.safetensors*"):
        if not (new / stale.name).exists():
            stale.unlink()
    for file in new.iterdir():
        os.replace(file, path / file.name)
    new.rmdir()


def hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else "model." + name


def load_tokenizer(path_or_name):
    """The directory's or hub id's tokenizer. InputError where there is none, or where it has more tokens than the embedding has rows."""
    from transformers import AutoTokenizer
    path = local_directory(path_or_name)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(f"{path}: holds no tokenizer (tokenizer.json)")
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = read_json(path / "config.json").get("vocab_size") if (path / "config.json").exists() else None
    if rows is not None and max(tokenizer.get_vocab().values()) >= rows:
        raise InputError(f"{path}: the tokenizer has ids up to {max(tokenizer.get_vocab().values())}, the embedding only {rows} rows")
    return tokenizer


def train_tokenizer(texts, vocab_size: int, tags):
    """Byte-level BPE of vocab_size tokens for a from-scratch model: every byte, single digits, and each of `tags` as one token.

    texts: an iterable of str. tags: literal strings such as "<think>" and "</think>"; ordinary text, so never "special".
    The one special token is <|endoftext|>: end of text, and padding.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(tags), special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    split = re.compile("|".join(map(re.escape, tags)) or "(?!)")
    tokenizer.train_from_iterator((piece for text in texts for piece in split.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
