"""Judges greedy tokens of a soak by the target in float32 (transformers).

The judge runs over a request's own tokens. Each token must have the largest logit, or a logit less than NEAR_TIE below
it: in float16 the batch size can decide between two such tokens. Any other token is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 0.05
"""In nats: the probabilities of the two tokens differ by a factor below 1.05."""


class Judge:
    """The target in float32, on the GPU if there is one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_float32_matmul_precision("highest")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = made.eval().to(self.device)
        self.seen: dict[tuple[int, ...], float] = {}

    def largest_gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Return how far, at most, the logit of a token is below the largest logit at its position, in nats."""
        key = (*prompt, -1, *tokens)
        if key not in self.seen:
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *tokens]], device=self.device)
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
                taken = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            self.seen[key] = float((logits.amax(1) - taken).max())
        return self.seen[key]


def judged(
    judge: Judge,
    prompts: Sequence[Sequence[int]],
    want: Sequence[Sequence[int]],
    differing: Mapping[tuple[int, ...], int],
) -> dict[str, Any]:
    """Return the entries of a soak's result about wrong tokens.

    Args:
        want: the tokens that were generated for each prompt before the soak. They are judged too.
        differing: (prompt, `max_tokens`, tokens...) of requests with other tokens, and the number of such requests.
    """
    wrong: list[dict[str, Any]] = []
    largest = 0.0
    for (prompt, limit, *got), times in differing.items():
        gap = judge.largest_gap(prompts[prompt], got)
        largest = max(largest, gap)
        if gap >= NEAR_TIE or len(got) != limit:
            wrong.append({"prompt": prompt, "limit": limit, "times": times, "gap": gap, "got": got})
    gaps = [judge.largest_gap(prompt, tokens) for prompt, tokens in zip(prompts, want, strict=True)]
    return {
        "requests_that_differ": sum(differing.values()),
        "their_largest_gap": round(largest, 4),
        "requests_with_a_wrong_token": sum(entry["times"] for entry in wrong),
        "generated_before": {
            "prompts": len(prompts),
            "tokens": sum(map(len, want)),
            "largest_gap": round(max(gaps), 4),
            "prompts_with_a_wrong_token": sum(gap >= NEAR_TIE for gap in gaps),
        },
        "near_tie_below": NEAR_TIE,
        "wrong": wrong,
    }
