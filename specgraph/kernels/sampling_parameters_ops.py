"""Launching the Triton kernels of the sampling parameters."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgraph.kernels import sampling_parameters as passes
from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.smallest_kept import select_kernel
from specgraph.ops.sampling_parameters import SamplingParameters

_COLUMNS = 4096
"""Columns per program."""
_CHUNK = 4096
"""Collected weights that the search reads at once."""


class SamplingParameterOps(Launcher):
    """The implementation of `specgraph.ops.adjust_logits`."""

    __slots__ = ()

    def adjust_logits(
        self, logits: Tensor, temperature: Tensor, parameters: SamplingParameters, draft_token_ids: Tensor,
        ancestors: Tensor | None = None, draft_to_target: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        logits = contiguous_rows(logits)
        (rows, columns), (requests, steps) = logits.shape, draft_token_ids.shape
        adjusted = logits.new_empty(rows, columns, dtype=torch.float32)
        if rows == 0:
            return adjusted
        wide = min(_COLUMNS, power_of_two(columns))
        blocks, per_request = ceil_div(columns, wide), rows // requests

        def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return logits.new_empty((rows, *shape), dtype=dtype)

        filters = temperature, *parameters[:3]
        tops = scratch(blocks, dtype=torch.float32)
        within = scratch(blocks, passes.CUTS), scratch(blocks, passes.CUTS, dtype=torch.int64)
        found, held = scratch(blocks, wide, dtype=torch.float32), scratch(blocks)
        cuts, ties = scratch(), scratch(blocks)
        options: dict[str, Any] = {"COLUMNS": wide, "enable_fp_fusion": False}
        how: dict[str, Any] = {"num_warps": 4, **options}
        shape: dict[str, Any] = {"BLOCKS": power_of_two(blocks), "CUTS": passes.CUTS, **options}
        self.launch(
            passes.adjust_kernel, (rows, blocks),
            logits, draft_token_ids, *parameters[3:], ancestors, draft_to_target, adjusted, tops, columns,
            parameters.bias.shape[1], logits.stride(0), per_request, steps, draft_token_ids.stride(0), blocks, **how,
        )  # fmt: skip
        self.launch(
            passes.cut_kernel, (rows, blocks),
            adjusted, tops, *filters, *within, columns, per_request, blocks, num_warps=4, **shape,
        )  # fmt: skip
        self.launch(
            passes.collect_kernel, (rows, blocks),
            adjusted, tops, *filters, *within, found, held, columns, per_request, blocks, num_warps=4, **shape,
        )  # fmt: skip
        self.launch(
            select_kernel, (rows,),
            *filters, *within, found, held, cuts, ties, per_request, blocks,
            CHUNK=max(16, _CHUNK // power_of_two(blocks)), num_warps=8, **shape,
        )  # fmt: skip
        self.launch(
            passes.exclude_kernel, (rows, blocks),
            adjusted, tops, *filters, cuts, ties, columns, per_request, blocks, BLOCKS=shape["BLOCKS"], **how,
        )  # fmt: skip
        return adjusted
