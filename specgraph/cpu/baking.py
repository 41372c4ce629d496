"""Tensors at fixed addresses, which a recorded op holds instead of the caller's tensors."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import torch


def storage_at(address: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over the memory at `address`. It owns no memory, and keeps none alive."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8).untyped_storage()


def tensor_over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over `storage` with the shape, strides and dtype of `like`. It is never an inference tensor, so
    any grad mode can write it."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        made = torch.empty(0, dtype=like.dtype, device="cpu")
        return made.set_(storage, like.storage_offset(), like.size(), like.stride())


class Baker:
    """Bakes the tensors of one capture. It makes one raw storage per address and size."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def bake(self, tensor: torch.Tensor, *, keep_grad: bool = False) -> torch.Tensor:
        """Return an alias of `tensor` by address.

        `keep_grad` keeps `requires_grad`. Custom ops may call composite ops, and some composite ops (matmul) choose
        their kernel by it even if no gradient is recorded.
        """
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        raw = self._storages.get(key)
        if raw is None:
            raw = self._storages[key] = storage_at(*key)
        baked = tensor_over(raw, tensor)
        return baked.requires_grad_() if keep_grad and tensor.requires_grad else baked


def map_tensors(value: Any, f: Any) -> Any:
    """Return `value` with `f` applied to its tensors. Containers are copied, so the caller may change its own."""
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, dict):
        return {key: map_tensors(v, f) for key, v in value.items()}  # pyright: ignore
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(v, f) for v in value])  # pyright: ignore
    return value
