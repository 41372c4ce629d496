"""Text in a target's folder or GGUF file: its tokenizer, the tokens that end a generation, and sampling defaults."""

from __future__ import annotations

import filecmp
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgraph.checkpoints.files import TOKENIZER_LIMIT, checked_file, checked_folder, exists, read_json, shown
from specgraph.checkpoints.gguf_file import is_gguf, json_of, open_gguf
from specgraph.checkpoints.gguf_tokenizer import gguf_tokenizer
from specgraph.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
"""Keys of generation_config.json that change which tokens are generated, with the values that change nothing."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of tokenizer_config.json whose token is special, whatever tokenizer.json says of it; a chat template may name
it."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer.json, with the added tokens of tokenizer_config.json; or a GGUF file's tokenizer.

    Its `truncation` and `padding` are left out: they are how its last user batched training texts; transformers ignores
    them too. Applied here they would cut or fill up a prompt.
    """
    from tokenizers import Tokenizer

    if is_gguf(folder):
        return gguf_tokenizer(open_gguf(folder))
    path = checked_folder(folder) / "tokenizer.json"
    if not exists(path):
        raise CheckpointError(f"{folder} has no tokenizer.json; the target's folder must hold one")
    checked_file(path, TOKENIZER_LIMIT)
    try:
        text = path.read_text(encoding="utf-8")
        _check_prefix(text)
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {first_line(error)}; fetch it again") from error
    try:
        tokenizer.encode("\U00013000")  # a hieroglyph: hardly in a vocabulary
    except Exception as error:  # bare, too
        raise CheckpointError(
            f"{path}: text with unknown characters cannot be encoded: {first_line(error)}; its model's unknown token "
            "should be in its vocabulary"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, folder / "tokenizer_config.json")
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, path: Path) -> None:
    """Add the tokens of `added_tokens_decoder` that tokenizer.json lacks, and mark special ones, as transformers does.

    Special tokens are left out of decoded text.
    """
    from tokenizers import AddedToken

    values = read_json(path) if exists(path) else {}
    listed = values.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path}: 'added_tokens_decoder' should be a mapping, is {shown(listed)}")
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    tokens: list[tuple[int | None, AddedToken]] = []
    entries: dict[str, Any] = listed
    for index in sorted(entries, key=lambda index: index.zfill(16)):
        entry = entries[index]
        content = entry.get("content") if isinstance(entry, dict) else None
        if not index.isdecimal() or not isinstance(content, str):
            raise CheckpointError(f"{path}: 'added_tokens_decoder' has {shown(index)}: {shown(entry)}, not a token")
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "special")}
        flags["normalized"] = bool(entry.get("normalized", not flags["special"]))
        tokens.append((int(index), AddedToken(content, **flags)))
    for name in NAMED_TOKENS:
        value = values.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content in known and not known[content].special:
            old = known[content]
            flags = {key: getattr(old, key) for key in ("single_word", "lstrip", "rstrip", "normalized")}
            tokens.append((None, AddedToken(content, special=True, **flags)))
    for index, token in tokens:
        is_new = tokenizer.token_to_id(token.content) is None
        if known.get(token.content) != token:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        found = tokenizer.token_to_id(token.content)
        if is_new and found != index:
            raise CheckpointError(
                f"{path}: 'added_tokens_decoder' gives {shown(token.content)} the id {index}, and the next free one in "
                f"tokenizer.json is {found}"
            )


def compare_tokenizers(tokenizer: Tokenizer, folder: Path, draft_folder: Path) -> None:
    """Warn (logger `specgraph`) where the drafter's folder has a tokenizer in which token ids are other tokens.

    Target and drafter exchange token ids, so a vocabulary of the same size says little: Llama 2 and Mistral have 32,000
    tokens each. The text stays right, and such drafts are seldom accepted. Ids that only one of the two has are left
    out, and a drafter without tokenizer.json is not compared.

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
    """Raise ValueError where tokenizers 0.23 would abort the process instead of raising.

    It removes as many bytes as `continuing_subword_prefix` has from the second part of every merge, without a look
    whether the part begins with the prefix.
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
    """Return `eos_token_id` of generation_config.json, else of config.json; empty when neither gives one."""
    for name in ("generation_config.json", "config.json"):
        path, value = folder / name, (json_of(folder, name) or {}).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
            raise CheckpointError(
                f"{path}: 'eos_token_id' is {shown(value)}; it should be a token id below {vocab_size}, "
                "or a list of such ids"
            )
        return tuple(ids)
    return ()


def sampling_defaults(folder: Path) -> str:
    """Return the defaults of generation_config.json that would change which tokens are generated, as one line; else "".

    They are not applied: a request says itself how it is sampled. Whoever loads the folder should be told.
    """
    values = json_of(folder, "generation_config.json") or {}
    given = [
        f"{key}={shown(values[key])}"
        for key, neutral in NEUTRAL_DEFAULTS.items()
        if values.get(key) is not None and values[key] not in neutral
    ]
    return ", ".join(given)
