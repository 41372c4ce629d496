"""The speculator in vLLM's place: the drafts of decode rounds against a dense float64 chain, over what vLLM changes."""

from __future__ import annotations

import numpy
import pytest
import torch
from draft.test_against_dense import dense_attend
from engine_rounds import BLOCK, MAX_LEN, Engine, K
from specgraph_models import DraftVocabulary, cut_vocabulary
from tiny_checkpoints import VOCAB
from vllm_objects import input_batch, quantise

from specgraph import SpecgraphError


@pytest.mark.parametrize(
    "engine",
    ["eagle3", "eagle", "mtp", "draft_model", "dflash", "dspark", "dspark-fill-in", "glm", "qwen", "deepseek"],
    indirect=True,
)
def test_drafts_follow_the_whole_history_in_vllms_cache(engine) -> None:
    for slot, length in ((2, 3), (0, 15), (4, 40)):
        engine.prompt(slot, length)
    draw = torch.Generator().manual_seed(5)
    for slots in ([2, 0, 4], [4, 2], [0], [2, 4], [0, 4, 2], [4], [2, 0]):
        counts = torch.randint(1, K + 2, (len(slots),), generator=draw).tolist()
        drafts, want = engine.round(slots, counts)
        assert drafts.tolist() == want
    engine.prompt(1, 2 * BLOCK - 2 * K - 1)  # a block's row for the last draft token is the first of the next block
    drafts, want = engine.round([1], [K + 1])
    assert drafts.tolist() == want
    assert engine.speculator.counts.by_reason == {"specgraph": 8}
    assert engine.speculator.captured
    assert engine.speculator.proposed == []


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_cut_vocabulary_is_a_copy_that_is_made_again_when_its_weight_is_replaced(kind, tmp_path) -> None:
    """The list is not sorted, and names tokens that an EAGLE-3 head of its own vocabulary can't draft."""
    path = tmp_path / "list.npy"
    engine = Engine(tmp_path, kind, draft_vocab=str(path))
    ids = torch.randperm(engine.vocab, generator=torch.Generator().manual_seed(2))[: engine.vocab // 3]
    numpy.save(path, ids.numpy())
    cut_vocabulary(engine.oracle, DraftVocabulary("the list", ids))
    with torch.inference_mode():
        engine.start()
    lm_head, head = engine.module.lm_head, engine.speculator.specgraph.head
    assert 3 < head.draft_vocab_size == engine.oracle.draft_vocab_size <= len(ids)
    engine.prompt(0, 9)
    engine.prompt(2, 20)
    drafts, want = engine.round([0, 2], [2, 1])
    assert drafts.tolist() == want
    old = lm_head.weight
    lm_head.weight = torch.nn.Parameter(-old.detach().clone(), requires_grad=False)
    old.data.fill_(float("nan"))
    engine.oracle.lm_head.neg_()
    drafts, want = engine.round([0, 2], [3, 1])
    assert drafts.tolist() == want
    assert engine.speculator.specgraph.head is not head


def test_a_list_for_another_vocabulary_is_refused_or_left_to_vllm(tmp_path) -> None:
    path = tmp_path / "list.npy"
    numpy.save(path, numpy.array([1, 1 << 20]))
    with pytest.raises(SpecgraphError, match=r"list.npy has the token id 1048576, the target's vocabulary has"):
        Engine(tmp_path, draft_vocab=str(path)).start()
    engine = Engine(tmp_path, draft_vocab=str(path), when_unsupported="vllm")
    engine.start()
    assert engine.speculator.specgraph.head is None


@pytest.mark.parametrize("how", ["tensor", "row", "block"])
def test_fp8_weights_draft_what_their_dequantised_matrices_draft_also_with_new_scales(tmp_path, how) -> None:
    engine = Engine(tmp_path)
    layer, of_oracle = engine.module.model.layers[0], engine.oracle.layers[0]
    for linear, weight in (
        (layer.self_attn.qkv_proj, of_oracle.qkv), (layer.self_attn.o_proj, of_oracle.output),
        (layer.mlp.gate_up_proj, of_oracle.gate_up), (layer.mlp.down_proj, of_oracle.down),
        (engine.module.model.fc, engine.oracle.tensors.fc),
    ):  # fmt: skip
        weight.matrix.copy_(quantise(linear, how).dequantised)
    engine.start()
    addresses = {tensor.data_ptr() for tensor in engine.speculator.specgraph.head.weights().values()}
    assert layer.self_attn.qkv_proj.weight.data_ptr() in addresses  # a view
    assert how != "row" or layer.self_attn.qkv_proj.weight_scale.data_ptr() in addresses
    engine.prompt(0, 9)
    engine.prompt(2, 20)
    for counts in ([2, 5], [1, 3], [4, 4]):
        drafts, want = engine.round([0, 2], counts)
        assert drafts.tolist() == want
    linear, name = layer.self_attn.qkv_proj, "weight_scale_inv" if how == "block" else "weight_scale"
    with torch.no_grad():
        of_oracle.qkv.matrix.mul_(2)
        scale = getattr(linear, name)
        if how == "row":
            scale.mul_(2)  # which the head reads itself
        else:
            setattr(linear, name, torch.nn.Parameter(scale * 2, requires_grad=False))
    engine.prompt(1, 9)
    drafts, want = engine.round([1], [3])
    assert drafts.tolist() == want


def test_what_was_accepted_near_max_model_len_writes_no_other_block(engine) -> None:
    engine.prompt(1, MAX_LEN - K - 1)
    before = engine.tensor.clone()
    engine.round([1], [K + 1])
    own = set(engine.blocks[1].tolist())
    changed = {b for b in range(len(before)) if not torch.equal(before[b], engine.tensor[b])}
    assert changed <= own


def test_after_sleep_mode_nothing_is_read_that_slept_and_was_not_brought_back(tmp_path) -> None:
    """vLLM maps weights, buffers and KV cache to the same addresses, and brings weights and buffers back. What was made
    while it loaded the weights sleeps with them."""
    engine = Engine(tmp_path, "mtp")
    speculator, module = engine.speculator, engine.module
    theirs = [*module.parameters(), *[m.cos_sin_cache for m in module.modules() if hasattr(m, "cos_sin_cache")]]
    with torch.inference_mode():
        speculator.load_model(module)
        addresses = {tensor.data_ptr() for tensor in theirs}
        ours = [t for t in speculator.specgraph.head.weights().values() if t.data_ptr() not in addresses]
        assert ours
        speculator.capture()
    engine.prompt(0, 9)
    engine.round([0], [2])
    saved = [tensor.detach().clone() for tensor in theirs]
    with torch.inference_mode():
        for tensor in (*theirs, *ours, *engine.tensors):
            tensor.detach().fill_(float("nan"))
        for tensor, was in zip(theirs, saved, strict=True):
            tensor.detach().copy_(was)
    engine.prompt(2, 12)
    for count in (3, 1):
        drafts, want = engine.round([2], [count])
        assert drafts.tolist() == want


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


def test_graphs_over_another_kv_cache_are_not_replayed(engine) -> None:
    """Until the next capture: vLLM 0.33 captures over a KV cache for profiling, then hands over the real one."""
    engine.prompt(0, 9)
    first = engine.speculator.fast_path.drafter
    engine.speculator.set_attn("model state", "kv cache config")
    with pytest.raises(SpecgraphError, match="closed"):
        first.propose(first.inputs(1))
    assert engine.speculator.attn == ("model state", "kv cache config")
    batch = input_batch([torch.arange(5)], [20], [0])
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
    with pytest.raises(SpecgraphError, match="closed"):  # else they stay until a garbage collection
        flipped.propose(1)
    assert engine.speculator.counts.by_reason == {"specgraph": 4}
