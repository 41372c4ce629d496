"""GGUF files of the Llama and Qwen families, read as the Hugging Face folders that they were made from.

The header has the facts of config.json and tokenizer_config.json; each tensor gets its name in a folder. The package
gguf dequantises weights while they are read. The header is parsed here: gguf's own reader makes an array for every
token and merge, which takes seconds.
Source: the specification of GGUF 3; for the names, `MODEL_TENSORS` and `Keys` of the package gguf.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import first_line
from specgraph_models.checkpoints import gguf_delta
from specgraph_models.checkpoints.files import checked_file, exists, read_json, shown
from specgraph_models.errors import CheckpointError

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    **gguf_delta.ARCHITECTURES,
}
"""`general.architecture` -> `model_type` of config.json."""

_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    **gguf_delta.KEYS,
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ELSEWHERE = {"vocab_size", "rope.dimension_count", "attention.value_length", *gguf_delta.ELSEWHERE}
"""Keys that repeat facts of the tensors or of other keys."""
_SCALING = {
    "factor": "factor",
    "attn_factor": "attn_factor",
    "original_context_length": "original_max_position_embeddings",
}

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
}
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""NAME in the keys `tokenizer.ggml.NAME_token_id` of tokens that end a text."""
END_TOKENS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))  # fmt: skip
"""Control tokens that end a text, a turn of a conversation or a file in llama.cpp (`special_eog_ids` in
src/llama-vocab.cpp)."""
_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+?)(?:\.(weight|bias))?")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
ROTATION = "rope_freqs.weight"
"""The divisors of frequencies, one per rotated pair: Llama 3's scaling, computed when the file was made."""
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KINDS: tuple[tuple[str, str, tuple[type, ...], bool], ...] = (
    (r"general\.architecture|tokenizer\.ggml\.(model|pre)|tokenizer\.chat_template(\..*)?", "text", (str,), False),
    (r"general\.alignment|split\.count|tokenizer\.ggml\..*_token_id", "an integer", (int,), False),
    (r"tokenizer\.ggml\.add_.*", "true or false", (bool,), False),
    (r"tokenizer\.ggml\.(tokens|merges)|tokenizer\.chat_templates", "a list of texts", (str,), True),
    (r"tokenizer\.ggml\.token_type", "a list of integers", (int,), True),
    (r"tokenizer\.ggml\.scores", "a list of numbers", (int, float), True),
)
"""Pattern of keys -> a description of the values that they may have, their types, and True if they are in a list. Other
keys become keys of config.json, and its reader checks them."""
HEADER_LIMIT = 64 << 20
"""The most bytes of a header, which has the values of keys. The largest published one has about 16 MB."""
_MOST_EXPERTS = 4096
_NUMBERS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
"""Number of a value's type -> its struct format. 8 is a string, 9 an array."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file, or one expert's part of it, to be read as a folder's tensor."""

    path: Path
    begin: int
    """The tensor's first byte in the file."""
    shape: tuple[int, ...]
    kind: str
    """The name of the tensor's quantisation, such as Q4_1 or F32."""
    heads: int = 0
    """The number of heads if their rows have the two elements of each rotated pair side by side. Otherwise 0."""
    change: gguf_delta.Change | None = None
    """The function from the stored values to a folder's. None if they are the same, in another order at most."""
    stored_shape: tuple[int, ...] | None = None
    """The shape in the file. None if it is `shape`."""

    def read(self) -> Tensor:
        """Return the tensor as float32, with its rows in a folder's order."""
        import gguf
        import numpy as np

        kind = gguf.GGMLQuantizationType[self.kind]
        shape = self.stored_shape or self.shape
        stored = (*shape[:-1], _row_bytes(shape[-1], self.kind))
        raw = np.fromfile(self.path, dtype=np.uint8, count=prod(stored), offset=self.begin)
        values = torch.from_numpy(gguf.dequantize(raw.reshape(stored), kind))
        if self.change is not None:
            return self.change(values)
        return values.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2) if self.heads else values


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    values: Mapping[str, Any]
    """The header's keys: numbers, strings, and lists of them."""
    tensors: Mapping[str, GgufTensor]
    """The tensors by their names in a folder. A tensor without a known name keeps its own."""

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the contents that config.json or tokenizer_config.json of the folder would have. Otherwise None."""
        if name == "config.json":
            return self._config()
        return self._tokenizer_config() if name == "tokenizer_config.json" else None

    def _config(self) -> dict[str, Any]:
        architecture = self.values["general.architecture"]
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}
        is_hybrid = architecture in gguf_delta.ARCHITECTURES
        required = _REQUIRED.keys() | (set() if is_hybrid else {"feed_forward_length"})
        if missing := sorted(required - own.keys()):
            raise CheckpointError(f"{self.path} has no key '{prefix}{missing[0]}'; it is damaged, or not a whole model")
        if architecture == "llama" and own.get("expert_count"):
            raise CheckpointError(f"{self.path} is a Llama with {own['expert_count']} experts, which is not read here")
        config: dict[str, Any] = {"model_type": ARCHITECTURES[architecture]}
        if architecture == "qwen3moe":
            config["norm_topk_prob"] = True  # the value of every published model; the file has no key for it
        for key, value in own.items():
            if key in _ELSEWHERE or key.startswith("rope.scaling."):
                continue
            name = (_REQUIRED | _OPTIONAL).get(key, prefix + key)
            if value != 0 or not key.startswith("expert_"):
                config[name] = value
        if is_hybrid:
            config |= gguf_delta.config_of(architecture, own)
        heads, size = (own[key] for key in ("attention.head_count", "embedding_length"))
        if type(heads) is int and type(size) is int and heads > 0:
            head_dim = config.setdefault("head_dim", own.get("rope.dimension_count", size // heads))
            for key in ("attention.value_length", *([] if is_hybrid else ["rope.dimension_count"])):
                if own.get(key, head_dim) != head_dim:
                    raise CheckpointError(
                        f"{self.path}: heads have {head_dim} elements, and '{prefix}{key}' is {shown(own[key])}; only "
                        "the same number is supported"
                    )
        embedding = self.tensors.get("model.embed_tokens.weight")
        config["vocab_size"] = embedding.shape[0] if embedding is not None else len(self._tokens())
        config["tie_word_embeddings"] = "lm_head.weight" not in self.tensors
        config["eos_token_id"] = self._stops()
        if scaling := self._scaling(own):
            config["rope_scaling"] = scaling
        kinds = sorted({each.kind for each in self.tensors.values()} - _PLAIN.keys())
        largest = max(self.tensors.values(), key=lambda each: prod(each.shape))
        config["dtype"] = "bfloat16" if kinds else _PLAIN[largest.kind]
        return config | ({"gguf_types": kinds} if kinds else {})

    def _scaling(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return `rope_scaling`. Empty if frequencies are not scaled."""
        given = {key.removeprefix("rope.scaling."): own[key] for key in own if key.startswith("rope.scaling.")}
        kind = given.pop("type", "none")
        given.pop("finetuned", None)
        if ROTATION in self.tensors:
            divisors = [float(value) for value in self.tensors[ROTATION].read().flatten()]
            return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        if kind == "none":
            return {}
        return {"rope_type": kind, **{_SCALING.get(key, f"rope.scaling.{key}"): given[key] for key in given}}

    def _stops(self) -> list[int]:
        """Return the ids of the tokens that end a text or a turn of a conversation.

        Tokens that keys name come first. Then come tokens that llama.cpp knows by their strings: files of the first
        converters name one token only.
        """
        keys = [f"tokenizer.ggml.{name}_token_id" for name in _ENDS]
        named = [self.values[key] for key in keys if key in self.values]
        tokens = self._tokens()
        kinds = self.values.get("tokenizer.ggml.token_type") or [_CONTROL] * len(tokens)
        known = {
            token: index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if token in END_TOKENS and kind in (_CONTROL, _USER_DEFINED)
        }
        if {"<|return|>", "<|call|>"} <= known.keys():
            known.pop("<|end|>", None)  # in these vocabularies it ends one message of an answer, not the answer
        return list(dict.fromkeys([*named, *known.values()]))

    def _tokens(self) -> list[str]:
        tokens: list[str] = self.values.get("tokenizer.ggml.tokens", [])
        return tokens

    def _tokenizer_config(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        tokens = self._tokens()
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            index = self.values.get(f"tokenizer.ggml.{key}_token_id")
            if index is not None and 0 <= index < len(tokens):
                found[f"{name}_token"] = tokens[index]
        key = "tokenizer.chat_template"
        named = {each.removeprefix(f"{key}."): text for each, text in self.values.items() if each.startswith(f"{key}.")}
        return found | {"chat_template": {"default": self.values.get(key), **named}}


def is_gguf(path: Path) -> bool:
    """Return True if a path has the name of a GGUF file."""
    return path.suffix == ".gguf"


def json_of(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a folder's file, or the same contents from a GGUF file. None if there is no file."""
    if is_gguf(folder):
        return open_gguf(folder).json(name)
    return read_json(folder / name) if exists(folder / name) else None


def open_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's header, and check that all of its tensors are complete and can be dequantised.

    Raises:
        CheckpointError: the package gguf is missing; the file is truncated, or is one of several parts; or its
            architecture or a quantisation is not supported.
    """
    if find_spec("gguf") is None:
        raise CheckpointError(f"{path} is a GGUF file; to read it: pip install gguf")
    found = checked_file(path).stat()
    return _opened(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4)
def _opened(path: Path, size: int, changed: int) -> GgufFile:
    """Return a file's header. It is cached by size and time of change: a load and every conversation need it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Reader(data))
    except (struct.error, ValueError, LookupError, OverflowError, MemoryError, OSError) as error:
        raise CheckpointError(
            f"{path} ({size} bytes) is truncated or not a GGUF file: {first_line(error)}; fetch it again"
        ) from None


class _Reader:
    """The file's bytes, and the position of the next one to read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.skip(struct.calcsize(form)))
        return value

    def skip(self, length: int) -> int:
        """Return the position, and move it on by `length` bytes. Raises ValueError if the header ends before."""
        place, self.place = self.place, self.place + length
        if self.place > min(len(self.data), HEADER_LIMIT):
            raise ValueError(f"{length} bytes go beyond its end, or beyond the {HEADER_LIMIT} that a header may have")
        return place

    def string(self) -> str:
        length = self.number("<Q")
        place = self.skip(length)
        return self.data[place : place + length].decode()

    def value(self, kind: int) -> Any:
        """Return the next value of this type."""
        if kind == 8:
            return self.string()
        if kind != 9:
            return self.number(_NUMBERS[kind])
        of, count = self.number("<I"), self.number("<Q")
        if of == 8:
            return [self.string() for _ in range(count)]
        form = _NUMBERS[of].lstrip("<")
        return list(struct.unpack_from(f"<{count}{form}", self.data, self.skip(count * struct.calcsize(form))))


def _check_kind(path: Path, key: str, value: Any) -> None:
    """Raise CheckpointError if the key is read here, and its value has another type than it should."""
    for pattern, what, types, listed in _KINDS:
        if re.fullmatch(pattern, key):
            items: list[Any] = value if isinstance(value, list) else [value]
            if isinstance(value, list) != listed or not {*map(type, items)} <= {*types}:
                raise CheckpointError(f"{path}: '{key}' should be {what}, is {shown(value)}; fetch it again")


def _parse(path: Path, reader: _Reader) -> GgufFile:
    if reader.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    reader.place = 4
    version, num_tensors, num_keys = (reader.number(form) for form in ("<I", "<Q", "<Q"))
    if version not in (2, 3):
        raise CheckpointError(f"{path} is of version {version} of GGUF; 2 and 3, little-endian, are read")
    values: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        values[key] = reader.value(reader.number("<I"))
        _check_kind(path, key, values[key])
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: 'general.architecture' is {shown(architecture)}; read from GGUF are {', '.join(ARCHITECTURES)}"
        )
    if values.get("split.count", 1) != 1:
        raise CheckpointError(f"{path} is one of several parts; join them: llama-gguf-split --merge")
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name, dims = reader.string(), reader.number("<I")
        shape = tuple(reader.number("<Q") for _ in range(dims))[::-1]
        if not all(shape):
            raise ValueError(f"tensor {shown(name)} has shape {shown(list(shape))}")
        entries.append((name, shape, reader.number("<I"), reader.number("<Q")))
    alignment = values.get("general.alignment", 32)
    if alignment < 1:
        raise ValueError(f"'general.alignment' is {shown(alignment)}")
    begin = -(-reader.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    kinds: dict[int, str] = {}
    for name, shape, number, offset in entries:
        kind = kinds[number] = kinds.get(number) or _kind(path, name, number)
        last = begin + offset + prod(shape[:-1]) * _row_bytes(shape[-1], kind)
        if last > len(reader.data):
            raise ValueError(f"tensor {shown(name)} ends at byte {last}")
        for ours, tensor in _named(name, GgufTensor(path, begin + offset, shape, kind), values):
            if ours in tensors:
                raise ValueError(f"it holds tensor {shown(name)} twice")
            tensors[ours] = tensor
    if not tensors:
        raise ValueError("it holds no tensor")
    return GgufFile(path, values, tensors)


def _named(name: str, tensor: GgufTensor, values: Mapping[str, Any]) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a tensor under its name in a folder. Of stacked experts [experts, out, in], yield each expert's matrix."""
    found = _NAME.fullmatch(name)
    if found is not None and gguf_delta.is_of_module(found[1], values):
        name, found = f"mtp.{name}", None  # an MTP module, which only a drafter reads
    if found is None or (found[3] is None and found[2] != "ssm_a"):
        yield name, tensor
        return
    block, part, suffix = found.groups()
    prefix = "" if block is None else f"model.layers.{block}."
    if (experts := _EXPERTS.fullmatch(part)) and len(tensor.shape) == 3:
        count, rows, columns = tensor.shape
        if count > _MOST_EXPERTS:
            raise ValueError(f"tensor {shown(name)} has {count} experts")
        size = rows * _row_bytes(columns, tensor.kind)
        for i in range(count):
            one = GgufTensor(tensor.path, tensor.begin + i * size, (rows, columns), tensor.kind)
            yield f"{prefix}mlp.experts.{i}.{experts[1]}_proj.{suffix}", one
        return
    if values["general.architecture"] == "llama" and part in ("attn_q", "attn_k"):
        heads = values.get("llama.attention.head_count", 0)
        heads = heads if part == "attn_q" else values.get("llama.attention.head_count_kv", heads)
        if type(heads) is int and heads > 0 and tensor.shape[0] % (2 * heads) == 0:  # otherwise the shape is refused
            tensor = GgufTensor(tensor.path, tensor.begin, tensor.shape, tensor.kind, heads)
    changed = list(gguf_delta.changes(part, suffix, tensor.shape, values))
    for ours, shape, change in changed:
        yield f"{prefix}{ours}", replace(tensor, shape=shape, change=change, stored_shape=tensor.shape)
    if not changed:
        yield (f"{prefix}{_TENSORS[part]}.{suffix}" if part in _TENSORS else name), tensor


def _kind(path: Path, name: str, number: int) -> str:
    """Return the name of a quantisation. Raises CheckpointError if gguf cannot dequantise it."""
    import gguf
    import numpy as np

    try:
        kind = gguf.GGMLQuantizationType(number)
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has quantisation {number}, which the installed package gguf does not undo; "
            "give a file with another (Q8_0, Q4_K_M), or install a newer gguf"
        ) from None
    return kind.name


def _row_bytes(columns: int, kind: str) -> int:
    import gguf

    return gguf.quant_shape_to_byte_shape((columns,), gguf.GGMLQuantizationType[kind])[0]
