"""A pytest plugin: the decoding cases of the conformance suite, with SmolLM2 and its EAGLE-3 head for the tiny pair.

    export PYTEST_PLUGINS=real_pair PYTHONPATH=examples/smollm2 TARGET=model.gguf
    export HEAD=drafters/smollm2/specgraph_smollm2/eagle3
    specgraph conformance cpu -k "test_decoding or test_trees" --timeout 600 --json FILE

Prompts are the beginnings of held-out ones, as long as the suite's. Cases about other kinds of drafters, and those that
compute with the tiny pair's own weights, are absent.
"""

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.checkpoints import load_drafter, load_target
from specgraph.checkpoints.tokens import read_tokenizer
from specgraph.engine import Request
from specgraph.models.llama import LlamaTarget
from specgraph.models.ngram import NgramHead
from specgraph.models.protocol import Head

TINY = "computes with the tiny pair's own weights or vocabulary"
OF_THE_TINY_PAIR = {
    "test_first_drafts": TINY, "test_prompt_keys": TINY, "test_compacted": TINY,
    "test_sampled": "its chi-square needs a pass per token of the vocabulary",
    "test_wrong[token-past-the-vocabulary]": TINY,
    "test_top_k": "its chi-square needs a pass per token of the vocabulary",
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


@cache
def texts() -> list[list[int]]:
    """Return the tokens of the held-out prompts."""
    tokenizer = read_tokenizer(Path(os.environ["TARGET"]))
    files = sorted((Path(__file__).parent / "held_out").glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [tokenizer.encode(json.loads(line)["prompt"] * 4).ids for line in lines]


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Put the pair in the tiny one's place, in everything that decodes."""
    from specgraph_conformance import decode_rig

    tiny, size = decode_rig.requests, 49152

    def requests(seed: int, count: int = 5, *given: Any, **options: Any) -> list[Request]:
        asked, known = tiny(seed, count, *given, **options), texts()
        lengths = [len(request.prompt_token_ids) for request in asked]
        cut = [known[(29 * i + seed) % len(known)][:length] for i, length in enumerate(lengths)]
        return [replace(request, prompt_token_ids=ids) for request, ids in zip(asked, cut, strict=True)]

    for item in items:
        names = vars(item.module)
        if names.get("decoder") is decode_rig.decoder:
            if (reason := OF_THE_TINY_PAIR.get(item.originalname, OF_THE_TINY_PAIR.get(item.name))) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
            names.update({"VOCAB": size} if "VOCAB" in names else {})
            names.update({"requests": requests} if names.get("requests") is tiny else {})
    decode_rig.make_target, decode_rig.make_head, decode_rig.VOCAB = make_target, make_head, size
