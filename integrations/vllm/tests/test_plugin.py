"""Settings, what is refused at start-up, and the wrapping of vLLM's `init_speculator`."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from specgraph_vllm import plugin
from specgraph_vllm.config import Settings, read_settings, unsupported_config
from specgraph_vllm.shims import RUNNER_MODULE, SHIMS
from vllm_objects import StockSpeculator, vllm_config

from specgraph.errors import ConfigError, UnsupportedError

CPU = torch.device("cpu")


def stock(*args):
    return ("stock", *args)


def stock_class(module, name):
    return type(name, (StockSpeculator,), {"from_module": module})


def wrapped(version="0.26.0"):
    return plugin.wrapped(stock, lambda: version, stock_class)


def test_without_the_key_nothing_changes() -> None:
    config = vllm_config(additional_config={"another": 1}, speculative_config__method="ngram")
    assert wrapped("9.9")(config, CPU, "req_states") == ("stock", config, CPU, "req_states")
    for other in (None, {}, "a string", object()):
        assert read_settings(other) is None


@pytest.mark.parametrize(("version", "args"), [("0.26.0", ()), ("0.26.1", ()), ("0.33.0", ("req_states",))])
def test_the_served_releases_get_specgraphs_speculator(version, args) -> None:
    config = vllm_config(additional_config={"specgraph": {"capture_sizes": [1, 8]}})
    made = wrapped(version)(config, CPU, *args)
    assert isinstance(made, StockSpeculator)
    assert type(made).__name__ == "SpecgraphSpeculator"
    assert made.settings == Settings(capture_sizes=[1, 8])
    assert (made.vllm_config, made.device) == (config, CPU)


@pytest.mark.parametrize(
    ("version", "method", "name"),
    [
        ("0.26.0", "eagle3", "EagleSpeculator"),
        ("0.26.0", "eagle", "EagleSpeculator"),
        ("0.26.0", "mtp", "MTPSpeculator"),
        ("0.33.0", "mtp", "MTPSpeculator"),
        ("0.33.0", "draft_model", "StandaloneARSpeculator"),
    ],
)
def test_the_speculator_is_one_of_vllms_class_for_the_method(version, method, name) -> None:
    made = wrapped(version)(vllm_config(speculative_config__method=method), CPU)
    assert type(made).__bases__[1].__name__ == name


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.34.0", "1.0"])
def test_other_releases_are_refused_or_left_to_vllm(version) -> None:
    with pytest.raises(UnsupportedError, match=rf"vLLM {version}: specgraph-vllm serves 0.26 and 0.33"):
        wrapped(version)(vllm_config(), CPU)
    config = vllm_config(additional_config={"specgraph": {"when_unsupported": "vllm"}})
    assert wrapped(version)(config, CPU) == ("stock", config, CPU)


REFUSED = [
    (
        {"speculative_config__method": "ngram"},
        "speculative method 'ngram'; specgraph drafts for eagle3, eagle, mtp here",
    ),
    ({"speculative_config__method": "draft_model"}, "'draft_model'; specgraph drafts for eagle3, eagle, mtp here"),
    ({"speculative_config__use_multi_module_mtp": lambda: True}, "several modules"),
    ({"speculative_config__use_gemma4_mtp": lambda: True}, "Gemma 4's"),
    ({"speculative_config__draft_sample_method": "probabilistic"}, "draft_sample_method 'probabilistic'"),
    ({"speculative_config__parallel_drafting": True}, "parallel_drafting"),
    ({"speculative_config__use_heterogeneous_vocab": True}, "use_heterogeneous_vocab"),
    ({"speculative_config__enable_adaptive_verification": True}, "enable_adaptive_verification"),
    ({"speculative_config__kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
    ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size 2"),
    ({"parallel_config__data_parallel_size": 4}, "data_parallel_size 4"),
    ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
    ({"model_config__dtype": torch.float32}, "dtype float32"),
    ({"cache_config__cache_dtype": "fp8_e4m3"}, "kv_cache_dtype 'fp8_e4m3'"),
    ({"model_config__enforce_eager": True}, "enforce_eager"),
    ({"compilation_config__cudagraph_mode__name": "NONE"}, "cudagraph_mode NONE"),
    ({"model_config__enable_sleep_mode": True}, "enable_sleep_mode"),
    ({"lora_config": object()}, "LoRA"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_not_served_is_one_line_at_start_up(changes, words, caplog) -> None:
    assert unsupported_config(vllm_config(), SHIMS[0].speculators) is None
    with pytest.raises(UnsupportedError, match=words) as error:
        wrapped()(vllm_config(**changes), CPU)
    assert "\n" not in str(error.value)
    config = vllm_config(**changes, additional_config={"specgraph": {"when_unsupported": "vllm"}})
    assert wrapped()(config, CPU) == ("stock", config, CPU)
    assert words in caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"when_unsuported": "vllm"}, "argument 'when_unsuported'; it takes when_unsupported, capture_sizes"),
        ({"when_unsupported": "ignore"}, "one of 'refuse', 'vllm', got 'ignore'"),
        ({"log_every": -1}, r"\['specgraph'\]: log_every must be at least 0, got -1"),
        (True, "is True; it is a mapping"),
    ],
)
def test_wrong_settings_are_errors(given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        wrapped()(vllm_config(additional_config={"specgraph": given}), CPU)


def test_registering_twice_wraps_once(monkeypatch) -> None:
    module = ModuleType(RUNNER_MODULE)
    module.init_speculator = stock
    monkeypatch.setitem(sys.modules, RUNNER_MODULE, module)
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    plugin.register()
    once = module.init_speculator
    assert once is not stock
    assert once.without_specgraph is stock
    plugin.register()
    assert module.init_speculator is once
