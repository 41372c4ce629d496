"""The distribution that a request's sampling parameters define, token by token in float64: the oracle of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence


def served(logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], temperature: float, **asked) -> list:
    """Probability of each token. `asked`: the parameters of `Request` by name."""
    penalty = asked.get("repetition_penalty", 1.0)
    scores = []
    for token, logit in enumerate(logits):
        score = logit + asked.get("logit_bias", {}).get(token, 0.0)
        if token in prompt or token in output:
            score = score / penalty if score > 0 else score * penalty
        times = list(output).count(token)
        score -= asked.get("frequency_penalty", 0.0) * times
        score -= asked.get("presence_penalty", 0.0) if times else 0.0
        scores.append(score)
    if temperature == 0:
        best = max(range(len(scores)), key=lambda token: (scores[token], -token))
        return [float(token == best) for token in range(len(scores))]
    largest = max(scores)
    weights = [math.exp((score - largest) / temperature) for score in scores]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    order = [token for token in order if weights[token] >= asked.get("min_p", 0.0)]
    order = order[: asked.get("top_k", 0) or len(order)]
    total, reached, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if not kept or reached < asked.get("top_p", 1.0) * total:
            kept.append(token)
        reached += weights[token]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(scores))]
