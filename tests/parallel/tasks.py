"""Tasks of a rank, by name, which `processes.run_ranks` runs in a process per rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from parallel.unequal_ranks import decoder as mixture_decoder
from parallel.unequal_ranks import run
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_models import DraftVocabulary
from specgraph_models.checkpoints import load_drafter, load_target, target_shape
from specgraph_models.parallel import WHOLE, ExpertParallel, Ranks, split_over
from specgraph_run.decoder import Request, SpeculativeDecoder
from specgraph_run.decoder.layout import ParallelLayout, context_parallel, join_layout

from specgraph.attention import KVCache, choose_attention
from specgraph.config import LoweringChoice
from specgraph.cpu.platform import CpuPlatform
from specgraph.draft import DraftTree
from specgraph.draft.ngram import NgramHead

FIXTURES = Path(__file__).parents[1] / "models" / "speculators_fixtures"
PROMPTS = ([3, 17, 4, 9, 40, 2, 11], [8, 1, 60])
TASKS: dict[str, Callable[..., Any]] = {}


def task(function: Callable[..., Any]) -> Callable[..., Any]:
    TASKS[function.__name__] = function
    return function


@task
def call(ranks: Ranks | None, module: str, name: str, **arguments: Any) -> Any:
    """A function of another folder's tests."""
    return getattr(import_module(module), name)(ranks, **arguments)


def make_decoder(
    ranks: Ranks | None,
    target: str,
    draft: str,
    decode: str = "merged",
    dtype: str = "float64",
    tree: bool = False,
    whole_drafter: bool = False,
    vocabulary: int = 0,
    experts: bool = False,
    context: int = 1,
    attention: str = "device",
    temperature: float = 0.0,
    **options: Any,
) -> SpeculativeDecoder:
    """A captured decoder of this rank's part of the pair; of all of it without ranks."""
    split, kind = split_over(ranks), getattr(torch, dtype)
    layout = None if ranks is None else ParallelLayout(ranks, split)
    if experts and ranks is not None:
        split = replace(split, experts=ExpertParallel(ranks.rank, ranks.size, ranks.name))
    if context > 1 and ranks is not None:
        split = replace(split, context=context_parallel(ranks, context))
    model = load_target(target, dtype=kind, max_model_len=64, tensor_parallel=split)
    drafted = target_shape(target, dtype=kind, max_model_len=64) if whole_drafter else model
    chosen = Random(5).sample(range(model.vocab_size), vocabulary)
    own = DraftVocabulary("the list", torch.tensor(chosen)) if chosen else None
    head = NgramHead(model.vocab_size) if draft == "ngram" else load_drafter(draft, drafted, draft_vocab=own)
    if tree:
        options["tree"] = DraftTree(num_steps=3, top_k=2, num_draft_tokens=6)
    config = decoder_settings(
        max_model_len=64, block_size=4, prefill_sizes=(8,), prefill="eager", decode=decode, sampled=temperature > 0,
        **{"num_speculative_tokens": 3, "max_num_requests": 2, "capture_sizes": (2,), **options},
    )  # fmt: skip
    platform = CpuPlatform()
    backend = choose_attention(attention, platform).backend
    decoder = SpeculativeDecoder(model, head, platform, *config, attention=backend, layout=layout)
    decoder.capture()
    return decoder


@task
def generate(ranks: Ranks | None, max_tokens: int = 8, temperature: float = 0.0, **made: Any) -> dict[str, Any]:
    """Tokens of two prompts, and a digest of the KV caches, whose bits depend on everything that ran."""
    decoder = make_decoder(ranks, temperature=temperature, **made)
    adaptive = getattr(decoder.rounds, "adaptive", None)
    requests = [Request(prompt_token_ids=p, max_tokens=max_tokens, temperature=temperature) for p in PROMPTS]
    tokens = [each.token_ids for each in decoder.generate(requests)]
    assert decoder.drafter is not None
    weights = decoder.target.model.weights().values()
    return {
        "tokens": tokens,
        "kv": digest([*decoder.target.caches, *decoder.drafter.caches]),
        "bytes": sum(tensor.nbytes for tensor in {id(t): t for t in weights}.values()),
        "accepted": decoder.metrics.mean_acceptance_length,
        "times": None if adaptive is None else str(adaptive.times),
        "launches": decoder.drafter.launches["propose"] / max(1, decoder.drafter.num_proposes),
    }


@task
def random_rounds(ranks: Ranks | None, runs: list[dict[str, Any]], rounds: int, share: int) -> list[dict[str, Any]]:
    """Requests of random lengths that join and end at random times, for so many rounds and until all have ended.

    Returns:
        Per run the tokens of each request, the drafts of each round (of requests that ran before it), a digest of the
        KV caches, acceptance, rounds, and how many of them had a request with fewer keys than the `share` ranks that
        share them.
    """
    found: list[dict[str, Any]] = []
    for each in runs:
        decoder = make_decoder(ranks, max_num_requests=3, capture_sizes=(1, 3), **each)
        assert decoder.drafter is not None
        rng, given, lengths, done, few = Random(rounds), dict[int, list[int]](), dict[int, int](), 0, 0
        drafts: list[Any] = []
        while done < rounds or decoder.num_unfinished:
            if done < rounds and rng.random() < 0.3:
                prompt = [rng.randrange(1, 60) for _ in range(rng.choice((1, 1, 2, 3, 7, 20)))]
                number = decoder.add(Request(prompt_token_ids=prompt, max_tokens=rng.randint(1, 20)))
                given[number], lengths[number] = [], len(prompt)
            few += any(lengths[key] + len(tokens) < share for key, tokens in given.items())
            before = [state for state in decoder.rounds.rows if state is not None]
            for chunk in decoder.step():
                given[chunk.request] += chunk.token_ids
                if chunk.finish_reason is not None:
                    lengths[chunk.request] = share
            drafted, rows = decoder.drafter.buffers.draft_token_ids.tolist(), decoder.rounds.rows
            drafts.append([drafted[row] for row, state in enumerate(rows) if state in before])
            done += 1
        caches = [*decoder.target.caches, *decoder.drafter.caches]
        found.append(
            {"tokens": list(given.values()), "drafts": drafts, "kv": digest(caches),
             "accepted": decoder.metrics.mean_acceptance_length, "rounds": done, "rounds_with_few_keys": few}
        )  # fmt: skip
        decoder.close()
    return found


@task
def several(ranks: Ranks | None, runs: list[dict[str, Any]]) -> list[Any]:
    """`generate` for each of `runs`, in one process: importing torch takes longer than running."""
    return [generate(ranks, **each) for each in runs]


@task
def unequal(ranks: Ranks, pair: list[str], rounds: int, lowerings: list[LoweringChoice]) -> list[list[Any]]:
    """Run `unequal_ranks.py` in each lowering, on data parallel ranks that share the experts; then requests of which
    two fail to join on rank 1 only, in the target's first pass and in the drafter's second.

    Returns:
        What each run found; and of each request how it ended, why, and whether its tokens are those of one process.
    """
    layout = join_layout(torch.device("cpu"), data_parallel=ranks.size, expert_parallel=True, timeout=120.0)
    folders, platform = (pair[0], pair[1]), CpuPlatform()
    alone = mixture_decoder(platform, folders, WHOLE, None, False, "eager")
    every = [mixture_decoder(platform, folders, layout.tensor_parallel, layout, False, each) for each in lowerings]
    runs = [run(ours, alone, layout.data_rank, rounds, seed=1) for ours in every]
    prompts = [[ranks.rank + 5] * 9, [7] * 18, [8] * 18, [3, 17, 4]]
    requests, ours = [Request(prompt_token_ids=prompt, max_tokens=12) for prompt in prompts], every[0]
    assert ours.drafter is not None
    if ranks.rank == 1:
        ours.target.prefill = failing_at(ours.target.prefill, [7] * 16)
        ours.drafter.prefill = failing_at(ours.drafter.prefill, [8] * 18, after=1)
    joined = [
        [each.finish_reason, each.message, each.token_ids == wanted.token_ids]
        for each, wanted in zip(ours.generate(requests), alone.generate(requests), strict=True)
    ]
    return [runs, joined]


def failing_at(real: Callable[..., Any], tokens: list[int], after: int = 0) -> Callable[..., Any]:
    """Return a function that fails where it is given these tokens, after some calls with them."""
    calls = 0

    def call(given: Any, *rest: Any, **options: Any) -> Any:
        nonlocal calls
        calls += list(given) == tokens
        if list(given) == tokens and calls > after:
            raise MemoryError("no room")
        return real(given, *rest, **options)

    return call


def digest(caches: list[KVCache]) -> str:
    """Return a digest of all blocks but the null block."""
    found = hashlib.sha256()
    for cache in caches:
        for tensor in (cache.key, cache.value):
            found.update(tensor[1:].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
