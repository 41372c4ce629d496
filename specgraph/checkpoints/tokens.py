"""What a target's folder says about text: its tokenizer, the tokens that end a generation, and sampling defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph.checkpoints.files import TOKENIZER_LIMIT, checked_file, checked_folder, exists, read_json, shown
from specgraph.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


def read_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json, without its `truncation` and `padding`.

    Those are how its last user batched training texts; transformers ignores them too. Applied here they would cut or
    fill up a prompt.

    Raises:
        CheckpointError: no such file, or not a tokenizer.
    """
    from tokenizers import Tokenizer

    path = checked_folder(folder) / "tokenizer.json"
    if not exists(path):
        raise CheckpointError(f"{folder} has no tokenizer.json; the target's folder must hold one")
    checked_file(path, TOKENIZER_LIMIT)
    try:
        text = path.read_text(encoding="utf-8")
        _check_prefix(text)
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {first_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
    """`eos_token_id` of generation_config.json, else of config.json; empty when neither gives one.

    Raises:
        CheckpointError: an unreadable file, or a value that is not a token id below `vocab_size` or a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if exists(path) else None
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
    """The defaults of generation_config.json that would change which tokens are generated, as one line; else "".

    They are not applied: a request says itself how it is sampled. Whoever loads the folder should be told.
    """
    path = folder / "generation_config.json"
    values = read_json(path) if exists(path) else {}
    given = [
        f"{key}={shown(values[key])}"
        for key, neutral in NEUTRAL_DEFAULTS.items()
        if values.get(key) is not None and values[key] not in neutral
    ]
    return ", ".join(given)
