"""Prompts and acceptance figures for the GPU scripts of every host engine. Nothing is downloaded."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def python_prompts(tokenizer_file: Path, count: int, seed: int) -> list[list[int]]:
    """Return token ids of `count` pieces of Python's own library, 20 to 300 tokens each."""
    from tokenizers import Tokenizer

    tokenizer, draw = Tokenizer.from_file(str(tokenizer_file)), random.Random(seed)
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size > 6000]
    prompts: list[list[int]] = []
    for index in range(count):
        text = files[index % len(files)].read_text(errors="replace")
        at = draw.randrange(0, 1500)
        ids = tokenizer.encode(text[at : at + 3000]).ids
        prompts.append(ids[: draw.randrange(20, 300)])
    return prompts


def python_text(path: Path, count: int, lengths: tuple[int, int]) -> None:
    """Write `count` pieces of Python's own library to a file in ShareGPT's format, which the engines' clients read.

    Args:
        lengths: the least and the most characters of a piece.
    """
    draw, pieces = random.Random(0), list[Any]()
    files = [file.read_text(errors="replace") for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    files = [text for text in files if len(text) > lengths[1]]
    for index in range(count):
        text, length = files[index % len(files)], draw.randint(*lengths)
        at = draw.randrange(len(text) - length)
        pieces.append({"conversations": [{"value": text[at : at + length]}, {"value": ""}]})
    path.write_text(json.dumps(pieces))


def soak_prompts(tokenizer_file: Path, max_len: int) -> list[list[int]]:
    """Return pieces of Python's library, the first 60 % of each (prefix-cache hits), and prompts near `max_len`."""
    base = python_prompts(tokenizer_file, 96, seed=1)
    joined = [token for prompt in base for token in prompt]
    near_the_end = [joined[900 * i : 900 * i + max_len - left] for i, left in enumerate((3, 6, 7, 24, 90))]
    return base + [prompt[: len(prompt) * 6 // 10] for prompt in base] + near_the_end


def acceptance(histogram: Sequence[int]) -> list[float]:
    """Return, for j = 0 .. K - 1, the share of rounds with more than j accepted draft tokens.

    Args:
        histogram: the number of rounds with 0 .. K accepted draft tokens.
    """
    total = max(sum(histogram), 1)
    return [round(sum(histogram[j + 1 :]) / total, 4) for j in range(len(histogram) - 1)]
