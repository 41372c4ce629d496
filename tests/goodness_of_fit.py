"""Chi-square tests of samplers. Seeds are fixed, so a test that passes once passes always."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Return the chance that a chi-square variable is above `statistic`."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value(counts: Sequence[float], probabilities: Sequence[float], least_expected: float = 5.0) -> float:
    """Return how likely counts at least this far off are, if `probabilities` is true.

    Cells expected to hold fewer than `least_expected` samples are thrown together, as the chi-square limit needs.
    A sample where the probability is 0 gives 0.
    """
    counts, expected = np.asarray(counts, float), np.asarray(probabilities, float)
    expected = expected / expected.sum() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < least_expected
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    return chi_square_tail(statistic, max(len(expected) - 1, 1))


def follows(counts: Sequence[float], probabilities: Sequence[float]) -> bool:
    """Return whether a sampler with these counts may be one of these probabilities."""
    return p_value(counts, probabilities) > 1e-3


def independent(table: Sequence[Sequence[float]]) -> bool:
    """Return whether rows and columns of a contingency table, larger than 2 x 2, may be independent."""
    counts = np.asarray(table, float)
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    degrees = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    return chi_square_tail(((counts - expected) ** 2 / expected).sum(), degrees) > 1e-3
