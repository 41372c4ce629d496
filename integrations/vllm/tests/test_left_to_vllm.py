"""The speculator leaves some proposes to vLLM's own code, and counts them; it refuses drafters when they are loaded."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from engine_rounds import BLOCK, Engine, K
from tiny_checkpoints import HEAD_DIM, KV_HEADS
from vllm_objects import LAYER_NAME, StockSpeculator, input_batch

from specgraph.errors import UnsupportedError


def changes(batch, **values):
    for name, value in values.items():
        setattr(batch, name, value)
    return batch


def test_everything_else_goes_to_vllm_unchanged_and_is_counted(engine) -> None:
    engine.prompt(0, 20)
    ids, aux = [torch.arange(5)], [torch.zeros(5, 32)] * 3

    def batch(**values):
        return changes(input_batch(ids, [20], [0]), **values)

    cases = [
        (batch(), {"dummy_run": True}, aux, "dummy run"),
        (batch(), {"is_profile": True}, aux, "dummy run"),
        (
            batch(num_reqs=4, num_tokens=20),
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


def test_vllms_own_draws_are_in_its_dtype_and_reach_the_sampler(tmp_path, monkeypatch) -> None:
    """vLLM 0.33 refuses to write them in another dtype than its logits have."""
    engine = Engine(tmp_path, divided=False, stored=torch.float16)
    seen, logits = [], torch.randn(K, engine.vocab).half()

    def stock(self, batch, *args, **options):
        seen.append(self.draft_logits.dtype)
        self.draft_logits[batch.idx_mapping] = logits
        return "vLLM's drafts"

    monkeypatch.setattr(StockSpeculator, "propose", wraps(StockSpeculator.propose)(stock))
    monkeypatch.setattr(StockSpeculator, "capture", lambda self: seen.append(self.draft_logits.dtype))
    engine.start()
    engine.propose(input_batch([torch.arange(5)], [20], [2]), None, [1])
    assert seen == [torch.float16] * 2
    sampler_reads = engine.speculator.draft_logits
    assert sampler_reads.dtype == torch.float32
    assert torch.equal(sampler_reads[2], logits.float())
    assert not sampler_reads[[0, 1, 3, 4]].any()


def test_text_batches_of_a_multimodal_model_are_served(engine) -> None:
    engine.prompt(0, 20)
    drafts, want = engine.round([0], [2])
    batch = input_batch([torch.arange(5)], [22], [0])
    result = engine.propose(batch, [torch.zeros(5, 32)] * 3, [1], mm_inputs=([], torch.zeros(5, dtype=torch.bool)))
    assert drafts.shape == result.shape == (1, K)
    assert len(want) == 1


def test_a_switch_leaves_every_propose_to_vllm(engine) -> None:
    engine.speculator.use_vllm = True
    batch = input_batch([torch.arange(5)], [20], [0])
    assert engine.propose(batch, [torch.zeros(5, 32)] * 3, [1]) == "vLLM's drafts"
    assert engine.speculator.counts.by_reason == {"switched off": 1}


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
        torch.zeros(5, 2, BLOCK, KV_HEADS, HEAD_DIM)
    )
    engine.start()
    batch = input_batch([torch.arange(5)], [20], [0])
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
    batch = input_batch(rows, [20, 20, 20], [0, 1, 2])
    assert engine.propose(batch, [torch.zeros(15, 32)] * 3, [1, 1, 1]) == "vLLM's drafts"


def test_counts_are_logged(tmp_path, caplog) -> None:
    engine = Engine(tmp_path, log_every=2)
    engine.start()
    engine.prompt(0, 9)
    with caplog.at_level("INFO", "vllm.specgraph"):
        engine.round([0], [1])
        engine.propose(input_batch([torch.arange(5)], [20], [0]), None, [1])
    assert "specgraph: 1, no hidden states of the target: 1" in caplog.text
