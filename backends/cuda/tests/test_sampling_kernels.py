"""Triton ops that choose draft tokens, of a row of NaN; the suite's kernel cases compare all else with float64."""

from __future__ import annotations

import torch
from against_float64 import make, triton_ops  # noqa: F401

from specgraph import ops


def test_a_row_of_nan_still_gives_a_token_that_exists() -> None:
    logits = make(3, 5000)
    logits[1] = float("nan")
    step, result = torch.tensor([0], device="cuda"), torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    token_ids, offsets = torch.empty(3, dtype=torch.int64, device="cuda"), torch.zeros(5000, dtype=torch.int64).cuda()
    drafts = ops.Drafts(result, offsets, step, token_ids)
    ops.draft_from_logits(logits, drafts)
    assert token_ids[1] == 0
    weight = make(5000, 512)
    x = torch.full((3, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    ops.draft_from_hidden(x, ops.LmHead(None, 0.0, weight), drafts)
    assert token_ids.tolist() == [0, 0, 0]
