"""Every supported target with every kind of drafter: what docs/models.md has in its matrix decodes the target's own
tokens, in the dtype that stands there."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import DRAFTERS, HIDDEN, VOCAB, make_head, make_target
from small_targets import TARGETS

from specgraph.checkpoints import load_target
from specgraph.checkpoints.architectures import ARCHITECTURES
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MATRIX = {
    name: {kind: list(DTYPES)[(row + column) % 3] for column, kind in enumerate(DRAFTERS)}
    for row, name in enumerate(ARCHITECTURES)
}
"""Target -> kind of drafter -> dtype: each target with each drafter once, each of the two in each dtype."""
PROMPTS = ([5, 9, 2], [40, 1, 17, 8, 8, 30, 2])


def decoded(target, head) -> tuple[list[list[int]], int]:
    """Greedy tokens, and rounds; without a head at the shape of the verify pass, which gives the same bits."""
    platform = CpuPlatform()
    config = EngineConfig(
        num_speculative_tokens=2, max_num_requests=2, max_model_len=32, block_size=4, decode="eager",
        capture_sizes=[2], prefill_sizes=[8],
    )  # fmt: skip
    decoder = SpeculativeDecoder(target, head, platform, config, query_len=3)
    decoder.capture()
    results = decoder.generate([Request(prompt_token_ids=prompt, max_tokens=8) for prompt in PROMPTS])
    decoder.close()
    platform.close()
    return [result.token_ids for result in results], decoder.metrics.num_drafts


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_every_drafter_drafts_for_it(name, tmp_path, random_model):
    architecture, config = TARGETS[name]
    random_model(architecture, tmp_path, **{**config, "vocab_size": VOCAB, "hidden_size": HIDDEN})
    alone = {}
    for kind, dtype in MATRIX[name].items():
        target = load_target(tmp_path, dtype=DTYPES[dtype])
        if dtype not in alone:
            alone[dtype] = decoded(target, None)[0]
        tokens, drafts = decoded(target, make_head(kind, make_target(DTYPES[dtype])))
        assert tokens == alone[dtype], (kind, dtype)
        assert drafts >= 3


def test_the_matrix_has_each_target_and_each_drafter_in_each_dtype():
    for kind in DRAFTERS:
        assert {row[kind] for row in MATRIX.values()} == set(DTYPES)
    assert all(set(row.values()) == set(DTYPES) for row in MATRIX.values())
