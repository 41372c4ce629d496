"""MTP with several modules: prompts in chunks and rounds of any K leave the KV of a float64 pass over the sequence."""

from __future__ import annotations

import pytest
import torch
from drafting.pairs import VOCAB, make_head, make_target
from drafting.test_against_dense import dense_attend
from drafting.test_drafters_bit_equal import make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from specgraph.drafting import ProposeBatch

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
    check_keys(drafter, oracle, prompt[1:], aux[:-1], blocks)


@pytest.mark.parametrize("lengths", ["device", "host"])
@pytest.mark.parametrize("lowering", ["eager", "step", "merged"])
def test_rounds_that_draft_less_leave_the_keys_of_every_module(lowering, lengths):
    """What a later round with a larger K attends to: else keys of whoever had these KV blocks before."""
    g = torch.Generator().manual_seed(1)
    head, oracle = make_head("mtp-modules", make_target()), make_head("mtp-modules", make_target(torch.float64))
    settings = {"num_speculative_tokens": 3, "k_candidates": (1, 3), "max_num_requests": 1, "max_model_len": LENGTH}
    drafter = make_drafter(head, lowering, lengths, **settings)
    tokens, aux = torch.randint(0, VOCAB, (1, 4), generator=g), torch.randn(4, head.aux_size, generator=g)
    drafter.propose(
        ProposeBatch(
            sampled_token_ids=tokens,
            num_sampled=torch.tensor([4], dtype=torch.int32),
            start_positions=torch.tensor([0]),
            aux_hidden=aux,
            block_table=torch.tensor([[2, 1, 3]], dtype=torch.int32),
        ),
        num_speculative_tokens=1,
    )
    check_keys(drafter, oracle, tokens[0], aux, [2, 1, 3])


def check_keys(drafter, oracle, tokens, aux, blocks):
    """Compare where all tokens are known: row p of module i takes token p + i of `tokens`, the one after position p is
    its first."""
    past, hidden = {}, aux.double()
    for module in range(drafter.config.num_speculative_tokens):
        known = len(tokens) - module
        if known < 1:
            break
        attend = dense_attend(oracle.attention_layers, torch.arange(known), past)
        hidden = oracle.forward_step(module, tokens[module:], hidden[:known], attend).carry
        slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(known)]
        for name, wanted in zip(("key", "value"), past[module], strict=True):
            stored = getattr(drafter.caches[module], name).flatten(0, 1)[slots]
            torch.testing.assert_close(stored.double(), wanted, atol=1e-4, rtol=1e-4, msg=f"module {module} {name}")
