"""Decoding with a tiny target and drafter on the platform under test, and the target's own tokens in float64."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.errors import UnsupportedError
from specgraph_models.llama import LlamaTarget
from specgraph_run.decoder import AcceptanceMetrics, DecoderOptions, Generation, Request, SpeculativeDecoder
from torch import Tensor

from specgraph_conformance.case import Absent
from specgraph_conformance.draft_comparison import TOLERANCE
from specgraph_conformance.draft_rig import fit_attention, small_limits
from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.rig import attention_backend
from specgraph_conformance.state_oracles import DenseStates
from specgraph_conformance.tiny_models import VOCAB, make_head, make_target

MODEL_SEED = 3
MANY: dict[str, Any] = {"max_num_requests": 9, "capture_sizes": (9,)}
"""Options of `decoder` for batches of up to nine requests."""


def decoder_settings(**settings: Any) -> tuple[DraftConfig, DecoderOptions]:
    """Sort fields of both classes into the configuration of target and drafter, and the decoder's own options."""
    own = {each.name: settings.pop(each.name) for each in fields(DecoderOptions) if each.name in settings}
    return DraftConfig(**settings), DecoderOptions(**own)


@contextmanager
def decoder(
    platform: Platform,
    *,
    decode: str = "auto",
    kind: str | None = "eagle",
    attention: str = "paged",
    recurrent: bool = False,
    **options: Any,
) -> Generator[SpeculativeDecoder]:
    """Make a decoder over the tiny target and drafter. If `kind` is None, the target decodes alone in the verify's
    shape.

    There is one capture size. Every pass thus has the same shape, and a request's bits don't depend on the others in
    the batch. `fit_attention` chooses the models' dtype and head size, and the block size; max_model_len stays as
    given. With `recurrent` a layer of the target has a state per request in place of keys and values.
    """
    limits: dict[str, Any] = {"k": 4, "max_num_requests": 3, "capture_sizes": (3,)}
    config, chosen = decoder_settings(**small_limits(**limits | options, decode=decode))
    shape = fit_attention(platform, attention, config.block_size)
    config = replace(config, block_size=shape.block)
    model: dict[str, Any] = {"dtype": shape.dtype, "head_dim": shape.dim}
    target = make_target(MODEL_SEED, platform.device, recurrent=recurrent, **model)
    head: Any = None if kind is None else make_head(kind, MODEL_SEED, platform.device, **model)
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
    """Return requests with different prompts, limits and seeds. Their prompt lengths are on both sides of a block
    border.

    The requests take the `temperatures` in turns.
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
    """Generate, and return the token ids of each request."""
    return [result.token_ids for result in made.generate(asked)]


def target_logits(target: LlamaTarget, prompt: Sequence[int], following: Sequence[int]) -> Tensor:
    """Return a target's logits after the prompt and after each token of `following`, [1 + n, vocab].

    Args:
        target: float64, on the host.
    """
    dense = DenseKeys.empty(target.attention_layers)
    ids = [*prompt, *following]
    dense.at(range(len(ids)))
    out = target.forward(torch.tensor(ids), dense.attend, (), DenseStates(target.recurrent_layers).recur)
    return target.logits(out.hidden[len(prompt) - 1 :])


def logits_of(made: SpeculativeDecoder, request: Request, tokens: Sequence[int]) -> Tensor:
    """Return the float64 logits of the decoder's target for each output token of a request."""
    own = made.target.model
    dim, recurrent = own.attention_layers[0].head_dim, bool(own.recurrent_layers)
    target = make_target(MODEL_SEED, torch.device("cpu"), own.dtype, torch.float64, dim, recurrent=recurrent)
    return target_logits(target, request.prompt_token_ids, tokens[:-1])


def token_error(logits: Tensor, tokens: Sequence[int], dtype: torch.dtype) -> str:
    """Return a sentence if a token is not the most likely one, up to the rounding of `dtype`. Otherwise return ""."""
    short = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    at = int(short.argmax())
    return "" if short[at] < TOLERANCE[dtype] else f"token {at} falls {float(short[at]):.3f} short of the best"


def logprob_error(logits: Tensor, result: Generation, dtype: torch.dtype) -> str:
    """Return a sentence if a log-probability of a token is not that of the logits. Otherwise return ""."""
    tokens = torch.tensor(result.token_ids)
    if len(result.logprobs) != len(tokens):
        return f"{len(result.logprobs)} log-probabilities for {len(tokens)} tokens"
    exact = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    off = (torch.tensor(result.logprobs, dtype=torch.float64) - exact).abs()
    at = int(off.argmax())
    return "" if off[at] < TOLERANCE[dtype] else f"log-probability {at} is off by {float(off[at]):.3g}"


def expect_targets_tokens(made: SpeculativeDecoder, asked: Sequence[Request], results: Sequence[Sequence[int]]) -> None:
    """Check each token against a dense float64 target: it must be the most likely one after the tokens before it."""
    for request, tokens in zip(asked, results, strict=True):
        error = token_error(logits_of(made, request, tokens), tokens, made.target.model.dtype)
        assert not error, error


def expect_targets_logprobs(made: SpeculativeDecoder, asked: Sequence[Request], results: Sequence[Generation]) -> None:
    """Check each token's log-probability against a dense float64 target's after the tokens before it."""
    for request, result in zip(asked, results, strict=True):
        error = logprob_error(logits_of(made, request, result.token_ids), result, made.target.model.dtype)
        assert not error, error


def expect_lossless(
    platform: Platform, asked: Sequence[Request], kind: str = "eagle", **options: Any
) -> AcceptanceMetrics:
    """Check for the tokens of the target decoding alone in the verify's shape. Return the speculative decoder's
    metrics.

    Args:
        options: as for `decoder`.
    """
    with decoder(platform, kind=kind, **options) as speculative:
        ours = generate(speculative, asked)
    with decoder(platform, kind=None, **options) as plain:
        assert ours == generate(plain, asked)
    return speculative.metrics
