"""Weights of a Hugging Face folder, read one at a time, checked, in the model's dtype and on its device.

A folder remembers which tensors were read, so that `refuse_unused` can name one that no reader knows. A model with a
tensor dropped in silence would compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specgraph.errors import CapacityError, first_line
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.gguf_file import is_gguf
from specgraph_models.checkpoints.quantised import FP8, Quantisation, from_fp8, from_mxfp4, scale_shapes, scales_by_row
from specgraph_models.checkpoints.quantised import IGNORED as QUANTISED_IGNORED
from specgraph_models.checkpoints.stored import StoredTensor, part_of
from specgraph_models.errors import CheckpointError
from specgraph_models.layers import Weight
from specgraph_models.parallel import Share

FLOATS = {"F64", "F32", "F16", "BF16", "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16"}
_INTEGERS = {"I64", "I32", "torch.int64", "torch.int32"}

_LARGEST_FP8 = 448.0
LARGEST_WEIGHT = 65504.0
"""The largest float16. No trained weight comes near it. A larger weight is damaged, and would overflow in a pass."""

ALWAYS_IGNORED: dict[str, str] = {
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)": "a buffer, computed from config.json",
    r"(.*\.)?self_attn\.(k_scale|v_scale)": "of an FP8 KV cache, which is refused for a folder that has them",
}
"""Pattern of tensor names -> the reason why they may be ignored in every format."""

_MASK = re.compile(r"(.*\.)?(self_)?attn\.(masked_)?bias")
"""Buffers of older files: the causal mask [1, 1, positions, positions], and the number that it replaces scores with.
No linear has such a name."""

KV_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""The ends of the names of an FP8 KV cache's scales. The last two are in folders of Quark."""


def _is_mask(stored: StoredTensor) -> bool:
    return stored.shape == () or (stored.shape[:2] == (1, 1) and len(stored.shape) == 4)


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The tensors of a folder by name, and the device and dtype to read weights to."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    device: torch.device
    dtype: torch.dtype
    used: set[str] = field(default_factory=set[str])
    """The names of tensors that were read or may be ignored."""
    quantisation: Quantisation | None = None
    """The storage of the weights. None if they are plain floating point."""
    keep_fp8: bool = False
    """Keep matrices of linears in FP8 if they are stored so; see `matrix`."""
    kept_fp8: set[str] = field(default_factory=set[str])
    """The names of matrices that were kept in FP8."""

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Sequence[str]:
        """Return all tensor names, sorted."""
        return sorted(self.tensors)

    def weight(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, share: Share | None = None
    ) -> Tensor:
        """Return a floating-point tensor on the folder's device. A tensor stored as FP8 is dequantised.

        Args:
            shape: the shape of the whole tensor.
            dtype: the result's dtype. None for the folder's.
            share: the part to read. None for all of it.

        Raises:
            CheckpointError: there is no such tensor; it has another shape (the text has both) or another dtype; an FP8
                matrix has no scale; or values are not finite.
            CapacityError: the device has not enough memory.
        """
        stored = self._stored(name, shape)
        if self._is_fp8(name):
            values = from_fp8(stored.read(None), *self._scales(name, stored))
            values = values if share is None else part_of(values, share)
        elif stored.dtype in FLOATS or is_gguf(stored.file):
            values = stored.read(share)
        else:
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} is stored as {stored.dtype}, and config.json does not say how "
                "to read that as floating point; give a float32, float16 or bfloat16 checkpoint"
            )
        return self._checked(name, stored, values.to(dtype=dtype or self.dtype))

    def optional_weight(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return `weight`. None if the folder has no such tensor."""
        return self.weight(name, shape) if name in self.tensors else None

    def stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], shares: Sequence[Share | None] | None = None
    ) -> Tensor:
        """Return several weights, or shares of them, joined along their first dimension. One matrix product then
        replaces several."""
        parts = zip(names, shapes, shares or [None] * len(names), strict=True)
        return torch.cat([self.weight(name, shape, share=share) for name, shape, share in parts])

    def matrix(
        self, names: Sequence[str], shapes: Sequence[tuple[int, int]], shares: Sequence[Share | None] | None = None
    ) -> Weight:
        """Return the matrices of a linear, or shares of them, `stacked`.

        They stay FP8 under three conditions: `keep_fp8` is set; all of them are stored as FP8; and their scales cover
        the same number of columns, a multiple of 16 that divides each rank's columns.
        """
        if self.keep_fp8 and all(self._is_fp8(name) for name in names):
            asked = zip(names, shapes, shares or [None] * len(names), strict=True)
            parts = [self._kept(name, shape, share) for name, shape, share in asked]
            kept = [part for part in parts if part is not None]
            if len(kept) == len(parts) and len({scale.shape[0] for _, scale in kept}) == 1:
                self.kept_fp8.update(names)
                values = torch.cat([part.view(torch.uint8) for part, _ in kept]).view(torch.float8_e4m3fn)
                return Weight(values, scale=torch.cat([scale for _, scale in kept], dim=1))
        return Weight(self.stacked(names, shapes, shares))

    def mxfp4(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return matrices [count, out, in] stored as `name`_blocks and `name`_scales, in the folder's dtype."""
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

    def _is_fp8(self, name: str) -> bool:
        """Return True if a tensor is stored as FP8 and config.json declares FP8."""
        said = self.quantisation is not None and self.quantisation.kind == "fp8"
        return said and name in self.tensors and self.tensors[name].dtype in FP8

    def _scales(self, name: str, stored: StoredTensor) -> tuple[Tensor, tuple[int, int] | None]:
        """Return the `scales_by_row` of an FP8 tensor, and the size of the block of the matrix that shares a scale."""
        block = self.quantisation.block if self.quantisation is not None and len(stored.shape) > 1 else None
        scale_name = next((n for n in (f"{name}_scale", f"{name}_scale_inv") if n in self.tensors), f"{name}_scale")
        shapes = scale_shapes(stored.shape, block)
        given = self.tensors[scale_name].shape if scale_name in self.tensors else ()
        scale = self._stored(scale_name, given if given in shapes else shapes[-1])
        if scale.dtype not in FLOATS:
            raise CheckpointError(f"{scale.file}: tensor {shown(scale_name)} is stored as {scale.dtype}, not as floats")
        return scales_by_row(scale.read(None), stored.shape, block), block

    def _kept(self, name: str, shape: tuple[int, int], share: Share | None) -> tuple[Tensor, Tensor] | None:
        """Return an FP8 matrix and its scales [groups, rows], on the device. None if its scales cannot be kept."""
        stored = self._stored(name, shape)
        scale, block = self._scales(name, stored)
        (rows, columns), width = shape, shape[1] if block is None else min(block[1], shape[1])
        if columns % width or width % 16:
            return None
        values, scale = stored.read(None), scale.expand(rows, -1).t()
        if share is not None:
            values = part_of(values, share)
            if share.dim == 0:
                scale = part_of(scale, Share(1, share.ranges))
            elif scale.shape[0] > 1:
                if any(edge % width for edges in share.ranges for edge in edges):
                    return None
                scale = part_of(scale, Share(0, tuple((begin // width, end // width) for begin, end in share.ranges)))
        largest = float(scale.abs().max())
        if not largest * _LARGEST_FP8 <= LARGEST_WEIGHT or bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} (stored as {stored.dtype}) or its scale, at most {largest:g}, is "
                f"not finite or makes values above {LARGEST_WEIGHT:g}; weights must be finite and below that"
            )
        return self._placed(name, values.contiguous()), self._placed(f"{name}_scale", scale.contiguous())

    def _checked(self, name: str, stored: StoredTensor, weight: Tensor) -> Tensor:
        """Return `weight` on the folder's device. Raises CheckpointError if a value is not finite or too large."""
        low, high = (float(limit) for limit in weight.aminmax())  # on the host: before any device work
        if not -LARGEST_WEIGHT <= low <= high <= LARGEST_WEIGHT:  # NaN compares false
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} (stored as {stored.dtype}, read as {weight.dtype}) holds values "
                f"from {low:g} to {high:g}; weights must be finite and below {LARGEST_WEIGHT:g}"
            )
        return self._placed(name, weight)

    def _placed(self, name: str, weight: Tensor) -> Tensor:
        """Return `weight` on the folder's device."""
        try:
            return weight.to(self.device)
        except RuntimeError as error:  # torch raises it, or a subclass such as OutOfMemoryError, on all devices
            raise CapacityError(
                f"the weights of {self.folder} could not be put on {self.device}, at tensor {shown(name)} of "
                f"{weight.nbytes / (1 << 30):.2f} GiB; free memory there, or choose a narrower dtype "
                f"({first_line(error)[:120]})"
            ) from error

    def integers(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return an integer tensor as int64, on the host."""
        stored = self._stored(name, shape)
        if stored.dtype not in _INTEGERS:
            raise CheckpointError(f"{stored.file}: tensor {shown(name)} is stored as {stored.dtype}, not as integers")
        return stored.read(None).to(torch.int64)

    def ignore(self, patterns: Mapping[str, str]) -> None:
        """Count a tensor as used if its whole name matches one of the patterns (pattern -> the reason)."""
        for pattern in patterns:
            compiled = re.compile(pattern)
            self.used.update(name for name in self.tensors if compiled.fullmatch(name))

    def refuse_unused(self) -> None:
        """Raise CheckpointError if any tensor was neither read nor ignored. The text names the first one."""
        self.ignore(ALWAYS_IGNORED if self.quantisation is None else ALWAYS_IGNORED | QUANTISED_IGNORED)
        self.used.update(name for name, stored in self.tensors.items() if _MASK.fullmatch(name) and _is_mask(stored))
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
