"""The noise of sampled drafts is a function of seed, position and the length of the text that they follow."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import DRAFTERS, VOCAB, make_head, make_target
from draft.rounds import make_drafter

K, SEEDS = 4, [0, 1, -5]


@pytest.mark.hazard("drafts-of-one-noise")
@pytest.mark.parametrize("kind", [*DRAFTERS, "dspark"])
def test_a_position_that_is_drafted_again_has_other_noise(kind):
    """So hot that noise alone decides. Rounds that end at the same length draw alike, whatever they accepted."""
    head = make_head(kind, make_target())
    limits = {"num_speculative_tokens": K, "max_num_requests": 4, "capture_sizes": [3, 4], "max_model_len": 48}
    drafter = make_drafter(head, "eager", sampled=True, **limits)
    inputs = drafter.inputs(3)
    inputs.sampled_token_ids.copy_(torch.arange(3 * (K + 1)).view(3, -1) % VOCAB)
    inputs.aux_hidden.normal_(generator=torch.Generator().manual_seed(1))
    inputs.block_table[:, :4] = torch.arange(12).view(3, 4) + 1
    inputs.temperature.fill_(1e7)
    inputs.seeds.copy_(torch.tensor(SEEDS))

    def drafts(start: int | list[int], count: int | list[int]) -> torch.Tensor:
        inputs.start_positions.copy_(torch.tensor(start))
        inputs.num_sampled.copy_(torch.tensor(count))
        with torch.inference_mode():
            return drafter.propose(inputs).token_ids

    first, second = drafts(5, 1), drafts(6, 1)
    assert not (first[:, None, 1:] == second[:, :-1]).all(dim=-1).any()
    assert torch.equal(drafts(5, 2), second)
    assert torch.equal(drafts([5, 6, 5], [1, 1, 2]), torch.stack([first[0], second[1], second[2]]))
    assert drafter.buffers.draft_seeds.shape == (4,)  # written in place: `out` takes other shapes
    drafter.close()
