"""Reads and writes draft vocabularies: files with the token ids of a target that a drafter may draft.

One of three formats: JSON, written by `specgraph draft-vocab`, which also names the tokenizer; `.npy`, an array of ids;
`.pt`, a tensor or a list of ids, which is SGLang's `--speculative-token-map`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from specgraph.errors import ConfigError, first_line
from specgraph.validation import checked
from specgraph_models.checkpoints.files import checked_file, exists, read_json, shown
from specgraph_models.checkpoints.gguf_file import is_gguf
from specgraph_models.checkpoints.tokenizer import Tokenizer
from specgraph_models.checkpoints.tokens import read_tokenizer
from specgraph_models.draft_vocab import MAKE, DraftVocabulary
from specgraph_models.errors import CheckpointError

SUFFIXES = (".json", ".npy", ".pt")
"""The suffix of a written file decides its format. A file that is read tells its format by its first bytes."""
_LIMIT = 256 << 20
"""Bytes of a file that is read."""


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return 16 hexadecimal digits that name a tokenizer by its tokens and their ids."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda each: (each[1], each[0]))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


@checked
def read_draft_vocab(path: Path | str, target: Path | str | None = None) -> DraftVocabulary:
    """Read a draft vocabulary.

    Args:
        target: the target's folder or GGUF file. If it has a tokenizer, and the file names one, they must be the same.

    Raises:
        CheckpointError: the file can't be read, is of no known format, or is for another tokenizer. Or its ids are
            none, negative or there twice.
    """
    path = Path(path)
    if target is not None and not Path(target).exists():
        raise CheckpointError(f"{target}: there is no such file or folder of a target")
    try:
        with checked_file(path, _LIMIT).open("rb") as file:
            start = file.read(6)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from None
    if start == b"\x93NUMPY":
        return DraftVocabulary(str(path), _ids(path, _from_npy))
    if start[:2] == b"PK" or start[:1] == b"\x80":  # a zip archive, or the pickle of an old torch
        return DraftVocabulary(str(path), _ids(path, _from_torch))
    content = read_json(path, _LIMIT)
    tokenizer, covers = content.get("tokenizer"), content.get("covers")
    ids = _checked(path, content.get("token_ids"))
    if not isinstance(tokenizer, str | None) or not isinstance(covers, float | int | None):
        raise CheckpointError(f"{path}: 'tokenizer' should be a string and 'covers' a number; {MAKE}")
    folder = Path(path if target is None else target)
    has_tokenizer = target is not None and (exists(folder / "tokenizer.json") or is_gguf(folder))
    if tokenizer is not None and has_tokenizer and tokenizer != tokenizer_digest(read_tokenizer(folder)):
        raise CheckpointError(f"{path} was made for another tokenizer than that of {folder}; {MAKE}")
    return DraftVocabulary(str(path), ids, tokenizer, covers)


def _from_npy(path: Path) -> Any:
    return torch.from_numpy(numpy.load(path, allow_pickle=False))


def _from_torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _ids(path: Path, read: Any) -> Tensor:
    try:
        found = read(path)
    except Exception as error:  # a hostile archive may raise any error
        raise CheckpointError(f"{path} cannot be read as token ids: {first_line(error)}; {MAKE}") from None
    return _checked(path, found)


def _checked(path: Path, found: Any) -> Tensor:
    """Return ids from a file as int64 [n]. Raises CheckpointError unless they are whole numbers in one dimension."""
    if isinstance(found, list) and all(type(each) is int and abs(each) < 1 << 62 for each in found):
        return torch.tensor(found, dtype=torch.int64)
    if isinstance(found, Tensor) and found.dim() == 1 and not found.is_floating_point() and found.dtype != torch.bool:
        return found.to(torch.int64)
    is_tensor = isinstance(found, Tensor)
    what = f"{found.dtype} {list(found.shape)}" if is_tensor else shown(found)
    raise CheckpointError(f"{path} holds {what}, not token ids, which are whole numbers in one dimension; {MAKE}")


def check_suffix(path: Path) -> None:
    """Raise ConfigError if a file of this name can't be written."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a draft vocabulary is written as {', '.join(SUFFIXES)}; give such a name")


def write_draft_vocab(path: Path, vocabulary: DraftVocabulary) -> None:
    """Write a draft vocabulary in the format of the file's suffix. Only JSON has more than the ids."""
    check_suffix(path)
    ids = vocabulary.token_ids
    if path.suffix == ".npy":
        numpy.save(path, ids.numpy())
    elif path.suffix == ".pt":
        torch.save(ids, path)
    else:
        about = {"tokenizer": vocabulary.tokenizer, "covers": vocabulary.covers}
        path.write_text(json.dumps({**about, "token_ids": ids.tolist()}) + "\n", encoding="utf-8")
