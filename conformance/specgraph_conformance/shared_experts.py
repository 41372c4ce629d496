"""Data parallel ranks that share the experts of a tiny mixture: each rank's requests, and the check of their tokens.

Each of two ranks has half of the experts of target and drafter, and requests of its own. All ranks must run the same
passes, and the tokens must be the ones of the whole model in float64.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.errors import RankError
from specgraph.ops.linear import Weight
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.experts import Experts, ExpertsConfig
from specgraph_models.llama import LlamaTarget
from specgraph_models.parallel import WHOLE, TensorParallel
from specgraph_run.decoder import Generation, Request, SpeculativeDecoder
from specgraph_run.decoder.layout import join_layout

from specgraph_conformance.decode_rig import logprob_error, target_logits, token_error
from specgraph_conformance.tiny_models import HIDDEN, VOCAB, make_target

EXPERTS = ExpertsConfig(num_experts=4, top_k=2, inner=64, layers=(True, True))
DTYPE = torch.float32
LENGTH, CHUNK = 64, 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """The prompt lengths on each of two ranks, and K by batch size."""

    prompts: tuple[tuple[int, ...], tuple[int, ...]]
    draft_schedule: dict[int, int] | None = None


SCENARIOS = {
    "equal": Scenario(((5, 3), (4, 6))),
    "sizes": Scenario(((5, 3, 7), (4,))),
    "idle": Scenario(((5, 3), ())),
    "k": Scenario(((5, 3, 7), (4,)), {1: 3, 4: 1}),
    "prompts": Scenario(((3 * CHUNK - 2,), (4,))),
}


def make_mixture(
    seed: int, device: torch.device, split: TensorParallel = WHOLE, compute: torch.dtype | None = None
) -> LlamaTarget:
    """Make the tiny target with a mixture of experts in each layer. `split` selects the experts of one rank."""
    plain = make_target(seed, device, DTYPE, compute)
    generator, count, inner = torch.Generator().manual_seed(seed), EXPERTS.num_experts, EXPERTS.inner
    begin, end = (0, count) if split.experts is None else split.experts.part(count)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
        return values.to(DTYPE).to(compute or DTYPE).to(device)

    layers = [
        replace(
            layer,
            gate_up=Weight(random(count, 2 * inner, HIDDEN)[begin:end].contiguous()),
            down=Weight(random(count, HIDDEN, inner)[begin:end].contiguous()),
            experts=Experts(EXPERTS, random(count, HIDDEN) * 4),
            tensor_parallel=split,
        )
        for layer in plain.layers
    ]
    config = replace(plain.sizes, experts=EXPERTS).split(split)
    return LlamaTarget(config, plain.embed_tokens, layers, plain.norm, plain.lm_head)


def asked_of(scenario: Scenario, rank: int, seed: int) -> list[Request]:
    """Return the requests of one rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in scenario.prompts[rank]]
    return [Request(prompt_token_ids=prompt, max_tokens=6 + 3 * i) for i, prompt in enumerate(prompts)]


def run_scenarios(
    platform: Platform, names: Sequence[str], seed: int, timeout: float
) -> Generator[tuple[str, str], None, None]:
    """Run scenarios on all ranks together. Scenarios with the same K by batch size share a decoder until one fails.

    Yields:
        The name of each scenario, and its error. The error is empty if the scenario passed.
    """
    left = sorted(names, key=lambda name: SCENARIOS[name].draft_schedule is not None)
    reference = make_mixture(seed, torch.device("cpu"), compute=torch.float64)
    while left:
        schedule = SCENARIOS[left[0]].draft_schedule
        layout = join_layout(platform.device, data_parallel=2, expert_parallel=True, timeout=timeout)
        try:
            target = make_mixture(seed, platform.device, layout.tensor_parallel)
            head = DraftModelHead(make_mixture(seed + 1, platform.device, layout.tensor_parallel), HIDDEN)
            config = DraftConfig(
                num_speculative_tokens=3, draft_schedule=schedule, max_num_requests=4, max_model_len=LENGTH,
                capture_sizes=(1, 4), prefill_sizes=(CHUNK,), decode="merged", prefill="full",
            )  # fmt: skip
            made = SpeculativeDecoder(target, head, platform, config, layout=layout)
            made.capture()
            while left and SCENARIOS[left[0]].draft_schedule == schedule:
                asked = asked_of(SCENARIOS[left[0]], layout.ranks.rank, seed)
                given = made.generate(asked)
                layout.ranks.exchange("the end of the scenario")
                yield left.pop(0), shortfall(reference, asked, given)
            made.close()
        except RankError as error:
            yield left.pop(0), str(error)
        finally:
            layout.ranks.close()


def shortfall(target: LlamaTarget, asked: Sequence[Request], given: Sequence[Generation]) -> str:
    """Check tokens against the whole target, and return the first error, or an empty string.

    Each token must be the most likely one after the tokens before it, up to ties. If it has a log-probability, this
    must be the target's.

    Args:
        target: float64, on the host.
    """
    for request, generation in zip(asked, given, strict=True):
        tokens = generation.token_ids
        if len(tokens) != request.max_tokens:
            return f"{len(tokens)} tokens instead of {request.max_tokens}"
        logits = target_logits(target, request.prompt_token_ids, tokens[:-1])
        error = token_error(logits, tokens, DTYPE)
        if generation.logprobs:
            error = error or logprob_error(logits, generation, DTYPE)
        if error:
            return error
    return ""
