"""How many rows of a propose have no KV block, as the ops that begin one count them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, on_host, run_op


@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.rows-without-block-are-counted",
    "begin_propose, begin_block and begin_masked add the number of rows whose token has a position and no KV block: "
    "those of sampled tokens and of the drafts after them.",
    hazard="rows-without-block-uncounted",
    cause="a count of rejected rows, of inert requests, of positions past max_model_len, or of one kind of row only",
)
def test_without_block(platform: Platform, way: str, later: int, seed: int) -> None:
    device, q, limit, block, mask = platform.device, 3, 70, 16, 99
    counts, starts = [3, 0, 1, 2, 1, 3, 2], [14, 3, 69, 31, 20, 45, 63]
    blocks = [[5, 0, 2, 0, 0], [0] * 5, [3, 4, 6, 1, 0], [8, 0, 9, 0, 0], [10, 11, 0, 0, 0], [0] * 5, [1, 2, 3, 4, 7]]
    n = len(counts)
    tokens = torch.randint(0, 90, (n, q), generator=torch.Generator().manual_seed(seed))
    given = [tokens, torch.tensor(counts, dtype=torch.int32), torch.tensor(starts), torch.tensor(blocks).int()]
    there = [tensor.to(device) for tensor in given]
    totals = {name: torch.full((1,), 7, device=device) for name in ("begin_propose", "begin_block", "begin_masked")}

    def full(rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(n * rows, dtype=dtype, device=device)

    def lengths() -> Tensor:
        return full(1, torch.int32)

    limits: dict[str, Any] = {"max_model_len": limit, "block_size": block}
    length, steps = later + 1, later + 1  # of a block: the last token and masks; of a masked pass: drafts
    parts = ("token_ids", "positions", "slot_mapping")
    propose: dict[str, Any] = {name: full(q) for name in parts} | {"seq_lens": lengths(), "step_seq_lens": lengths()}
    propose |= {"last_rows": full(1), "step_positions": full(1)}
    propose["draft_step"] = torch.zeros(1, dtype=torch.int64, device=device)
    in_block: dict[str, Any] = {name: full(length) for name in parts} | {"seq_lens": lengths()}
    in_block |= {"context_positions": full(q), "context_slots": full(q)}
    masked: dict[str, Any] = {name: full(q + steps - 1) for name in (*parts, "hidden_rows")}
    masked |= {"seq_lens": lengths(), "draft_rows": full(steps)}

    def work() -> None:
        total = totals["begin_propose"]
        ops.begin_propose(*there, **limits, **propose, later_rows=later, rows_without_block=total)
        total = totals["begin_block"]
        ops.begin_block(*there, mask_token_id=mask, **limits, **in_block, rows_without_block=total)
        total = totals["begin_masked"]
        ops.begin_masked(*there, mask_token_id=mask, **limits, **masked, rows_without_block=total)

    written = (*totals.values(), *propose.values(), *in_block.values(), *masked.values())
    run_op(platform, way, work, written)
    for name, rows in (("begin_propose", later), ("begin_block", length), ("begin_masked", later)):
        places = [
            (r, p) for r in range(n) if counts[r] for p in range(starts[r], starts[r] + counts[r] + rows) if p < limit
        ]
        wanted = 7 + sum(blocks[r][p // block] == 0 for r, p in places)
        seen = int(on_host(totals[name]))
        assert seen == wanted, f"{name} counts {seen - 7} rows without a block, and there are {wanted - 7}"
