"""The hand-over against a loop over requests and rows, in the forms in which engines keep a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft.pairs import make_head, make_target
from hypothesis import given
from hypothesis import strategies as st
from specgraph_plugin import FastPath, PromptChunk, PromptPass, VerifyOutput, fill_batch

from specgraph import DraftConfig, Drafter, ProposeBatch, open_platform
from specgraph.attention import allocate_caches
from specgraph.errors import ConfigError, UnsupportedError

MAX_LEN, BLOCK, WIDTH = 40, 4, 13


@st.composite
def verify_outputs(draw):
    """(VerifyOutput, K, first row and tokens of each request, its row of block ids): random counts, positions up to the
    context's end, requests of equal or of other numbers of rows, in slots in any order, stale tables."""
    k, n = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    q, slots = k + 1, torch.tensor(draw(st.permutations(range(8)))[:n])
    starts = torch.tensor([draw(st.integers(0, MAX_LEN - q)) for _ in range(n)])
    counts = torch.tensor([draw(st.integers(1, q)) for _ in range(n)]).int()
    first, more, total = [r * q for r in range(n)], {}, n * q
    if draw(st.booleans()):
        before = [draw(st.integers(0, 9)) for _ in range(n)]  # rows of a prompt, before its last one
        first = [sum(before[: r + 1]) + sum(counts[:r].tolist()) for r in range(n)]
        total = first[-1] + int(counts[-1])
        more["first_rows"] = torch.tensor(first)
    ids = torch.randint(0, 99, (total + draw(st.integers(0, 7)),), generator=g).int()
    rows = [ids[at : at + c].tolist() for at, c in zip(first, counts, strict=True)]
    if draw(st.booleans()):
        more["last_tokens"], more["last_rows"] = torch.randint(100, 200, (8, 1), generator=g), slots.int()
        last = more["last_tokens"][slots, 0].tolist()
        tokens = [[*row[1:], end] for row, end in zip(rows, last, strict=True)]
    else:
        tokens = rows
    if draw(st.booleans()):
        columns = draw(st.sampled_from([36, 40, 53]))
        blocks = torch.randint(1, 50, (8, -(-columns // BLOCK)), generator=g)
        table = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)[:, :columns].int()
        more |= {"table_of_slots": True, "table_rows": slots}
        blocks = blocks[slots]
    else:
        blocks = torch.randint(1, 50, (n + 2, draw(st.sampled_from([9, 10, 16]))), generator=g)
        table = blocks.int()
    states = [torch.randn(len(ids), 3, generator=g) for _ in range(draw(st.integers(1, 4)))]
    positions = (starts[:, None] + torch.arange(q)).flatten()
    end = VerifyOutput(
        token_ids=ids, num_sampled=counts, starts=positions[::q], table=table, hidden_states=states, **more
    )
    return end, k, first, tokens, blocks.tolist()


@given(verify_outputs(), st.integers(0, 2))
def test_every_request_gets_its_own(made, padding) -> None:
    end, k, first, tokens, blocks = made
    n, q = end.num_requests, k + 1
    into = ProposeBatch(
        sampled_token_ids=torch.full((n + padding, q), -9),
        num_sampled=torch.full((n + padding,), -9, dtype=torch.int32),
        start_positions=torch.full((n + padding,), -9),
        aux_hidden=torch.full(((n + padding) * q, 3 * len(end.hidden_states)), -9.0),
        block_table=torch.full((n + padding, WIDTH), -9, dtype=torch.int32),
    )
    reach = 2 * k + 1 + padding % 2
    fill_batch(end, into, MAX_LEN, BLOCK, reach)
    for r in range(n):
        count, start = int(end.num_sampled[r]), int(end.starts[r])
        assert into.sampled_token_ids[r].tolist() == tokens[r] + [0] * (q - count)
        assert (int(into.num_sampled[r]), int(into.start_positions[r])) == (count, start)
        for j in range(count if end.first_rows is not None else q):
            at = first[r] + j
            assert into.aux_hidden[r * q + j].tolist() == [x for part in end.hidden_states for x in part[at].tolist()]
        last = min(start + reach, MAX_LEN) - 1  # that this propose can write
        assert into.block_table[r].tolist() == (blocks[r][: last // BLOCK + 1] + [0] * WIDTH)[:WIDTH]
    assert into.num_sampled[n:].tolist() == [0] * padding


def test_what_is_missing_or_not_served_is_named() -> None:
    target, platform = make_target(), open_platform("cpu")
    head = make_head("eagle", target)
    caches = allocate_caches(head.attention_layers, 4, BLOCK, torch.float32, platform.device)
    sizes = {"num_speculative_tokens": 1, "max_num_requests": 1, "max_model_len": 16, "block_size": BLOCK}
    fast = FastPath(head, caches, platform, **sizes, sampled=True, capture_sizes=[1])
    zeros = torch.zeros(1, dtype=torch.int32)
    end = VerifyOutput(
        token_ids=torch.zeros(2, dtype=torch.int32), num_sampled=zeros, starts=zeros, table=torch.zeros(1, 4).int(),
        hidden_states=[torch.zeros(2, head.aux_size)],
    )  # fmt: skip
    for more, missing in (({}, "temperature"), ({"temperature": torch.ones(1)}, "seeds")):
        with pytest.raises(ConfigError, match=f"the VerifyOutput has no {missing}: give it one"):
            fast.fill(replace(end, **more))
    fast.fill(replace(end, temperature=torch.ones(1), seeds=torch.ones(1, dtype=torch.int64)))
    head = make_head("mtp-modules", target)
    caches = allocate_caches(head.attention_layers, 4, BLOCK, torch.float32, platform.device)
    with pytest.raises(UnsupportedError, match="several MTP modules take tokens further on"):
        FastPath(head, caches, platform, **sizes | {"num_speculative_tokens": 2})


def test_one_of_several_modules_drafts_as_a_drafter_with_a_prefill_does() -> None:
    platform, head, rows = open_platform("cpu"), make_head("mtp-modules", make_target()), 19
    sizes = {"num_speculative_tokens": 1, "max_num_requests": 1, "max_model_len": MAX_LEN, "block_size": BLOCK}
    ours, theirs = (allocate_caches(head.attention_layers, 11, BLOCK, torch.float32, platform.device) for _ in range(2))
    prompt = torch.arange(rows) % 13 + 1
    states, blocks = torch.randn(rows, head.aux_size), [*range(1, 11)]
    fast = FastPath(head, ours, platform, **sizes, capture_sizes=[1])
    output = VerifyOutput(
        token_ids=prompt, num_sampled=torch.ones(1, dtype=torch.int32), starts=torch.tensor([rows - 1]),
        table=torch.tensor([blocks]).int(), hidden_states=[states], first_rows=torch.tensor([rows - 1]),
        last_tokens=torch.tensor([[7]]), last_rows=torch.zeros(1).int(),
    )  # fmt: skip
    fast.write_prompts(
        PromptPass(
            chunks=[PromptChunk(0, rows, 0, table_row=0, next_row=None)],
            token_ids=prompt,
            next_tokens=torch.zeros(1).int(),
            hidden_states=[states],
            table=output.table,
        )
    )
    fast.fill(output)
    drafter = Drafter(head, theirs, platform, DraftConfig(**sizes))
    drafter.capture()
    batch = drafter.inputs(1)
    batch.start_positions.fill_(rows - 1)
    batch.block_table[:, : len(blocks)].copy_(torch.tensor([blocks]))
    batch.join(0, torch.tensor(7), drafter.prefill(prompt.tolist(), range(rows), blocks, states))
    assert torch.equal(fast.propose(1).token_ids, drafter.propose(batch).token_ids)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.key[1:5], other.key[1:5])
    assert ours[0].key[1:5].any()


def test_a_part_that_is_none_of_the_head_s_weights_is_named() -> None:
    platform = open_platform("cpu")
    head = make_head("eagle", make_target())
    caches = allocate_caches(head.attention_layers, 4, BLOCK, torch.float32, platform.device)
    sizes = {"num_speculative_tokens": 1, "max_num_requests": 1, "max_model_len": 16, "block_size": BLOCK}
    with pytest.raises(ConfigError, match=r"rank_parts has qkv, which EagleHead\.weights\(\) has not"):
        FastPath(head, caches, platform, **sizes, rank_parts=["fc", "qkv"])


def test_a_drafter_whose_prompts_another_program_writes_has_no_prefill() -> None:
    platform = open_platform("cpu")
    head = make_head("eagle", make_target())
    caches = allocate_caches(head.attention_layers, 4, BLOCK, torch.float32, platform.device)
    sizes = {"num_speculative_tokens": 1, "max_num_requests": 1, "max_model_len": 16, "block_size": BLOCK}
    drafter = FastPath(head, caches, platform, **sizes).drafter
    assert not [name for name in drafter.read_set() if name.startswith("prefill")]
    with pytest.raises(UnsupportedError, match="prefill: this drafter's prompts are written by the program"):
        drafter.prefill([1, 2], range(1), [1])
