"""Prompts of random tokens."""

from __future__ import annotations

import torch
from tiny_checkpoints import VOCAB


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """`length` tokens, the same for the same seed."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
