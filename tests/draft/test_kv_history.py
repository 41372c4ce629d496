"""Rounds that stand on keys which were never written: `DraftConfig(debug=True)` names the position or the block.

Without it each of these mistakes leaves the text right and the drafts worse, without a word.
"""

from __future__ import annotations

import pytest
import torch
from draft.pairs import make_head, make_target
from hypothesis import given, settings
from hypothesis import strategies as st

from specgraph import DraftConfig, Drafter, DraftTree, ProposeBatch, allocate_caches
from specgraph.cpu import CpuPlatform
from specgraph.errors import ConfigError

K, BLOCK, MAX_LEN, REQUESTS, NUM_BLOCKS = 3, 8, 48, 2, 14
HEADS = {kind: make_head(kind, make_target()) for kind in ("eagle", "dflash", "mtp-modules", "draft-model")}


class Engine:
    """An engine without a target: what it accepts is given. Mistakes are made from outside, one at a time."""

    def __init__(self, kind: str = "eagle", **options) -> None:
        self.head, platform = HEADS[kind], CpuPlatform()
        sizes = {"max_num_requests": REQUESTS, "max_model_len": MAX_LEN, "block_size": BLOCK, "prefill_sizes": [8]}
        config = DraftConfig(num_speculative_tokens=K, decode="eager", debug=True, **sizes, **options)
        caches = allocate_caches(self.head.attention_layers, NUM_BLOCKS, BLOCK, self.head.dtype, platform.device)
        self.drafter = Drafter(self.head, caches, platform, config)
        self.drafter.capture()
        self.free = list(range(1, NUM_BLOCKS))
        self.starts, self.counts = [0] * REQUESTS, [0] * REQUESTS
        self.blocks: list[list[int]] = [[] for _ in range(REQUESTS)]
        self.sampled = torch.ones(REQUESTS, K + 1, dtype=torch.int64)
        self.drafts = torch.zeros(REQUESTS, K, dtype=torch.int64)

    def grow(self, row: int, tokens: int) -> None:
        while len(self.blocks[row]) * BLOCK < min(tokens, MAX_LEN):
            self.blocks[row].append(self.free.pop(0))

    def join(self, row: int, length: int, chunk: int = 8, shared: list[int] | None = None) -> None:
        """A prompt: `shared` are full blocks of its beginning that another request's prefill wrote."""
        self.leave(row)
        self.blocks[row] = list(shared or [])
        begin = len(self.blocks[row]) * BLOCK
        self.grow(row, length + 2 * (K + 1))
        for at in range(begin, length, chunk):
            positions = range(at, min(at + chunk, length))
            aux = torch.randn(len(positions), self.head.aux_size)
            self.drafter.prefill([1] * length, positions, self.blocks[row], aux)
        self.starts[row], self.counts[row] = length - 1, 1

    def leave(self, row: int) -> None:
        self.free = [block for block in self.blocks[row] if block not in self.free] + self.free
        self.blocks[row], self.counts[row] = [], 0

    def batch(self) -> ProposeBatch:
        width = max(map(len, self.blocks), default=0) or 1
        return ProposeBatch(
            sampled_token_ids=self.sampled.clone(),
            num_sampled=torch.tensor(self.counts, dtype=torch.int32),
            start_positions=torch.tensor(self.starts),
            aux_hidden=torch.randn(REQUESTS * (K + 1), self.head.aux_size),
            block_table=torch.tensor([b + [0] * (width - len(b)) for b in self.blocks], dtype=torch.int32),
        )

    def propose(self) -> None:
        self.drafts = self.drafter.propose(self.batch()).token_ids

    def accept(self, row: int, accepted: int) -> None:
        self.starts[row] += self.counts[row]
        self.counts[row] = accepted + 1
        self.sampled[row, :accepted], self.sampled[row, accepted] = self.drafts[row, :accepted], 1
        self.grow(row, self.starts[row] + 2 * (K + 1))


@pytest.mark.parametrize("kind", HEADS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_rounds_of_a_sound_engine_pass(kind, data):
    """Requests join, leave and take over blocks, in chunks and with any number of accepted drafts."""
    engine = Engine(kind)
    for _ in range(6):
        for row in range(REQUESTS):
            if not engine.counts[row] or engine.starts[row] + 2 * (K + 1) >= MAX_LEN:
                chunk = data.draw(st.integers(1, 8))
                engine.join(row, data.draw(st.integers(1, 25)), chunk)
            else:
                engine.accept(row, data.draw(st.integers(0, K)))
        engine.propose()


def test_blocks_that_a_prefill_wrote_may_be_shared():
    engine = Engine()
    engine.join(0, 20)
    engine.propose()
    engine.join(1, 20, shared=engine.blocks[0][:2])
    engine.propose()


def test_what_was_drafted_as_a_chain_says_nothing_of_a_tree():
    """Batches of one draft trees, where another request had drafted a chain at the same place of the same block."""
    tree = DraftTree(num_steps=2, top_k=2, num_draft_tokens=4)
    engine = Engine(draft_schedule={1: "tree", REQUESTS: K}, tree=tree)
    engine.join(0, 12)
    engine.join(1, 6)
    engine.propose()
    chain, before = engine.drafts[0].tolist(), list(engine.blocks[0])
    engine.leave(1)
    engine.join(0, 12)
    assert engine.blocks[0] == before
    for start, tokens in ((11, [1]), (12, [(chain[0] + 1) % 40, 1])):  # its last prompt position, then a path of a tree
        batch = engine.drafter.inputs(1)
        batch.sampled_token_ids[0, : len(tokens)] = torch.tensor(tokens)
        batch.num_sampled[0], batch.start_positions[0] = len(tokens), start
        batch.aux_hidden.normal_()
        batch.block_table[0, : len(before)] = torch.tensor(before)
        assert engine.drafter.propose(batch).parents is not None


def shifted(engine: Engine) -> None:
    engine.starts[1] += 1


def shifted_in_blocks_that_were_another_s(engine: Engine) -> None:
    engine.join(1, 20)
    before = list(engine.blocks[1])
    engine.join(1, 13)
    assert engine.blocks[1] == before[: len(engine.blocks[1])]
    engine.starts[1] += 1


def counts_without_the_target_s_token(engine: Engine) -> None:
    engine.counts[1] = 2
    engine.propose()
    engine.starts[1], engine.counts[1] = engine.starts[1] + 3, 1  # 3 tokens were new


def last_chunk_only(engine: Engine) -> None:
    engine.leave(1)
    engine.free.reverse()  # blocks that no request had
    engine.grow(1, 30)
    engine.drafter.prefill([1] * 20, range(16, 20), engine.blocks[1], torch.randn(4, engine.head.aux_size))
    engine.starts[1], engine.counts[1] = 19, 1


def prompt_so_far(engine: Engine) -> None:
    """Each chunk's last row is left out, as if the prompt ended there."""
    engine.leave(1)
    engine.grow(1, 30)
    for end in (8, 16, 20):
        positions = range(max(0, end - 8) if end < 20 else 16, end)
        aux = torch.randn(len(positions), engine.head.aux_size)
        engine.drafter.prefill([1] * end, positions, engine.blocks[1], aux)
    engine.starts[1], engine.counts[1] = 19, 1


def cached_prefix_without_keys(engine: Engine) -> None:
    engine.join(1, 20, shared=[engine.free.pop(), engine.free.pop()])


def tokens_from_the_verify_s_input_on(engine: Engine) -> None:
    engine.propose()
    engine.accept(0, 2)
    engine.accept(1, 2)
    last = (engine.drafts[1, 0] + 1) % 40
    engine.sampled[1, 1:], engine.sampled[1, 0] = engine.sampled[1, :-1].clone(), last


def drafts_of_another_row(engine: Engine) -> None:
    engine.propose()
    engine.drafts = (engine.drafts + 1) % 40
    engine.accept(0, 0)
    engine.accept(1, 1)


def second_draft_of_another_row(engine: Engine) -> None:
    engine.propose()
    engine.accept(0, 0)
    engine.accept(1, 2)
    engine.sampled[1, 1] = (engine.sampled[1, 1] + 1) % 40


def same_block(engine: Engine) -> None:
    engine.blocks[1][1:] = engine.blocks[0][1:]


def one_block_twice(engine: Engine) -> None:
    engine.blocks[1][-1] = engine.blocks[1][-2]


def finished_and_not_inert(engine: Engine) -> None:
    gone, start = list(engine.blocks[1]), engine.starts[1]
    engine.leave(0)
    engine.leave(1)  # frees blocks that request 0 gets
    engine.join(0, 9)
    engine.blocks[1], engine.starts[1], engine.counts[1] = gone, start, 1


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (shifted, r"start_positions of request 1 is 13, .*never wrote the key of position 12 into"),
        (shifted_in_blocks_that_were_another_s, r"request 1 is 13, .*position 12 into"),
        (counts_without_the_target_s_token, r"request 1 is 15, .*position 14 into"),
        (last_chunk_only, r"request 1 is 19, .*position 0 and 15 more"),
        (prompt_so_far, r"request 1 is 19, .*position 7 and 1 more"),
        (cached_prefix_without_keys, r"request 1 is 19, .*position 0 and 15 more"),
        (tokens_from_the_verify_s_input_on, r"sampled_token_ids of request 1 begin with \[.*drafted \[.* position 13"),
        (drafts_of_another_row, r"sampled_token_ids of request 1 begin with \[.*drafted \[.* position 13"),
        (second_draft_of_another_row, r"sampled_token_ids of request 1 begin with \[.*drafted \[.* position 13"),
        (same_block, r"requests 0 and 1 both have block \d+, which this round writes for request 0"),
        (one_block_twice, r"requests 1 and 1 both have block \d+"),
        (finished_and_not_inert, r"requests 0 and 1 both have block \d+"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused(mistake, message):
    engine = Engine()
    engine.join(0, 6)
    engine.join(1, 13)
    mistake(engine)
    with pytest.raises(ConfigError, match=message):
        engine.propose()


def test_a_first_round_behind_a_prompt_that_was_never_given_to_prefill():
    engine = Engine()
    engine.grow(0, 30)
    engine.starts[0], engine.counts[0] = 12, 2
    with pytest.raises(
        ConfigError, match=r"start_positions of request 0 is 12, .* never wrote .* position 0 and 11 more"
    ):
        engine.propose()
    engine.starts[0], engine.counts[0] = 0, 1  # a prompt of one token has no row that a prefill writes
    engine.propose()


def test_made_up_rounds_of_a_start_up_are_not_looked_at():
    engine = Engine()
    engine.grow(0, 30)
    engine.starts[0], engine.counts[0] = 12, 2
    with engine.drafter.unchecked():
        engine.propose()
    with pytest.raises(ConfigError, match="never wrote the key of position 0"):
        engine.propose()


@pytest.mark.parametrize(("block", "shown"), [(0, 0), (-1, -1), (NUM_BLOCKS, NUM_BLOCKS)])
def test_a_prefill_into_a_block_that_no_request_owns(block, shown):
    engine = Engine()
    aux = torch.randn(8, engine.head.aux_size)
    with pytest.raises(ConfigError, match=rf"positions 8 to 14 into block {shown}: .* 1 to {NUM_BLOCKS - 1}"):
        engine.drafter.prefill([1] * 16, range(8, 16), [2, block], aux)
    if block == 0:  # an unused entry of a block table; no other block outside of the caches is
        engine.drafter.prefill([1] * 16, range(8), [2, block], aux)
    else:
        with pytest.raises(ConfigError, match=rf"positions 0 to 7 into block {shown}"):
            engine.drafter.prefill([1] * 16, range(8), [2, block], aux)
