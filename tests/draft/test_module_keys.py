"""MTP with several modules: prompts in chunks and rounds of any K leave the KV of a float64 pass over the sequence."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import make_drafter
from draft.test_against_dense import dense_attend
from hypothesis import given, settings
from hypothesis import strategies as st

from specgraph.draft import ProposeBatch

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


def check_keys(drafter, oracle, tokens, aux, blocks):
    """Compare where all tokens are known: row p of module i takes token p + i of `tokens`, the one after position p is
    its first."""
    past, hidden, block = {}, aux.double(), drafter.config.block_size
    for module in range(drafter.config.num_speculative_tokens):
        known = len(tokens) - module
        if known < 1:
            break
        attend = dense_attend(oracle.attention_layers, torch.arange(known), past)
        hidden = oracle.forward_step(module, tokens[module:], hidden[:known], attend).carry
        slots = [blocks[p // block] * block + p % block for p in range(known)]
        for name, wanted in zip(("key", "value"), past[module], strict=True):
            stored = getattr(drafter.caches[module], name).flatten(0, 1)[slots]
            torch.testing.assert_close(stored.double(), wanted, atol=1e-4, rtol=1e-4, msg=f"module {module} {name}")


def test_a_request_that_shares_the_blocks_of_a_prefix():
    """Prefix caching: its past rows lie in a block that another request wrote, in a batch of its own."""
    g = torch.Generator().manual_seed(3)
    head, oracle = make_head("mtp-modules", make_target()), make_head("mtp-modules", make_target(torch.float64))
    drafter = make_drafter(
        head, "merged", "device", num_speculative_tokens=4, max_num_requests=1, max_model_len=LENGTH, prefill_sizes=[8]
    )
    text, aux = torch.randint(0, VOCAB, (12,), generator=g), torch.randn(12, head.aux_size, generator=g)
    drafter.prefill(text[:8].tolist(), range(8), [1, 2], aux[:8])
    drafter.prefill(text[:6].tolist(), range(BLOCK, 6), [1, 3], aux[BLOCK:6])
    known = 5
    for count in (1, 2, 3):
        round_aux = torch.randn(5, head.aux_size, generator=g)
        round_aux[:count] = aux[known : known + count]
        tokens = torch.zeros(1, 5, dtype=torch.int64)
        tokens[0, :count] = text[known + 1 : known + 1 + count]
        drafter.propose(
            ProposeBatch(
                sampled_token_ids=tokens,
                num_sampled=torch.tensor([count], dtype=torch.int32),
                start_positions=torch.tensor([known]),
                aux_hidden=round_aux,
                block_table=torch.tensor([[1, 3, 4, 5]], dtype=torch.int32),
            )
        )
        known += count
        check_keys(drafter, oracle, text[1 : known + 1], aux[:known], [1, 3, 4, 5])
    drafter.close()


def test_what_is_kept_takes_the_memory_that_a_generator_counts():
    head = make_head("mtp-modules", make_target())
    drafter = make_drafter(head, "eager", "device", num_speculative_tokens=4, max_num_requests=1, max_model_len=LENGTH)
    kept = [tensor for name, tensor in drafter.read_set().items() if name.startswith("buffers.past.")]
    blocks = drafter.caches[0].key.shape[0]
    assert sum(tensor.nbytes for tensor in kept) == blocks * head.kind.bytes_per_block(head, 4, BLOCK) > 0
    one = make_head("mtp", make_target())
    assert one.kind.bytes_per_block(one, 4, BLOCK) == 0
