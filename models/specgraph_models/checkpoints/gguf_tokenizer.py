"""The tokenizer of a GGUF file, built from its vocabulary: byte-level BPE, or SentencePiece's BPE.

Text is split before merges. A file names the rule for it, but does not contain the rule.
Source: llama.cpp for the rules' names (`tokenizer.ggml.pre`), the published tokenizer.json files for the expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.gguf_file import GgufFile
from specgraph_models.checkpoints.tokenizer import tokenizer_call
from specgraph_models.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "smollm": r"\p{N}",
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
}
"""`tokenizer.ggml.pre` -> the expression that splits text. None for GPT-2's alone, which also follows smollm's."""
_SPECIAL, _USER_DEFINED = (2, 3), (4,)
"""Values of `tokenizer.ggml.token_type`: special tokens, and other tokens that are found in text as a whole."""
_SPACE = "\u2581"


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of a GGUF file.

    Raises:
        CheckpointError: there is none, its kind or splitting rule is not known, or its parts contradict each other.
    """
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in file.values.items()}
    tokens, kind = values.get("tokens"), values.get("model")
    if not tokens or kind is None:
        raise CheckpointError(f"{file.path} has no tokenizer ('tokenizer.ggml.tokens'); give a file that has one")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{file.path}: 'tokenizer.ggml.model' is {shown(kind)}; read are gpt2 and llama")
    if kind == "gpt2" and values.get("pre") not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: 'tokenizer.ggml.pre' is {shown(values.get('pre'))}; known are {', '.join(_SPLITS)}"
        )
    embedding = file.tensors.get("model.embed_tokens.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens, and embeddings of {embedding.shape[0]}")
    with tokenizer_call(file.path, "has a tokenizer that cannot be read"):
        tokenizer = _byte_level(values) if kind == "gpt2" else _sentencepiece(values)
        _add_tokens(tokenizer, values)
        tokenizer.encode("\U00013000")
    return tokenizer


def _byte_level(values: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    ids = {token: index for index, token in enumerate(values["tokens"])}
    split = _SPLITS[values["pre"]]
    # Llama 3 keeps a word that is a token, even if no merges lead to it
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_merges(values), ignore_merges=split == _LLAMA3))
    if values["pre"] in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    own = split is not None and values["pre"] != "smollm"
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not own)
    splits = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(values: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = values["tokens"]
    ids, unknown = {token: index for index, token in enumerate(tokens)}, values.get("unknown_token_id")
    merges = _merges(values) if "merges" in values else _merges_by_score(ids, values["scores"])
    unknown = tokens[unknown] if unknown is not None else None
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = values.get("add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first" if prefixed else "never", split=False)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", left=1)] if prefixed else [])])
    return tokenizer


def _merges(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [merge.split(" ") for merge in values.get("merges", ())]
    return [(left, right) for left, right in pairs]


def _merges_by_score(ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, the best first: SentencePiece merges by the best score."""
    found: list[tuple[float, int, int, int, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                lengths = -len(left), -len(right)
                found.append((-scores[index], *lengths, index, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, values: Mapping[str, Any]) -> None:
    """Add the tokens that are found in text as a whole, and the tokens that begin and end a text."""
    from tokenizers import AddedToken, processors

    tokens: list[str] = values["tokens"]
    typed = list(zip(tokens, values.get("token_type", ()), strict=False))  # some files have no types
    special, others = (
        [AddedToken(each, normalized=False, special=of is _SPECIAL) for each, kind in typed if kind in of]
        for of in (_SPECIAL, _USER_DEFINED)
    )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)
    begins = values["model"] == "llama" or _SPLITS.get(values.get("pre", "")) == _LLAMA3
    first, last = (
        [tokens[values[f"{name}_token_id"]]] if values.get(f"add_{name}_token", default) else []
        for name, default in (("bos", begins), ("eos", False))
    )
    if first or last:
        named = [(token, tokenizer.token_to_id(token)) for token in (*first, *last)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=named)
