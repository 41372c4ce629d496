"""The segments of prompts' chunks, against the rows that they have to hold."""

from __future__ import annotations

import pytest
from specgraph_plugin import PromptChunk
from specgraph_plugin.prompts import SEGMENT, segments_of


@pytest.mark.parametrize("writes_ends", [False, True])
def test_each_row_is_in_one_segment_with_its_token(writes_ends) -> None:
    chunks, want, first = list[PromptChunk](), [], 0
    for length in range(1, 3 * SEGMENT + 2):
        for next_row in (None, 500 + length):
            chunk = PromptChunk(first, length, 100 * length, table_row=900 + length, next_row=next_row)
            rows = length if writes_ends or next_row is not None else length - 1
            for i in range(rows):
                token = next_row if i == length - 1 and next_row is not None else -1
                want.append((first + i, 100 * length + i, 900 + length, token))
            chunks, first = [*chunks, chunk], first + length
    got = []
    for row, count, position, table_row, next_row in zip(*segments_of(chunks, writes_ends), strict=True):
        assert 0 < count <= SEGMENT
        got += [(row + i, position + i, table_row, next_row if i == count - 1 else -1) for i in range(count)]
    assert got == want
