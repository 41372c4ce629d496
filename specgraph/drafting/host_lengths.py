"""The lengths of each draft step as host integers, for attention that takes them so."""

from __future__ import annotations

from collections.abc import Sequence

from specgraph.attention import HostLengths


def draft_lengths(
    start_positions: Sequence[int], num_sampled: Sequence[int], step: int, query_len: int, padded: int
) -> HostLengths:
    """The same numbers as the device metadata has at `step`: this round's rejected tokens are counted out.

    Args:
        start_positions: position of each real request's first row in the target's pass.
        num_sampled: accepted + 1 of each real request.
        step: draft step; 0 runs `query_len` rows a request, later ones 1.
        query_len: K + 1.
        padded: requests of the graph; padded ones get length 0.
    """
    tail = [0] * (padded - len(start_positions))
    rows = query_len if step == 0 else 1
    if step == 0:
        seq_lens = [start + query_len for start in start_positions]
    else:
        seq_lens = [start + count + step for start, count in zip(start_positions, num_sampled, strict=True)]
    return HostLengths(query_lens=[rows] * padded, seq_lens=seq_lens + tail)
