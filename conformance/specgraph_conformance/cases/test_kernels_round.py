"""The ops between two rounds of the lowering `round`, against plain Python loops, eagerly and in a graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

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
    run_op(platform, way, lambda: ops.stop_finished(*inputs), inputs[1:3])
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
    run_op(platform, way, lambda: ops.next_verify(*inputs, last, copied), (moved, last, copied))
    for r, count in enumerate(counts.tolist()):
        assert on_host(moved)[r] == (starts[r] + count if count else -1), f"position of request {r}"
        assert on_host(last)[r] == (tokens[r, count - 1] if count else 0), f"last token of request {r}"
    assert on_host(copied).tolist() == wider[:, :k].tolist()


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.publish-round",
    "A round's results go to the next slot of the ring with its number; a launch goes on while a request does.",
    cause="publish_round: a slot of another round, or a launch that goes on for nobody or ends too early",
    quick=True,
)
def test_publish_round(platform: Platform, way: str, seed: int) -> None:
    device, requests, query_len, slots, size = platform.device, 19, 4, 3, 1030
    generator = torch.Generator().manual_seed(seed)
    ring = torch.full((slots, size + 2), -9, device=device)
    progress, again = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    expected, done = on_host(ring), 0
    for number in range(1, 9):
        tokens = torch.randint(-1, 9, (requests, query_len), generator=generator)
        counts = torch.randint(0, query_len + 1, (requests,), generator=generator).int()
        left = torch.randint(0, 6, (requests,), generator=generator)
        left = left.where(torch.tensor(number % 3 > 0), torch.zeros_like(left))  # nobody has room in every third round
        stops = torch.randint(-1, 3, (requests, 16), generator=generator)
        results = torch.randint(0, 999, (size,), generator=generator)
        inputs = results.to(device), tokens.to(device), counts.to(device), left.to(device), stops.to(device)
        written = ring, progress, again
        run_op(platform, way, partial(ops.publish_round, *inputs, *written, 4), written)
        live = [
            0 < count < room and not {token for token in row[:count] if token >= 0} & set(stop)
            for row, count, room, stop in zip(
                tokens.tolist(), counts.tolist(), left.tolist(), stops.tolist(), strict=True
            )
        ]
        done += 1
        goes_on = any(live) and done < 4
        done *= goes_on
        expected[(number - 1) % slots] = torch.cat([results, torch.tensor([number, int(goes_on)])])
        assert on_host(ring).equal(expected), f"round {number}: the ring has other words than it should"
        assert on_host(again).item() == int(goes_on), f"round {number}: {sum(live)} requests go on, {done} rounds done"
