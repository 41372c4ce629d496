"""A config derives numbers from its own; those that it refuses are in test_bad_input.py."""

from __future__ import annotations

import pytest
from specgraph_run.decoder.config import acceptance_chances

from specgraph.draft import DraftConfig
from specgraph.errors import ConfigError


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_the_block_table_has_room_for_every_row_of_a_round(k, block_size):
    """The last round begins at the last position: K + 1 rows, then one for each step after the first."""
    config = DraftConfig(num_speculative_tokens=k, max_num_requests=2, max_model_len=48, block_size=block_size)
    last_position = (48 - 1) + k + (k - 1)
    assert last_position // block_size < config.max_blocks


@pytest.mark.parametrize(
    ("asked", "chances"), [(0, (0.0, 0.0)), (1, (1.0, 1.0)), ([1.0, 0.0], (1.0, 0.0)), ([0.5, 0.5], (0.5, 1.0))]
)
def test_a_synthetic_share_may_be_nothing_or_all(asked, chances):
    assert acceptance_chances(asked, 2) == chances


def test_how_drafts_are_chosen_is_one_of_two():
    limits = {"num_speculative_tokens": 2, "max_num_requests": 1, "max_model_len": 48, "sampled": True}
    assert DraftConfig(**limits).keeps_draft_probs
    assert not DraftConfig(**limits, draft_sampling="greedy").keeps_draft_probs
    with pytest.raises(ConfigError, match="one of 'sampled', 'greedy', got 'argmax'"):
        DraftConfig(**limits, draft_sampling="argmax")
