"""The sizes that are captured, and the graph that serves a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgraph.capture import BatchDescriptor, dispatch, padded_size
from specgraph.config import capture_sizes, prefill_sizes
from specgraph.errors import ConfigError

PHASES = ("verify", "propose", "first", "step")
named_sizes = st.integers(1, 60).flatmap(
    lambda most: st.tuples(st.just(most), st.sets(st.integers(1, most), min_size=1).map(list))
)


@given(st.integers(1, 2000))
def test_default_sizes_hold_every_batch_and_end_at_the_limit(limit):
    sizes = capture_sizes(limit)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == limit
    assert all(padded_size(n, sizes) is not None for n in range(1, limit + 1))


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_default_sizes_pad_little(limit, n):
    """At most twice a small batch, 7 rows up to 64 requests, 15 beyond."""
    if n > limit:
        return
    padding = padded_size(n, capture_sizes(limit)) - n
    assert padding <= (n if n <= 4 else 7 if n <= 64 else 15)


def test_default_sizes_are_those_of_the_docstring():
    assert capture_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert capture_sizes(3) == (1, 2, 3)
    assert prefill_sizes(9000) == (16, 32, 64, 128, 256, 512)
    assert prefill_sizes(100) == (16, 32, 64, 100)
    assert prefill_sizes(512) == (16, 32, 64, 128, 256, 512)


@given(named_sizes)
def test_named_sizes_are_captured_exactly(case):
    limit, asked = case
    assert capture_sizes(limit, asked) == tuple(sorted(asked))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([42, 43], r"\[43\] are outside 1\.\.42"),
        ([0, 4], r"\[0\] are outside"),
        ([-1], r"\[-1\] are outside"),
        ([4, 8, 4], "twice"),
        ([], "empty"),
    ],
)
def test_a_size_that_cannot_be_captured_is_refused(asked, says):
    """A maximum of 42 once became 40 without a word, and batches of 41 and 42 ran eager."""
    with pytest.raises(ConfigError, match=says):
        capture_sizes(42, asked)


@pytest.mark.hazard("block-misaligned-sizes")
@given(named_sizes, st.integers(1, 80), st.sampled_from(PHASES), st.integers(1, 8))
def test_a_batch_goes_to_the_least_size_that_holds_it_or_says_why_not(case, n, phase, steps):
    limit, asked = case
    sizes = capture_sizes(limit, asked)
    rows = 1 if phase == "step" else steps + 1
    batch = BatchDescriptor(phase, n, rows, steps)
    plan = dispatch(batch, sizes)
    holding = [size for size in sizes if size >= n]
    assert plan.captured == bool(holding)
    assert plan.descriptor == BatchDescriptor(phase, min(holding, default=n), rows, steps)
    assert plan.descriptor.num_tokens == plan.descriptor.num_requests * rows
    if holding:
        assert plan.reason == ""
    else:
        assert str(n) in plan.reason
        assert str(max(sizes)) in plan.reason
    assert dispatch(batch, sizes) == plan


@pytest.mark.hazard("dynamic-k-negative")
def test_descriptors_of_different_shapes_differ():
    every = {
        BatchDescriptor(phase, n, rows, steps)
        for phase in PHASES
        for n in (1, 2)
        for rows in (1, 4)
        for steps in (3, 5)
    }
    assert len(every) == 32
    assert len({str(d) for d in every}) == 32
