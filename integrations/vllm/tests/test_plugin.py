"""Settings, what is refused at start-up, and the wrapping of vLLM's `init_speculator`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mixtures import forward_context
from specgraph_plugin.vllm.config import Settings, read_settings, unsupported_config
from specgraph_vllm import plugin
from specgraph_vllm.names import RUNNER_MODULE
from vllm_objects import StockSpeculator, batch_class, vllm_config

from specgraph.errors import ConfigError, UnsupportedError

CPU = torch.device("cpu")


def stock(*args):
    return StockSpeculator(*args[:2])


def gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, logits_cache=None):
    """As in 0.33."""


def wrapped(make=stock, batch=batch_class, gumbel=gumbel_sample):
    named = {"InputBatch": batch, "set_forward_context": lambda: forward_context}
    return plugin.wrapped(make, lambda module, name: named.get(name, lambda: gumbel)())


def test_without_the_key_nothing_changes() -> None:
    config = vllm_config(additional_config={"another": 1}, speculative_config__method="ngram")
    made = wrapped(lambda *args: args, lambda: object)
    assert made(config, CPU, "req_states") == (config, CPU, "req_states")
    for other in (None, {}, "a string", object()):
        assert read_settings(other) is None


@pytest.mark.parametrize("args", [(), ("req_states",)])
def test_vllms_speculator_becomes_specgraphs(args) -> None:
    config = vllm_config(additional_config={"specgraph": {"capture_sizes": [1, 8]}})
    made = wrapped()(config, CPU, *args)
    assert isinstance(made, StockSpeculator)
    assert type(made).__name__ == "SpecgraphStockSpeculator"
    assert made.specgraph.settings == Settings(capture_sizes=[1, 8])
    assert (made.vllm_config, made.device) == (config, CPU)


class OtherNames(StockSpeculator):
    """As a release might have it: a parameter moved, a method renamed, an attribute gone."""

    capture = max_num_tokens = None

    def propose(self, input_batch, slot_mappings, attn_metadata):
        """Never called."""

    def __getattribute__(self, name):
        if name == "max_num_tokens":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_release_with_other_names_is_refused_by_these_names_or_left_to_vllm(caplog) -> None:
    class InputBatch:
        num_reqs: int

    def make(*args):
        return OtherNames(*args[:2])

    with pytest.raises(UnsupportedError) as error:
        wrapped(make, lambda: InputBatch)(vllm_config(), CPU)
    said = str(error.value)
    for words in (
        "OtherNames.propose takes (input_batch, slot_mappings, attn_metadata), expected (input_batch, attn_metadata, ",
        "OtherNames.capture is missing",
        "OtherNames.max_num_tokens is missing",
        "InputBatch.query_start_loc_np is missing",
    ):
        assert words in said
    assert "load_model" not in said
    assert "num_reqs" not in said.replace("max_num_reqs", "")
    assert "\n" not in said
    config = vllm_config(additional_config={"specgraph": {"when_unsupported": "vllm"}})
    assert type(wrapped(make, lambda: InputBatch)(config, CPU)) is OtherNames
    assert "OtherNames.capture is missing" in caplog.text
    for module in ("json", "json.elsewhere"):  # a function that moved
        absent = plugin.wrapped(stock, lambda *_, module=module: plugin._named(module, "set_forward_context"))
        with pytest.raises(UnsupportedError, match=rf"it has no {module}\.set_forward_context"):
            absent(vllm_config(), CPU)
        assert type(absent(config, CPU)) is StockSpeculator


REFUSED = [
    (
        {"speculative_config__method": "ngram"},
        "'ngram'; specgraph drafts for eagle3, eagle, mtp, dflash, dspark, ",
    ),
    ({"speculative_config__use_multi_module_mtp": lambda: True}, "several modules"),
    ({"speculative_config__use_gemma4_mtp": lambda: True}, "Gemma 4's"),
    ({"speculative_config__parallel_drafting": True}, "parallel_drafting"),
    ({"speculative_config__use_heterogeneous_vocab": True}, "use_heterogeneous_vocab"),
    ({"speculative_config__enable_adaptive_verification": True}, "enable_adaptive_verification"),
    ({"speculative_config__kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype 'fp8_e5m2'"),
    ({"cache_config__calculate_kv_scales": True}, "calculate_kv_scales"),
    ({"speculative_config__draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size 2"),
    ({"parallel_config__data_parallel_size": 4}, "data_parallel_size 4"),
    (
        {
            "speculative_config__method": "dspark",
            "num_lookahead_tokens": 5,
            "speculative_config__draft_model_config__hf_config__sample_from_anchor": False,
        },
        "reserves no KV slot for its last row",
    ),
    (
        {
            "speculative_config__method": "dspark",
            "speculative_config__draft_model_config__hf_config__dspark_bonus_anchor": True,
        },
        "reserves no KV slot for its last row",
    ),
    ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
    ({"speculative_config__method": "mtp", "parallel_config__enable_eplb": True}, "enable_eplb with method 'mtp'"),
    ({"model_config__dtype": torch.float32}, "dtype float32"),
    ({"cache_config__cache_dtype": "nvfp4"}, "kv_cache_dtype 'nvfp4'"),
    ({"model_config__enforce_eager": True}, "enforce_eager"),
    ({"compilation_config__cudagraph_mode__name": "NONE"}, "a mode of graphs NONE"),
    ({"watermark_config": object()}, "watermark_config"),
    ({"kv_transfer_config": object()}, "kv_transfer_config"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_not_served_is_one_line_at_start_up(changes, words, caplog) -> None:
    graphs = vllm_config().compilation_config.cudagraph_mode
    assert unsupported_config(vllm_config(), graphs) is None
    for method in ("dflash", "dspark"):  # both draft in parallel; a LoRA of the target is the engine's
        of = {"speculative_config__method": method, "speculative_config__parallel_drafting": True}
        assert unsupported_config(vllm_config(**of, lora_config=object()), graphs) is None
    of["speculative_config__draft_model_config__hf_config__sample_from_anchor"] = False
    assert unsupported_config(vllm_config(**of, num_lookahead_tokens=6), graphs) is None
    with pytest.raises(UnsupportedError, match=words) as error:
        wrapped()(vllm_config(**changes), CPU)
    assert "\n" not in str(error.value)
    config = vllm_config(**changes, additional_config={"specgraph": {"when_unsupported": "vllm"}})
    assert type(wrapped()(config, CPU)) is StockSpeculator
    assert words in caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"when_unsuported": "vllm"}, "did you mean when_unsupported by 'when_unsuported'?"),
        ({"when_unsupported": "ignore"}, "one of 'refuse', 'vllm', got 'ignore'"),
        ({"log_every": -1}, r"\['specgraph'\]: log_every must be at least 0, got -1"),
        (True, "is True; it is a mapping"),
    ],
)
def test_wrong_settings_are_errors(given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        wrapped()(vllm_config(additional_config={"specgraph": given}), CPU)


def test_the_cache_of_draft_logits_is_told_by_its_parameter() -> None:
    def make(*args):
        return StockSpeculator(*args[:2], draft_logits=torch.zeros(2, 4, 8, dtype=torch.bfloat16))

    def of_0_26(logits, apply_temperature, output_processed_logits=None):
        """As in 0.26."""

    for gumbel, divided in ((gumbel_sample, False), (of_0_26, True)):
        made = wrapped(make, gumbel=gumbel)(vllm_config(), CPU)
        assert made.logits_are_divided is divided
        assert made.draft_logits.dtype == torch.float32
    with pytest.raises(UnsupportedError, match=r"gumbel_sample takes \(obj\), and none is logits_cache"):
        wrapped(make, gumbel=len)(vllm_config(), CPU)


def test_registering_twice_wraps_once_and_the_v1_runner_is_refused_where_specgraph_is_asked_for(
    monkeypatch, caplog
) -> None:
    class VllmConfig:
        @property
        def use_v2_model_runner(self) -> bool:
            return self.v2

    runner, config, platforms = ModuleType(RUNNER_MODULE), ModuleType("vllm.config"), ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="cuda")
    runner.init_speculator, config.VllmConfig = stock, VllmConfig
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (runner, config, platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    once, chosen = runner.init_speculator, VllmConfig.use_v2_model_runner
    assert once is not stock
    assert once.without_specgraph is stock
    plugin.register()
    assert runner.init_speculator is once
    assert VllmConfig.use_v2_model_runner is chosen
    asked, made = {"specgraph": {}}, VllmConfig()
    for made.v2, made.additional_config in ((True, asked), (False, {}), (False, None)):
        assert made.use_v2_model_runner is made.v2
    made.additional_config = asked
    with pytest.raises(UnsupportedError, match=r"takes its V1 model runner .* VLLM_USE_V2_MODEL_RUNNER=1"):
        made.use_v2_model_runner  # noqa: B018
    made.additional_config = {"specgraph": {"when_unsupported": "vllm"}}
    for _ in range(2):
        assert made.use_v2_model_runner is False
    assert caplog.text.count("vLLM drafts by itself: vLLM takes its V1 model runner") == 1


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("npu", "does not draft on 'npu', specgraph-vllm-ascend does: pip install specgraph-vllm-ascend"),
        ("xpu", "does not draft on 'xpu', no distribution drafts there: leave 'specgraph' out of --additional-config"),
    ],
)
def test_another_device_is_refused_with_the_distribution_to_install(monkeypatch, caplog, device, words) -> None:
    class VllmConfig:
        def __init__(self, additional_config) -> None:
            self.additional_config = additional_config
            self.__post_init__()

        def __post_init__(self) -> None:
            self.made = True

    config, platforms = ModuleType("vllm.config"), ModuleType("vllm.platforms")
    config.VllmConfig, platforms.current_platform = VllmConfig, SimpleNamespace(device_type=device)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for module in (config, platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugin, "installed_version", lambda name: "")
    for _ in range(2):
        plugin.register()
    assert VllmConfig({}).made
    with pytest.raises(UnsupportedError, match=words):
        VllmConfig({"specgraph": {}})
    assert VllmConfig({"specgraph": {"when_unsupported": "vllm"}}).made
    assert caplog.text.count(words) == 1
    monkeypatch.setattr(plugin, "installed_version", lambda name: "0.1.0")
    VllmConfig.__post_init__ = VllmConfig.__post_init__.without_specgraph
    plugin.register()
    assert hasattr(VllmConfig.__post_init__, "without_specgraph") == (device == "xpu")
