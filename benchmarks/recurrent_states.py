"""Times verifies of Qwen3-Next-80B-A3B and Qwen3.5-27B by K, with random weights, and the states in them.

    python benchmarks/recurrent_states.py states.json

- verify: one verify of a target with one or two groups of layers (three recurrent ones, one with attention), its graph
  replayed at 1,000 tokens of context. Each request has K + 1 records to fold, the most that a round can leave, or none;
  the difference is the fold. `whole_model_us` is the time of one group plus the difference of two groups and one for
  each further group: an extrapolation, the whole model was not run.
- op: one recurrent layer's op alone, 10 calls in a graph; the bytes of all layers' states; and the time that moving one
  layer's states would take at 4.8 TB/s.
- prompt: the same op for a prompt's 512 rows.

Parts that would begin after --seconds are left out, and the file names them. It is written after each row. Other
platforms than cuda run tiny sizes: they show that the script works, and their times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from specgraph_models import ops
from specgraph_models.config import ModelConfig
from specgraph_models.delta import DeltaConfig, DeltaNet
from specgraph_models.experts import ExpertsConfig
from specgraph_models.layers import DecoderLayer
from specgraph_models.llama import LlamaTarget
from specgraph_models.ops.delta import DeltaWeights, StateRows
from specgraph_models.rotary import RotaryConfig
from specgraph_run.decoder import SpeculativeDecoder
from specgraph_run.decoder.states import RequestStates, bytes_per_request
from specgraph_run.options import DecoderOptions
from specgraph_run.tools.shapes import RandomWeights
from specgraph_run.tools.timing import device_time

from specgraph import open_platform
from specgraph.attention import choose_attention
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.draft.ngram import NgramHead

GROUP = (True, True, True, False)
"""The layers of a group: True if it is recurrent."""


@dataclass(frozen=True)
class Asked:
    """The sizes of a run."""

    requests: Sequence[int]
    ks: Sequence[int]
    context: int
    prompt_rows: int
    models: dict[str, ModelConfig]


def model(layers: int, delta: DeltaConfig, experts: ExpertsConfig | None, *sizes: int) -> ModelConfig:
    """sizes: vocabulary, hidden, intermediate, heads, KV heads, head_dim."""
    vocab, hidden, inner, heads, kv_heads, head_dim = sizes
    return ModelConfig(
        architecture="qwen3_next" if experts else "qwen3_5_text", vocab_size=vocab, hidden_size=hidden,
        intermediate_size=inner, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=1e-6, max_position_embeddings=2048, tie_word_embeddings=False, dtype=torch.bfloat16,
        rotary=RotaryConfig(theta=1e7), rotary_dim=head_dim // 4, qk_norm=True, output_gate=True, experts=experts,
        delta=delta,
    )  # fmt: skip


def delta(heads: int) -> DeltaConfig:
    return DeltaConfig(key_heads=16, value_heads=heads, key_size=128, value_size=128, kernel=4)


MIXTURE = ExpertsConfig(num_experts=512, top_k=10, inner=512, layers=(True,), shared_inner=512, shared_gated=True)
TINY = DeltaConfig(key_heads=2, value_heads=4, key_size=8, value_size=8, kernel=4)
FULL = Asked((1, 16, 64), (0, 1, 3, 5), 1000, 512, {
    "Qwen3.5-27B": model(64, delta(48), None, 248320, 5120, 17408, 24, 4, 256),
    "Qwen3-Next-80B-A3B": model(48, delta(32), MIXTURE, 151936, 2048, 5120, 16, 2, 256),
})  # fmt: skip
SHORT = Asked((1, 4), (0, 3), 20, 8, {
    "tiny": model(8, TINY, None, 64, 32, 48, 4, 2, 8),
    "tiny, mixture": model(8, TINY, replace(MIXTURE, num_experts=6, top_k=2, inner=16, shared_inner=12), 64, 32, 48,
                           4, 2, 8),
})  # fmt: skip


def random_target(sizes: ModelConfig, make: RandomWeights, groups: int) -> LlamaTarget:
    """Return a target of some groups of layers, with random weights."""
    made = [layer(sizes, make, recurrent) for recurrent in GROUP * groups]
    table, output = (make.matrix(sizes.vocab_size, sizes.hidden_size) for _ in range(2))
    return LlamaTarget(replace(sizes, num_layers=len(made)), table, made, make.norm(sizes.hidden_size), output)


def layer(sizes: ModelConfig, make: RandomWeights, recurrent: bool) -> DecoderLayer:
    hidden, experts, net = sizes.hidden_size, sizes.experts, sizes.delta
    assert net is not None
    heads, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    rows, inputs = (net.channels + net.values + 2 * net.value_heads, net.values) if recurrent else (0, heads)
    inner = sizes.intermediate_size if experts is None else experts.inner
    norm = None if recurrent else make.norm(sizes.head_dim)
    linear = make.linear if experts is None else partial(make.stacked, experts)
    return DecoderLayer(
        qkv=make.linear(rows or 2 * (heads + kv), hidden), output=make.linear(hidden, inputs),
        post_norm=make.norm(hidden), gate_up=linear(2 * inner, hidden), down=linear(hidden, inner),
        input_norm=make.norm(hidden), query_norm=norm, key_norm=norm,
        experts=experts and replace(make.router(experts, hidden), shared_gate=make.matrix(1, hidden)),
        delta=DeltaNet(net, gate_weights(net, make), make.norm(net.value_size).float()) if recurrent else None,
    )  # fmt: skip


def gate_weights(sizes: DeltaConfig, make: RandomWeights) -> DeltaWeights:
    one = make.norm(sizes.value_heads).float()
    return DeltaWeights(make.matrix(sizes.channels, sizes.kernel), -one / 2, one * 0)


def verifies(platform: Platform, sizes: ModelConfig, asked: Asked, groups: int, repeats: int) -> list[dict[str, Any]]:
    """Time the verify of a target with some groups of layers, for all requests and Ks."""
    target = random_target(sizes, RandomWeights(platform.device, sizes.dtype), groups)
    attention = choose_attention("auto", platform, target.attention_layers, target.dtype).backend
    most = max(*asked.requests, len(asked.ks))
    schedule = dict(enumerate(sorted(asked.ks, reverse=True), most - len(asked.ks) + 1))
    config = DraftConfig(
        num_speculative_tokens=max(asked.ks), max_num_requests=most, max_model_len=asked.context + 64,
        block_size=attention.preferred_block_size, capture_sizes=sorted({*asked.requests, most}),
        draft_schedule=schedule, prefill="eager",
        prefill_sizes=[asked.prompt_rows],
    )  # fmt: skip
    decoder = SpeculativeDecoder(
        target, NgramHead(sizes.vocab_size, 2, 1), platform, config, DecoderOptions(), attention=attention
    )
    runner = decoder.target
    runner.capture()
    states, shared = runner.states, runner.shared
    assert states is not None
    for cache in runner.caches:
        for part in cache:
            part.copy_(torch.randn(part.shape, device=platform.device))
    per_request = shared.block_table.shape[1]
    per_request = min(per_request, (decoder.allocator.num_blocks - 1) // config.max_num_requests)
    for row in range(most):
        blocks = torch.arange(1 + row * per_request, 1 + (row + 1) * per_request)
        shared.block_table[row, :per_request].copy_(blocks)
        states.take(int(blocks[0]), row + 1)
    shared.start_positions.fill_(asked.context)
    rows: list[dict[str, Any]] = []
    for batch in runner.verify_program.batches():
        k, requests = batch.num_speculative_tokens, batch.num_requests
        if k not in asked.ks or requests not in asked.requests:
            continue
        ready = runner.prepare(runner.verify_program, batch)
        took: dict[str, float] = {}
        for name, pending in (("with_fold_us", k + 1), ("without_fold_us", 0)):
            found: list[float] = []
            for _ in range(repeats):
                states.covered.fill_(asked.context - pending)  # the pass moves it on
                call = partial(runner.verify, ready, [asked.context] * requests)
                found += device_time(platform, call, repeats=1, warmup=0)
            took[name] = round(statistics.median(found[3:]), 1)
        rows.append({"groups": groups, "requests": requests, "k": k, **took})
    decoder.close()
    return rows


def whole_models(rows: list[dict[str, Any]], groups: int) -> Iterator[dict[str, Any]]:
    """Yield the extrapolated time of a model of so many groups from the rows of one group and of two."""
    times = {(row["groups"], row["requests"], row["k"]): row for row in rows}
    for (of, requests, k), one in times.items():
        two = times.get((2, requests, k))
        if of == 1 and two is not None:
            name, other = "with_fold_us", "without_fold_us"
            each = two[name] - one[name]
            fold = one[name] - one[other] + (groups - 1) * (each - (two[other] - one[other]))
            whole = one[name] + (groups - 1) * each
            share = round(fold / whole, 4)
            yield {"requests": requests, "k": k, "whole_model_us": round(whole), "fold_share": share}


def one_op(
    platform: Platform, sizes: ModelConfig, requests: int, rows: int, repeats: int, commits: bool = False
) -> dict[str, Any]:
    """Time one layer's op with rows per request, as a verify of that many rows or as a prompt."""
    net, device, most = sizes.delta, platform.device, 4 if commits else rows
    assert net is not None
    make = RandomWeights(device, sizes.dtype)
    state = RequestStates(
        [net], max_num_requests=requests, most_rows=most, num_blocks=requests + 1, dtype=sizes.dtype, device=device
    ).layers[0]
    weights, total = gate_weights(net, make), requests * rows
    mixed, gates = make.matrix(total, net.channels), make.matrix(total, 2 * net.value_heads)

    def places(start: int, pending: int) -> StateRows:
        first, count, folded = (torch.full((requests,), value, device=device) for value in (start, rows, pending))
        slots = torch.arange(1, requests + 1, device=device)
        return StateRows(first, count, slots, folded)

    def took(at: StateRows) -> float:
        return in_graph(platform, lambda: ops.gated_delta_rule(mixed, gates, weights, state, at, commits), repeats)

    if commits:
        return {"requests": requests, "rows": rows, "us": took(places(0, 0))}
    start = 1000
    with_fold, without = took(places(start, rows)), took(places(start, 0))
    layers = sizes.num_layers // len(GROUP) * sum(GROUP)
    moved = 2 * requests * net.value_heads * net.key_size * net.value_size * 4
    return {
        "requests": requests, "k": rows - 1, "with_fold_us": with_fold, "without_fold_us": without,
        "fold_us": round(with_fold - without, 2), "state_traffic_us_at_4.8_TB_s": round(moved / 4.8e6, 2),
        "states_of_all_layers_gib": round(requests * bytes_per_request([net] * layers, rows, sizes.dtype) / 2**30, 3),
    }  # fmt: skip


def all_ops(platform: Platform, sizes: ModelConfig, asked: Asked, repeats: int) -> list[dict[str, Any]]:
    return [one_op(platform, sizes, requests, k + 1, repeats) for requests in asked.requests for k in asked.ks]


def in_graph(platform: Platform, work: Callable[[], Any], repeats: int) -> float:
    """Return the median microseconds of 10 calls in one graph, divided by 10."""
    with platform.use(platform.capture_stream):
        work()
    platform.synchronize()

    def ten() -> None:
        for _ in range(10):
            work()

    graph = platform.graph()
    with graph.capture():
        ten()
    found = device_time(platform, graph.replay, repeats=repeats, warmup=3)
    graph.close()
    return round(statistics.median(found) / 10, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--repeats", type=int, default=23)
    given = parser.parse_args()
    began = time.perf_counter()
    platform = open_platform(given.platform)
    info, asked = platform.info, FULL if given.platform.startswith("cuda") else SHORT
    content: dict[str, Any] = {
        "command": "python benchmarks/recurrent_states.py", "device": info.device_name, "platform": info.name,
        "versions": dict(info.versions), "repeats": given.repeats, "context": asked.context, "left_out": [],
    }  # fmt: skip

    def add(part: str, name: str, make: Callable[[], Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
        if time.perf_counter() - began > given.seconds:
            content["left_out"].append(f"{part} of {name}")
            return []
        rows = list(make())
        content.setdefault(part, []).extend({"model": name, **row} for row in rows)
        content["seconds"] = round(time.perf_counter() - began, 1)
        given.out.write_text(json.dumps(content, indent=1) + "\n")
        for row in rows:
            print(part, name, json.dumps(row), flush=True)
        return rows

    with torch.inference_mode():
        for name, sizes in asked.models.items():
            rows = list[dict[str, Any]]()
            for groups in (1, 2):
                rows += add("verify", name, partial(verifies, platform, sizes, asked, groups, given.repeats))
            add("whole_model", name, partial(whole_models, rows, sizes.num_layers // len(GROUP)))
        for name, sizes in asked.models.items():
            add("op", name, partial(all_ops, platform, sizes, asked, given.repeats))
            prompt = partial(one_op, platform, sizes, 1, asked.prompt_rows, given.repeats, commits=True)
            add("prompt", name, lambda prompt=prompt: [prompt()])
    content["seconds"] = round(time.perf_counter() - began, 1)
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    platform.close()


if __name__ == "__main__":
    main()
