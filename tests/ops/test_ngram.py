"""N-gram drafts of random texts, against Python's own search in strings."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from specgraph_conformance.op_rows.ngram import drafts_by_ngram

from specgraph import ops


@given(st.data())
def test_drafts_are_what_python_finds(data):
    block, limit, k = (data.draw(st.integers(1, most), name) for most, name in ((9, "block"), (40, "limit"), (6, "k")))
    longest = data.draw(st.integers(1, 8), "prompt_lookup_max")
    shortest = data.draw(st.integers(1, longest), "prompt_lookup_min")
    tokens = st.integers(0, data.draw(st.integers(0, 3), "highest token"))
    texts = data.draw(st.lists(st.lists(tokens, max_size=limit + 3), min_size=1, max_size=3), "texts")
    columns = -(-(limit + 3) // block)
    order = data.draw(st.permutations(range(1, len(texts) * columns + 1)), "blocks")
    table = torch.tensor(order, dtype=torch.int32).view(len(texts), columns)
    history = torch.full((table.numel() + 1, block), 99, dtype=torch.int32)
    for text, blocks in zip(texts, table.tolist(), strict=True):
        slots = [blocks[i // block] * block + i % block for i in range(len(text))]
        ops.keep_tokens(torch.tensor(text, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64), history)
    drafts = torch.full((len(texts), k), -1)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    ops.ngram_propose(history, table, lengths, shortest, longest, limit, drafts)
    assert drafts.tolist() == [drafts_by_ngram(text[:limit], k, shortest, longest) for text in texts]
