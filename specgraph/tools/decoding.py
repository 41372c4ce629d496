"""Tokens per second of the shipped pair, with and without drafting, measured in one run."""

from __future__ import annotations

import time
from typing import Any

from specgraph.device import Platform
from specgraph.engine.load import load_generator
from specgraph.options import LoweringChoice

PROMPTS = (
    'def read_chunk(self, size):\n    """Read at most size bytes, returned as a bytes object."""\n',
    "import os\nimport sys\n\ndef walk(top, topdown=True):\n",
    "class Counter(dict):\n    def __init__(self, iterable=None):\n",
    "def parse_args(argv):\n    parser = argparse.ArgumentParser()\n",
)


def bench_decoding(platform: Platform, *, k: int, lowerings: tuple[LoweringChoice, ...]) -> list[dict[str, Any]]:
    """Generate 100 tokens for each of PROMPTS, one request at a time.

    Returns:
        One row per lowering and one without drafting; each counts its fastest of 3 passes over all prompts.
    """
    generators = {
        lowering: load_generator(
            platform=platform, num_speculative_tokens=k, decode=lowering or "auto", speculate=lowering is not None
        )
        for lowering in (*lowerings, None)
    }
    seconds: dict[str | None, float] = dict.fromkeys(generators, float("inf"))
    tokens = 0
    for _ in range(3):  # all ways in turns; see bench_propose
        for lowering, generator in generators.items():
            requests = [generator.request(prompt, max_tokens=100) for prompt in PROMPTS]
            start = time.perf_counter()
            tokens = sum(len(generator.generate([request])[0].token_ids) for request in requests)
            seconds[lowering] = min(seconds[lowering], time.perf_counter() - start)
    rows: list[dict[str, Any]] = []
    for lowering, generator in generators.items():
        rows.append(
            {
                "pair": "tiny-python",
                "k": k if lowering else 0,
                "lowering": lowering or "without drafting",
                "tokens_per_second": round(tokens / seconds[lowering], 1),
                "mean_acceptance_length": round(generator.decoder.metrics.mean_acceptance_length, 3),
            }
        )
        generator.close()
    return rows
