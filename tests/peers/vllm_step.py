"""vLLM's test of the kernel between two draft steps, run against our `advance`: a pytest plugin.

It puts modules with vLLM's names in the place of vLLM, on the CPU.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch
from peers.left_out import pytest_collection_modifyitems as pytest_collection_modifyitems
from torch import Tensor

from specgraph import ops

PADDING_SLOT_ID = -1


def step(
    positions_1d: Tensor,
    block_table_tensor: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: Tensor,
    out_slot_mapping: Tensor,
    input_batch_size: int | None = None,
) -> None:
    """Do vLLM's step by `advance`, which takes positions from lengths, with one row per request."""
    padding = (input_batch_size or len(positions_1d)) - len(positions_1d)
    lengths = torch.nn.functional.pad(positions_1d.int() + 1, (0, padding))
    table = torch.nn.functional.pad(block_table_tensor, (0, 0, 0, padding))
    positions = torch.zeros_like(lengths, dtype=torch.int64)
    draft_step = torch.zeros(1, dtype=torch.int64)
    ops.advance(lengths, positions, out_slot_mapping, draft_step, table, max_model_len, block_size)
    seq_lens.add_(lengths[: len(seq_lens)] - positions_1d.int() - 1)
    out_clamped_positions.copy_(positions[: len(positions_1d)])


def pytest_configure() -> None:
    """Put the modules that the test imports in the place of vLLM's."""
    platform = SimpleNamespace(device_type="cpu", is_cuda_alike=lambda: True, is_xpu=lambda: False)
    names: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1": {},
        "vllm.v1.spec_decode": {},
        "vllm.v1.spec_decode.utils": {
            "PADDING_SLOT_ID": PADDING_SLOT_ID,
            "eagle_step_update_slot_mapping_and_metadata": step,
        },
        "triton": {"__version__": "0"},
    }
    for name, contents in names.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(contents)
