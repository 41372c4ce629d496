"""The V2 model runner: how `init_speculator` is wrapped, and the speculator against a dense float64 chain.

vLLM's side is that of the tests of specgraph-vllm, since vllm-ascend's speculators inherit from vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace

import engine_rounds
import pytest
import torch
from ascend_objects import config, v2_runner_module
from engine_rounds import Engine, K
from specgraph_plugin import FastPath
from specgraph_vllm_ascend import plugin
from specgraph_vllm_ascend.speculator import adopt_speculator
from vllm_objects import StockSpeculator, input_batch

from specgraph.errors import UnsupportedError

CPU = torch.device("cpu", 0)


@pytest.fixture
def engine(tmp_path, monkeypatch) -> Engine:
    """An engine with the speculator of an NPU. Each propose compares the host's numbers with those on the device."""
    monkeypatch.setattr(engine_rounds, "adopt", lambda made, settings, *_: adopt_speculator(made, settings))
    propose = FastPath.propose

    def compared(fast, num_requests, host_start_positions):
        inputs = fast.drafter.inputs(num_requests)
        live = inputs.num_sampled[:num_requests] > 0
        starts = torch.tensor(host_start_positions)
        assert torch.equal(inputs.start_positions[:num_requests][live], starts[live].to(inputs.start_positions.dtype))
        return propose(fast, num_requests, host_start_positions)

    monkeypatch.setattr(FastPath, "propose", compared)
    made = Engine(tmp_path, capture_sizes=[1, 3])
    made.speculator.vllm_config.model_config.uses_mrope = False
    with torch.inference_mode():
        made.start()
    return made


def test_drafts_follow_the_whole_history_in_vllm_ascends_cache(engine) -> None:
    for slot, length in ((2, 3), (0, 15), (4, 40)):
        engine.prompt(slot, length)
    draw = torch.Generator().manual_seed(5)
    for slots in ([2, 0, 4], [4, 2], [0]):
        counts = torch.randint(1, K + 2, (len(slots),), generator=draw).tolist()
        drafts, want = engine.round(slots, counts)
        assert drafts.tolist() == want
    assert engine.speculator.counts.by_reason == {"specgraph": 3}
    assert engine.speculator.captured
    assert engine.speculator.fast_path.drafter.resolution.lowering == "merged"


def test_so_do_those_beside_prompts(engine) -> None:
    engine.prompt(0, 15)
    ids = torch.randint(0, engine.vocab, (9,), generator=engine.g)
    engine.tokens[1], engine.aux[1] = ids[:0], torch.zeros(0, engine.oracle.aux_size)
    drafts, want = engine.mixed({0: (engine.tokens[0][-1:].repeat(K + 1), 2, 0), 1: (ids, 0, 5)})
    assert drafts[0].tolist() == want[0]
    drafts, want = engine.mixed({1: (ids[:4], 1, 0), 0: (engine.tokens[0][-1:].repeat(K + 1), 3, 0)})
    assert drafts.tolist() == want
    assert engine.speculator.counts.by_reason == {"specgraph": 2}


def test_a_dummy_run_is_vllm_ascends_own(engine) -> None:
    batch = input_batch([torch.arange(5)], [20], [0])
    assert engine.propose(batch, [torch.zeros(5, 32)] * 3, [1], dummy_run=True) == "vLLM's drafts"
    assert engine.speculator.counts.by_reason == {"dummy run": 1}


def test_the_runner_makes_specgraphs_speculator_whichever_patch_binds_the_name_last() -> None:
    module = v2_runner_module()
    for _ in range(2):
        plugin.wrap_v2(module)
    stock = module.init_speculator
    made = module.NPUModelRunner(config(), CPU).speculator
    assert isinstance(made, StockSpeculator)
    assert type(made).__name__ == "SpecgraphStockSpeculator"
    assert module.init_speculator.without_specgraph is stock

    def of_310p(vllm_config, device):
        return StockSpeculator(vllm_config, device)

    module.init_speculator = of_310p  # as patch_spec_decode_310 does
    assert type(module.NPUModelRunner(config(), CPU).speculator).__name__ == "SpecgraphStockSpeculator"
    assert module.init_speculator.without_specgraph is of_310p
    assert type(module.NPUModelRunner(config(additional_config={}), CPU).speculator) is StockSpeculator


def test_vllm_ascends_configuration_does_not_see_the_key() -> None:
    """vllm-ascend 0.30 refuses unknown keys of `additional_config`, and 0.23 takes the whole configuration."""

    class AscendConfig:
        def __init__(self, vllm_config: str = "", *, refresh: bool = False) -> None:
            self.seen = vllm_config, refresh

    module = SimpleNamespace(AscendConfig=AscendConfig)
    for _ in range(2):
        plugin.let_key_pass(module)
    assert module.AscendConfig(refresh=True, specgraph={}).seen == ("", True)
    assert module.AscendConfig("whole").seen == ("whole", False)
    with pytest.raises(TypeError, match="specgrahp"):
        module.AscendConfig(specgrahp={})


def test_newer_releases_pass_the_states_of_requests_too() -> None:
    """As vllm-ascend's main branch does."""
    seen = []

    def init_speculator(vllm_config, device, req_states):
        seen.append(req_states)
        return StockSpeculator(vllm_config, device)

    made = plugin.wrapped_v2(init_speculator, v2_runner_module().AscendInputBatch)(config(), CPU, "states")
    assert type(made).__name__ == "SpecgraphStockSpeculator"
    assert seen == ["states"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_config__method": "dflash"}, "method 'dflash'; specgraph drafts for eagle3, eagle, mtp"),
        ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size 2; one NPU is served"),
        ({"speculative_config__enforce_eager": True}, "speculative option enforce_eager"),
    ],
)
def test_what_is_not_served_is_one_line_or_left_to_vllm_ascend(changes, words, caplog) -> None:
    module = v2_runner_module()
    plugin.wrap_v2(module)
    with pytest.raises(UnsupportedError, match=words) as error:
        module.NPUModelRunner(config(**changes), CPU)
    assert "\n" not in str(error.value)
    left = config(**changes, additional_config={"specgraph": {"when_unsupported": "vllm"}})
    assert type(module.NPUModelRunner(left, CPU).speculator) is StockSpeculator
    assert words in caplog.text


def test_sampled_drafts_and_other_names_are_refused() -> None:
    module = v2_runner_module()

    def sampled(vllm_config, device):
        made = StockSpeculator(vllm_config, device)
        made.draft_logits = torch.zeros(3, 4, 8)
        return made

    with pytest.raises(UnsupportedError, match=r"draft_sample_method 'probabilistic'; drafts are greedy here"):
        plugin.wrapped_v2(sampled, module.AscendInputBatch)(config(), CPU)

    class OtherNames(StockSpeculator):
        def propose(self, input_batch, slot_mappings):
            """Never called."""

    with pytest.raises(UnsupportedError) as error:
        plugin.wrapped_v2(lambda config, where: OtherNames(config, where), SimpleNamespace)(config(), CPU)
    for words in (
        "OtherNames.propose takes (input_batch, slot_mappings), expected (input_batch, attn_metadata, ",
        "SimpleNamespace.cu_num_logits_np is missing",
        "init_speculator takes (config, where), expected (vllm_config, device, ...)",
    ):
        assert words in str(error.value)
