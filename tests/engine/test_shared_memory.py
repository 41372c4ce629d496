"""What target and drafter share: the memory of the round, which no graph of the other side changes unasked."""

from __future__ import annotations

import pytest

from specgraph.capture import BatchDescriptor

RESULTS = {
    "round.results", "round.sampled_token_ids", "round.num_sampled", "round.rows_without_block", "round.aux_hidden",
    "prefill.aux_hidden",
}  # fmt: skip
INPUTS = {"round.start_positions", "round.block_table", "round.temperature", "round.seeds"}


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
    decoder = make_decoder(shadow, decode=lowering, sampled=True, capture_sizes=[4])
    for request in requests[:3]:
        decoder.add(request)
    for _ in range(3):
        decoder.step()
    memory = decoder.target.round
    before = {name: tensor.clone() for name, tensor in memory.named_tensors().items()}
    target, drafter = decoder.target, decoder.drafter
    target.run(target.prepare(target.verify_program, BatchDescriptor("verify", 4, 4, 3)))
    drafter.run(drafter.prepare(drafter.program, BatchDescriptor("propose", 4, 4, 3)))
    for name, tensor in memory.named_tensors().items():
        if name in INPUTS:
            assert tensor.equal(before[name]), name


def test_a_request_is_uploaded_when_it_joins_or_moves_and_else_never(make_decoder, shadow, requests, monkeypatch):
    decoder, uploads = make_decoder(shadow, capture_sizes=[4]), []
    write = decoder.rounds.write_requests
    monkeypatch.setattr(
        decoder.rounds, "write_requests", lambda running, first: (uploads.append(first), write(running, first))
    )
    wanted = make_decoder(shadow, capture_sizes=[4]).generate(requests)
    for request in requests:
        decoder.add(request)
    tokens: dict[int, list[int]] = {}
    while decoder.num_unfinished:
        uploads.clear()
        rows, seen = {state.index: state.row for state in decoder.rounds.running}, set(tokens)
        for chunk in decoder.step():
            tokens.setdefault(chunk.request, []).extend(chunk.token_ids)
        order = list(rows)
        moved = [rows[index] for index in order] != list(range(len(order)))
        joined = bool(set(tokens) - seen)
        assert len(uploads) <= moved + joined
        if moved:
            assert uploads[0] == 0
    assert [tokens[i] for i in range(len(requests))] == [result.token_ids for result in wanted]
