"""The Triton kernel of the hand-over, and the calls that try it on a device.

The modules here need `triton`; a plugin does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specgraph.ops.copies import BatchTensors


def verified_rounds() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield hand-overs of two requests in buffers for three: a round with K = 1, and the ends of prompts."""
    g = torch.Generator().manual_seed(0)

    def buffers(states: int) -> BatchTensors:
        zeros = torch.zeros(3, 2, dtype=torch.int64)
        aux, table = torch.zeros(6, states * 24, dtype=torch.bfloat16), torch.zeros(3, 16, dtype=torch.int32)
        return BatchTensors(zeros, zeros[:, 0].int() + 9, zeros[:, 1].clone(), aux, table)

    def hidden(states: int) -> list[torch.Tensor]:
        return [torch.randn(7, 24, generator=g).to(torch.bfloat16) for _ in range(states)]

    tokens, starts = torch.arange(7, dtype=torch.int32) + 40, torch.tensor([3, 0, 6, 0])[::2]
    blocks, counts = torch.arange(32, dtype=torch.int32).view(2, 16) + 1, torch.tensor([2, 1], dtype=torch.int32)
    limits: dict[str, Any] = {"max_model_len": 16, "block_size": 4, "reach": 3}
    given: dict[str, Any] = {"token_ids": tokens, "num_sampled": counts, "starts": starts, "table": blocks}
    none = dict.fromkeys(("first_rows", "table_rows", "last_tokens", "last_rows"))
    yield (
        "load_verify_output",
        {**given, "hidden_states": hidden(1), "to": buffers(1), **none, "table_of_slots": False, **limits},
    )
    rows = {"first_rows": torch.tensor([5, 1]), "table_rows": torch.tensor([1, 0])}
    last = {"last_tokens": torch.tensor([[90], [91]]), "last_rows": torch.tensor([1, -1])}
    of_rows = {"hidden_states": hidden(3), "to": buffers(3), **rows, **last, "table_of_slots": True}
    yield "load_verify_output", {**given, **of_rows, **limits}
