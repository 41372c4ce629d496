"""Target and drafter share the memory of the round, which no graph of the other side changes unasked."""

from __future__ import annotations

import pytest
from specgraph_run.decoder import joining

from specgraph.capture import BatchDescriptor

RESULTS = {
    "shared.results", "shared.sampled_token_ids", "shared.num_sampled", "shared.rows_without_block",
    "shared.aux_hidden", "prefill.aux_hidden",
}  # fmt: skip
INPUTS = {"shared.start_positions", "shared.block_table", "shared.temperature", "shared.seeds"}


def names_by_storage(runner):
    names: dict[int, set[str]] = {}
    for name, tensor in runner.read_set().items():
        if tensor.numel() and not name.startswith("weights."):
            names.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return names


def test_target_and_drafter_share_the_round_and_nothing_else(make_decoder, eagle3):
    """Metadata in particular: the next verify would overwrite what the drafter's graphs read."""
    decoder = make_decoder(eagle3, decode="merged", sampled=True)
    target, drafter = names_by_storage(decoder.target), names_by_storage(decoder.drafter)
    shared = {name for storage in target.keys() & drafter.keys() for name in target[storage] | drafter[storage]}
    # Metadata holds the block table itself, under its own name.
    tables = {name for name in shared if name.endswith("metadata.block_table") or name.startswith("buffers.")}
    assert shared - tables == RESULTS | INPUTS | ({"draft_to_target"} & shared)
    assert all(name.endswith(".block_table") for name in tables)


@pytest.mark.parametrize("lowering", ["eager", "merged"])
def test_no_graph_writes_what_the_host_uploads_once(make_decoder, shadow, requests, lowering):
    decoder = make_decoder(shadow, decode=lowering, sampled=True)
    for request in requests[:3]:
        decoder.add(request)
    for _ in range(3):
        decoder.step()
    memory = decoder.target.shared
    before = {name: tensor.clone() for name, tensor in memory.named_tensors("shared").items()}
    target, drafter = decoder.target, decoder.drafter
    target.run(target.prepare(target.verify_program, BatchDescriptor("verify", 4, 4, 3)))
    drafter.run(drafter.prepare(drafter.program, BatchDescriptor("propose", 4, 4, 3)))
    for name, tensor in memory.named_tensors("shared").items():
        if name in INPUTS:
            assert tensor.equal(before[name]), name


def test_a_request_is_uploaded_when_it_joins_and_never_else(make_decoder, shadow, requests, monkeypatch):
    decoder, uploads, write = make_decoder(shadow, capture_sizes=[1, 4]), [], joining.write
    wanted = make_decoder(shadow, capture_sizes=[1, 4]).generate(requests)
    monkeypatch.setattr(joining, "write", lambda into, values: (uploads.append(into), write(into, values)))
    assert [result.token_ids for result in decoder.generate(requests)] == [result.token_ids for result in wanted]
    assert len(uploads) == 2 * len(requests)  # block table and position
