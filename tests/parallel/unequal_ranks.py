"""Random unequal batches on data parallel ranks that share the experts of a tiny mixture, against one process.

Requests of random lengths come to each rank at random times; some ranks have none for many rounds and take part in the
others' passes. The drafter is a mixture too; float64. Greedy requests have chains whose length follows the batch size;
of sampled ones half are at temperature 0.8, with chains of one length (sampled tokens depend on it).
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from specgraph_models import load_drafter, load_target
from specgraph_models.parallel import TensorParallel
from specgraph_run.decoder import Request, SpeculativeDecoder
from specgraph_run.decoder.layout import ParallelLayout

from specgraph.config import DraftConfig, LoweringChoice
from specgraph.device import Platform

LENGTH, REQUESTS = 64, 4


def write_pair(folder: Path) -> tuple[str, str]:
    """A mixture in the Qwen3-MoE layout with random weights, and its drafter: the same weights and a little noise, so
    that some drafts are accepted."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=24, norm_topk_prob=True, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for scale, name in ((0.2, "target"), (0.01, "draft")):
            for parameter in model.parameters():
                noise = torch.randn_like(parameter) * scale
                parameter.copy_(noise if name == "target" and parameter.dim() > 1 else parameter + noise)
            model.save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


def decoder(
    platform: Platform,
    pair: tuple[str, str],
    split: TensorParallel,
    layout: ParallelLayout | None,
    sampled: bool,
    decode: LoweringChoice,
) -> SpeculativeDecoder:
    """Return the pair in float64, captured."""
    target = load_target(pair[0], platform.device, torch.float64, LENGTH, split)
    config = DraftConfig(
        num_speculative_tokens=3, draft_schedule=None if sampled else {2: 3, 4: 1},
        max_num_requests=REQUESTS, max_model_len=LENGTH,
        block_size=4, capture_sizes=(2, 4), prefill_sizes=(4, 16), prefill="eager", sampled=sampled, decode=decode,
    )  # fmt: skip
    made = SpeculativeDecoder(target, load_drafter(pair[1], target), platform, config, layout=layout)
    made.capture()
    return made


def random_request(rng: random.Random, sampled: bool) -> Request:
    """A prompt of 1 to 30 tokens, 1 to 16 tokens to generate."""
    prompt = [rng.randrange(120) for _ in range(rng.choice((1, 2, 5, 14, 17, 30)))]
    temperature = rng.choice((0.0, 0.8)) if sampled else 0.0
    return Request(
        prompt_token_ids=prompt, max_tokens=rng.randint(1, 16), temperature=temperature, seed=rng.randrange(999)
    )


def run(ours: SpeculativeDecoder, alone: SpeculativeDecoder, data_rank: int, rounds: int, seed: int) -> dict[str, Any]:
    """`rounds` rounds and then those that finish what was begun; all ranks run it together. Afterwards each decodes its
    own requests again with the whole model in its own process.

    Args:
        ours: of this rank.
        alone: of the whole model.

    Returns:
        Of this rank: rounds, those without a request of its own, the sizes of its batches, requests, tokens, and how
        many requests differ from the single process.
    """
    rng, sampled = random.Random(seed * 1000 + data_rank), ours.config.sampled
    asked: dict[int, Request] = {}
    given: dict[int, list[int]] = {}
    sizes: Counter[int] = Counter()
    done = busy = 0
    while done < rounds or ours.others_unfinished:
        if done < rounds:
            if rng.random() < 0.06:
                busy = 0 if busy else rng.choice((1, 2, 4))  # requests that this rank keeps, or none for a while
            if ours.num_unfinished < busy and rng.random() < 0.7:
                request = random_request(rng, sampled)
                asked[ours.add(request)] = request
        sizes[len(ours.rounds.running)] += 1
        for chunk in ours.step():
            given.setdefault(chunk.request, []).extend(chunk.token_ids)
        done += 1
    wanted = alone.generate(list(asked.values()))
    different = sum(given[key] != each.token_ids for key, each in zip(asked, wanted, strict=True))
    return {
        "rank": data_rank, "rounds": done, "rounds_without_requests": sizes[0],
        "batch_sizes": dict(sorted(sizes.items())), "requests": len(asked), "tokens": sum(map(len, given.values())),
        "acceptance_length": ours.metrics.mean_acceptance_length, "requests_that_differ": different,
    }  # fmt: skip
