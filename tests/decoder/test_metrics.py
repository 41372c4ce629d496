"""Acceptance metrics by their definitions, counted once more from scratch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specgraph_run.decoder.metrics import AcceptanceMetrics


@pytest.mark.hazard("metrics-without-drafts")
@pytest.mark.hazard("metrics-count-the-bonus")
@given(
    st.integers(1, 7).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), max_size=30))),
    st.integers(1, 9),
)
def test_definitions(case, batch):
    steps, accepted = case
    metrics = AcceptanceMetrics(steps)
    for place in range(0, len(accepted), batch):
        metrics.observe(accepted[place : place + batch], steps)
    drafts = len(accepted)
    assert metrics.num_drafts == drafts
    assert metrics.mean_acceptance_length == (1 + sum(accepted) / drafts if drafts else 1.0)
    assert metrics.acceptance_per_position == [
        sum(count > i for count in accepted) / drafts if drafts else 0.0 for i in range(steps)
    ]


def test_two_metrics_share_nothing():
    first, second = AcceptanceMetrics(3), AcceptanceMetrics(3)
    first.observe([3], 3)
    assert second.accepted == [0, 0, 0]
