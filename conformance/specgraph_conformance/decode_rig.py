"""Decoding with a tiny pair on the platform under test, and the target's own tokens in float64."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.errors import UnsupportedError
from specgraph_run.decoder import AcceptanceMetrics, DecoderOptions, Generation, Request, SpeculativeDecoder
from torch import Tensor

from specgraph_conformance.case import Absent
from specgraph_conformance.draft_comparison import TOLERANCE
from specgraph_conformance.draft_rig import fit_attention, small_limits
from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.rig import attention_backend
from specgraph_conformance.tiny_models import CONFIG, VOCAB, make_head, make_target

MODEL_SEED = 3
MANY: dict[str, Any] = {"max_num_requests": 9, "capture_sizes": (9,)}
"""Options of `decoder` for batches of up to nine requests."""


def decoder_settings(**settings: Any) -> tuple[DraftConfig, DecoderOptions]:
    """Return the limits of target and drafter, and the decoder's own options, from fields of both."""
    own = {each.name: settings.pop(each.name) for each in fields(DecoderOptions) if each.name in settings}
    return DraftConfig(**settings), DecoderOptions(**own)


@contextmanager
def decoder(
    platform: Platform, *, decode: str = "auto", kind: str | None = "eagle", attention: str = "paged", **options: Any
) -> Generator[SpeculativeDecoder]:
    """A decoder over the tiny pair; `kind` None decodes with the target alone at the verify pass's shape.

    One capture size, so that every pass has one shape and bits don't depend on who else is in the batch. The pair's
    dtype and head size, and the block size, are those of `fit_attention`; max_model_len stays.
    """
    limits: dict[str, Any] = {"k": 4, "max_num_requests": 3, "capture_sizes": (3,)}
    config, chosen = decoder_settings(**small_limits(**limits | options, decode=decode))
    shape = fit_attention(platform, attention, config.block_size)
    config = replace(config, block_size=shape.block)
    model: dict[str, Any] = {"dtype": shape.dtype, "head_dim": shape.dim}
    target = make_target(MODEL_SEED, platform.device, **model)
    head = None if kind is None else make_head(kind, MODEL_SEED, platform.device, **model)
    try:
        made = SpeculativeDecoder(
            target,
            head,
            platform,
            config,
            chosen,
            query_len=config.query_len,
            attention=(backend := attention_backend(platform, attention)),
        )
        assert made.target.attention is backend, f"the target runs attention '{made.target.attention.name}'"
        assert made.drafter is None or made.drafter.attention is backend, "the drafter runs other attention"
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


def target_logits(
    prompt: Sequence[int], following: Sequence[int], dtype: torch.dtype = torch.float32, head_dim: int = CONFIG.head_dim
) -> Tensor:
    """float64 logits of the tokens after the prompt and after each of `following`, [1 + n, vocab].

    `dtype` and `head_dim` are those of the target whose weights are taken.
    """
    target = make_target(MODEL_SEED, torch.device("cpu"), dtype, torch.float64, head_dim)
    dense = DenseKeys.empty(target.attention_layers)
    ids = [*prompt, *following]
    dense.at(range(len(ids)))
    out = target.forward(torch.tensor(ids), dense.attend)
    return target.logits(out.hidden[len(prompt) - 1 :])


def logits_of(made: SpeculativeDecoder, request: Request, tokens: Sequence[int]) -> Tensor:
    """float64 logits of each of a request's output tokens, of the decoder's target."""
    target = made.target.model
    return target_logits(request.prompt_token_ids, tokens[:-1], target.dtype, target.attention_layers[0].head_dim)


def expect_targets_tokens(made: SpeculativeDecoder, asked: Sequence[Request], results: Sequence[Sequence[int]]) -> None:
    """Each token must be the most likely one of a dense float64 target after those before it, up to ties.

    A tie is as wide as the rounding of the decoder's dtype.
    """
    for request, tokens in zip(asked, results, strict=True):
        logits = logits_of(made, request, tokens)
        short = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        at = int(short.argmax())
        assert short[at] < TOLERANCE[made.target.model.dtype], f"token {at} falls {short[at]:.3f} short of the best"


def expect_targets_logprobs(made: SpeculativeDecoder, asked: Sequence[Request], results: Sequence[Generation]) -> None:
    """Each token must have its log-probability in a dense float64 target after those before it."""
    for request, result in zip(asked, results, strict=True):
        tokens = result.token_ids
        assert len(result.logprobs) == len(tokens), f"{len(result.logprobs)} values for {len(tokens)} tokens"
        exact = logits_of(made, request, tokens).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        off = (torch.tensor(result.logprobs, dtype=torch.float64) - exact).abs()
        at = int(off.argmax())
        assert off[at] < TOLERANCE[made.target.model.dtype], f"log-probability {at} is off by {off[at]:.3g}"


def expect_lossless(
    platform: Platform, asked: Sequence[Request], kind: str = "eagle", **options: Any
) -> AcceptanceMetrics:
    """Expect the tokens of the target alone at the verify pass's shape, and return the speculative decoder's metrics.

    Args:
        options: those of `decoder`.
    """
    with decoder(platform, kind=kind, **options) as speculative:
        ours = generate(speculative, asked)
    with decoder(platform, kind=None, **options) as plain:
        assert ours == generate(plain, asked)
    return speculative.metrics
