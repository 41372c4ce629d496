"""Generation with KV caches in FP8: less memory, the same tokens in every lowering, and drafts that are accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specgraph_run import load_generator

from specgraph.attention import PagedAttention, choose_attention
from specgraph.cpu import CpuPlatform
from specgraph.device import no
from specgraph.errors import CapacityError, ConfigError, UnsupportedError

PROMPTS = ["def read_chunk(self, size):\n", "import os\nimport sys\n\ndef walk(top"]
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}


def generated(**options):
    limits = {"max_model_len": 128, "max_num_requests": 2, "capture_sizes": [2], "prefill": "eager"}
    settings = {"platform": "cpu", **limits, **options}
    with load_generator(kv_cache_dtype="fp8", **settings) as generator:
        caches = [cache for runner in generator.decoder.runners.values() for cache in runner.caches]
        assert {part.dtype for cache in caches for part in cache} == {torch.float8_e4m3fn}
        return generator.text(PROMPTS, max_tokens=24), generator.decoder.metrics.mean_acceptance_length


@pytest.fixture(scope="module")
def alone():
    """The target's own tokens, from FP8 caches too: what speculation must not change."""
    return generated(speculate=False, decode="eager")[0]


@pytest.mark.parametrize(
    "options",
    [{"decode": "eager"}, {"decode": "merged"}, {"decode": "merged", "attention": "host"}, TREE],
    ids=["eager", "merged", "host lengths", "tree"],
)
def test_drafting_does_not_change_the_tokens(options, alone):
    texts, accepted = generated(**options)
    assert texts == alone
    assert accepted > 1.5


def test_it_takes_a_quarter_of_the_memory_of_float32():
    """Memory that holds one request in FP8, and no more, does not hold it in float32."""
    with load_generator(platform="cpu", decode="eager") as generator:
        layers = [a for runner in generator.decoder.runners.values() for a in runner.stack.layers]
    needed = sum(2 * a.num_kv_heads * a.head_dim for a in layers) * 16 * 5 / 2**30
    options = {"platform": "cpu", "max_model_len": 64, "kv_memory": needed, "decode": "eager"}
    load_generator(**options, kv_cache_dtype="fp8").close()
    with pytest.raises(CapacityError):
        load_generator(**options)


def test_attention_that_cannot_is_refused_by_name():
    class WithItsOwn(CpuPlatform):
        def attention_backends(self):
            return {"narrow": lambda platform: PagedAttention("narrow", cache_dtypes=())}

    layers = load_generator(platform="cpu", decode="eager").decoder.target.model.attention_layers
    how = layers, torch.float32, None, False, torch.float8_e4m3fn
    with pytest.raises(UnsupportedError, match=r"'narrow'.*float8_e4m3fn; --attention device"):
        choose_attention("narrow", WithItsOwn(), *how)
    choice = choose_attention("auto", WithItsOwn(), *how)
    assert choice.backend.name == "paged"
    assert "narrow" in choice.reason
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of 'auto', 'fp8', got 'int8'"):
        load_generator(platform="cpu", kv_cache_dtype="int8")


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"fp8_weights": "keep"}], ids=["cache", "weights"])
def test_a_device_without_fp8_refuses_it(monkeypatch, options):
    without = replace(CpuPlatform().capabilities, float8=no("its copies know no e4m3"))
    monkeypatch.setattr(CpuPlatform, "capabilities", without)
    with pytest.raises(UnsupportedError, match=r"fp8.*: 'cpu' has no FP8: its copies know no e4m3"):
        load_generator(platform="cpu", decode="eager", **options)
