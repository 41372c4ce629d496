"""The tasks of each of two ranks in test_tensor_parallel.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from zlib import crc32

import torch
from engine_rounds import Engine
from mixtures import Group, forward_context
from specgraph_models.decoder import DecoderModel
from specgraph_models.parallel.join import ranks_of_groups
from specgraph_plugin.vllm.mtp import mtp_parts
from specgraph_vllm import plugin
from specgraph_vllm.names import FORWARD_CONTEXT, TENSOR_PARALLEL
from test_prompts import Load
from vllm_objects import StockSpeculator, batch_class, vllm_config

KINDS = {
    "shipped": 6, "mtp": 3, "dflash": 3, "dspark": 3, "target as drafter": 3, "glm": 3, "qwen": 3, "deepseek": 3,
}  # fmt: skip
"""Proposes of each kind; the target as its own drafter is a language model of eight layers."""


def started(ranks, kind: str, change=None, **settings) -> Engine:
    """The engine of this rank. `ranks` stand for vLLM's group: its process groups are all that is taken of them."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), kind, ranks=ranks_of_groups(ranks.device, ranks.host), **settings)
    if change is not None:
        change(engine)
    engine.start()
    return engine


def draft(ranks) -> list[list[int]]:
    """For each kind: proposes, drafts compared with those of the whole module, those that differ, comparisons between
    the ranks, and weights that are not split as the head says."""
    found = []
    for kind, number in KINDS.items():
        engine = started(ranks, kind, compare_every=4, capture_sizes=[3])
        load, compared, wrong, proposes = Load(engine, 5, 40), 0, 0, 0
        before = engine.speculator.specgraph.ranks.exchanges
        while proposes < number:
            if load.draw(0, 2) == 0:
                load.arrive()
            if work := load.work():
                proposes += 1
                for got, want in zip(*engine.mixed(work), strict=True):
                    compared += want is not None
                    wrong += want is not None and got.tolist() != want
            load.leave()
        assert engine.speculator.counts.by_reason == {"specgraph": proposes}
        exchanges = engine.speculator.specgraph.ranks.exchanges - before
        found.append([proposes, compared, wrong, exchanges, mislabelled(engine.speculator)])
        engine.speculator.fast_path.drafter.close()
        engine.speculator.specgraph.ranks.close()
    return found


def mislabelled(speculator) -> list[str]:
    """The weights that are the same on both ranks and should be parts, or the other way round; of a mixture of vLLM's
    nothing is told apart."""
    parts, wrong = speculator.specgraph.head.rank_parts(), []
    for name, tensor in speculator.specgraph.head.weights().items():
        digest = crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        one, other = speculator.specgraph.ranks.exchange(name, [digest])
        if tensor.numel() and (one != other) != (name in parts) and ".mlp." not in name:
            wrong.append(name)
    return wrong


def drift(ranks, what: str) -> str:
    """Rank 1 is another one, in what is supported, in a whole projection, in a token, or by an error in a propose; or
    both ranks take a part for a whole weight."""

    def change(engine: Engine) -> None:
        if ranks.rank and what == "support":
            engine.speculator.kv_cache_config.kv_cache_groups = []
        if ranks.rank and what == "weight":
            mtp_parts(engine.module).projection.weight.data.mul_(2)

    if what == "label":
        of = DecoderModel.rank_parts
        DecoderModel.rank_parts = lambda head: of(head) - {"layers.0.down"}
    kind = "mtp" if what == "weight" else "shipped"
    engine = started(ranks, kind, change, compare_every=2, capture_sizes=[1], when_unsupported="vllm")
    engine.prompt(0, 9)
    for count in (2, 1, 3, 1):
        if ranks.rank and what == "token":
            engine.g.manual_seed(9)
        if ranks.rank and what == "error":
            raise ValueError("of this rank alone")
        engine.round([0], [count])
    return "nothing was noticed"


def wrap(ranks) -> str:
    """`init_speculator` of a configuration for two ranks, and what vLLM's modules sum up in its context."""
    group = Group()
    group.device_group, group.cpu_group = ranks.device, ranks.host
    named = {"InputBatch": batch_class(), TENSOR_PARALLEL[1]: lambda: group, FORWARD_CONTEXT[1]: forward_context}
    make = plugin.wrapped(lambda *args: StockSpeculator(*args[:2]), lambda module, name: named[name])
    made = make(vllm_config(parallel_config__tensor_parallel_size=2), torch.device("cpu"), "req_states")
    with made._forward_context(None, made.vllm_config, num_tokens=1):
        total = group.all_reduce(torch.tensor([1.0, ranks.rank])).tolist()
    return f"{type(made).__name__} {made.specgraph.ranks.rank} of {made.specgraph.ranks.members}: {total}"
