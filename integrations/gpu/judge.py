"""Judge whether greedy tokens of a soak are the target's own, by the target in float32 (transformers).

The judge is fed with the very tokens of a request: each must have the largest logit, or a near-tie of it. A near-tie is
a difference below NEAR_TIE: float16 falls either way there when the batch has another size. Any other token is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 0.05
"""In nats: the probabilities of two tokens are within a factor of 1.05."""


class Judge:
    """The target in float32, on the GPU where there is one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_float32_matmul_precision("highest")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = made.eval().to(self.device)
        self.seen: dict[tuple[int, ...], float] = {}

    def largest_gap(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """The largest difference between the best logit and that of a token, over all tokens, in nats."""
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
    """The part of a soak's result that says whether tokens were wrong.

    Args:
        want: the tokens that each prompt continued with before the soak; judged too.
        differing: (prompt, tokens asked for, tokens...) of requests that continued differently, and how many did.
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
