"""Every supported target with every kind of drafter: it decodes the target's own tokens.

`test_recurrent_targets.py` has the targets with recurrent layers.
"""

from __future__ import annotations

import pytest
import torch
from draft.pairs import DRAFTERS, HIDDEN, VOCAB, make_head, make_target
from small_targets import TARGETS
from specgraph_models.checkpoints import load_target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MATRIX = {
    name: {kind: list(DTYPES)[(row + column) % 3] for column, kind in enumerate(DRAFTERS)}
    for row, name in enumerate(TARGETS)
}
"""Target -> kind of drafter -> dtype: each target with each drafter once, each of the two in each dtype."""
PROMPTS = ([5, 9, 2], [40, 1, 17, 8, 8, 30, 2])


@pytest.mark.parametrize("name", TARGETS)
@torch.inference_mode()
def test_every_drafter_drafts_for_it(name, tmp_path, random_model, decoded):
    architecture, config = TARGETS[name]
    random_model(architecture, tmp_path, **{**config, "vocab_size": VOCAB, "hidden_size": HIDDEN})
    options = {"num_speculative_tokens": 2, "decode": "eager"}
    for dtype_name, dtype in DTYPES.items():
        target = load_target(tmp_path, dtype=dtype)
        alone, _ = decoded(target, None, PROMPTS, 8, **options)
        for kind in (kind for kind in DRAFTERS if MATRIX[name][kind] == dtype_name):
            tokens, decoder = decoded(target, make_head(kind, make_target(dtype)), PROMPTS, 8, **options)
            assert tokens == alone, (kind, dtype)
            assert decoder.metrics.num_drafts >= 3


def test_the_matrix_has_each_target_and_each_drafter_in_each_dtype():
    for kind in DRAFTERS:
        assert {row[kind] for row in MATRIX.values()} == set(DTYPES)
    assert all(set(row.values()) == set(DTYPES) for row in MATRIX.values())
