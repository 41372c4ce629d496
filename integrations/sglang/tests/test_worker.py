"""The draft worker in SGLang's place: its drafts against a dense float64 chain, the rest to SGLang's own code."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draft.test_against_dense import dense_chain
from mixtures import TP_GROUP, mixture_folder
from mtp_objects import DeepseekV3ForCausalLMNextN, Glm4MoeForCausalLMNextN, MiMoMTP, Qwen3NextForCausalLMMTP
from parallel.processes import results
from plugin.kernel_forms import recorded
from sglang_objects import (
    HybridLinearKVPool,
    LlamaForCausalLMEagle,
    LlamaForCausalLMEagle3,
    MHATokenToKVPool,
    MLATokenToKVPool,
    StockDraftWorker,
    prompt_tails,
    round_batch,
    server_args,
)
from specgraph_models import DraftVocabulary, cut_vocabulary, load_drafter, load_target
from specgraph_models.checkpoints import target_shape
from specgraph_sglang.draft_model import draft_cache, draft_head
from specgraph_sglang.worker import draft_worker_class
from tiny_checkpoints import write_eagle, write_eagle3, write_target
from vllm_objects import mimo_folder, split

from specgraph.errors import SpecgraphError, UnsupportedError

K, MAX_LEN, SLOTS, SIZES = 4, 96, 6, [1, 3]
E4M3 = torch.float8_e4m3fn
MODULES = {"eagle3": (LlamaForCausalLMEagle3, write_eagle3), "eagle": (LlamaForCausalLMEagle, write_eagle)}
MTP = {
    "glm": Glm4MoeForCausalLMNextN, "qwen": Qwen3NextForCausalLMMTP, "deepseek": DeepseekV3ForCausalLMNextN,
    "mimo": MiMoMTP,
}  # fmt: skip


class Engine:
    """SGLang's side: request slots, `req_to_token`, the KV pool, and rounds whose accepted counts are drawn."""

    def __init__(self, folder, method: str, page: int, ranks=None) -> None:
        """Method "fp8" is EAGLE-3 with an FP8 KV cache. `ranks`: this process is one of those that split the module."""
        size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        if ranks is not None:
            TP_GROUP.device_group, TP_GROUP.cpu_group = ranks.device, ranks.host
        vocab = {} if ranks is None else {"vocab": 128}  # SGLang pads others to 64 rows
        fp8, method = method == "fp8", method.replace("fp8", "eagle3")
        self.stored = (lambda x: x.float().to(E4M3).double()) if fp8 else lambda x: x
        self.page, self.g = page, torch.Generator().manual_seed(3)
        if method in MTP:
            target_folder = mimo_folder(folder) if method == "mimo" else mixture_folder(folder, method)
            draft_folder, module = target_folder, MTP[method]
            read = load_target if method == "mimo" else partial(target_shape, max_model_len=128)
            target = read(folder, dtype=torch.float32)
            self.oracle = load_drafter(draft_folder, read(folder, dtype=torch.float64))
        else:
            module, write = MODULES[method]
            target_folder = write_target(folder / "t", **vocab)
            draft_folder = write(folder / "d", **vocab, **({"draft_vocab": 64} if vocab else {}))
            target = load_target(target_folder, dtype=torch.float32)
            self.oracle = load_drafter(draft_folder, load_target(target_folder, dtype=torch.float64))
        config = json.loads((draft_folder / "config.json").read_text())
        self.vocab, self.hidden_size, layer = target.vocab_size, target.hidden_size, self.oracle.attention_layers[0]
        pages, dtype = MAX_LEN // page, E4M3 if fp8 else torch.float32
        pool = MLATokenToKVPool if layer.latent else MHATokenToKVPool
        heads = max(1, layer.num_kv_heads // size)
        self.pool = pool(SLOTS * pages, page, heads, layer.head_dim, dtype)
        if method == "qwen":
            self.pool = HybridLinearKVPool(page_size=page, full_kv_pool=self.pool)
        owned = (torch.randperm(SLOTS * pages, generator=self.g) + 1).view(SLOTS, pages)
        slots = (owned[:, :, None] * page + torch.arange(page)).view(SLOTS, MAX_LEN)
        stale = torch.full((SLOTS, 9), 3 * page + 1)
        made = draft_worker_class(StockDraftWorker, SimpleNamespace(
            build_eagle_verify_input=lambda *args, **named: SimpleNamespace(args=args, named=named),
            get_batch_sizes_to_capture=lambda runner: (SIZES, None),
            EagleDraftInput=SimpleNamespace, _eagle_prefill_tail_tokens=prompt_tails,
            tp_group=ranks and (lambda: TP_GROUP),
        ))  # fmt: skip
        w = self.worker = made()
        w.server_args, w.speculative_num_steps, w.speculative_num_draft_tokens = server_args(page_size=page), K, K + 1
        w.req_to_token_pool = SimpleNamespace(req_to_token=torch.cat([slots, stale], 1).int())
        model = module(draft_folder, config, target, torch.float32)
        if size > 1:
            split(model, rank, size)
        w.draft_runner = SimpleNamespace(
            model=model, token_to_kv_pool=self.pool,
            model_config=SimpleNamespace(context_len=MAX_LEN, spec_hidden_size=target.hidden_size, dtype=torch.float32),
        )  # fmt: skip
        w._topk1_parents_prealloc = torch.zeros(8, K)
        w._topk1_score_indices_prealloc = torch.ones(8, K)
        w._capture_cuda_graphs()
        self.tokens, self.aux = {}, {}

    def prompt(self, slot: int, length: int) -> None:
        """A whole prompt of one request."""
        self.tokens[slot], self.aux[slot] = torch.zeros(0).long(), torch.zeros(0, self.oracle.aux_size)
        self.chunks({slot: (torch.randint(0, self.vocab, (length,), generator=self.g), None)})

    def chunks(self, work: dict[int, tuple[torch.Tensor, int | None]]):
        """A pass over chunks of prompts: by slot, its rows and the prompt's next token, None at the prompt's end."""
        starts = [len(self.tokens[slot]) for slot in work]
        rows, following = [ids for ids, _ in work.values()], [-1 if n is None else n for _, n in work.values()]
        states = [torch.randn(len(ids), self.oracle.aux_size, generator=self.g) for ids in rows]
        sampled = torch.randint(0, self.vocab, (len(work),), generator=self.g)
        batch = round_batch(
            list(work), [s + len(ids) for s, ids in zip(starts, rows, strict=True)], input_ids=torch.cat(rows),
            prefix_lens=starts, extend_lens=[len(ids) for ids in rows], following=following,
        )  # fmt: skip
        tails = prompt_tails(batch, sampled)
        for i, slot in enumerate(work):
            self.tokens[slot] = torch.cat([self.tokens[slot], rows[i][1:], tails[i : i + 1]])
            self.aux[slot] = torch.cat([self.aux[slot], states[i]])
        with torch.inference_mode():
            return self.worker._draft_extend_for_prefill(batch, torch.cat(states), sampled.int(), None)

    def want(self, slots: list[int]) -> list[list[int]]:
        """The drafts of the dense chain over each whole history."""
        of = [(self.oracle, self.tokens[slot], self.aux[slot].double(), K) for slot in slots]
        return [dense_chain(*each, stored=self.stored)[1] for each in of]

    def round(self, slots: list[int], counts: list[int]):
        """A round, from its drafts to its tail: (its batch, its result, the drafts of the dense chain)."""
        with torch.inference_mode():  # as SGLang's scheduler runs
            self.worker.draft(round_batch(slots, [0] * len(slots)))
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
        with torch.inference_mode():
            self.worker._draft_extend_for_decode(batch, result)
        return batch, result, self.want(slots)


def draft_on_a_rank(ranks) -> list[list[int]]:
    """Drafts of rounds on this rank that differ from those of the whole module."""
    wrong, seen = [], 0
    for method in ("eagle3", "glm", "deepseek"):
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(Path(folder), method, 16, ranks)
        for slot, length in ((2, 3), (0, 15), (4, 40)):
            engine.prompt(slot, length)
        for slots, counts in (([2, 0, 4], [1, 3, 5]), ([4, 2], [2, 2]), ([0, 4, 2], [4, 1, 5])):
            _, _, want = engine.round(slots, counts)
            got = handed_out(engine, slots).tolist()
            wrong += [row for row, each in zip(got, want, strict=True) if row != each]
            seen += len(got)
    return [wrong, [seen]]


def test_two_ranks_draft_what_the_whole_module_drafts() -> None:
    assert results(2, "call", module="test_worker", name="draft_on_a_rank") == [[[], [24]]] * 2


@pytest.fixture
def method() -> str:
    return "eagle3"


@pytest.fixture
def page() -> int:
    return 16


@pytest.fixture
def engine(tmp_path, method, page, monkeypatch) -> Engine:
    forms = recorded(monkeypatch)
    made = Engine(tmp_path, method, page)
    made.forms, made.forms_at_start = forms, [*forms]
    return made


def handed_out(engine: Engine, slots: list[int]) -> torch.Tensor:
    asked = round_batch(slots, [0] * len(slots))  # of which SGLang's verify takes requests' grammars
    with torch.inference_mode():
        verify = engine.worker.draft(asked)
    batch, draft_input, parents, scores, tokens, probs = verify.args
    assert (draft_input, probs) == ("draft input", None)
    assert batch is asked
    assert parents.shape == scores.shape == (len(slots), K)
    assert verify.named["num_draft_tokens"] == K + 1
    return tokens


@pytest.mark.parametrize(("method", "page"), [("eagle3", 16), ("eagle", 32), ("glm", 16), ("qwen", 1), ("mimo", 32)])
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
            (len(slots), 1), torch.int64, (len(slots), engine.hidden_size),
        )  # fmt: skip
    assert engine.worker.specgraph.counts.by_reason == {"specgraph": 10}


@pytest.mark.parametrize(("method", "page"), [("eagle3", 16), ("fp8", 1), ("deepseek", 32)])
def test_requests_that_begin_are_drafted_for_beside_those_that_go_on(engine) -> None:
    """Arrivals, chunks, prefixes of other requests' pages, cancels, rows of requests that go on in the pass of prompts
    (--enable-mixed-chunk): no token is SGLang's."""
    draw, waiting, running, compared = torch.Generator().manual_seed(9), {}, [], 0
    slots_of = engine.worker.req_to_token_pool.req_to_token
    own = slots_of.clone()

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    for _ in range(40):
        free = [s for s in range(SLOTS) if s not in running and s not in waiting]
        if len(waiting) + len(running) < SIZES[-1] and number(0, 2) == 0:
            slot = free[number(0, len(free) - 1)]
            prompt, shared = torch.randint(0, engine.vocab, (number(1, 50),), generator=draw), 0
            others = [s for s in running if len(engine.tokens[s]) > engine.page]
            slots_of[slot] = own[slot]
            engine.tokens[slot], engine.aux[slot] = torch.zeros(0).long(), torch.zeros(0, engine.oracle.aux_size)
            if others and number(0, 1):
                other = others[number(0, len(others) - 1)]
                shared = min((len(engine.tokens[other]) - 1) // engine.page * engine.page, 32)
                slots_of[slot, :shared] = slots_of[other, :shared]
                engine.tokens[slot], engine.aux[slot] = engine.tokens[other][:shared], engine.aux[other][:shared]
                prompt = torch.cat([engine.tokens[slot][-1:], prompt])
            waiting[slot] = prompt[: MAX_LEN - 4 * K - shared]
        if waiting and number(0, 1):
            lengths = {slot: min(len(prompt), number(5, 40)) for slot, prompt in waiting.items()}
            mixed = {slot: (engine.tokens[slot][-1:], None) for slot in running if number(0, 2) == 0}
            engine.chunks({
                slot: (prompt[: lengths[slot]], int(prompt[lengths[slot]]) if lengths[slot] < len(prompt) else None)
                for slot, prompt in waiting.items()
            } | mixed)  # fmt: skip
            left = {slot: prompt[lengths[slot] :] for slot, prompt in waiting.items()}
            running += [slot for slot, rest in left.items() if not len(rest)]
            waiting = {slot: rest for slot, rest in left.items() if len(rest)}
        elif running:
            order = [running[i] for i in torch.randperm(len(running), generator=draw)]
            assert handed_out(engine, order).tolist() == engine.want(order)
            compared += len(order)
            engine.round(order, [number(1, K + 1) for _ in order])
            running = [s for s in running if len(engine.tokens[s]) < MAX_LEN - 2 * K - 1 and number(0, 14)]
        if waiting and not number(0, 9):
            waiting.popitem()
    assert compared > 30
    assert all(form in engine.forms_at_start for form in engine.forms), "a kernel is compiled while SGLang serves"
    assert set(engine.worker.specgraph.counts.by_reason) == {"specgraph"}


def test_what_an_mtp_head_does_not_have_is_refused_by_name(tmp_path) -> None:
    folder = mixture_folder(tmp_path, "deepseek")
    target, config = target_shape(folder, max_model_len=64), json.loads((folder / "config.json").read_text())
    module = DeepseekV3ForCausalLMNextN(folder, config, target, torch.float32)
    for pool in (MHATokenToKVPool(2, 16, 1, 32, torch.float32), MLATokenToKVPool(2, 16, 1, 32, E4M3)):
        with pytest.raises(UnsupportedError, match="the drafter's KV cache is"):
            draft_cache(draft_head(module), module, pool)
    module.model.decoder.self_attn.w_kc = module.model.decoder.self_attn.w_kc.to(E4M3)
    with pytest.raises(UnsupportedError, match="the engine keeps them in another form here"):
        draft_head(module)


@pytest.mark.parametrize("method", ["glm"])
def test_a_mixture_that_the_graphs_cannot_add_up_is_refused_whatever_its_folder(engine) -> None:
    for name, value in (("moe_a2a_backend", "deepep"), ("ep_size", 2)):
        engine.worker.server_args = server_args(tp_size=4, **{name: value})
        with pytest.raises(UnsupportedError, match=f"--{name.replace('_', '-')} {value} with MTP"):
            engine.worker._capture_cuda_graphs()


def test_replaced_weights_are_followed(engine, caplog) -> None:
    engine.prompt(0, 9)
    first = engine.worker.specgraph.fast_path
    weight = engine.worker.draft_runner.model.lm_head.weight
    engine.worker.draft_runner.model.lm_head.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    weight.data.fill_(float("nan"))
    for count in (2, 5):
        assert handed_out(engine, [0]).tolist() == engine.want([0])
        engine.round([0], [count])
    assert caplog.text.count("captures its graphs again") == 1
    with pytest.raises(SpecgraphError, match="closed"):  # else they stay until a garbage collection
        first.propose(1)


def test_a_cut_vocabulary_is_a_copy_that_is_made_again_when_its_weight_is_replaced(tmp_path, monkeypatch) -> None:
    """SGLang's own map is a torch file of ids, the most frequent one first."""
    path = tmp_path / "freq.pt"
    ids = torch.randperm(48, generator=torch.Generator().manual_seed(2))[:16]
    torch.save(ids.tolist(), path)
    monkeypatch.setenv("SPECGRAPH_DRAFT_VOCAB", str(path))
    engine = Engine(tmp_path, "mimo", 16)
    cut_vocabulary(engine.oracle, DraftVocabulary("the list", ids))
    head = engine.worker.specgraph.fast_path.drafter.head
    assert 3 < head.draft_vocab_size == engine.oracle.draft_vocab_size <= len(ids)
    engine.prompt(0, 9)
    for turn in range(3):
        assert handed_out(engine, [0]).tolist() == engine.want([0])
        if turn == 1:
            owner = engine.worker.draft_runner.model.lm_head
            old = owner.weight
            owner.weight = torch.nn.Parameter(-old.detach().clone(), requires_grad=False)
            old.data.fill_(float("nan"))
            engine.oracle.lm_head.neg_()
        engine.round([0], [2 + turn])
    assert engine.worker.specgraph.fast_path.drafter.head is not head


def test_near_the_end_of_the_context_no_other_request_is_written(engine) -> None:
    engine.prompt(1, MAX_LEN - K - 1)
    before = engine.pool.k_buffer[0].clone()
    engine.round([1], [K + 1])
    own = set((engine.worker.req_to_token_pool.req_to_token[1, :MAX_LEN] // engine.page).tolist())
    changed = (before != engine.pool.k_buffer[0]).flatten(1).any(1).nonzero().flatten()
    assert set((changed // engine.page).tolist()) <= own


def test_requests_without_tokens_are_drafted_by_sglang_and_the_others_keep_theirs(engine) -> None:
    engine.prompt(3, 13)
    rounds = engine.worker.specgraph
    _, _, want = engine.round([3], [2])
    rounds.use_sglang = True
    engine.prompt(5, 15)
    verify = engine.worker.draft(round_batch([5, 3], [15, 15]))
    rows, stock = verify.draft_token.view(2, K + 1).tolist(), engine.worker.drafted.view(2, K + 1).tolist()
    assert rows == [stock[0], [stock[1][0], *want[0]]]
    engine.prompt(3, 7)  # another request gets the slot: nothing of the old one is left
    verify = engine.worker.draft(round_batch([3], [7]))
    assert torch.equal(verify.draft_token, engine.worker.drafted)


@pytest.mark.parametrize("why", ["switched off", "more requests than the largest captured size"])
def test_everything_else_goes_to_sglang_and_is_counted(engine, why) -> None:
    slots = [0, 1, 2, 3] if why.startswith("more") else [0, 1]
    for slot in slots:
        engine.prompt(slot, 20)
    engine.round([0], [1])
    if why == "switched off":
        engine.worker.specgraph.use_sglang = True
    _, result, _ = engine.round(slots, [1] * len(slots))
    assert result.next_draft_input.topk_p == "SGLang's"
    assert engine.worker.specgraph.counts.by_reason[why] == 1
    assert engine.worker.specgraph.kept.holds(slots) == [False] * len(slots)


def test_prompts_with_embeddings_are_sglangs(engine) -> None:
    engine.prompt(0, 5)  # its request ends before its first round, and another one gets the slot
    batch = round_batch([0], [2], input_ids=torch.arange(2), prefix_lens=[0], extend_lens=[2], following=[-1])
    got = engine.worker._draft_extend_for_prefill(batch, torch.zeros(2, 96), torch.tensor([1]), torch.zeros(2, 32))
    assert got == "SGLang's"
    assert engine.worker.specgraph.counts.by_reason == {"specgraph": 1, "multimodal inputs": 1}
    assert engine.worker.specgraph.begun.holds([0]) == [False]
