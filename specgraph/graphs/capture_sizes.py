"""Which batch sizes are captured.

Sizes of uniform batches count requests. Rows follow per phase as requests * rows-per-request, so step 0's ladder (K + 1
rows a request) and the later steps' (1 row a request) come from one list and no size can be misaligned to K + 1. Sizes
of prompt passes count rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from specgraph.errors import ConfigError


def capture_sizes(max_num_requests: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Request counts to capture, ascending.

    By default 1, 2, 4, then multiples of 8 up to 64, then multiples of 16, and always `max_num_requests` itself.
    Sizes that the user names are captured exactly as named, or refused.

    Raises:
        ConfigError: a named size is not in 1..max_num_requests, or named twice.
    """
    if max_num_requests < 1:
        raise ConfigError(f"max_num_requests must be at least 1, got {max_num_requests}")
    if asked is None:
        ladder = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_requests, 16)]
        return (*(size for size in ladder if size < max_num_requests), max_num_requests)
    return _checked("capture sizes", asked, max_num_requests, "max_num_requests")


def prefill_sizes(max_model_len: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Rows of prompt passes, ascending: the last one is also the longest chunk of a prompt.

    By default powers of two from 16 to 512, or to `max_model_len` if that is less.

    Raises:
        ConfigError: a named size is not in 1..max_model_len, or named twice.
    """
    if asked is not None:
        return _checked("prefill sizes", asked, max_model_len, "max_model_len")
    return (*(size for size in (16, 32, 64, 128, 256) if size < max_model_len), min(512, max_model_len))


def _checked(what: str, asked: Sequence[int], limit: int, limit_name: str) -> tuple[int, ...]:
    if not asked:
        raise ConfigError(f"{what}: the list is empty; name at least one size, or use lowering 'eager'")
    wrong = [size for size in asked if not 1 <= size <= limit]
    if wrong:
        raise ConfigError(f"{what} {wrong} are outside 1..{limit} ({limit_name})")
    if len(set(asked)) != len(asked):
        raise ConfigError(f"{what} {list(asked)} name a size twice")
    return tuple(sorted(asked))


def padded_size(num_requests: int, sizes: Sequence[int]) -> int | None:
    """The smallest captured size that holds `num_requests`; None when none does."""
    index = bisect_left(sizes, num_requests)
    return sizes[index] if index < len(sizes) else None
