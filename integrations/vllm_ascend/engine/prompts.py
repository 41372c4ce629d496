"""Prompts in the language of `models`, and random times at which requests arrive."""

from __future__ import annotations

import random


def some_prompts(count: int, longest: int, seed: int = 11) -> list[list[int]]:
    """Return prompts that begin with the name of a table. Some are longer than one pass of the engine."""
    r = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(count):
        length = r.choice([3, 5, 17, 40, longest])
        made.append([r.randrange(2, 6), *(r.randrange(2, 128) for _ in range(length - 1))])
    return made


def schedule(seed: int, prompts: int) -> tuple[list[int], list[int], list[int]]:
    """Return 6 to 12 requests: the number of each prompt, its new tokens, and the engine step at which it arrives."""
    r = random.Random(seed)
    count = r.randint(6, 12)
    chosen = [r.randrange(prompts) for _ in range(count)]
    return chosen, [r.randint(4, 24) for _ in range(count)], [r.randint(0, 14) for _ in range(count)]
