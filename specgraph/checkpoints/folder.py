"""Weights of a Hugging Face folder, read one at a time: checked, in the dtype and on the device of the model.

A folder remembers which tensors were read, so that `refuse_unused` can name one that no reader knows: a tensor that is
dropped in silence is a model that computes something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specgraph.checkpoints.files import shown
from specgraph.checkpoints.quantised import FP8, Quantisation, from_fp8, from_mxfp4, scale_shapes
from specgraph.checkpoints.quantised import IGNORED as QUANTISED_IGNORED
from specgraph.checkpoints.stored import StoredTensor, part_of, stored_tensors
from specgraph.errors import CapacityError, CheckpointError, first_line
from specgraph.parallel import Share

FLOATS = {"F64", "F32", "F16", "BF16", "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"}
_INTEGERS = {"I64", "I32", "torch.int64", "torch.int32"}

LARGEST_WEIGHT = 65504.0
"""The largest float16. No trained weight comes near it; a larger one is damage, and overflows on the way to a logit."""

ALWAYS_IGNORED: dict[str, str] = {
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)": "a buffer, computed from config.json",
    r"(.*\.)?self_attn\.(k_scale|v_scale)": "a scale of FP8 KV caches, read with kv_cache_dtype fp8",
}
"""Pattern of tensor names -> why they may be ignored in every format."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The tensors of a folder by name, and the device and dtype that weights are delivered in."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    device: torch.device
    dtype: torch.dtype
    used: set[str] = field(default_factory=set[str])
    """Names that were read, or that may be ignored."""
    quantisation: Quantisation | None = None
    """How weights are stored, where not as plain floating point."""
    keep_fp8: bool = False
    """Matrices of linears that are stored as FP8 stay so: see `load_matrix`."""
    kept_fp8: set[str] = field(default_factory=set[str])
    """Names of those that did."""
    kv_scales: bool = False
    """The KV cache will be FP8: scales of keys and values go into the weights (`scale_kv`)."""

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Sequence[str]:
        """All tensor names, sorted."""
        return sorted(self.tensors)

    def weight(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, share: Share | None = None
    ) -> Tensor:
        """A floating-point tensor in the folder's dtype or the one given, on its device; also one stored as FP8.

        Args:
            shape: of the whole tensor.
            share: the part to read; all of it when None.

        Raises:
            CheckpointError: no such tensor, another shape (both are named), another dtype, no scale beside an FP8
                matrix, or values that are not finite.
            CapacityError: the device has not enough memory.
        """
        stored = self._stored(name, shape)
        if self.is_fp8(name):
            _, scale, block = self.fp8_parts(name, shape)
            values = from_fp8(stored.read(None), scale, block)
            values = values if share is None else part_of(values, share)
        elif stored.dtype in FLOATS:
            values = stored.read(share)
        else:
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} is stored as {stored.dtype}, and config.json does not say how "
                "to read that as floating point; give a float32, float16 or bfloat16 checkpoint"
            )
        return self._checked(name, stored, values.to(dtype=dtype or self.dtype))

    def mxfp4(self, name: str, shape: Sequence[int]) -> Tensor:
        """Matrices [count, out, in] stored as `name`_blocks and `name`_scales, in the folder's dtype.

        Raises:
            CheckpointError, CapacityError: as `weight`.
        """
        *rows, columns = shape
        if self.quantisation is None or self.quantisation.kind != "mxfp4" or columns % 32:
            raise CheckpointError(
                f"{self.folder} holds {name}_blocks, blocks of 32 columns: that needs a multiple of 32 columns (here "
                f"{columns}), and 'quant_method' mxfp4 in config.json"
            )
        blocks, scales = (
            self._stored(f"{name}_{part}", (*rows, columns // 32, *more))
            for part, more in (("blocks", (16,)), ("scales", ()))
        )
        for part in (blocks, scales):
            if part.dtype not in ("U8", "torch.uint8"):
                raise CheckpointError(f"{part.file}: a part of {shown(name)} is stored as {part.dtype}, not as bytes")
        return self._checked(name, blocks, from_mxfp4(blocks.read(None), scales.read(None)).to(self.dtype))

    def is_fp8(self, name: str) -> bool:
        """Whether a tensor is stored as FP8, and config.json says so."""
        said = self.quantisation is not None and self.quantisation.kind == "fp8"
        return said and name in self.tensors and self.tensors[name].dtype in FP8

    def fp8_parts(self, name: str, shape: Sequence[int]) -> tuple[StoredTensor, Tensor, tuple[int, int] | None]:
        """A tensor for which `is_fp8`, its scale as it is stored, and the block of the matrix that shares one scale.

        Raises:
            CheckpointError: no such tensor or scale, or another shape or dtype of one.
        """
        stored = self._stored(name, shape)
        block = None if self.quantisation is None else self.quantisation.block
        scale_name = next((n for n in (f"{name}_scale", f"{name}_scale_inv") if n in self.tensors), f"{name}_scale")
        shapes = scale_shapes(stored.shape, block)
        given = self.tensors[scale_name].shape if scale_name in self.tensors else ()
        scale = self._stored(scale_name, given if given in shapes else shapes[-1])
        if scale.dtype not in FLOATS:
            raise CheckpointError(f"{scale.file}: tensor {shown(scale_name)} is stored as {scale.dtype}, not as floats")
        return stored, scale.read(None), block if len(stored.shape) == 2 else None

    def _checked(self, name: str, stored: StoredTensor, weight: Tensor) -> Tensor:
        """`weight` on the folder's device, if its values are those of weights."""
        low, high = (float(limit) for limit in weight.aminmax())  # on the host: before any device work
        if not -LARGEST_WEIGHT <= low <= high <= LARGEST_WEIGHT:  # NaN compares false
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} (stored as {stored.dtype}, read as {weight.dtype}) holds values "
                f"from {low:g} to {high:g}; weights must be finite and below {LARGEST_WEIGHT:g}"
            )
        return self.placed(name, weight)

    def placed(self, name: str, weight: Tensor) -> Tensor:
        """`weight` on the folder's device.

        Raises:
            CapacityError: the device has not enough memory.
        """
        try:
            return weight.to(self.device)
        except RuntimeError as error:  # torch's errors of all devices, OutOfMemoryError too, are RuntimeErrors
            raise CapacityError(
                f"the weights of {self.folder} could not be put on {self.device}, at tensor {shown(name)} of "
                f"{weight.nbytes / (1 << 30):.2f} GiB; free memory there, or choose a narrower dtype "
                f"({first_line(error)[:120]})"
            ) from error

    def optional_weight(self, name: str, shape: Sequence[int], share: Share | None = None) -> Tensor | None:
        """As `weight`, or None when the folder has no such tensor."""
        return self.weight(name, shape, share=share) if name in self.tensors else None

    def stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], shares: Sequence[Share | None] | None = None
    ) -> Tensor:
        """Several weights, or shares of them, joined along their first dimension: one matrix product instead of
        several."""
        parts = zip(names, shapes, shares or [None] * len(names), strict=True)
        return torch.cat([self.weight(name, shape, share=share) for name, shape, share in parts])

    def integers(self, name: str, shape: Sequence[int]) -> Tensor:
        """An integer tensor as int64, on the host.

        Raises:
            CheckpointError: no such tensor, another shape, or another dtype.
        """
        stored = self._stored(name, shape)
        if stored.dtype not in _INTEGERS:
            raise CheckpointError(f"{stored.file}: tensor {shown(name)} is stored as {stored.dtype}, not as integers")
        return stored.read(None).to(torch.int64)

    def ignore(self, patterns: Mapping[str, str]) -> None:
        """Count tensors whose whole name matches one of the patterns (pattern -> why it may be ignored) as used."""
        for pattern in patterns:
            compiled = re.compile(pattern)
            self.used.update(name for name in self.tensors if compiled.fullmatch(name))

    def refuse_unused(self) -> None:
        """Raise CheckpointError if any tensor was neither read nor ignored; the message names the first."""
        self.ignore(ALWAYS_IGNORED if self.quantisation is None else ALWAYS_IGNORED | QUANTISED_IGNORED)
        unused = sorted(self.tensors.keys() - self.used)
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise CheckpointError(
                f"{self.folder} holds tensor {shown(unused[0])}{more}, which this format does not use; "
                "the model would compute something else without it, so it is not loaded"
            )

    def _stored(self, name: str, shape: Sequence[int]) -> StoredTensor:
        if name not in self.tensors:
            last = name.rsplit(".", 2)[-2:]
            similar = [n for n in self.names() if n.rsplit(".", 2)[-2:] == last][:3]
            hint = f"; similar names: {', '.join(similar)}" if similar else f"; it has {len(self.tensors)} others"
            raise CheckpointError(
                f"{self.folder} has no tensor {name!r}{hint}; config.json is of another model, or weights are missing"
            )
        stored = self.tensors[name]
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} has shape {shown(list(stored.shape))}, "
                f"config.json asks for {list(shape)}"
            )
        self.used.add(name)
        return stored


def open_checkpoint(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantisation: Quantisation | None = None,
    keep_fp8: bool = False,
    kv_scales: bool = False,
) -> CheckpointFolder:
    """List a folder's tensors. Headers of all files are checked now, so truncation shows before any device work.

    Raises:
        CheckpointError: no weights, a missing shard, or a truncated or malformed file.
    """
    return CheckpointFolder(
        folder,
        stored_tensors(folder),
        device,
        dtype,
        quantisation=quantisation,
        keep_fp8=keep_fp8,
        kv_scales=kv_scales,
    )
