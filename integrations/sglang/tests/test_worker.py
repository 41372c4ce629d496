"""The draft worker in SGLang's place: decode rounds against a dense float64 chain, the rest to SGLang's own code."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from draft.test_against_dense import dense_attend, dense_chain
from sglang_objects import (
    LlamaForCausalLMEagle,
    LlamaForCausalLMEagle3,
    MHATokenToKVPool,
    StockDraftWorker,
    round_batch,
    server_args,
)
from specgraph_sglang.worker import draft_worker_class
from tiny_checkpoints import write_eagle, write_eagle3, write_target

from specgraph import load_drafter, load_target

K, MAX_LEN, SLOTS, SIZES = 4, 96, 6, [1, 2, 3]
MODULES = {"eagle3": (LlamaForCausalLMEagle3, write_eagle3), "eagle": (LlamaForCausalLMEagle, write_eagle)}


class Engine:
    """SGLang's side: request slots, `req_to_token`, the KV pool, and rounds whose accepted counts are drawn."""

    def __init__(self, folder, method: str, page: int) -> None:
        self.page, (module, write) = page, MODULES[method]
        self.g = torch.Generator().manual_seed(3)
        target_folder, draft_folder = write_target(folder / "t"), write(folder / "d")
        target = load_target(target_folder, dtype=torch.float32)
        self.oracle = load_drafter(draft_folder, load_target(target_folder, dtype=torch.float64))
        config = json.loads((draft_folder / "config.json").read_text())
        self.vocab, layer = target.vocab_size, self.oracle.attention_layers[0]
        pages = MAX_LEN // page
        self.pool = MHATokenToKVPool(SLOTS * pages, page, layer.num_kv_heads, layer.head_dim, torch.float32)
        owned = (torch.randperm(SLOTS * pages, generator=self.g) + 1).view(SLOTS, pages)
        slots = (owned[:, :, None] * page + torch.arange(page)).view(SLOTS, MAX_LEN)
        stale = torch.full((SLOTS, 9), 3 * page + 1)
        made = draft_worker_class(StockDraftWorker, SimpleNamespace(
            build_eagle_verify_input=lambda *args, **named: SimpleNamespace(args=args, named=named),
            get_batch_sizes_to_capture=lambda runner: (SIZES, None),
        ))  # fmt: skip
        w = self.worker = made()
        w.start_specgraph()
        w.server_args, w.speculative_num_steps, w.speculative_num_draft_tokens = server_args(page_size=page), K, K + 1
        w.req_to_token_pool = SimpleNamespace(req_to_token=torch.cat([slots, stale], 1).int())
        w.draft_runner = SimpleNamespace(
            model=module(draft_folder, config, target, torch.float32), token_to_kv_pool=self.pool,
            model_config=SimpleNamespace(context_len=MAX_LEN, spec_hidden_size=32, dtype=torch.float32),
        )  # fmt: skip
        w._topk1_parents_prealloc = torch.zeros(8, K)
        w._topk1_score_indices_prealloc = torch.ones(8, K)
        w.init_cuda_graphs()
        self.tokens, self.aux = {}, {}

    def prompt(self, slot: int, length: int) -> None:
        """A prompt, as SGLang leaves it: rows 0 .. length - 1 are in the cache."""
        self.tokens[slot] = torch.randint(0, self.vocab, (length,), generator=self.g)
        self.aux[slot] = torch.randn(length, self.oracle.aux_size, generator=self.g)
        past: dict = {}
        rows = dense_attend(self.oracle.attention_layers, torch.arange(length), past)
        self.oracle.forward(self.tokens[slot], self.oracle.combine(self.aux[slot].double()), rows)
        places = self.worker.req_to_token_pool.req_to_token[slot, :length].long()
        self.pool.k_buffer[0][places] = torch.stack([past[0][0][p] for p in range(length)]).float()
        self.pool.v_buffer[0][places] = torch.stack([past[0][1][p] for p in range(length)]).float()
        assert self.worker._draft_extend_for_prefill(round_batch([slot], [length])) == "prefill"

    def round(self, slots: list[int], counts: list[int]):
        """A verify and the tail of its round: (its batch, its result, the drafts of the dense chain)."""
        tokens, states, starts = [], [], []
        for slot, count in zip(slots, counts, strict=True):
            starts.append(len(self.tokens[slot]))
            after = torch.randint(0, self.vocab, (K + 1,), generator=self.g)
            aux = torch.randn(K + 1, self.oracle.aux_size, generator=self.g)
            self.tokens[slot] = torch.cat([self.tokens[slot], after[:count]])
            self.aux[slot] = torch.cat([self.aux[slot], aux[:count]])
            aux[count:] *= 5  # rejected rows
            tokens.append(after)
            states.append(aux)
        batch = round_batch(slots, starts)
        result = SimpleNamespace(
            next_token_ids=torch.cat(tokens).int(), accept_lens=torch.tensor(counts).int(),
            logits_output=SimpleNamespace(hidden_states=torch.cat(states)), next_draft_input=SimpleNamespace(),
        )  # fmt: skip
        with torch.inference_mode():  # as SGLang's scheduler runs
            self.worker._draft_extend_for_decode(batch, result)
        want = [dense_chain(self.oracle, self.tokens[slot], self.aux[slot].double(), K)[1] for slot in slots]
        return batch, result, want


@pytest.fixture
def method() -> str:
    return "eagle3"


@pytest.fixture
def page() -> int:
    return 16


@pytest.fixture
def engine(tmp_path, method, page) -> Engine:
    return Engine(tmp_path, method, page)


def handed_out(engine: Engine, slots: list[int]) -> torch.Tensor:
    verify = engine.worker.draft(round_batch(slots, [0] * len(slots)))
    batch, draft_input, parents, scores, tokens, probs = verify.args
    assert (draft_input, probs, len(batch.seq_lens)) == ("draft input", None, len(slots))
    assert parents.shape == scores.shape == (len(slots), K)
    assert verify.named["num_draft_tokens"] == K + 1
    return tokens


@pytest.mark.parametrize(("method", "page"), [("eagle3", 16), ("eagle3", 1), ("eagle", 32)])
def test_drafts_follow_the_whole_history_in_sglangs_cache(engine) -> None:
    for slot, length in ((2, 3), (0, 15), (4, 40)):
        engine.prompt(slot, length)
    draw = torch.Generator().manual_seed(5)
    for slots in ([2, 0, 4], [4, 2], [0], [2, 4], [0, 4, 2], [4], [2, 0]):
        counts = torch.randint(1, K + 2, (len(slots),), generator=draw).tolist()
        _, result, want = engine.round(slots, counts)
        assert handed_out(engine, slots).tolist() == want
        assert handed_out(engine, slots[::-1]).tolist() == want[::-1]  # by slot, in whichever order they come next
        draft = result.next_draft_input
        assert (draft.topk_p.shape, draft.topk_index.dtype, draft.hidden_states.shape) == (
            (len(slots), 1), torch.int64, (len(slots), 32),
        )  # fmt: skip
    assert engine.worker.specgraph.counts.by_reason == {"prompts": 3, "specgraph": 7}


def test_near_the_end_of_the_context_no_other_request_is_written(engine) -> None:
    engine.prompt(1, MAX_LEN - K - 1)
    before = engine.pool.k_buffer[0].clone()
    engine.round([1], [K + 1])
    own = set((engine.worker.req_to_token_pool.req_to_token[1, :MAX_LEN] // engine.page).tolist())
    changed = (before != engine.pool.k_buffer[0]).flatten(1).any(1).nonzero().flatten()
    assert set((changed // engine.page).tolist()) <= own


def test_requests_without_tokens_are_drafted_by_sglang_and_the_others_keep_theirs(engine) -> None:
    for slot in (3, 5):
        engine.prompt(slot, 10 + slot)
    _, _, want = engine.round([3], [2])
    verify = engine.worker.draft(round_batch([5, 3], [15, 15]))
    rows, stock = verify.draft_token.view(2, K + 1).tolist(), engine.worker.drafted.view(2, K + 1).tolist()
    assert rows == [stock[0], [stock[1][0], *want[0]]]
    engine.prompt(3, 7)  # another request gets the slot: nothing of the old one is left
    verify = engine.worker.draft(round_batch([3], [7]))
    assert torch.equal(verify.draft_token, engine.worker.drafted)


@pytest.mark.parametrize("why", ["switched off", "more requests than the largest captured size", "no captured graphs"])
def test_everything_else_goes_to_sglang_and_is_counted(engine, why) -> None:
    slots = [0, 1, 2, 3] if why.startswith("more") else [0, 1]
    for slot in slots:
        engine.prompt(slot, 20)
    engine.round([0], [1])
    if why == "switched off":
        engine.worker.specgraph.use_sglang = True
    if why == "no captured graphs":
        engine.worker.specgraph.fast_path = None
    _, result, _ = engine.round(slots, [1] * len(slots))
    assert result.next_draft_input.topk_p == "SGLang's"
    assert engine.worker.specgraph.counts.by_reason[why] == 1
    assert engine.worker.specgraph.kept.holds(slots) == [False] * len(slots)
