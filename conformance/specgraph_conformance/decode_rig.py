"""Decoding with a tiny pair on the platform under test, and the target's own tokens in float64."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from specgraph.decoding import EngineConfig, Request, SpeculativeDecoder
from specgraph.errors import UnsupportedError
from specgraph.platforms import Platform
from torch import Tensor

from specgraph_conformance.case import Absent
from specgraph_conformance.draft_rig import make_config
from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.rig import attention_backend
from specgraph_conformance.tiny_models import VOCAB, make_head, make_target

MODEL_SEED = 3
MANY: dict[str, Any] = {"max_num_requests": 9, "capture_sizes": (9,)}
"""Options of `decoder` for batches of up to nine requests."""


@contextmanager
def decoder(
    platform: Platform, *, lowering: str = "auto", kind: str | None = "eagle", attention: str = "paged", **options: Any
) -> Generator[SpeculativeDecoder]:
    """A decoder over the tiny pair; `kind` None decodes with the target alone at the verify pass's shape.

    One capture size, so that every pass has one shape and bits don't depend on who else is in the batch.
    """
    limits: dict[str, Any] = {"k": 4, "max_num_requests": 3, "capture_sizes": (3,)}
    engine = {
        name: options.pop(name) for name in ("num_blocks", "prefill_chunk", "synthetic_acceptance") if name in options
    }
    config = EngineConfig(**asdict(make_config(lowering=lowering, **limits | options)), **engine)
    target = make_target(MODEL_SEED, platform.device)
    head = None if kind is None else make_head(kind, MODEL_SEED, platform.device)
    try:
        made = SpeculativeDecoder(
            target,
            head,
            platform,
            config,
            query_len=config.query_len,
            attention=attention_backend(platform, attention),
        )
        made.capture()
    except UnsupportedError as error:
        raise Absent(str(error)) from error
    try:
        yield made
    finally:
        made.close()


def requests(seed: int, count: int = 5, tokens: int = 20, temperatures: Sequence[float] = (0.0,)) -> list[Request]:
    """Requests with different prompts, prompt lengths (on both sides of a block border), limits and seeds.

    `temperatures` are taken in turns.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [(3, 16, 17, 30, 9)[i % 5] + i // 5 for i in range(count)]
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [
        Request(
            prompt_token_ids=prompt,
            max_tokens=tokens - 3 * (i % 3),
            seed=i,
            temperature=temperatures[i % len(temperatures)],
        )
        for i, prompt in enumerate(prompts)
    ]


def generate(made: SpeculativeDecoder, asked: Sequence[Request]) -> list[list[int]]:
    """Token ids of each request."""
    return [result.token_ids for result in made.generate(asked)]


def target_logits(prompt: Sequence[int], following: Sequence[int]) -> Tensor:
    """float64 logits of the tokens after the prompt and after each of `following`, [1 + n, vocab]."""
    target = make_target(MODEL_SEED, torch.device("cpu"), compute=torch.float64)
    dense = DenseKeys.empty(target.attention_layers)
    ids = [*prompt, *following]
    dense.at(range(len(ids)))
    out = target.forward(torch.tensor(ids), dense.attend)
    return target.logits(out.hidden[len(prompt) - 1 :])


def expect_targets_tokens(asked: Sequence[Request], results: Sequence[Sequence[int]]) -> None:
    """Each token must be the most likely one of a dense float64 target after those before it, up to ties in float32."""
    for request, tokens in zip(asked, results, strict=True):
        logits = target_logits(request.prompt_token_ids, tokens[:-1])
        short = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert short.max() < 0.02, f"token {int(short.argmax())} falls {short.max():.3f} short of the best"
