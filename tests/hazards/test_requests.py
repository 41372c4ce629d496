"""Requests of a decoder: memory that is theirs, and tokens at which they end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from specgraph_conformance.decode_rig import decoder, generate, requests
from torch import Tensor

from specgraph.device import Platform


@pytest.mark.hazard("graph-reuses-target-metadata")
def test_target_and_drafter_share_no_metadata(platform: Platform) -> None:
    """Target and drafter share no metadata tensor that one of them rewrites while the other's graphs still read it."""
    with decoder(platform) as made:
        assert made.drafter is not None
        drafter, target = made.drafter.read_set(), made.target.verify_program.named_tensors()
        own = _storages(drafter, "buffers.first.") | _storages(drafter, "buffers.step.")
        assert own.isdisjoint(_storages(target, "verify.metadata.")), (
            "the drafter's graphs read metadata that the target's verify rewrites"
        )


def _storages(named: Mapping[str, Tensor], prefix: str) -> set[int]:
    """Return the addresses of all tensors except the block table, which target and drafter share and no graph
    writes."""
    own = {name: tensor for name, tensor in named.items() if name.startswith(prefix)}
    assert own, f"no tensor is called {prefix}"
    del own[f"{prefix}block_table"]
    return {tensor.untyped_storage().data_ptr() for tensor in own.values()}


@pytest.mark.hazard("round-token-after-stop")
def test_stops_where_asked(platform: Platform, seed: int) -> None:
    """Generation ends at max_tokens exactly, or after the first stop token, also where accepted draft tokens follow it
    or another request goes on."""
    request, other = requests(seed, count=2, tokens=15)
    with decoder(platform) as made:
        full, kept = generate(made, [request, other])
        assert len(full) == 15
        for limit in (1, 2, 6):
            assert generate(made, [replace(request, max_tokens=limit), other]) == [full[:limit], kept]
        stop = full[7]
        result, _ = made.generate([replace(request, stop_token_ids=[stop]), other])
        assert result.token_ids == full[: full.index(stop) + 1]
        assert result.finish_reason == "stop"


@pytest.mark.hazard("stops-of-one-request")
def test_each_request_has_its_stops(platform: Platform, seed: int) -> None:
    """Requests of one batch each end at the first of their own stop tokens, and at no other request's."""
    asked = requests(seed, count=3, tokens=24)
    with decoder(platform) as made:
        texts = generate(made, asked)
        wanted = list[list[int]]()
        for number, place in enumerate((12, 7, 2)):
            others = texts[(number + 1) % 3][-4:]  # another request's stop tokens, which this one does not generate
            stop = texts[number][place]
            stops = [stop, *(token for token in others if token not in texts[number])]
            asked[number] = replace(asked[number], stop_token_ids=stops)
            wanted.append(texts[number][: texts[number].index(stop) + 1])
        results = made.generate(asked)
    for number, (result, tokens) in enumerate(zip(results, wanted, strict=True)):
        assert (result.token_ids, result.finish_reason) == (tokens, "stop"), f"request {number} ended at another token"
