"""The matrices of a model's linears: in the folder's dtype, or as the FP8 values and scales that the folder stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.checkpoints.files import shown
from specgraph.checkpoints.folder import LARGEST_WEIGHT, CheckpointFolder
from specgraph.checkpoints.stored import part_of
from specgraph.errors import CheckpointError
from specgraph.models.layers import Weight
from specgraph.parallel import Share

_LARGEST_FP8 = 448.0


def load_matrix(
    folder: CheckpointFolder,
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    shares: Sequence[Share | None] | None = None,
) -> Weight:
    """Matrices, or shares of them, joined along their rows: one product instead of several.

    They stay FP8 where `folder.keep_fp8` asks for it, all of them are stored so, and their scales are for the same
    number of columns, a multiple of 16 that divides each rank's.

    Raises:
        CheckpointError, CapacityError: as `CheckpointFolder.weight`.
    """
    if folder.keep_fp8 and all(folder.is_fp8(name) for name in names):
        asked = zip(names, shapes, shares or [None] * len(names), strict=True)
        parts = [_fp8(folder, name, shape, share) for name, shape, share in asked]
        kept = [part for part in parts if part is not None]
        if len(kept) == len(parts) and len({scale.shape[0] for _, scale in kept}) == 1:
            folder.kept_fp8.update(names)
            if len(kept) == 1:
                return Weight(kept[0][0], scale=kept[0][1])
            weight = torch.cat([values.view(torch.uint8) for values, _ in kept]).view(torch.float8_e4m3fn)
            return Weight(weight, scale=torch.cat([scale for _, scale in kept], dim=1))
    return Weight(folder.stacked(names, shapes, shares))


def _fp8(
    folder: CheckpointFolder, name: str, shape: tuple[int, int], share: Share | None
) -> tuple[Tensor, Tensor] | None:
    """The values and the scales by row of one matrix, on the folder's device; None if its scales cannot be kept."""
    stored, scale, block = folder.fp8_parts(name, shape)
    (rows, columns), width = shape, shape[1] if block is None else min(block[1], shape[1])
    if columns % width or width % 16:
        return None
    scale = scale.float()
    if block is not None:
        scale = scale.repeat_interleave(min(block[0], rows), 0)[:rows].t()
    else:
        scale = scale.view(1, -1).expand(1, rows)
    values = stored.read(None)
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
            f"{stored.file}: tensor {shown(name)} (stored as {stored.dtype}) or its scale, at most {largest:g}, is not "
            f"finite or makes values above {LARGEST_WEIGHT:g}; weights must be finite and below that"
        )
    return folder.placed(name, values.contiguous()), folder.placed(f"{name}_scale", scale.contiguous())
