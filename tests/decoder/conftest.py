"""Tiny pairs and decoders around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from random_prompts import prompt
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_models.checkpoints import load_drafter, load_target
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.llama import LlamaTarget
from specgraph_run.decoder import Request, SpeculativeDecoder
from tiny_checkpoints import write_eagle3, write_target

from specgraph.attention import AttentionBackend, PagedAttention, PagedHostAttention
from specgraph.config import DraftConfig
from specgraph.cpu.platform import CpuPlatform
from specgraph.draft.protocol import DraftHead

MakeDecoder = Callable[..., SpeculativeDecoder]

MAX_MODEL_LEN, BLOCK_SIZE = 64, 4


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_folder) -> LlamaTarget:
    """A random Llama with a vocabulary of 96."""
    return load_target(target_folder)


@pytest.fixture(scope="session")
def reference(target_folder) -> Any:
    """The same target by transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory, target) -> DraftHead:
    """A random EAGLE-3 head: of its drafts hardly any is accepted."""
    return load_drafter(write_eagle3(tmp_path_factory.mktemp("eagle3")), target)


@pytest.fixture(scope="session")
def shadow(target_folder, target) -> DraftHead:
    """The target with a disturbed vocabulary head as its own drafter: some drafts are accepted, some not."""
    model = load_target(target_folder)
    g = torch.Generator().manual_seed(5)
    for name, weight in model.weights().items():
        if "lm_head" in name:
            weight.add_(torch.randn(weight.shape, generator=g) * 0.12)
    return DraftModelHead(model, target.hidden_size)


@pytest.fixture(scope="session")
def small_pair_folder(tmp_path_factory) -> Path:
    """A vocabulary of 6 and a draft vocabulary of 4, for statistics."""
    folder: Path = tmp_path_factory.mktemp("small")
    write_target(folder / "target", vocab=6)
    write_eagle3(folder / "draft", vocab=6, draft_vocab=4)
    return folder


@pytest.fixture(scope="session")
def small_pair(small_pair_folder) -> tuple[LlamaTarget, DraftHead]:
    """The small pair, loaded."""
    target = load_target(small_pair_folder / "target")
    return target, load_drafter(small_pair_folder / "draft", target)


@pytest.fixture(scope="session")
def target_alone(target) -> Callable[[list[Request]], list[list[int]]]:
    """`target_alone(requests)`: the greedy tokens of each, decoded once, without a drafter or another request."""
    config = DraftConfig(
        num_speculative_tokens=3, max_num_requests=1, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, decode="eager"
    )
    decoder = SpeculativeDecoder(target, None, CpuPlatform(), config, query_len=4)

    @cache
    def tokens(prompt_token_ids: tuple[int, ...], max_tokens: int) -> list[int]:
        asked = Request(prompt_token_ids=prompt_token_ids, max_tokens=max_tokens)
        return decoder.generate([asked])[0].token_ids

    return lambda requests: [tokens(tuple(each.prompt_token_ids), each.max_tokens) for each in requests]


@pytest.fixture
def make_decoder(target) -> Iterator[MakeDecoder]:
    """`make_decoder(head, ...)`: captured and ready; K = 3, up to 4 requests, eager unless told. Closed at the end.

    Captured are batches of as many requests as may run, or of the sizes of the draft schedule, and no prefill passes
    (the suite has those): most of a test's time is capture.
    """
    made: list[SpeculativeDecoder] = []

    def make(
        head: DraftHead | None,
        *,
        target: LlamaTarget = target,
        attention: str = "device",
        query_len: int | None = None,
        **changes: Any,
    ) -> SpeculativeDecoder:
        sizes = changes.get("draft_schedule") or [changes.get("max_num_requests", 4)]
        settings: dict[str, Any] = {
            "num_speculative_tokens": 3,
            "max_num_requests": 4,
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "decode": "eager",
            "capture_sizes": sorted(sizes),
            "prefill": "eager",
            "prefill_sizes": [16],
        }
        platform = CpuPlatform()
        backend: AttentionBackend = PagedHostAttention(platform) if attention == "host" else PagedAttention()
        decoder = SpeculativeDecoder(
            target,
            head,
            platform,
            *decoder_settings(**(settings | changes)),
            query_len=query_len,
            attention=backend,
        )
        decoder.capture()
        made.append(decoder)
        return decoder

    yield make
    for decoder in made:
        decoder.close()
        decoder.platform.close()


@pytest.fixture
def requests() -> list[Request]:
    """Seven requests of different lengths, on block borders and off, that want different numbers of tokens."""
    shapes = [(4, 20), (9, 3), (1, 17), (16, 1), (15, 12), (30, 9), (8, 14)]
    return [Request(prompt_token_ids=prompt(n, seed=n), max_tokens=m) for n, m in shapes]
