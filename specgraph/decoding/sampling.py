"""The token after a prompt: no draft stands there, so it is one draw from the target."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels import noise


def sample_token(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """One token from softmax(logits / temperature), by the noise that a verify would resample that position with.

    Args:
        logits: [vocab].
        temperature: 0 is argmax.
        position: where the token will stand.

    Returns:
        int64 scalar tensor.
    """
    if temperature == 0:
        return logits.argmax()
    at = torch.full((1,), position, dtype=torch.int64, device=logits.device)
    seeds = torch.full((1,), seed, dtype=torch.int64, device=logits.device)
    return (logits.float() / temperature + noise.gumbel(seeds, at, noise.RESAMPLE, logits.shape[-1])[0]).argmax()
