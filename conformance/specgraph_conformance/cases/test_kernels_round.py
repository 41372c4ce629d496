"""The ops between two rounds of the lowering `round`, against plain Python loops, eagerly and in a graph."""

from __future__ import annotations

import pytest
import torch
from specgraph import kernels
from specgraph.platforms import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, on_host, run_op


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [0, 3])
@case(
    "kernels.stop-finished",
    "Requests that sampled a stop token or their last token become inert, and no others; what remains is counted.",
    hazard="round-token-after-stop",
    cause="stop_finished: a stop token past the sampled ones, -1 taken for a stop token, or a limit missed by one",
    quick=True,
)
def test_stop_finished(platform: Platform, way: str, k: int, seed: int) -> None:
    device, requests = platform.device, 19
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 9, (requests, k + 1), generator=generator)
    counts = torch.randint(0, k + 2, (requests,), generator=generator).int()
    left = torch.randint(0, k + 4, (requests,), generator=generator)
    stops = torch.randint(-1, 9, (requests, 16), generator=generator)
    stops[:, 2:] = -1
    inputs = [tensor.to(device).clone() for tensor in (tokens, counts, left, stops)]
    run_op(platform, way, lambda: kernels.stop_finished(*inputs), inputs[1:3])
    seen_counts, seen_left = (on_host(tensor).tolist() for tensor in inputs[1:3])
    for r, (row, count, remaining) in enumerate(zip(tokens.tolist(), counts.tolist(), left.tolist(), strict=True)):
        stopped = any(token >= 0 and token in stops[r].tolist() for token in row[:count])
        finished = stopped or count >= remaining
        assert seen_counts[r] == (0 if finished else count), (
            f"request {r} sampled {row[:count]}, has room for {remaining} and stops at {stops[r, :2].tolist()}: its "
            f"count is {seen_counts[r]}, and it is {'' if finished else 'not '}finished"
        )
        assert seen_left[r] == max(remaining - count, 0), (
            f"request {r} had {remaining} tokens to come and sampled {count}: {seen_left[r]} remain"
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [0, 1, 5])
@case(
    "kernels.next-verify",
    "The verify after a propose begins at the last sampled token with its drafts; inert requests stay inert.",
    cause="next_verify: the last token of another place, a position that is not moved on, or drafts of a wider buffer",
    quick=True,
)
def test_next_verify(platform: Platform, way: str, k: int, seed: int) -> None:
    device, requests, before = platform.device, 19, 4
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 90, (requests, before), generator=generator)
    counts = torch.randint(0, before + 1, (requests,), generator=generator).int()
    starts = torch.randint(0, 500, (requests,), generator=generator)
    wider = torch.randint(0, 90, (requests, 7), generator=generator)
    last, copied = torch.full((requests,), -77, device=device), torch.full((requests, k), -77, device=device)
    moved = starts.to(device).clone()
    inputs = tokens.to(device), counts.to(device), wider.to(device)[:, :k], moved
    run_op(platform, way, lambda: kernels.next_verify(*inputs, last, copied), (moved, last, copied))
    for r, count in enumerate(counts.tolist()):
        assert on_host(moved)[r] == (starts[r] + count if count else -1), f"position of request {r}"
        assert on_host(last)[r] == (tokens[r, count - 1] if count else 0), f"last token of request {r}"
    assert on_host(copied).tolist() == wider[:, :k].tolist()
