"""The tensors of a Hugging Face folder, and their places, read from the headers of its files.

A GGUF file is read as the folder that it was made from. A folder has one of four layouts: `model.safetensors`; shards
named by `model.safetensors.index.json`; another single `*.safetensors`; or `pytorch_model.bin` (several published EAGLE
heads have nothing else), and its pickle is not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import CapacityError, first_line
from specgraph_models.checkpoints.files import checked_file, exists, listed, read_json, shown
from specgraph_models.checkpoints.gguf_file import ROTATION, GgufTensor, is_gguf, open_gguf
from specgraph_models.checkpoints.pickled import NotPlain, PickledTensor, pickled_tensors
from specgraph_models.errors import CheckpointError
from specgraph_models.parallel import Share

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype's name in the file: "BF16" in safetensors, "torch.bfloat16" in a pickle, "Q4_1" in GGUF."""
    read: Callable[[Share | None], Tensor]
    """Reads the tensor or a share of it. Only that part of the file is read, except from GGUF."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder or a GGUF file by name. Raises CheckpointError if there is none.

    The headers of all files are checked now, so a truncated file is found before any device work.
    """
    if is_gguf(folder):
        return _gguf_tensors(folder)
    index, single, pickle_file = folder / _INDEX, folder / "model.safetensors", folder / "pytorch_model.bin"
    if exists(index):
        tensors = _indexed_tensors(index)
        if exists(single) and single not in {stored.file for stored in tensors.values()}:
            raise CheckpointError(
                f"{folder} holds weights twice: {single.name}, and the shards that {_INDEX} names; remove those that "
                "do not belong to config.json"
            )
    else:
        paths = [single] if exists(single) else sorted(folder.glob("*.safetensors"))
        if len(paths) > 1:
            raise CheckpointError(
                f"{folder} has {len(paths)} safetensors files but no {_INDEX} to say which tensors each one holds"
            )
        if paths:
            tensors = _safetensors(paths[0])
        elif exists(pickle_file):
            tensors = _pickled_tensors(pickle_file)
        else:
            expected = f"expected model.safetensors, {_INDEX} or pytorch_model.bin"
            raise CheckpointError(f"{folder} has no weights: {expected} (it holds: {listed(folder)})")
    if not tensors:
        raise CheckpointError(f"{folder} has files for weights, but they hold no tensor; fetch the checkpoint again")
    return tensors


def _indexed_tensors(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index} is not an index: 'weight_map' should map names of tensors to names of files")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if shard in ("", ".", "..") or re.search(r"[/\\\0]", shard):
            raise CheckpointError(f"{index} names {shown(shard)}, which is not a file of this folder")
        path = index.parent / shard
        if not exists(path):
            raise CheckpointError(f"{index} names {shown(shard)}, which is not in the folder; fetch the missing shard")
        found = _safetensors(path)
        mapped = {name for name, holder in weight_map.items() if holder == shard}
        if absent := mapped - found.keys():
            first = f"{shown(min(absent))} ({len(absent)} such)"
            raise CheckpointError(f"{index} says {shard} holds {first}, it does not")
        if twice := sorted(found.keys() & tensors.keys()):
            other = tensors[twice[0]].file.name
            raise CheckpointError(f"{path} holds {shown(twice[0])}, and so does {other}; keep the one of the index")
        tensors |= found  # also tensors that the index does not name, as in transformers and vLLM
    return tensors


def _safetensors(path: Path) -> dict[str, StoredTensor]:
    import safetensors

    size = checked_file(path).stat().st_size

    def guarded(read: Callable[..., Any], *args: object) -> Any:
        try:
            return read(*args)
        except MemoryError as error:
            raise CapacityError(f"{path} ({size} bytes) does not fit into this process's memory: {error}") from None
        except (safetensors.SafetensorError, OSError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{path} ({size} bytes) is truncated or not a safetensors file: {first_line(error)}; fetch it again"
            ) from error

    file = guarded(safetensors.safe_open, path, "pt", "cpu")
    headers = {name: guarded(file.get_slice, name) for name in guarded(file.keys)}

    def read(name: str, share: Share | None) -> Tensor:
        return file.get_tensor(name) if share is None else part_of(file.get_slice(name), share)

    return {
        name: StoredTensor(path, tuple(h.get_shape()), h.get_dtype(), partial(guarded, read, name))
        for name, h in headers.items()
    }


def _gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    def read(tensor: GgufTensor, share: Share | None) -> Tensor:
        return tensor.read() if share is None else part_of(tensor.read(), share)

    tensors = {name: each for name, each in open_gguf(path).tensors.items() if name != ROTATION}
    return {name: StoredTensor(path, each.shape, each.kind, partial(read, each)) for name, each in tensors.items()}


def part_of(source: Any, share: Share) -> Tensor:
    """Return a share of a tensor, or of a file's tensor that is read by slices."""
    skipped = (slice(None),) * share.dim
    return torch.cat([source[(*skipped, slice(begin, end))] for begin, end in share.ranges], dim=share.dim)


def _pickled_tensors(path: Path) -> dict[str, StoredTensor]:
    checked_file(path)
    try:
        tensors = pickled_tensors(path)
    except NotPlain as error:
        problem = f"holds more than plain tensors: {first_line(error)}"
        raise CheckpointError(f"{path} {problem}; convert it to safetensors") from None
    except Exception as error:  # a hostile archive may raise any error
        problem = f"is truncated, or not a zip archive of tensors ({type(error).__name__})"
        raise CheckpointError(f"{path} {problem}; convert it to safetensors") from error

    def read(tensor: PickledTensor, share: Share | None) -> Tensor:
        return tensor.read() if share is None else part_of(tensor.read(), share)

    return {
        name: StoredTensor(path, each.shape, str(each.dtype), partial(read, each)) for name, each in tensors.items()
    }
