"""MTP with several modules: a prompt in chunks leaves the KV of one float64 pass over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from drafting.pairs import VOCAB, make_head, make_target
from drafting.test_against_dense import dense_attend
from drafting.test_drafters_bit_equal import make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTH, BLOCK = 64, 4


@pytest.mark.parametrize("lengths", ["device", "host"])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    k=st.integers(2, 4),
    length=st.integers(1, 40),
    chunk=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_chunks_leave_the_keys_of_the_whole_prompt(lengths, k, length, chunk, seed):
    """Module i takes token p + i + 1 at position p, also where a chunk ends before it."""
    g = torch.Generator().manual_seed(seed)
    head, oracle = make_head("mtp-modules", make_target()), make_head("mtp-modules", make_target(torch.float64))
    drafter = make_drafter(
        head, "merged", lengths, num_speculative_tokens=k, max_num_requests=1, max_model_len=LENGTH, prefill_sizes=[16]
    )
    blocks = (torch.randperm(LENGTH // BLOCK, generator=g) + 1).tolist()
    prompt = torch.randint(0, VOCAB, (length,), generator=g)
    aux = torch.randn(length, head.aux_size, generator=g)
    for first in range(0, length, chunk):
        rows = range(first, min(first + chunk, length))
        drafter.prefill(prompt.tolist(), rows, blocks, aux[first : rows.stop])
    past, hidden, n = {}, aux.double(), length - 1  # the last row waits for the token that the target samples
    for module in range(k):
        known = min(n, max(0, length - 1 - module))  # rows whose token the prompt holds
        if not known:
            break
        attend = dense_attend(oracle.attention_layers, torch.arange(known), past)
        hidden = oracle.forward_step(module, prompt[module + 1 : module + 1 + known], hidden[:known], attend).carry
        slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(known)]
        for name, wanted in zip(("key", "value"), past[module], strict=True):
            stored = getattr(drafter.caches[module], name).flatten(0, 1)[slots]
            torch.testing.assert_close(stored.double(), wanted, atol=1e-4, rtol=1e-4, msg=f"module {module} {name}")
