"""The language model that plays every agent: one hand-written decoder for the Llama, Qwen2/2.5 and Qwen3 families.

Pre-norm RMSNorm (arXiv 1910.07467), rotary positions (2104.09864; Llama-3 scaling; YaRN, 2309.00071), grouped-query attention
(2305.13245), SwiGLU (2002.05202), optional QKV bias (Qwen2), QK-norm (Qwen3). Parameters carry the Hugging Face names, so
weights go in and out unchanged and what is saved here is read by `transformers` and vLLM as if those had written it.

Chain-of-Agents (arXiv 2508.13167) asks three things of a model that a plain decoder does not give:
- rows with their own lengths: a rollout appends an observation of 40 tokens to one row while another decodes a single one.
  Rows are right-padded and a token's position is its row's own length, so there is no left padding and no position argument;
- a key-value cache that outlives a tool call (`KVCache`): rows are copied, swapped and freed without moving the others;
- log-probabilities of the trained tokens only (`token_logprobs`): [B, T, V] never exists, forward or backward.

Left out: sliding-window attention, mixture of experts, dropout, CUDA graphs. A checkpoint that needs one is refused by name.

    model = load_model("Qwen/Qwen2.5-7B-Instruct", torch.bfloat16, "cuda")     # or any directory; PRESETS for small new models
    logits = model.logits(model(ids))                                          # ids (B, T) -> fp32 (B, T, V)
"""
import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hf import ModelConfig, load_tokenizer, local_directory, read_json, read_tensors, write_directory  # noqa: F401 (load_tokenizer: its place is beside load_model)

BUCKET = 16     # attention reads the cache to a multiple of this
SPLIT = 2 ** 16 # on a CPU: what one more call of attention costs, in products of a query with a key, times head_dim, done meanwhile
CHUNK = 512     # positions whose logits exist at one time in token_logprobs

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
        self.rope_table = torch.empty(0, 0)      # cos and sin, grown on demand; no buffer: meta init and .to(bf16) must not touch it
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():       # variance-preserving; blocks write small into the residual stream
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                blocks = 2 * config.num_hidden_layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=0.02 if name == "embed_tokens.weight" else (blocks * parameter.shape[1]) ** -0.5)

    def forward(self, ids: Tensor, cache: "KVCache | None" = None, lengths=None, segments=None) -> Tensor:
        """ids (B, T) -> hidden (B, T, D) after the final norm. Rows are right-padded; what stands at padded positions means nothing.

        cache: B rows (see `KVCache.select`); row b's new tokens are written and positioned after what it holds. No gradient then.
        lengths: how many of the T tokens of each row are real, as a list or a CPU tensor (B,); None = all. Only a cache needs it:
            without one, causal attention already keeps real tokens from seeing the padding on their right.
        segments (B, T): several texts in a row; attention stays within equal ids, positions restart at each. Not with a cache.
        """
        B, T = ids.shape
        x = self.embed_tokens(ids)                                          # (B, T, D)
        length, positions, mask = T, slice(T), None                         # mask None: causal over the T new tokens
        if cache is not None:
            length, positions = cache.begin(T, lengths)
        elif segments is not None:
            t = torch.arange(T, device=ids.device)
            starts = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0)) * t
            positions = t - starts.cummax(1).values                         # (B, T)
            mask = ((segments[:, :, None] == segments[:, None, :]) & (t[:, None] >= t))[:, None]   # (B, 1, T, T)
        cos, sin = self.rope(length, ids.device)[:, positions].to(x.dtype)  # (B or none, T, 1, head_dim) each
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            for layer in self.layers:
                if self.checkpointing and torch.is_grad_enabled():
                    x = checkpoint(layer, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = layer(x, cos, sin, mask, cache)
            x = self.norm(x)
        if cache is not None:
            cache.advance()
        return x

    @property
    def head_weight(self) -> Tensor:                                            # (V, D)
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V), fp32 (float64 for a float64 model)."""
        return matmul_fp32(hidden.reshape(-1, hidden.shape[-1]), self.head_weight.T).view(*hidden.shape[:-1], -1)

    def token_logprobs(self, hidden: Tensor, targets: Tensor, mask: Tensor, temperature=1.0, entropy=False):
        """log p(targets[b, t] | hidden[b, t]) -> (B, T), fp32 or float64, 0 where mask is False; nats.

        hidden (B, T, D); targets (B, T): the token that follows position t (the caller shifts); mask (B, T) bool: trained positions.
        Logits are divided by temperature first. entropy=True: also the entropy of each distribution, (B, T), differentiable too.
        Under FSDP2: `register_fsdp_forward_method(model, "token_logprobs")`, because the head's weight is read here.
        """
        results = TokenLogprobs.apply(hidden[mask], self.head_weight, targets[mask], temperature, entropy)
        spread = [torch.zeros(mask.shape, dtype=r.dtype, device=r.device).masked_scatter(mask, r) for r in results if r is not None]
        return tuple(spread) if entropy else spread[0]

    def rope(self, length: int, device) -> Tensor:
        """cos and signed sin of the positions 0 .. length - 1 (or beyond), fp32: (2, length, 1, head_dim)."""
        if self.rope_table.device != device or self.rope_table.shape[1] < length:
            with torch.inference_mode(False), torch.no_grad():
                frequencies, scale = rope_frequencies(self.config)
                size = 1 << max(length - 1, 255).bit_length()
                angles = torch.outer(torch.arange(size, dtype=torch.float32), frequencies)      # (size, head_dim / 2)
                cos, sin = angles.cos() * scale, angles.sin() * scale
                table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))    # (2, size, head_dim)
                self.rope_table = table[:, :, None].to(device)
        return self.rope_table


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
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
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps) if config.model_type == "qwen3" else nn.Identity()
                                    for _ in range(2))

    def forward(self, x, cos, sin, mask, cache):
        B, T, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)), cos, sin).transpose(1, 2)    # (B, H, T, head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim)), cos, sin).transpose(1, 2)    # (B, KV, T, head_dim)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)                                   # (B, KV, T, head_dim)
        blocks = cache.append(self.layer, k, v) if cache is not None else []
        if blocks:      # queries that share a key head become one longer query: (B, KV, H / KV * T, head_dim)
            q = q.reshape(B, k.shape[1], -1, self.head_dim).split([len(keys) for keys, _, _ in blocks])
            y = torch.cat([F.scaled_dot_product_attention(part, *block) for part, block in zip(q, blocks)])
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(y.reshape(B, -1, T, self.head_dim).transpose(1, 2).reshape(B, T, -1))


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled():      # torch's is a longer chain of small operations
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return torch.addcmul(torch.full((), self.eps), norm, norm, value=1 / x.shape[-1]).rsqrt_().mul(x).mul_(self.weight)
        return super().forward(x)


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


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair, (head_dim / 2,) fp32, and the factor on cos and sin (YaRN's attention temperature)."""
    rope, theta, head_dim = config.rope_scaling, config.rope_theta, config.head_dim
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope is None:
        return plain, 1.0
    factor, original = rope["factor"], rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope["rope_type"] == "llama3":    # by the number of turns in the original context: few are stretched, many kept
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((original * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return plain / factor * (1 - keep) + plain * keep, 1.0

    def pair_with(turns):                # YaRN: the same idea, blended linearly over the index of the pair
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(weight):
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
    low, high = pair_with(rope.get("beta_fast") or 32), pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 1e-3)).clamp(0, 1)
    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return plain / factor * (1 - keep) + plain * keep, magnitude(1) if scale is None else scale


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a (n, k) @ b (k, m), summed and returned in fp32 (float64 stays), so that products of half-precision inputs are never rounded."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype) @ b.to(dtype)


class TokenLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target], CHUNK positions at a time; backward recomputes each chunk's log-softmax.

    All but the last: it is kept, since backward begins there and holds one chunk anyway."""

    @staticmethod
    def log_softmax(hidden, weight, temperature):                        # (n, D), (V, D) -> (n, V)
        return F.log_softmax(matmul_fp32(hidden, weight.T).div_(temperature), -1)

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, entropy):     # (N, D), (V, D), (N,)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.set_materialize_grads(False)                                 # an entropy that is only looked at has no gradient: None
        ctx.temperature = temperature
        logprobs, entropies = [], []
        for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK)):
            logp = None                                                  # before the next chunk's is born
            logp = TokenLogprobs.log_softmax(h, weight, temperature)     # (CHUNK, V)
            logprobs.append(logp.gather(-1, t[:, None])[:, 0])
            if entropy:
                entropies.append(-(logp.exp().mul_(logp)).sum(-1))
        ctx.last = logp if any(ctx.needs_input_grad) else None
        return torch.cat(logprobs), torch.cat(entropies) if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):                    # (N,), (N,) or None
        hidden, weight, targets = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(grad_entropies)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for i in reversed(range(0, max(len(hidden), 1), CHUNK)):
            rows = slice(i, i + CHUNK)
            h, t, g = hidden[rows], targets[rows, None], grad_logprobs[rows, None]
            logp, ctx.last = ctx.last, None
            if logp is None:
                logp = TokenLogprobs.log_softmax(h, weight, ctx.temperature)
            if grad_entropies is None:                                   # d log p[t] / d logits = onehot(t) - p
                p, slope = logp.exp_(), g
            else:                                                        # dH / d logits = -p (log p + H)
                p = logp.exp()
                slope = g + grad_entropies[rows, None] * (logp - (p * logp).sum(-1, keepdim=True))
            grad_logits = p.mul_(-slope).scatter_add_(1, t, g).div_(ctx.temperature).to(weight.dtype)
            grad_hidden[rows] = matmul_fp32(grad_logits, weight).to(hidden.dtype)
            grad_chunk = matmul_fp32(grad_logits.T, h)
            grad_weight = grad_chunk if grad_weight is None else grad_weight.add_(grad_chunk)
            del logp, p, grad_logits, grad_chunk                         # before the next chunk's are born
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


# ---------------------------------------------------------------- the key-value cache

class KVCache:
    """Keys and values of `rows` independent texts, each with its own length (at most max_len tokens).

    `lengths` (rows,) lives on the device; `host_lengths` mirrors it as a list, so that no step waits for the device.
    `select(rows)` is some of the rows as a cache of its own, sharing everything. Neighbours attend in one call: on a GPU keep live rows together.
    """

    def __init__(self, config: ModelConfig, rows: int, max_len: int, dtype=torch.float32, device="cpu"):
        slots = -(-(max_len + 1) // BUCKET) * BUCKET      # at least one more than max_len: padding is written into the last
        self.data = torch.zeros(config.num_hidden_layers, 2, rows, config.num_key_value_heads, slots, config.head_dim,
                                dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ramp = F.pad(torch.zeros(slots, dtype=dtype, device=device), (0, slots), value=-math.inf)     # see begin
        self.host_lengths, self.max_len = [0] * rows, max_len
        self.rows, self.index = range(rows), torch.arange(rows, device=device)
        self.group = config.num_attention_heads // config.num_key_value_heads

    @property
    def bytes(self) -> int:
        return self.data.nbytes

    def select(self, rows) -> "KVCache":
        """rows: their numbers in this, the whole cache; row i of a forward pass is rows[i]."""
        part, together = copy.copy(self), list(rows) == list(range(rows[0], rows[-1] + 1))
        part.rows, part.index = rows, self.index[rows[0]:rows[-1] + 1] if together else torch.tensor(rows, device=self.data.device)
        return part

    def copy_row(self, src: int, dst: int, length: int):
        """Let row dst hold the first `length` tokens of row src (a prompt that several samples share)."""
        self.data[:, :, dst, :, :length] = self.data[:, :, src, :, :length]
        self.set_length(dst, length)

    def swap_rows(self, i: int, j: int):
        a, b = self.host_lengths[i], self.host_lengths[j]
        row_i = self.data[:, :, i, :, :a].clone()
        self.copy_row(j, i, b)
        self.data[:, :, j, :, :a] = row_i
        self.set_length(j, a)

    def set_length(self, row: int, length: int):
        """Keep the first `length` tokens of a row; 0 frees the row for another text."""
        self.lengths[row] = length
        self.host_lengths[row] = length

    # A forward pass calls begin once, append in every layer, advance at the end.

    def begin(self, T: int, lengths) -> tuple[int, Tensor]:
        """Plan for T new tokens a row: a bound on their positions, and the positions (B, T)."""
        held, device, slots = [self.host_lengths[row] for row in self.rows], self.lengths.device, self.data.shape[4]
        self.new = [T] * len(held) if lengths is None else torch.as_tensor(lengths).tolist()
        if len(self.new) != len(held) or max(self.new) > T or max(map(sum, zip(held, self.new))) > self.max_len:
            raise ValueError(f"a cache of {len(held)} rows x {self.max_len} tokens that holds {held} cannot take {self.new}")
        t = torch.arange(T, device=device)
        positions = written = self.lengths[self.index][:, None] + t                         # (B, T)
        self.counts = T
        if lengths is not None:
            self.counts = torch.tensor(self.new, device=device)
            written = positions.where(t < self.counts[:, None], slots - 1)
        self.write = self.index[:, None], written
        self.blocks = []                                                                    # none: nothing but the new tokens
        if max(held):
            copies = 1 if T == 1 else self.group                                            # of a mask for every query (see Attention); alike where T is 1
            ramps = (slots - 1 - positions[:, None].repeat(1, 1, copies)).clamp_(min=0)     # (B, 1, H / KV * T or 1); padding may lie beyond
            for a, b in self.neighbours(held, T):
                first, S = self.rows[a], min(-(-(max(held[a:b]) + T) // BUCKET) * BUCKET, slots)
                read = self.data[:, :, first:first + b - a, :, :S].flatten(0, 1).unbind()   # of every layer, (b - a, KV, S, head_dim): keys, values
                self.blocks.append((read, self.ramp.unfold(0, S, 1)[ramps[a:b]]))           # mask (.., S): position p has p + 1 zeros, then -inf
        return max(held) + T, positions

    def neighbours(self, held, T) -> list[tuple[int, int]]:
        """Cut the rows into blocks that attend in one call, each as far as its longest row reads: rows that lie side by side, and on a CPU,
        where one more call costs less than much padding, a new block where a row would be, or make, too much of it. -> (first, last + 1)"""
        spare = SPLIT // (T * self.data.shape[3] * self.data.shape[5]) if self.data.device.type == "cpu" else math.inf     # slots read in vain
        blocks, first, longest = [], 0, held[0]
        for row in range(1, len(held)):
            padding = (row - first) * (held[row] - longest) if held[row] > longest else longest - held[row]
            if self.rows[row] != self.rows[row - 1] + 1 or padding > spare:
                blocks.append((first, row))
                first, longest = row, held[row]
            longest = max(longest, held[row])
        return [*blocks, (first, len(held))]

    def append(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Write the new keys and values (B, KV, T, head_dim). -> what attention reads, block by block: keys, values and mask; [] if only k and v."""
        keys, values = self.data[layer].unbind(0)                                           # (rows, KV, slots, head_dim)
        keys.transpose(1, 2)[self.write] = k.transpose(1, 2)
        values.transpose(1, 2)[self.write] = v.transpose(1, 2)
        return [(read[2 * layer], read[2 * layer + 1], mask) for read, mask in self.blocks]

    def advance(self):
        self.lengths[self.index] += self.counts
        for row, new in zip(self.rows, self.new):
            self.host_lengths[row] += new


# ---------------------------------------------------------------- Hugging Face directories in and out (files and tensors: hf.py)

def load_model(path_or_name, dtype: torch.dtype = torch.float32, device="cpu") -> Transformer:
    """Read a Hugging Face directory or hub id; tensors go to dtype and device one by one. InputError lists all that do not fit."""
    path = local_directory(path_or_name)
    config = ModelConfig.from_hf(read_json(path / "config.json"), path / "config.json")
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {hf_name(name): list(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = read_tensors(path, shapes, dtype, device, spare=["lm_head.weight"] if config.tie_word_embeddings else [])
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, assign=True)
    if (path / "generation_config.json").exists():
        model.generation_config = read_json(path / "generation_config.json")
    return model


def save_model(model: Transformer, tokenizer, path, state_dict: dict | None = None):
    """Write config, weights, generation config and tokenizer (may be None) as a Hugging Face directory.

    state_dict: the full weights, where the model's own are sharded; one rank saves.
    """
    tensors = {hf_name(name): tensor.detach() for name, tensor in (state_dict or model.state_dict()).items()}
    write_directory(path, model.config.to_hf(), tensors, model.generation_config, tokenizer)


def hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else "model." + name
