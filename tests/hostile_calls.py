"""Public names with valid arguments, and the tiny objects that they belong to, for an attack from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import write_eagle3, write_target
from torch import Tensor

import specgraph as sg
from specgraph import api, attention, checkpoints, engine, models, parallel
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder, TextGenerator

TOKENS = [1, 2, 3, 4, 5]
PUBLIC = {
    name: getattr(module, name)
    for module in (api, attention, checkpoints, engine, models, parallel)
    for name in module.__all__
}


class World:
    """Objects under attack, made when they are first asked for and again where one was closed."""

    def __init__(self, folder: Path) -> None:
        self.target_folder, self.draft_folder = write_target(folder / "target"), write_eagle3(folder / "draft")
        self.platform = sg.open_platform("cpu")
        self.target = sg.load_target(self.target_folder)
        self.head = sg.load_drafter(self.draft_folder, self.target)
        self.draft_config = sg.DraftConfig(
            num_speculative_tokens=2, max_num_requests=2, max_model_len=64, block_size=4, decode="eager", debug=True
        )
        self.engine_config = EngineConfig(
            num_speculative_tokens=2, max_num_requests=2, max_model_len=64, block_size=4, decode="eager", sampled=True,
            sampling_parameters=True,
        )  # fmt: skip
        self.ask = {"prompt_token_ids": TOKENS, "max_tokens": 4}

    @property
    def request(self) -> Request:
        return Request(**self.ask)

    @cached_property
    def caches(self) -> list[sg.KVCache]:
        return sg.allocate_caches(self.head.attention_layers, 40, 4, torch.float32, torch.device("cpu"))

    def make_drafter(self) -> sg.Drafter:
        drafter = sg.Drafter(self.head, self.caches, self.platform, self.draft_config)
        drafter.capture()
        return drafter

    def make_decoder(self) -> SpeculativeDecoder:
        decoder = SpeculativeDecoder(self.target, self.head, self.platform, self.engine_config)
        decoder.capture()
        return decoder

    def make_generator(self) -> TextGenerator:
        return sg.load_generator(
            max_model_len=64, decode="eager", num_speculative_tokens=2, sampled=True, max_num_requests=2
        )

    @cached_property
    def drafter(self) -> sg.Drafter:
        return self.make_drafter()

    @cached_property
    def decoder(self) -> SpeculativeDecoder:
        return self.make_decoder()

    @cached_property
    def generator(self) -> TextGenerator:
        return self.make_generator()

    @cached_property
    def module(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 4)

    @cached_property
    def aux(self) -> Tensor:
        return torch.randn(5, self.head.aux_size, generator=torch.Generator().manual_seed(1))

    def round(self) -> dict[str, Tensor]:
        """Return the tensors of a round after the prompt of 5 tokens, of which one token was sampled."""
        return {
            "sampled_token_ids": torch.tensor([[7, 0, 0]]), "num_sampled": torch.tensor([1], dtype=torch.int32),
            "start_positions": torch.tensor([4]), "aux_hidden": self.aux[:3].clone(),
            "block_table": torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
        }  # fmt: skip

    def good(self, thing: str) -> list[int]:
        """Return the tokens of a known good call."""
        if thing == "drafter":
            self.drafter.prefill(TOKENS, range(5), [1, 2, 3, 4], self.aux)
            return self.drafter.propose(sg.ProposeBatch(**self.round())).token_ids.tolist()
        if thing == "decoder":
            return self.decoder.generate([self.request])[0].token_ids
        if thing == "generator":
            return self.generator.generate([replace(self.request, max_tokens=2)])[0].token_ids
        return []

    def finish(self, engine: SpeculativeDecoder | TextGenerator, added: int) -> None:
        """Step until the request that was added is finished, by a chunk."""
        for _ in range(200):
            if any(chunk.request == added and chunk.finish_reason for chunk in engine.step()):
                return
        raise AssertionError(f"request {added} is gone")


@dataclass(frozen=True)
class Call:
    """A public name with valid arguments."""

    name: str
    make: Callable[[World], tuple[Callable[..., Any], dict[str, Any]]]
    take: tuple[str, ...] = ()
    """Sorts of values that its arguments may have besides those of the valid ones."""

    @property
    def thing(self) -> str:
        """The object that must work on after the call: "drafter", "decoder", "generator" or none."""
        return self.name.partition(".")[0] if "." in self.name else ""


def call(name: str, *take: str, use: Callable[[World, Callable[..., Any]], Callable[..., Any]] | None = None,
         valid: Callable[[World], dict[str, Any]]) -> Call:  # fmt: skip
    """Return the call of a public name or, with a dot, of a method of a world's object.

    Args:
        use: makes of the name the function that is called with the arguments.
    """

    def make(world: World) -> tuple[Callable[..., Any], dict[str, Any]]:
        thing, _, method = name.partition(" ")[0].rpartition(".")
        function = getattr(getattr(world, thing), method) if thing else PUBLIC[method]
        return use(world, function) if use else function, valid(world)

    return Call(name, make, take)


def closed_again(_: World, make: Callable[..., Any]) -> Callable[..., None]:
    return lambda **kw: make(**kw).close()


def to_its_end(_: World, stream: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **kw: list(islice(stream(**kw), 99))


def engine_calls(thing: str) -> list[Call]:
    def added(world: World, add: Callable[..., int]) -> Callable[..., None]:
        return lambda request: world.finish(getattr(world, thing), add(request))

    return [
        call(f"{thing}.generate", valid=lambda w: {"requests": [w.request, w.request]}),
        call(f"{thing}.stream", use=to_its_end, valid=lambda w: {"requests": [w.request, w.request]}),
        call(f"{thing}.cancel", valid=lambda w: {"request_id": 99}),
        call(f"{thing}.add", use=added, valid=lambda w: {"request": w.request}),
    ]


SAMPLING = {"temperature": 0.5, "seed": 3}
RUNNER = {
    "num_speculative_tokens": 3, "max_num_requests": 4, "capture_sizes": [1, 4], "prefill_sizes": [8],
    "decode": "eager", "prefill": "eager", "fallback": "eager", "check_inputs": False, "debug": False, "sampled": True,
    "draft_sampling": "greedy", "max_model_len": 64, "block_size": 4, "draft_schedule": {1: 3, 4: 2},
}  # fmt: skip
ENGINE = RUNNER | {
    "num_blocks": 90, "kv_cache_dtype": "auto", "rounds_ahead": 1, "sampling_parameters": True, "logprobs": True
}  # fmt: skip
FLOAT = {"dtype": torch.float32}
CALLS = [
    call("Request", "none", valid=lambda w: {
        "prompt_token_ids": [1, 2], "max_tokens": 2, **SAMPLING, "stop_token_ids": [5], "top_k": 4, "top_p": 0.9,
        "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "logit_bias": {3: 1.0}}),
    call("DraftTree", valid=lambda w: {"num_steps": 3, "top_k": 2, "num_draft_tokens": 4}),
    call("DraftConfig", "none", valid=lambda w: RUNNER),
    call("EngineConfig", "none", valid=lambda w: ENGINE),
    call("EngineOptions", "none", "dtype", valid=lambda w: {
        **ENGINE, "kv_memory": 10.0, "memory_fraction": 0.5, "attention": "auto", "dtype": "float32",
        "tensor_parallel": 1, "data_parallel": 1, "enable_expert_parallel": False, "rank_timeout": 5.0}),
    call("open_platform", "none", valid=lambda w: {"name": "cpu"}),
    call("allocate_caches", valid=lambda w: {
        "layers": list(w.head.attention_layers), "num_blocks": 3, "block_size": 4, **FLOAT,
        "device": torch.device("cpu")}),
    call("allocate_sampling", valid=lambda w: {"requests": 2, "vocab_size": 9, "device": torch.device("cpu")}),
    call("choose_attention", "none", valid=lambda w: {
        "name": "auto", "platform": w.platform, "layers": list(w.head.attention_layers), **FLOAT, "block_size": 4,
        "trees": False}),
    call("target_shape", "none", "device", valid=lambda w: {
        "target": w.target_folder, "device": "cpu", **FLOAT, "max_model_len": 64}),
    call("load_target", "none", "device", valid=lambda w: {
        "folder": w.target_folder, "device": "cpu", **FLOAT, "max_model_len": 64, "keep_fp8": False}),
    call("load_drafter", "none", valid=lambda w: {
        "folder": w.draft_folder, "target": w.target, **FLOAT, "keep_fp8": False}),
    call("drafter_format", valid=lambda w: {"folder": w.draft_folder}),
    call("NgramHead", valid=lambda w: {"draft_vocab_size": 96, "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
    call("eagle_head_from_module", valid=lambda w: {"module": w.module}),
    call("eagle3_head_from_module", valid=lambda w: {"module": w.module, "draft_to_target": torch.zeros(3).long()}),
    call("load_generator", "none", "text", "type", "builtin_function_or_method", use=closed_again, valid=lambda w: {
        "target": None, "draft": None, "platform": "cpu", "speculate": False, "progress": None, "options": None,
        "max_model_len": 64, "decode": "eager", "num_blocks": 20}),
    call("Drafter", use=closed_again, valid=lambda w: {
        "head": w.head, "caches": w.caches, "platform": w.platform, "config": w.draft_config, "attention": None,
        "sampling": None}),
    call("SpeculativeDecoder", "none", use=closed_again, valid=lambda w: {
        "target": w.target, "head": w.head, "platform": w.platform, "config": w.engine_config, "query_len": None,
        "attention": None, "layout": None}),
    *engine_calls("decoder"),
    *engine_calls("generator"),
    call("decoder.check", valid=lambda w: {"request": w.request}),
    call("decoder.generate request", "none", use=lambda w, generate: lambda **kw: generate([w.request, Request(**kw)]),
         valid=lambda w: {**w.ask, **SAMPLING, "stop_token_ids": [5], "top_k": 4, "logit_bias": {3: 1.0}}),
    call("decoder.add request", "none", use=lambda w, add: lambda **kw: w.finish(w.decoder, add(Request(**kw))),
         valid=lambda w: {**w.ask, **SAMPLING}),
    call("decoder.capture", "type", "builtin_function_or_method", valid=lambda w: {"progress": None}),
    call("generator.request", "none", valid=lambda w: {
        "prompt": "def f", "max_tokens": 2, **SAMPLING, "chat": False, "top_k": 4, "chat_template_kwargs": {}}),
    call("generator.requests", "none", valid=lambda w: {"prompt": "def f", "max_tokens": 2, **SAMPLING, "n": 2}),
    call("generator.text", "none", "text", valid=lambda w: {"prompts": ["def f"], "n": 2, "max_tokens": 2, **SAMPLING}),
    call("generator.stream_text", "none", "text", use=to_its_end, valid=lambda w: {
        "prompt": "def f", "max_tokens": 3, "stop": ["x"], **SAMPLING}),
    call("drafter.propose", use=lambda w, propose: lambda **kw: propose(sg.ProposeBatch(**kw)),
         valid=lambda w: w.round()),
    call("drafter.propose options", "none", "type", "builtin_function_or_method", valid=lambda w: {
        "batch": sg.ProposeBatch(**w.round()), "host_start_positions": [4], "host_num_sampled": [1], "copy": True,
        "num_speculative_tokens": 2}),
    call("drafter.prefill", "none", valid=lambda w: {
        "prompt": TOKENS, "positions": range(5), "blocks": [1, 2, 3, 4], "aux_hidden": w.aux, "at_least": 0}),
    call("drafter.inputs", "none", valid=lambda w: {"num_requests": 1, "query_len": 3, "bound": None}),
    call("drafter.dispatch", "none", valid=lambda w: {"num_requests": 1, "query_len": 3}),
    call("drafter.bind", valid=lambda w: {"tensors": sg.ProposeBatch(**w.round())}),
    call("AttentionLayer", "none", valid=lambda w: {
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.5, "rotary": torch.zeros(9, 8), "causal": True,
        "window": 3, "sinks": torch.zeros(4), "latent": False}),
    call("join_ranks", valid=lambda w: {
        "device": torch.device("cpu"), "size": 1, "timeout": 5.0, "init_method": "env://", "rank": 0}),
    call("join_layout", valid=lambda w: {
        "device": torch.device("cpu"), "tensor_parallel": 1, "data_parallel": 1, "expert_parallel": False,
        "timeout": 5.0, "rank": 0}),
    call("Drafter KVCache", use=lambda w, make: lambda key, value: make(
        w.head, [sg.KVCache(key, value)], w.platform, w.draft_config).close(),
         valid=lambda w: w.caches[0]._asdict()),
    call("drafter.inputs join", use=lambda w, inputs: inputs(1).join, valid=lambda w: {
        "row": 0, "token_id": torch.tensor(3), "aux_hidden": w.aux[0]}),
]  # fmt: skip
