"""Synthetic acceptance: random weights, and drafts accepted at the asked share of each position."""

from __future__ import annotations

import pytest
from decoder.pair_decoder import make_pair_decoder
from specgraph_run.decoder import DecoderOptions, Request
from specgraph_run.decoder.config import acceptance_chances, check_options

from specgraph.config import DraftConfig
from specgraph.errors import ConfigError


def run(synthetic, decode="eager"):
    decoder = make_pair_decoder(
        "dflash", num_speculative_tokens=4, max_num_requests=8, max_model_len=128, decode=decode, capture_sizes=[8],
        synthetic_acceptance=synthetic,
    )  # fmt: skip
    results = decoder.generate([Request(prompt_token_ids=[3, 1, 4], max_tokens=60) for _ in range(8)])
    decoder.close()
    return [r.token_ids for r in results], decoder.metrics


@pytest.mark.parametrize(
    ("synthetic", "shares"),
    [
        (0.7, (0.7, 0.49, 0.343, 0.2401)),
        ((0.9, 0.6, 0.3, 0.0), (0.9, 0.6, 0.3, 0.0)),
        (1.0, (1, 1, 1, 1)),
        (0, [0] * 4),
    ],
)
def test_shares_by_position(synthetic, shares):
    _, metrics = run(synthetic)
    drafts = metrics.num_drafts
    for got, wanted in zip(metrics.acceptance_per_position, shares, strict=True):
        assert abs(got - wanted) <= 4 * (wanted * (1 - wanted) / drafts) ** 0.5 + 1e-9


def test_requests_do_not_accept_alike_and_lowerings_do():
    tokens, eager = run(0.5)
    assert len({tuple(ids) for ids in tokens}) > 1
    again, merged = run(0.5, "merged")
    assert again == tokens
    assert merged.accepted == eager.accepted


@pytest.mark.parametrize(
    ("synthetic", "message"),
    [
        (1.5, "at most 1, got 1.5"),
        ((0.5, 0.4), "give 4 shares"),
        ((0.5, 0.6, 0.1, 0.1), "rises"),
        ((0.5, 0.4, 0.1, -1), r"\[3\] must be at least 0"),
    ],
)
def test_bad_tables(synthetic, message):
    config = DraftConfig(num_speculative_tokens=4, max_num_requests=1, max_model_len=64)
    with pytest.raises(ConfigError, match=message):
        check_options(config, DecoderOptions(synthetic_acceptance=synthetic))


def test_chances_after_a_position_that_accepts_nothing():
    assert acceptance_chances((0.5, 0.0, 0.0), 3) == (0.5, 0.0, 0.0)
