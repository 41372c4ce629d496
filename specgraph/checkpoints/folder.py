"""Tensors of a Hugging Face folder, read one at a time.

Layouts: `model.safetensors`; shards named by `model.safetensors.index.json`; any other lone `*.safetensors`; and
`pytorch_model.bin` (several published EAGLE heads have nothing else), read with `weights_only`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Which file holds each tensor, and the device and dtype that tensors are delivered in."""

    folder: Path
    files: Mapping[str, Path]
    """Tensor name -> file."""
    device: torch.device
    dtype: torch.dtype
    pickled: Mapping[str, Tensor]
    """Tensors of a `.bin` file, mapped from disk; empty for safetensors."""

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def names(self) -> Sequence[str]:
        """All tensor names, sorted."""
        return sorted(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        self._require(name)
        if name in self.pickled:
            return tuple(self.pickled[name].shape)
        with _opened(self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def raw(self, name: str) -> Tensor:
        """A tensor as stored, on the host.

        Raises:
            CheckpointError: no such tensor.
        """
        self._require(name)
        if name in self.pickled:
            return self.pickled[name]
        with _opened(self.files[name]) as file:
            return file.get_tensor(name)

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """A floating-point tensor in the folder's dtype, on its device.

        Raises:
            CheckpointError: no such tensor, another shape (both are named), or not plain floating point.
        """
        self.check_shape(name, shape)
        stored = self.raw(name)
        if stored.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.files[name]}: tensor {name!r} is stored as {stored.dtype}; quantised weights are not "
                "supported, give a float32, float16 or bfloat16 checkpoint"
            )
        return stored.to(device=self.device, dtype=self.dtype)

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise CheckpointError, naming both shapes, unless the tensor has this shape."""
        stored = self.shape(name)
        if stored != tuple(shape):
            raise CheckpointError(
                f"{self.files[name]}: tensor {name!r} has shape {list(stored)}, config.json asks for {list(shape)}"
            )

    def optional_weight(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """As `weight`, or None when the folder has no such tensor."""
        return self.weight(name, shape) if name in self.files else None

    def stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        """Several weights joined along their first dimension: one matrix product instead of several."""
        return torch.cat([self.weight(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def _require(self, name: str) -> None:
        if name not in self.files:
            last = name.rsplit(".", 2)[-2:]
            similar = [n for n in self.names() if n.rsplit(".", 2)[-2:] == last][:3]
            hint = f"; similar names: {', '.join(similar)}" if similar else f"; it has {len(self.files)} others"
            raise CheckpointError(f"{self.folder} has no tensor {name!r}{hint}")


def open_checkpoint(folder: Path, device: torch.device, dtype: torch.dtype) -> CheckpointFolder:
    """List a folder's tensors. Headers of all files are checked now, so truncation shows before any device work.

    Raises:
        CheckpointError: no weights, a missing shard, or a truncated or malformed file.
    """
    index, single = folder / _INDEX, folder / "model.safetensors"
    files: dict[str, Path] = {}
    if index.exists():
        files = _indexed_files(index)
    else:
        paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if len(paths) > 1:
            raise CheckpointError(
                f"{folder} has {len(paths)} safetensors files but no {_INDEX} to say which tensors each one holds"
            )
        if paths:
            files = dict.fromkeys(_tensor_names(paths[0]), paths[0])
        elif (pickle_file := folder / "pytorch_model.bin").exists():
            pickled = _read_pickle(pickle_file)
            return CheckpointFolder(folder, dict.fromkeys(pickled, pickle_file), device, dtype, pickled)
    if not files:
        there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise CheckpointError(
            f"{folder} has no weights: expected model.safetensors, {_INDEX} or pytorch_model.bin (it holds: {there})"
        )
    return CheckpointFolder(folder, files, device, dtype, {})


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards with a 'weight_map': {error!r}") from error
    for path in sorted(set(files.values())):
        if not path.exists():
            raise CheckpointError(f"{index} names {path.name}, which is not in the folder; fetch the missing shard")
        absent = {name for name, shard in files.items() if shard == path} - set(_tensor_names(path))
        if absent:
            raise CheckpointError(f"{index} says {path.name} holds {min(absent)!r} ({len(absent)} such), it does not")
    return files


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # here, so that a drafter without a folder needs no safetensors

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not a safetensors file: {error}; fetch it again"
        ) from error


def _tensor_names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is truncated or not a file of tensors: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointError(f"{path} should hold a mapping of names to tensors")
    return {str(name): tensor for name, tensor in loaded.items()}
