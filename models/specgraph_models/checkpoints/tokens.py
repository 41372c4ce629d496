"""Text in a target's folder or GGUF file: its tokenizer, the tokens that end a text, and sampling defaults."""

from __future__ import annotations

import filecmp
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from specgraph.errors import first_line
from specgraph_models.checkpoints.files import TOKENIZER_LIMIT, checked_file, checked_folder, exists, read_json, shown
from specgraph_models.checkpoints.gguf_file import is_gguf, json_of, open_gguf
from specgraph_models.checkpoints.gguf_tokenizer import gguf_tokenizer
from specgraph_models.checkpoints.special_tokens import add_special_tokens, read_special_tokens
from specgraph_models.checkpoints.tokenizer import Tokenizer, tokenizer_call
from specgraph_models.errors import CheckpointError

_LOG = logging.getLogger("specgraph")

NEUTRAL_DEFAULTS: dict[str, tuple[object, ...]] = {
    "do_sample": (False,),
    "temperature": (1.0, 0.0),
    "top_p": (1.0,),
    "top_k": (0, -1, 50),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "stop_strings": ([],),
}
"""Keys of generation_config.json that change the generated tokens, with the values that change nothing."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return a folder's tokenizer.json, with the tokens that its other files name; or a GGUF file's tokenizer.

    `truncation` and `padding` of tokenizer.json are left out, as in transformers. They were set to batch training
    texts, and would cut or fill up a prompt.

    Raises:
        CheckpointError: there is no tokenizer, or it can't be read, or it can't encode any text.
    """
    import tokenizers

    if is_gguf(folder):
        return Tokenizer(gguf_tokenizer(open_gguf(folder)), folder)
    path = checked_folder(folder) / "tokenizer.json"
    if not exists(path):
        raise CheckpointError(f"{folder} has no tokenizer.json; the target's folder must hold one")
    checked_file(path, TOKENIZER_LIMIT)
    tokens, config = read_special_tokens(folder), json_of(folder, "tokenizer_config.json") or {}
    with tokenizer_call(path, "cannot be read as a tokenizer (fetch it again)"):
        text = path.read_text(encoding="utf-8")
        _check_prefix(text)
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        add_special_tokens(backend, tokens, folder)
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    with tokenizer_call(path, "can't encode text; its unknown token should be in its vocabulary, and its steps whole"):
        backend.encode("\U00013000")  # a hieroglyph, which hardly any vocabulary has
    cleaned = not isinstance(backend.model, tokenizers.models.BPE)  # transformers ignores the key for BPE too
    for key in ("fix_mistral_regex", "fast_tokenizer_files", *(["clean_up_tokenization_spaces"] if cleaned else [])):
        if config.get(key):
            _LOG.warning("%s: '%s' of tokenizer_config.json is not applied; transformers applies it", folder, key)
    return Tokenizer(backend, folder)


def compare_tokenizers(tokenizer: Tokenizer, folder: Path, draft_folder: Path) -> None:
    """Warn (logger `specgraph`) if ids of the drafter's tokenizer are other tokens than in the target's.

    Target and drafter exchange token ids, so an equal vocabulary size means little: Llama 2 and Mistral have 32,000
    tokens each. The text stays right, but the target seldom accepts such drafts. Ids that only one of the two has are
    left out. A drafter without tokenizer.json is not compared.

    Args:
        tokenizer, folder: the target's.
    """
    path = draft_folder / "tokenizer.json"
    stored = exists(path)
    if not stored and not is_gguf(draft_folder):
        return
    try:
        if stored:
            checked_file(path, TOKENIZER_LIMIT)
        if stored and exists(folder / "tokenizer.json") and filecmp.cmp(folder / "tokenizer.json", path, shallow=False):
            return
        own, drafts = (
            {i: t for t, i in each.get_vocab().items()} for each in (tokenizer, read_tokenizer(draft_folder))
        )
    except (CheckpointError, OSError) as error:
        _LOG.warning("the drafter's tokenizer is not compared with the target's: %s", first_line(error))
        return
    shared = own.keys() & drafts.keys()
    different = [index for index in shared if own[index] != drafts[index]]
    if different:
        first = min(different)
        _LOG.warning(
            "%s: %d of %d token ids are other tokens than in %s (id %d: %s, the target's is %s); the target "
            "seldom accepts drafts of them; give a drafter with the target's tokenizer",
            path, len(different), len(shared), folder, first, shown(drafts[first]), shown(own[first]),
        )  # fmt: skip


def _check_prefix(text: str) -> None:
    """Raise ValueError if tokenizers 0.23 would abort the process instead of raising an error.

    It removes the length of `continuing_subword_prefix` from the second part of every merge, without a check that the
    part begins with the prefix.
    """
    if not re.search(r'"continuing_subword_prefix"\s*:\s*"[^"]', text):
        return
    model = json.loads(text).get("model", {})
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges") or ():
        second = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not second.startswith(prefix):
            raise ValueError(f"merge {shown(merge)} does not continue with the prefix {shown(prefix)}")


def stop_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text.

    They are `eos_token_id` of generation_config.json, or of config.json if the former has none, and the tokenizer's
    `eos_token`. A GGUF file has them in its keys, and llama.cpp knows others by their strings.

    A chat fine-tune of a base model often has the end of a turn in the tokenizer's files only. vLLM and SGLang also
    stop at both, transformers at `eos_token_id` alone.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path, found = folder / name, json_of(folder, name) or {}
        value, text = found.get("eos_token_id"), found.get("text_config")
        if value is None and isinstance(text, dict):
            value = text.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
            raise CheckpointError(
                f"{path}: 'eos_token_id' is {shown(value)}; it should be a token id below {vocab_size}, "
                "or a list of such ids"
            )
        break
    named = None if is_gguf(folder) else _eos_token_id(folder)
    if named is not None and named < vocab_size:  # a larger id can't be generated
        ids = [*ids, named]
    return tuple(dict.fromkeys(ids))


def _eos_token_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's `eos_token`, from tokenizer.json. If it lists none, ask the tokenizer."""
    named, path = read_special_tokens(folder).named.get("eos_token"), folder / "tokenizer.json"
    if named is None or not exists(path):
        return None
    added = read_json(path, TOKENIZER_LIMIT).get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == named.content and type(token.get("id")) is int:
            return token["id"]
    return read_tokenizer(folder).token_to_id(named.content)


def shown_stops(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return a line with the tokens that end a text: `texts end at <|im_end|> (2), </s> (7)`."""
    if not ids:
        return "no token ends a text (there is no eos_token_id)"
    return "texts end at " + ", ".join(f"{tokenizer.id_to_token(index) or 'token'} ({index})" for index in ids)


def sampling_defaults(folder: Path) -> str:
    """Return the defaults of generation_config.json that would change the generated tokens, as one line; "" if none.

    They are not applied: each request tells how it is sampled. The caller should show the line.
    """
    values = json_of(folder, "generation_config.json") or {}
    given = [
        f"{key}={shown(values[key])}"
        for key, neutral in NEUTRAL_DEFAULTS.items()
        if values.get(key) is not None and values[key] not in neutral
    ]
    return ", ".join(given)
