"""A pytest plugin: the decoding cases of the conformance suite, with SmolLM2 and its EAGLE-3 head for the tiny pair.

    export PYTEST_PLUGINS=real_pair PYTHONPATH=examples/smollm2 TARGET=model.gguf
    export HEAD=drafters/smollm2/specgraph_smollm2/eagle3
    specgraph conformance cpu -k "test_decoding or test_trees" --timeout 600 --json FILE

Cases about other kinds of drafters, and those that compute with the tiny pair's own weights, are absent.
"""

import os
from functools import cache
from pathlib import Path

import pytest
import torch

from specgraph.checkpoints import load_drafter, load_target
from specgraph.models.llama import LlamaTarget
from specgraph.models.ngram import NgramHead
from specgraph.models.protocol import Head

TINY = "computes with the tiny pair's own weights or vocabulary"
OF_THE_TINY_PAIR = {
    "test_first_drafts": TINY, "test_prompt_keys": TINY, "test_compacted": TINY,
    "test_sampled": "its chi-square needs a pass per token of the vocabulary; see chi_square.py",
    "test_wrong[token-past-the-vocabulary]": TINY,
    "test_top_k": "its chi-square needs a pass per token of the vocabulary; see chi_square.py",
}  # fmt: skip
"""Tests that say nothing about another pair, and why."""


@cache
def make_target(
    seed: int, device: torch.device, dtype: torch.dtype, compute: torch.dtype | None = None, head_dim: int = 64
) -> LlamaTarget:
    """See `tiny_models.make_target`."""
    if dtype != torch.float32 or head_dim != 64:
        pytest.skip(f"asks for {dtype} and heads of {head_dim} where the oracle is float32 and SmolLM2's have 64")
    return load_target(Path(os.environ["TARGET"]), device, compute or dtype)


def make_head(kind: str, seed: int, device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> Head:
    """See `tiny_models.make_head`; a case that asks for EAGLE gets EAGLE-3."""
    target = make_target(seed, device, dtype, head_dim=head_dim)
    if kind == "ngram":
        return NgramHead(target.vocab_size, prompt_lookup_max=3)
    if kind not in ("eagle", "eagle3"):
        pytest.skip(f"drafts by {kind}, and SmolLM2 has an EAGLE-3 head")
    return load_drafter(Path(os.environ["HEAD"]), target)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the pair in the tiny one's place, in everything that decodes."""
    from specgraph_conformance import decode_rig

    for item in items:
        module = item.module
        if vars(module).get("decoder") is decode_rig.decoder:
            if (reason := OF_THE_TINY_PAIR.get(item.originalname, OF_THE_TINY_PAIR.get(item.name))) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
            if "VOCAB" in vars(module):
                module.VOCAB = 49152
    decode_rig.make_target, decode_rig.make_head, decode_rig.VOCAB = make_target, make_head, 49152
