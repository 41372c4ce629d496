"""Stand-ins that vllm-ascend 0.23.0 needs here: its one Triton kernel without a fallback, in torch ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SlotMapping:
    """`_compute_slot_mapping_kernel` of vllm.v1.worker.block_table, launched as `kernel[grid](...)`: the slot of each
    token's key, and `PAD_ID` behind the last token. The grid has one row more than there are requests."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        requests = grid[0] - 1

        def launch(
            num_tokens: int, room: int, starts: Tensor, positions: Tensor, table: Tensor, stride: int, block_size: int,
            slots: Tensor, *, PAD_ID: int, **_: Any,
        ) -> None:  # fmt: skip
            rows = torch.arange(requests, device=positions.device)
            lengths = (starts[1 : requests + 1] - starts[:requests]).long()
            row, position = rows.repeat_interleave(lengths, output_size=num_tokens), positions[:num_tokens].long()
            slots[:num_tokens] = table[row, position // block_size] * block_size + position % block_size
            slots[num_tokens:room].fill_(PAD_ID)

        return launch


def install() -> None:
    """Put the kernel in its place. vllm-ascend's compiled extension is tried here, before torch.compile would: without
    CANN it does not load, and vllm-ascend goes on with torch_npu's ops."""
    import vllm.v1.worker.block_table as module
    from vllm_ascend.utils import enable_custom_op

    module._compute_slot_mapping_kernel = SlotMapping()
    enable_custom_op()
