"""A trial of the Triton ops on a device: it compares the ops of a sampled chain with their plain torch references.

So a Triton that compiles wrong code for the device is refused before it drafts a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from specgraph.ops import DeviceLengths, Drafts, Draws, KVCache, Mask, NewRows, Norm, Weight
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.library import declared

Calls = Callable[[], Iterator[tuple[str, dict[str, Any]]]]
"""Yields the name of an op and its arguments by name."""


def agrees_with_reference(kernels: Any, calls: Calls, device: torch.device) -> str | None:
    """Compare unregistered `kernels` with their references. Return a message about the first difference, or None."""
    for name, arguments in calls():
        seen, wanted = (tree_map_only(Tensor, lambda t: t.to(device, copy=True), arguments) for _ in range(2))
        seen["its result"] = getattr(kernels, name)(**seen)
        wanted["its result"] = declared()[name].reference(**wanted)
        pairs = zip(tree_leaves(seen), tree_flatten_with_path(wanted)[0], strict=True)
        for value, (path, expected) in pairs:
            if isinstance(expected, Tensor) and not _close(value, expected):
                return f"{name} in Triton differs from plain torch in {keystr(path)}"
    return None


def _close(seen: Tensor, expected: Tensor) -> bool:
    """Return whether integers are equal, and floating-point numbers within bfloat16's rounding."""
    if not expected.is_floating_point():
        return torch.equal(seen, expected)
    return torch.allclose(seen.float(), expected.float(), atol=2e-2, rtol=2e-2)


def draft_round() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield draft ops with arguments: three requests of 2 rows, the last one inert, with scattered blocks."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    def i32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    limits = {"max_model_len": 16, "block_size": 4}
    table = torch.tensor([[5, 2, 0, 0], [1, 3, 4, 0], [0, 0, 0, 0]], dtype=torch.int32)
    starts, slots = torch.tensor([4, 8, 0]), torch.tensor([8, 9, 16, 17, -1, -1])
    positions, lens = torch.tensor([4, 5, 8, 9, 0, 0]), i32(6, 10, 0)
    rows, last = torch.zeros(3, 6).long(), torch.zeros(2, 3).long()
    begun = Rows(
        rows[0], rows[1], i32(0, 0, 0), rows[2], last[0], last[1], i32(0, 0, 0), draft_step=torch.zeros(1).long()
    )
    sampled = torch.tensor([[7, 9], [3, 1], [0, 0]])
    yield "begin_rows", {
        "plan": RowPlan(2, 16, 4, slots_of_rejected=True),
        "given": RowInputs(starts, table, i32(2, 1, 0), sampled), "rows": begun,
    }  # fmt: skip
    yield "norm_linear", {"x": normal(6, 64), "norm": Norm(normal(64), 1e-6), "weight": Weight(normal(96, 64) / 8)}
    new = NewRows(normal(6, 2, 32), normal(6, 2, 32), normal(16, 32, dtype=torch.float32), positions, slots)
    yield "paged_attention", {
        "query": normal(6, 4, 32), "cache": KVCache(normal(6, 4, 2, 32), normal(6, 4, 2, 32)), "block_table": table,
        "lengths": DeviceLengths(lens, i32(0, 2, 4, 6), 2), "mask": Mask(), "new": new, "scale": 32**-0.5,
    }  # fmt: skip
    sampling = {"temperature": torch.tensor([0.0, 0.9, 1.3]), "seeds": torch.tensor([1, 2**40, 3])}
    drafts = Drafts(torch.zeros(3, 2).long(), None, torch.ones(1).long(), torch.zeros(3).long())
    yield "draft_from_logits", {
        "logits": normal(3, 500, dtype=torch.float32), "drafts": drafts,
        "draws": Draws(**sampling, positions=lens, more_positions=None, draft_probs=torch.zeros(3, 2, 500)),
    }  # fmt: skip
    yield "advance", {
        "seq_lens": lens, "positions": starts + 1, "slot_mapping": slots[1::2], "block_table": table, **limits,
        "draft_step": torch.ones(1).long(),
    }  # fmt: skip
