"""Ranks that each hold a part of every request's keys (decode context parallel) against one process, in float64."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft.pairs import make_head, make_target
from draft.rounds import make_drafter
from parallel.mixtures import write_mixture
from parallel.processes import results
from parallel.tasks import FIXTURES, TASKS, several
from safetensors.torch import load_file, save_file
from specgraph_models.parallel import TensorParallel
from specgraph_plugin import PromptChunk, PromptPass
from specgraph_plugin.prompts import PromptProgram
from specgraph_run import GeneratorOptions
from specgraph_run.decoder.layout import join_layout
from specgraph_run.text.load import join

from specgraph.attention import AttentionLayer, PagedAttention, PagedHostAttention, allocate_caches
from specgraph.device import open_platform
from specgraph.errors import ConfigError
from specgraph.parallel import ContextParallel

ROUNDS = int(os.environ.get("ROUNDS", "6"))
"""Random rounds per run; with more than 12, of every kind of drafter on 2 and on 4 ranks."""
DRAFTERS = ("eagle3-llama", "eagle", "mtp", "dflash", "peagle", "dspark", "dspark-rnn", "dflash2")


def run(draft: str = "eagle3-llama", **changes: Any) -> dict[str, Any]:
    return {"target": str(FIXTURES / "target"), "draft": str(FIXTURES / draft), **changes}


FP8 = {"kv_cache_dtype": "fp8"}
LOWERINGS = ({"decode": "eager"}, {"decode": "step"}, {})
"""The last is merged."""
RUNS = [
    run(),
    run("dflash"),
    run(whole_drafter=True, temperature=0.8),
    run("target", attention="host"),
]
ONE_PROCESS = ("target", "draft", "tree", "temperature", "whole_drafter")
"""Settings that decide about the tokens: neither lowerings nor the kind of lengths do."""


def alone(runs: list[dict[str, Any]]) -> list[Any]:
    """Each run in this process, without graphs."""
    asked = [{name: each[name] for name in ONE_PROCESS if name in each} | {"decode": "eager"} for each in runs]
    distinct = [each for n, each in enumerate(asked) if each not in asked[:n]]
    with torch.inference_mode():
        found = several(None, distinct)
    return [found[distinct.index(each)] for each in asked]


def of_one_kv_head(name: str, to: Path) -> str:
    """Write a fixture with the first of its two KV heads alone, so that 2 and 4 ranks hold the same one."""
    to = to / name
    to.mkdir()
    config = json.loads((FIXTURES / name / "config.json").read_text())
    for section in (config, config.get("transformer_layer_config", {})):
        if "num_key_value_heads" in section:
            section["num_key_value_heads"] = 1
    (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(FIXTURES / name / "model.safetensors")
    halves = {key: t.chunk(2)[0].contiguous() for key, t in tensors.items() if ".k_proj." in key or ".v_proj." in key}
    save_file({**tensors, **halves}, to / "model.safetensors")
    return str(to)


def check(runs: list[dict[str, Any]], of_ranks: list[list[Any]], whole: list[Any]) -> None:
    for number, each in enumerate(runs):
        for rank in of_ranks:
            assert rank[number]["tokens"] == whole[number]["tokens"], each
            assert rank[number]["accepted"] == whole[number]["accepted"], each


def test_every_drafter_on_pairs_of_ranks():
    """Four ranks of two KV heads: two share the keys of each head, and gather each other's query heads; or both hold
    all keys of their head."""
    four = results(4, "several", runs=[*({**each, "context": 2} for each in RUNS), RUNS[0]])
    check([*RUNS, RUNS[0]], four, alone([*RUNS, RUNS[0]]))
    heads = [rank[-1]["kv"] for rank in four]
    assert heads[0] == heads[1] != heads[2] == heads[3]
    assert len({rank[0]["kv"] for rank in four}) == 4, "every rank has keys of its own"
    assert four[0][0]["launches"] == 1, "the collectives are inside the merged graph"


KINDS = ("target", "tree", "host", *DRAFTERS, "domino", "ngram", "latent", "latent-host")


def add_domino(folder: Path) -> None:
    """Make a DFlash folder one of Domino, in its authors' layout."""
    tensors, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    shapes = {"prefix_gru.weight_ih_l0": (18, 32), "prefix_gru.weight_hh_l0": (18, 6)}
    shapes |= {"embed_proj.0.weight": (5, 38), "embed_proj.2.weight": (64, 5)}
    tensors |= {name: torch.randn(*shape, generator=g) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    section = {"projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 5, "pure_draft_prefix_len": 1}
    section |= {"shift_label": True, "target_layer_ids": [0, 2], "mask_token_id": 63}
    (folder / "config.json").write_text(json.dumps({**config, "block_size": 5, "dflash_config": section}))


def of_kind(kind: str, folder: Path, target: str) -> dict[str, Any]:
    """Return a run of one KV head; `target` is its own drafter in the first three kinds, as latents are of theirs."""
    ways = {"tree": {"tree": True, **FP8}, "host": {"attention": "host"}, "latent-host": {"attention": "host"}}
    if kind.startswith("latent"):
        target = draft = write_mixture("DeepseekV3", folder)
    elif kind in ("target", "ngram", *ways):
        draft = kind if kind == "ngram" else target
    elif kind == "domino":
        draft = of_one_kv_head("dflash", folder)
        add_domino(Path(draft))
    else:
        draft = of_one_kv_head(kind, folder)
    return {"target": target, "draft": draft, **ways.get(kind, {})}


@pytest.mark.parametrize("share", (4,) if ROUNDS <= 12 else (2, 4))
@pytest.mark.parametrize("kinds", [KINDS[1:2]] if ROUNDS <= 12 else [[kind] for kind in KINDS], ids="-".join)
def test_random_rounds_of_ranks_that_share_one_kv_head(kinds, share, tmp_path):
    """Requests join and end at random; with prompts of one to three tokens some rank holds no key of a request."""
    target = of_one_kv_head("target", tmp_path)
    runs = [of_kind(kind, tmp_path, target) for kind in kinds]
    ways = LOWERINGS if ROUNDS > 12 else LOWERINGS[2:]
    shared = [{**each, "context": share, **how} for each in runs for how in ways]
    found = results(share, "random_rounds", runs=shared, rounds=ROUNDS, share=share)
    eager = [{**each, "decode": "eager"} for each in runs]
    whole = TASKS["random_rounds"](None, runs=eager, rounds=ROUNDS, share=share)
    for number, (kind, one) in enumerate(zip(kinds, whole, strict=True)):
        for rank in found:
            mine = rank[number * len(ways) : (number + 1) * len(ways)]
            assert all(way["tokens"] == one["tokens"] and way["drafts"] == one["drafts"] for way in mine), kind
            assert len({way["kv"] for way in mine}) == 1, f"lowerings are bit-equal: {kind}"
            assert mine[0]["rounds_with_few_keys"] > 0
        figures = {key: mine[-1][key] for key in ("accepted", "rounds", "rounds_with_few_keys")}
        print(json.dumps({"kind": kind, "ranks": share, "requests": len(one["tokens"]), **figures}))
        assert one["accepted"] > 2 or kind not in KINDS[:2], "drafts are accepted, and rows of trees move"


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_ranks_make_the_context_of_their_own_positions(kind, monkeypatch):
    """A prompt in chunks: the caches of all ranks together are those of one process, from a part of the rows each."""
    head, made = make_head(kind, make_target(torch.float64)), []
    stored = type(head).store_context
    monkeypatch.setattr(
        type(head), "store_context", lambda self, c, store: made.append(len(c)) or stored(self, c, store)
    )
    states = torch.randn(23, head.aux_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layers, caches = head.attention_layers, {}
    for rank in (None, *range(4)):
        ranks = None if rank is None else ContextParallel(rank, 4, "unused")
        head.attention_layers = tuple(replace(layer, ranks=ranks) for layer in layers)
        limits = {"num_speculative_tokens": 3, "max_num_requests": 1, "max_model_len": 32, "prefill_sizes": [8]}
        drafter = make_drafter(head, "eager", capture=False, **limits)
        made.clear()
        for chunk in (range(7), range(7, 15), range(15, 23)):
            drafter.prefill(list(range(1, 24)), chunk, [3, 1, 4, 2, 5, 6, 7, 8], states[chunk.start : chunk.stop])
        assert made == ([8] * 3 if rank is None else [2] * 3)
        caches[rank] = [part.clone() for cache in drafter.caches for part in cache]
        drafter.close()
    for whole, *parts in zip(*caches.values(), strict=True):
        torch.testing.assert_close(torch.stack(parts, dim=2).flatten(1, 2)[1:], whole[1:], rtol=0, atol=1e-12)
        assert whole[1:].any()


def test_prompts_of_an_engine_s_pass_in_caches_that_ranks_share():
    """Rows of several prompts follow each other there, so a rank's own ones are not every N-th row."""
    head = make_head("dflash", make_target(torch.float64))
    g = torch.Generator().manual_seed(3)
    given = PromptPass(
        chunks=[PromptChunk(0, 21, 0, 0, 0), PromptChunk(21, 6, 3, 1, 1)],
        token_ids=torch.arange(1, 28), next_tokens=torch.tensor([1, 2]),
        hidden_states=[torch.randn(27, head.aux_size, dtype=torch.float64, generator=g)],
        table=torch.tensor([[3, 1, 4, 2, 5, 6], [7, 8, 9, 0, 0, 0]], dtype=torch.int32),
    )  # fmt: skip
    layers, caches = head.attention_layers, {}
    for rank in (None, *range(4)):
        ranks = None if rank is None else ContextParallel(rank, 4, "unused")
        head.attention_layers = tuple(replace(layer, ranks=ranks) for layer in layers)
        limits = {"num_speculative_tokens": 3, "max_num_requests": 2, "max_model_len": 32}
        drafter = make_drafter(head, "eager", capture=False, **limits)
        PromptProgram(drafter.program, 128).run(drafter, given)
        caches[rank] = [part.clone() for cache in drafter.caches for part in cache]
        drafter.close()
    for whole, *parts in zip(*caches.values(), strict=True):
        torch.testing.assert_close(torch.stack(parts, dim=2).flatten(1, 2)[1:], whole[1:], rtol=0, atol=1e-12)
        assert whole[1:].any()


def test_latents_are_shared_by_position(tmp_path):
    """Multi-head latent attention is whole on every rank, and its cache, which no heads could split, is shared."""
    folder = write_mixture("DeepseekV3", tmp_path)
    runs = [{"target": folder, "draft": folder, **how} for how in ({}, {"attention": "host"})]
    found = results(2, "several", runs=[{**each, "context": 2} for each in runs])
    check(runs, found, alone(runs))
    assert found[0][0]["kv"] != found[1][0]["kv"]


@pytest.mark.parametrize(("ranks", "share"), [(2, 2), (4, 4), (8, 8)])
def test_ranks_of_other_kv_heads_are_refused(ranks, share):
    split = TensorParallel(0, ranks, "all", context=ContextParallel(0, share, "keys"))
    with pytest.raises(
        ConfigError, match=f"over {share} ranks: .* has 2 KV heads, so {max(1, ranks // 2)} of {ranks} "
    ):
        split.check((16, 2), 64, "the llama model")


def test_ranks_that_cannot_split_a_latent_model():
    with pytest.raises(ConfigError, match="over 4 ranks: the deepseek_v3 model has an MLP of 30 columns, which"):
        TensorParallel(0, 4, "all").check(None, 30, "the deepseek_v3 model")


def test_more_ranks_than_split_the_matrices_are_refused():
    with pytest.raises(ConfigError, match=r"decode_context_parallel 2, tensor_parallel 1: .* choose a divisor"):
        join_layout(torch.device("cpu"), decode_context_parallel=2)
    with pytest.raises(ConfigError, match=r"decode_context_parallel 2, tensor_parallel 1: .* choose a divisor"):
        join(open_platform("cpu"), GeneratorOptions(decode_context_parallel=2), {})


@pytest.mark.parametrize("attention", [PagedAttention(), PagedHostAttention(open_platform("cpu"))])
def test_sinks_of_other_heads_and_windows_without_their_lengths_are_refused(attention):
    """A rank has the sinks of its own heads, and attends with those of all; host lengths of parts have no window."""
    shared, gathered = ContextParallel(0, 2, "keys"), ContextParallel(0, 2, "keys", gathers_heads=True)
    with_sinks = AttentionLayer(2, 1, 8, 1.0, sinks=torch.zeros(2), ranks=gathered)
    assert not attention.supports(with_sinks, torch.float32, 16)
    for mask in ({"window": 4}, {"sinks": torch.zeros(2)}):
        layer = AttentionLayer(2, 1, 8, 1.0, ranks=shared, **mask)
        assert bool(attention.supports(layer, torch.float32, 16)) == (not attention.host_parameters)


def test_blocks_that_ranks_cannot_share_are_refused():
    layer = AttentionLayer(2, 1, 8, 1.0, ranks=ContextParallel(0, 3, "keys"))
    with pytest.raises(ConfigError, match="blocks of 16 tokens over 3 ranks"):
        allocate_caches([layer], 2, 16, torch.float32, torch.device("cpu"))
    (cache,) = allocate_caches([layer], 2, 24, torch.float32, torch.device("cpu"))
    assert cache.key.shape == (2, 8, 1, 8)
