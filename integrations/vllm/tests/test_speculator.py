"""The speculator in vLLM's place: its drafts against a dense float64 chain, and what it leaves to vLLM's own code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draft.test_against_dense import dense_attend, dense_chain
from specgraph_vllm.config import Settings
from specgraph_vllm.draft_model import draft_layers
from specgraph_vllm.speculator import adopt
from tiny_checkpoints import HEAD_DIM, KV_HEADS, VOCAB, write_eagle3, write_target
from vllm_objects import LAYER_NAME, StockSpeculator, input_batch, kv_cache, mimo_folder, vllm_config
from vllm_objects import Eagle3LlamaForCausalLM as EAGLE3
from vllm_objects import EagleLlamaForCausalLM as EAGLE
from vllm_objects import LlamaForCausalLM as LM
from vllm_objects import MiMoMTP as MTP

from specgraph import SpecgraphError, load_drafter, load_target, shipped_pair
from specgraph.errors import UnsupportedError
from specgraph.plugin import fast_path

K, BLOCK, MAX_LEN, MAX_SEQS, SLOTS, MAX_ROWS = 4, 16, 96, 3, 5, 48


DRAFTERS = Path(__file__).parents[3] / "examples/tiny-python/drafters"


E4M3 = torch.float8_e4m3fn


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(E4M3).double()


class Engine:
    """vLLM's side: request slots, block tables, the KV cache, and rounds whose accepted counts are drawn."""

    def __init__(self, folder, kind: str = "eagle3", divided: bool | None = None, **settings) -> None:
        """Kind "fp8" is EAGLE-3 with an FP8 KV cache. `divided`: drafts are sampled, and whether their logits are
        divided by the temperature."""
        fp8, kind = kind == "fp8", kind.replace("fp8", "eagle3")
        self.stored = in_e4m3 if fp8 else lambda x: x
        self.g = torch.Generator().manual_seed(3)
        if kind == "eagle3":
            target_folder, draft_folder, made = write_target(folder / "t"), write_eagle3(folder / "d"), EAGLE3
        elif kind == "eagle":
            target_folder, draft_folder, made = shipped_pair()[0], DRAFTERS / "eagle1", EAGLE
        elif kind == "mtp":
            target_folder = draft_folder = mimo_folder(folder / "t")
            made = MTP
        else:
            target_folder, draft_folder, made = shipped_pair()[0], DRAFTERS / "draft-model", LM
        target = load_target(target_folder, dtype=torch.float32)
        self.oracle = load_drafter(draft_folder, load_target(target_folder, dtype=torch.float64))
        config = json.loads((draft_folder / "config.json").read_text())
        self.module, self.vocab = made(draft_folder, config, target, torch.float32), target.vocab_size
        self.first = {} if kind == "draft_model" else None
        """By slot, a prompt's first token: a language model has its key and value too."""
        self.names = [layer.self_attn.attn.layer_name for layer in draft_layers(self.module)]
        per_request, layer = MAX_LEN // BLOCK, self.oracle.attention_layers[0]
        self.tensors = [
            kv_cache(1 + SLOTS * per_request, layer.num_kv_heads, BLOCK, layer.head_dim, torch.float32)
            for _ in self.names
        ]
        if fp8:
            self.tensors = [kv.transpose(1, 2).to(E4M3).view(torch.uint8).transpose(1, 2) for kv in self.tensors]
        self.tensor = self.tensors[0]
        self.blocks = (torch.randperm(SLOTS * per_request, generator=self.g) + 1).view(SLOTS, -1).int()
        self.last_sampled = torch.full((SLOTS, 1), 7)
        of = {"kv_cache_dtype": "fp8" if fp8 else "auto", "_k_scale_float": 1.0, "_v_scale_float": 1.0}
        context = {n: SimpleNamespace(kv_cache=kv, **of) for n, kv in zip(self.names, self.tensors, strict=True)}
        s = self.speculator = StockSpeculator(
            vllm_config(
                compilation_config__static_forward_context=context,
                model_config__get_hidden_size=lambda: target.hidden_size,
            ),
            torch.device("cpu", 0),
        )
        if divided is not None:
            s.draft_logits = torch.zeros(SLOTS, K, self.vocab)
        adopt(s, Settings(**settings), lambda: bool(divided))
        self.temperature, self.seeds = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.5]), torch.arange(SLOTS) + 99
        s.num_speculative_steps, s.max_num_reqs, s.max_model_len, s.max_num_tokens = K, MAX_SEQS, MAX_LEN, MAX_ROWS
        s.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a", *self.names])])
        s.block_tables = SimpleNamespace(
            **{"block_sizes" if kind == "draft_model" else "kernel_block_sizes": [BLOCK]},
            input_block_tables=[torch.full((MAX_SEQS, per_request + 2), 3).int()],
        )
        self.tokens, self.aux, self.prompts = {}, {}, set()
        self.next_prefill = torch.full((SLOTS,), 5, dtype=torch.int32)

    def start(self) -> None:
        self.speculator.load_model(self.module)
        self.speculator.capture()

    def prompt(self, slot: int, length: int) -> None:
        """A prompt, as vLLM leaves it after its own code has drafted: rows 0 .. length - 1 are in the cache."""
        self.tokens[slot] = torch.randint(0, self.vocab, (length,), generator=self.g)
        self.aux[slot] = torch.randn(length, self.oracle.aux_size, generator=self.g)
        if self.first is not None:
            self.first[slot] = torch.randint(0, self.vocab, (1,), generator=self.g)
        past: dict = {}
        ids, aux = self.history(slot)
        rows = dense_attend(self.oracle.attention_layers, torch.arange(len(ids)), past)
        self.oracle.forward(ids, self.oracle.combine(aux), rows)
        for position in range(len(ids)):
            block = self.blocks[slot, position // BLOCK]
            for layer, tensor in enumerate(self.tensors):
                pair = torch.cat([past[layer][0][position], past[layer][1][position]], -1)
                tensor[block, :, position % BLOCK] = pair.float()

    def history(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and hidden states of all rows that the drafter has seen, from position 0 on."""
        if self.first is None:
            return self.tokens[slot], self.aux[slot].double()
        tokens = torch.cat([self.first[slot], self.tokens[slot]])
        return tokens, torch.zeros(len(tokens), self.oracle.aux_size, dtype=torch.float64)

    def round(self, slots: list[int], counts: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
        """One decode round: the drafts of specgraph, and those of the dense chain over each whole history."""
        rows, aux, starts = [], [], []
        for slot, count in zip(slots, counts, strict=True):
            # Row at position p: token p, hidden state p. `tokens` holds the token *after* each position of the cache.
            start = len(self.tokens[slot])
            ids = torch.randint(0, self.vocab, (K + 1,), generator=self.g)
            ids[0] = self.tokens[slot][-1]
            states = torch.randn(K + 1, self.oracle.aux_size, generator=self.g)
            last = torch.randint(0, self.vocab, (), generator=self.g)
            self.last_sampled[slot, 0] = last
            self.tokens[slot] = torch.cat([self.tokens[slot], ids[1:count], last[None]])
            self.aux[slot] = torch.cat([self.aux[slot], states[:count]])
            states[count:] *= 5  # rejected rows
            rows.append(ids)
            aux.append(states)
            starts.append(start)
        table = self.speculator.block_tables.input_block_tables[0]
        table[: len(slots), : self.blocks.shape[1]] = self.blocks[slots]
        batch = input_batch(rows, starts, slots, len(slots) * K, [False] * len(slots))
        padding = torch.zeros(5, self.oracle.aux_size)
        states = torch.cat([*aux, padding])
        parts = [part.contiguous() for part in states.chunk(3, dim=1)] if self.oracle.aux_layers else None
        drafts = self.propose(batch, parts, counts, last=states)
        want = [dense_chain(self.oracle, *self.history(slot), K)[1] for slot in slots]
        return drafts, want

    def mixed(self, work: dict[int, tuple[torch.Tensor, int, int]]) -> tuple[torch.Tensor, list[list[int] | None]]:
        """One pass over prompts' chunks and rounds of any lengths; as `round`, but None where nothing was sampled.

        Args:
            work: by slot, the tokens of its rows, how many tokens the target sampled, and the prompt's next token.
        """
        rows, aux, starts, rejected, prefilling = [], [], [], [], []
        for slot, (ids, count, following) in work.items():
            start = len(self.tokens[slot])
            prompt = start == 0 or slot in self.prompts
            valid = len(ids) if prompt else count
            states = torch.randn(len(ids), self.oracle.aux_size, generator=self.g)
            self.next_prefill[slot], last = following, torch.randint(0, self.vocab, (), generator=self.g)
            if count:
                self.last_sampled[slot, 0] = last
                self.prompts.discard(slot)
            after = last[None] if count else torch.tensor([following])
            if start == 0 and self.first is not None:
                self.first[slot] = ids[:1]
            self.tokens[slot] = torch.cat([self.tokens[slot], ids[1:valid], after])
            self.aux[slot] = torch.cat([self.aux[slot], states[:valid]])
            states[valid:] *= 5
            for into, value in zip(
                (rows, aux, starts, rejected, prefilling), (ids, states, start, len(ids) - valid, prompt), strict=True
            ):
                into.append(value)
        slots, counts = list(work), [count for _, count, _ in work.values()]
        self.speculator.block_tables.input_block_tables[0][: len(slots), : self.blocks.shape[1]] = self.blocks[slots]
        drafts = sum(len(ids) - 1 for ids, p in zip(rows, prefilling, strict=True) if not p)
        states = torch.cat([*aux, torch.zeros(5, self.oracle.aux_size)])
        parts = [part.contiguous() for part in states.chunk(3, dim=1)] if self.oracle.aux_layers else None
        made = self.propose(
            input_batch(rows, starts, slots, drafts, prefilling), parts, counts, last=states, rejected=rejected
        )
        return made, [
            dense_chain(self.oracle, *self.history(slot), K, stored=self.stored)[1] if count else None
            for slot, count in zip(slots, counts, strict=True)
        ]

    def propose(self, batch, aux, counts, *extra, last=None, rejected=None, **options):
        sampled = torch.tensor(counts, dtype=torch.int32)
        rest = K + 1 - sampled if rejected is None else torch.tensor(rejected, dtype=torch.int32)
        tensors = (last, aux, sampled, rest, self.last_sampled, self.next_prefill, self.temperature, self.seeds)
        with torch.inference_mode():
            return self.speculator.propose(batch, {}, {}, *tensors, *extra, **options)


@pytest.fixture
def engine(tmp_path, request) -> Engine:
    made = Engine(tmp_path, getattr(request, "param", "eagle3"))
    with torch.inference_mode():  # as vLLM calls it
        made.start()
    return made


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_every_form_of_a_round_is_handed_over_at_start_up(tmp_path, monkeypatch, kind) -> None:
    """On a device each form is a kernel of its own, which would be compiled while vLLM serves."""
    forms, fill = [], fast_path.fill_round

    def recorded(end, *rest) -> None:
        states = [(state.dtype, state.shape[1]) for state in end.hidden_states]
        given = end.token_ids, end.num_sampled, end.starts, end.table, end.first_rows, end.last_tokens, end.last_rows
        forms.append((states, end.table_of_slots, [None if tensor is None else tensor.dtype for tensor in given]))
        fill(end, *rest)

    monkeypatch.setattr(fast_path, "fill_round", recorded)
    engine = Engine(tmp_path, kind)
    engine.start()
    at_start = len(forms)
    engine.prompt(0, 7)
    engine.round([0], [2])
    engine.tokens[1], engine.aux[1] = torch.zeros(0, dtype=torch.int64), torch.zeros(0, engine.oracle.aux_size)
    engine.prompts.add(1)
    engine.mixed({1: (torch.arange(20), 1, 0)})
    assert len(forms) == at_start + 2
    assert all(form in forms[:at_start] for form in forms[at_start:])


@pytest.mark.parametrize("engine", ["eagle3", "eagle", "mtp", "draft_model"], indirect=True)
def test_drafts_follow_the_whole_history_in_vllms_cache(engine) -> None:
    for slot, length in ((2, 3), (0, 15), (4, 40)):
        engine.prompt(slot, length)
    draw = torch.Generator().manual_seed(5)
    for slots in ([2, 0, 4], [4, 2], [0], [2, 4], [0, 4, 2], [4], [2, 0]):
        counts = torch.randint(1, K + 2, (len(slots),), generator=draw).tolist()
        drafts, want = engine.round(slots, counts)
        assert drafts.tolist() == want
    assert engine.speculator.counts.by_reason == {"specgraph": 7}
    assert engine.speculator.captured
    assert engine.speculator.proposed == []


class Load:
    """Requests that arrive, are cancelled and end at random, in passes of at most `budget` rows; a prompt may begin
    with blocks that another request wrote."""

    def __init__(self, engine: Engine, seed: int, budget: int) -> None:
        self.engine, self.budget, self.g = engine, budget, torch.Generator().manual_seed(seed)
        self.waiting: dict[int, torch.Tensor] = {}
        """By slot, the tokens of a prompt that have not run."""
        self.running: list[int] = []
        self.own = engine.blocks.clone()

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.g))

    def arrive(self) -> None:
        e, free = self.engine, [s for s in range(SLOTS) if s not in self.running and s not in self.waiting]
        if not free or len(self.running) + len(self.waiting) == MAX_SEQS:
            return
        slot, length = free[self.draw(0, len(free) - 1)], self.draw(1, 60)
        prompt = torch.randint(0, e.vocab, (length,), generator=self.g)
        e.blocks[slot], e.tokens[slot] = self.own[slot], torch.zeros(0, dtype=torch.int64)
        e.aux[slot] = torch.zeros(0, e.oracle.aux_size)
        others = [s for s in self.running if len(e.tokens[s]) > BLOCK]
        if others and self.draw(0, 1):  # its first blocks are in the prefix cache
            other = others[self.draw(0, len(others) - 1)]
            shared = (len(e.tokens[other]) - 1) // BLOCK * BLOCK
            e.blocks[slot, : shared // BLOCK] = e.blocks[other, : shared // BLOCK]
            e.tokens[slot], e.aux[slot] = e.tokens[other][:shared], e.aux[other][:shared]
            prompt = torch.cat([e.tokens[slot][-1:], prompt])[: MAX_LEN - shared - 3 * K]
            if e.first is not None:
                e.first[slot] = e.first[other]
        self.waiting[slot] = prompt
        e.prompts.add(slot)

    def work(self) -> dict[int, tuple[torch.Tensor, int, int]]:
        e, left, work = self.engine, self.budget, {}
        for slot in self.running:
            drafts = min(K if self.draw(0, 3) else self.draw(0, K), left - 1)
            ids = torch.randint(0, e.vocab, (drafts + 1,), generator=self.g)
            ids[0], left = e.tokens[slot][-1], left - drafts - 1
            work[slot] = ids, self.draw(1, drafts + 1), 0
        for slot in list(self.waiting):
            rows, self.waiting[slot] = self.waiting[slot][:left], self.waiting[slot][left:]
            if len(rows):
                rest, left = self.waiting[slot], left - len(rows)
                work[slot] = rows, int(not len(rest)), int(rest[0]) if len(rest) else 0
        for slot in [slot for slot, rest in self.waiting.items() if not len(rest)]:
            del self.waiting[slot]
            self.running.append(slot)
        order = torch.randperm(len(work), generator=self.g).tolist()
        return {slot: work[slot] for slot in (list(work)[i] for i in order)}

    def leave(self) -> None:
        """End requests at the context's end, and now and then cancel one, also in its prompt."""
        room = MAX_LEN - 2 * K - 1  # what is drafted past the end of the context has no key
        self.running = [s for s in self.running if len(self.engine.tokens[s]) < room and self.draw(0, 19)]
        if self.waiting and not self.draw(0, 9):
            self.waiting.popitem()


@pytest.mark.parametrize(("engine", "budget"), [
    ("eagle3", 24), ("eagle3", 80), ("fp8", 40), ("mtp", 40), ("draft_model", 40),
], indirect=["engine"])  # fmt: skip
def test_prompts_and_rounds_of_any_length_draft_in_one_batch(engine, budget) -> None:
    """A budget of 80 rows is more than one captured pass of 48 holds."""
    load, compared, proposes, mixed = Load(engine, 11, budget), 0, 0, 0
    while proposes < 40:
        if load.draw(0, 2) == 0:
            load.arrive()
        if work := load.work():
            drafts, want = engine.mixed(work)
            assert [got for got, each in zip(drafts.tolist(), want, strict=True) if each] == [w for w in want if w]
            compared, proposes = compared + sum(w is not None for w in want), proposes + 1
            mixed += any(len(ids) > K + 1 for ids, *_ in work.values())
        load.leave()
    assert compared > 40
    assert mixed > 5
    assert engine.speculator.counts.by_reason == {"specgraph": proposes}
    assert engine.speculator.proposed == []


def test_what_was_accepted_near_max_model_len_writes_no_other_block(engine) -> None:
    engine.prompt(1, MAX_LEN - K - 1)
    before = engine.tensor.clone()
    engine.round([1], [K + 1])
    own = set(engine.blocks[1].tolist())
    changed = {b for b in range(len(before)) if not torch.equal(before[b], engine.tensor[b])}
    assert changed <= own


def dense_probs(oracle, tokens, aux, drafts, temperature):
    """The distribution of each draft in the target's vocabulary, float64 [K, vocabulary], along these drafts."""
    past, layers, found = {}, oracle.attention_layers, []
    out = oracle.forward(tokens, oracle.combine(aux), dense_attend(layers, torch.arange(len(tokens)), past))
    for step, token in enumerate(drafts):
        logits = oracle.logits(out.hidden[-1:])[0] / temperature
        whole = torch.full((VOCAB,), float("-inf"), dtype=torch.float64)
        whole[torch.arange(len(logits)) + oracle.draft_to_target] = logits
        found.append(whole.softmax(-1))
        place = torch.tensor([len(tokens) + step])
        out = oracle.forward(torch.tensor([token]), out.carry[-1:], dense_attend(layers, place, past))
    return torch.stack(found)


@pytest.mark.parametrize("divided", [False, True])
def test_sampled_drafts_come_with_the_distributions_that_they_were_drawn_from(tmp_path, divided) -> None:
    engine = Engine(tmp_path, divided=divided)
    engine.start()
    for slot in (0, 1, 3):
        engine.prompt(slot, 10 + slot)
    seen = set()
    for counts in ([2, 1, 5], [1, 3, 1], [4, 4, 2]):
        drafts, want = engine.round([0, 3, 1], counts)
        assert drafts[0].tolist() == want[0]  # temperature 0
        for row, slot in ((1, 3), (2, 1)):
            temperature = engine.temperature[slot]
            ids, aux = engine.history(slot)
            expected = dense_probs(engine.oracle, ids, aux, drafts[row].tolist(), float(temperature))
            given = engine.speculator.draft_logits[slot].double()
            assert torch.allclose((given if divided else given / temperature).softmax(-1), expected, atol=1e-5)
            assert (expected[range(K), drafts[row]] > 0).all()
            seen.add(tuple(drafts[row].tolist()) == tuple(want[row]))
    assert False in seen  # drawn, not the likeliest
    assert engine.speculator.counts.by_reason == {"specgraph": 3}


def changes(batch, **values):
    for name, value in values.items():
        setattr(batch, name, value)
    return batch


def test_everything_else_goes_to_vllm_unchanged_and_is_counted(engine) -> None:
    engine.prompt(0, 20)
    ids, aux = [torch.arange(5)], [torch.zeros(5, 32)] * 3

    def batch(**values):
        return changes(input_batch(ids, [20], [0], K, [False]), **values)

    cases = [
        (batch(), {"dummy_run": True}, aux, "dummy run"),
        (batch(), {"is_profile": True}, aux, "dummy run"),
        (
            batch(num_reqs=4, num_draft_tokens=16, num_tokens=20),
            {},
            aux,
            "more requests than the largest captured size",
        ),
        (batch(has_structured_output_reqs=True), {}, aux, "structured output"),
        (batch(), {}, None, "no hidden states of the target"),
        (batch(), {"mm_inputs": ([torch.zeros(1)], torch.zeros(1))}, aux, "multimodal inputs"),
        (batch(), {"num_speculative_tokens": 2}, aux, "fewer draft tokens asked for"),
    ]
    seen = []
    for made, options, states, reason in cases:
        assert engine.propose(made, states, [1], **options) == "vLLM's drafts"
        args, got = engine.speculator.proposed[-1]
        assert args[0] is made
        assert args[4] is states
        assert got == options
        seen.append(reason)
    assert dict(engine.speculator.counts.by_reason) == {reason: seen.count(reason) for reason in seen}
    # The runner may give them by position, too
    assert engine.propose(batch(), aux, [1], None, True) == "vLLM's drafts"
    assert len(engine.speculator.proposed[-1][0]) == 13


def test_text_batches_of_a_multimodal_model_are_served(engine) -> None:
    engine.prompt(0, 20)
    drafts, want = engine.round([0], [2])
    batch = input_batch([torch.arange(5)], [22], [0], K, [False])
    result = engine.propose(batch, [torch.zeros(5, 32)] * 3, [1], mm_inputs=([], torch.zeros(5, dtype=torch.bool)))
    assert drafts.shape == result.shape == (1, K)
    assert len(want) == 1


def test_a_switch_leaves_every_propose_to_vllm(engine) -> None:
    engine.speculator.use_vllm = True
    batch = input_batch([torch.arange(5)], [20], [0], K, [False])
    assert engine.propose(batch, [torch.zeros(5, 32)] * 3, [1]) == "vLLM's drafts"
    assert engine.speculator.counts.by_reason == {"switched off": 1}


def test_graphs_over_another_kv_cache_are_not_replayed(engine) -> None:
    """Until the next capture: vLLM 0.33 captures over a KV cache for profiling, then hands over the real one."""
    engine.prompt(0, 9)
    first = engine.speculator.fast_path.drafter
    engine.speculator.set_attn("model state", "kv cache config")
    with pytest.raises(SpecgraphError, match="closed"):
        first.propose(first.inputs(1))
    assert engine.speculator.attn == ("model state", "kv cache config")
    batch = input_batch([torch.arange(5)], [20], [0], K, [False])
    assert engine.propose(batch, [torch.zeros(5, 32)] * 3, [1]) == "vLLM's drafts"
    assert engine.speculator.counts.by_reason == {"no captured graphs": 1}
    with torch.inference_mode():
        engine.speculator.capture()
    drafts, want = engine.round([0], [2])
    assert drafts.tolist() == want


def test_weights_may_be_updated_in_place_and_replaced(engine, caplog) -> None:
    engine.prompt(0, 9)
    engine.prompt(2, 20)
    with torch.no_grad():
        engine.module.lm_head.weight.neg_()  # in place: the very next drafts follow
        flipped = engine.speculator.fast_path
        drafts, want = engine.round([0, 2], [2, 1])
        assert drafts.tolist() != want
        engine.module.lm_head.weight.neg_()
    drafts, want = engine.round([0, 2], [1, 3])
    assert drafts.tolist() == want
    assert engine.speculator.fast_path is flipped
    for owner in (engine.module.lm_head, engine.module.model.layers[0].self_attn.qkv_proj):
        old = owner.weight
        owner.weight = torch.nn.Parameter(old.detach().clone(), requires_grad=False)
        old.data.fill_(float("nan"))  # what a graph must not read any more
    for counts in ([2, 5], [1, 1]):
        drafts, want = engine.round([0, 2], counts)
        assert drafts.tolist() == want
    assert caplog.text.count("captures its graphs again") == 1
    assert engine.speculator.counts.by_reason == {"specgraph": 4}


def test_an_unsupported_drafter_is_refused_when_it_is_loaded(tmp_path) -> None:
    engine = Engine(tmp_path)
    engine.module.config.hidden_act = "gelu"
    with pytest.raises(UnsupportedError, match="hidden_act 'gelu'"):
        engine.start()


def test_scales_of_an_fp8_cache_are_refused(tmp_path) -> None:
    engine = Engine(tmp_path, "fp8")
    engine.speculator.vllm_config.compilation_config.static_forward_context[LAYER_NAME]._v_scale_float = 0.5
    with pytest.raises(UnsupportedError, match=r"the FP8 KV cache of .* has scales \(1.0, 0.5\)"):
        engine.start()


def test_or_left_to_vllm(tmp_path, caplog) -> None:
    engine = Engine(tmp_path, when_unsupported="vllm")
    engine.tensor = engine.speculator.vllm_config.compilation_config.static_forward_context[LAYER_NAME].kv_cache = (
        torch.zeros(2, 5, BLOCK, KV_HEADS, HEAD_DIM)
    )
    engine.start()
    batch = input_batch([torch.arange(5)], [20], [0], K, [False])
    assert engine.propose(batch, [torch.zeros(5, 32)] * 3, [1]) == "vLLM's drafts"
    assert engine.speculator.counts.by_reason == {"not supported": 1}
    assert "vLLM drafts by itself: the KV cache of" in caplog.text


def test_batches_above_the_named_sizes_go_to_vllm(tmp_path) -> None:
    engine = Engine(tmp_path, capture_sizes=[1, 2])
    engine.start()
    for slot in (0, 1, 2):
        engine.prompt(slot, 10 + slot)
    drafts, want = engine.round([0, 1], [3, 1])
    assert drafts.tolist() == want
    rows = [torch.arange(5)] * 3
    batch = input_batch(rows, [20, 20, 20], [0, 1, 2], 3 * K, [False] * 3)
    assert engine.propose(batch, [torch.zeros(15, 32)] * 3, [1, 1, 1]) == "vLLM's drafts"


def test_counts_are_logged(tmp_path, caplog) -> None:
    engine = Engine(tmp_path, log_every=2)
    engine.start()
    engine.prompt(0, 9)
    with caplog.at_level("INFO", "vllm.specgraph"):
        engine.round([0], [1])
        engine.propose(input_batch([torch.arange(5)], [20], [0], K, [False]), None, [1])
    assert "specgraph: 1, no hidden states of the target: 1" in caplog.text
