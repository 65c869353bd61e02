"""Hugging Face directories in and out: config.json, tensors, tokenizers. `model.py` turns them into a model and back.

A checkpoint is a directory (or a hub id) with config.json, safetensors (one file, or shards and an index), a tokenizer, and often
generation_config.json. What is read is checked before it is used, and all that does not fit stands in one error; what is written
appears whole or not at all, and is read by transformers 4 and 5 and by vLLM.

Left out: pickled weights (.bin): loading one runs code. Such a directory is refused; `transformers` can convert it.
"""
import atexit
import io
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_NEEDS = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
SHARD_SIZE = "5GB"


class InputError(ValueError):
    """Something the user gave is wrong. One line: file, line or field, and what was expected."""


def end_process(code):
    """End here, after what `atexit` holds, and skip Python's finalisation: a Gloo thread that drops its last tensor meanwhile would abort the
    process (torch 2.13, pytorch issue 190489), and torchrun would call a finished run failed. As from Python itself, 0 becomes 120 where
    the last output cannot be written."""
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:
        code = code or 120
    finally:
        os._exit(code)


def exit_on_input_error():
    """Make the script end with one line and exit code 2 on InputError, with 130 on Ctrl-C; other errors keep their traceback."""
    def hook(kind, error, trace):
        if issubclass(kind, InputError):
            try:
                print(f"error: {error}", file=sys.__stderr__, flush=True)   # sys.stderr: torch.distributed holds it back until a hook returns
            finally:
                end_process(2)
        wrapped = [inner for inner, _ in getattr(error, "failures", {}).values()]      # torch's CheckpointException: by rank
        if any(isinstance(inner, KeyboardInterrupt) for inner in [error, *wrapped]):
            end_process(130)
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
    model_type: str = "qwen3"               # decides two more things: QK-norm (qwen3), no bias on o_proj (qwen2)
    extra: dict = field(default_factory=dict)

    @classmethod
    def from_hf(cls, hf: dict, place="config.json") -> "ModelConfig":
        """Read a config.json, old (`rope_scaling`) or new (`rope_parameters`) spelling. InputError names what is not supported."""
        def expect(key, value, allowed):
            if value not in allowed:
                raise InputError(f"{place}: {key} = {value!r} is not supported, expected {' or '.join(map(str, allowed))}")
        expect("model_type", hf.get("model_type"), list(FAMILIES))
        rope = {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_parameters") or hf.get("rope_scaling") or {})}
        rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
        expect("rope_type", rope["rope_type"], list(ROPE_NEEDS))
        for key, only in {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "attention_dropout": 0,
                          "partial_rotary_factor": 1, "quantization_config": None}.items():
            expect(key, {**hf, **rope}.get(key, only), [only, None])
        for kind in hf.get("layer_types") or ():
            expect("layer_types", kind, ["full_attention"])
        needed = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        absent = [key for key in needed if key not in hf] + [key for key in ROPE_NEEDS[rope["rope_type"]] if key not in rope]
        if absent:
            raise InputError(f"{place}: field {absent[0]!r} is missing")
        for key in needed:
            if not isinstance(hf[key], int) or hf[key] < 1:
                raise InputError(f"{place}: field {key!r}: expected a whole number from 1 on, found {hf[key]!r}")
        own = {f.name for f in fields(cls)}
        given = {"num_key_value_heads": hf["num_attention_heads"], "head_dim": hf["hidden_size"] // hf["num_attention_heads"],
                 **{key: value for key, value in hf.items() if key in own and value is not None}}
        given |= {"attention_bias": hf["model_type"] == "qwen2" or given.get("attention_bias", False),
                  "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if rope["rope_type"] != "default" else None}
        derived = own | {"architectures", "dtype", "torch_dtype", "rope_parameters"}
        return cls(**given, extra={key: value for key, value in hf.items() if key not in derived})

    def to_hf(self) -> dict:
        """The config.json, in the spelling that transformers 4, transformers 5 and vLLM all read."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return {"architectures": [FAMILIES[self.model_type]], "hidden_act": "silu", **self.extra, **own}


def local_directory(path_or_name) -> Path:
    """A directory as it is; anything else is a hub id, fetched into the Hugging Face cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError
    if Path(path_or_name).is_dir():
        return Path(path_or_name)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path_or_name)) or str(path_or_name).startswith("."):
        raise InputError(f"{path_or_name}: no such directory (and no hub id, which is NAME or OWNER/NAME)")
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(str(path_or_name), allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise InputError(f"model {path_or_name}: no such directory, and the hub says: {str(error).splitlines()[0]}") from error


def parse_json(content: bytes, place, kind="JSON"):
    """JSON in UTF-8 -> value. InputError names the place."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:       # not UTF-8, or a number of 5,000 digits, is a ValueError too
        raise InputError(f"{place}: not valid {kind}: {error}") from None


def json_object(value, place) -> dict:
    """The value, if it is a JSON object. InputError names the place."""
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected a JSON object, found {type(value).__name__}")
    return value


def read_file(path) -> bytes:
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a folder, not a file") from None
    except (OSError, ValueError) as error:              # a NUL in a name is a ValueError
        raise InputError(f"{path}: cannot be read: {error}") from None


def read_json(path) -> dict:
    return json_object(parse_json(read_file(path), path), path)


def read_rows(path) -> list[tuple[str, dict]]:
    """The objects of a file of JSON lines, or of one JSON list -> [(place, object)]; place is "file:line" (of a list "file:number"), from 1."""
    content, kind = read_file(path), "JSON (one object a line, or one list)"
    if re.match(rb"(\xef\xbb\xbf)?\s*\[", content):
        rows = [(f"{path}:{i}", row) for i, row in enumerate(parse_json(content, path, kind), 1)]
    else:
        rows = [(f"{path}:{i}", parse_json(line, f"{path}:{i}", kind)) for i, line in enumerate(io.BytesIO(content), 1) if line.strip()]
    return [(place, json_object(row, place)) for place, row in rows]


def read_jsonl(path) -> list[dict]:
    return [row for _, row in read_rows(path)]


def read_tensors(path: Path, wanted: dict, dtype, device, spare=()) -> dict:
    """The tensors of a directory's safetensors files, one by one straight to dtype (torch.dtype) and device: {name: tensor}.

    wanted: {name: shape}. Every one of them must be there with its shape, and nothing else but rotary tables and the names in `spare`;
    InputError lists all that do not fit.
    """
    from safetensors import SafetensorError, safe_open
    index = path / "model.safetensors.index.json"
    files = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    if absent := [name for name in files if not (path / name).exists()]:
        raise InputError(f"{path / absent[0]}: no such file")
    found, tensors = {}, {}
    for file in files:
        try:
            with safe_open(path / file, "pt") as weights:
                found |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}
        except SafetensorError as error:
            raise InputError(f"{path / file}: not a whole safetensors file ({error}); a pointer of git-lfs, or a download that stopped?") from None
    unknown = [name for name in found.keys() - wanted.keys() if not name.endswith("inv_freq") and name not in spare]
    wrong = [f"{name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'no such tensor')}"
             for name in [*wanted, *unknown] if found.get(name) != wanted.get(name)]
    if wrong:
        raise InputError(f"{path}: the weights do not fit config.json: {'; '.join(wrong)}")
    for file in files:
        with safe_open(path / file, "pt", device=str(device)) as weights:
            tensors |= {name: weights.get_tensor(name).to(dtype) for name in weights.keys() if name in wanted}
    return tensors


def write_directory(path, config: dict, tensors: dict, generation: dict, tokenizer):
    """Write config, weights (in files of 5 GB), generation config ({}: the tokenizer's end of text) and tokenizer (may be None). Every file appears whole or not at all."""
    from huggingface_hub import save_torch_state_dict
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    path = Path(path)
    new = path / ".writing"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_torch_state_dict(tensors, new, max_shard_size=SHARD_SIZE)
    if tokenizer is not None:
        tokenizer.save_pretrained(new)
        settings = new / "tokenizer_config.json"    # transformers 5 writes a class name that transformers 4 does not know
        settings.write_text(settings.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
        generation = generation or {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if generation:
        (new / "generation_config.json").write_text(json.dumps(generation, indent=2))
    (new / "config.json").write_text(json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}, indent=2))
    mode = (new / "config.json").stat().st_mode
    written = [file.relative_to(new) for file in new.rglob("*") if file.is_file()]      # (further chat templates lie in a folder)
    for name in written:
        os.chmod(new / name, mode)                    # safetensors writes its files readable by the owner only
        with open(new / name, "rb") as file:
            os.fsync(file.fileno())
        (path / name).parent.mkdir(exist_ok=True)
        os.replace(new / name, path / name)
    for old in path.glob("model*.safetensors*"):      # shards that a smaller model no longer has
        if old.relative_to(path) not in written:
            old.unlink()
    shutil.rmtree(new)


def load_tokenizer(path_or_name):
    """The directory's or hub id's tokenizer. InputError where there is none, or where its ids go beyond the embedding's rows."""
    from transformers import AutoTokenizer
    path = local_directory(path_or_name)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(f"{path}: holds no tokenizer (tokenizer.json)")
    if (path / "tokenizer.json").exists():
        read_json(path / "tokenizer.json")      # a broken one is named; the library's own error names no file
    tokenizer = AutoTokenizer.from_pretrained(path)
    largest = max(tokenizer.get_vocab().values())
    rows = read_json(path / "config.json").get("vocab_size") if (path / "config.json").exists() else None
    if rows and largest >= rows:
        raise InputError(f"{path}: the tokenizer has ids up to {largest}, the embedding {rows} rows")
    return tokenizer


def train_tokenizer(texts, vocab_size: int, tags):
    """Byte-level BPE of vocab_size tokens for a from-scratch model: every byte, single digits, and each of `tags` as one token. The space before a
    capital is a token of its own, so that a name has the same tokens after a space as after a tag: a tiny model copies by matching tokens.

    texts: an iterable of str. tags: literal strings such as "<think>" and "</think>"; ordinary text, so never "special".
    The one special token is <|endoftext|>: end of text, and padding.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    bytes_of, digits = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(individual_digits=True)
    space = pre_tokenizers.Split(Regex(r" (?=\p{Lu})"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([space, digits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(tags), special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    split = re.compile("|".join(map(re.escape, tags)) or "(?!)")
    tokenizer.train_from_iterator((piece for text in texts for piece in split.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
