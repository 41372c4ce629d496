"""Public names with valid arguments, and the tiny objects that they belong to, for an attack from outside."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import specgraph_models
import specgraph_run
import torch
from specgraph_models import checkpoints, parallel
from specgraph_plugin import ProposeCounts
from specgraph_run.decoder import DecoderOptions, Request, SamplingBuffers, SpeculativeDecoder, allocate_sampling
from specgraph_run.text import TextGenerator
from tiny_checkpoints import write_eagle3, write_target
from torch import Tensor

import specgraph as sg
from specgraph import api, attention, draft
from specgraph import parallel as core_parallel
from specgraph.ops import Weight

TOKENS = [1, 2, 3, 4, 5]
PUBLIC = {
    name: getattr(module, name)
    for module in (
        api,
        attention,
        draft,
        core_parallel,
        specgraph_models,
        parallel,
        checkpoints,
        specgraph_run,
        specgraph_run.decoder,
    )
    for name in module.__all__
} | {"ProposeCounts": ProposeCounts}


class World:
    """Objects under attack, made when they are first asked for and again where one was closed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, count()
        self.target_folder, self.draft_folder = write_target(folder / "target"), write_eagle3(folder / "draft")
        self.platform = sg.open_platform("cpu")
        self.target = specgraph_models.load_target(self.target_folder)
        self.head = specgraph_models.load_drafter(self.draft_folder, self.target)
        self.draft_config = sg.DraftConfig(
            num_speculative_tokens=2, max_num_requests=2, max_model_len=64, block_size=4, decode="eager", debug=True
        )
        self.decoder_config = sg.DraftConfig(
            num_speculative_tokens=2, max_num_requests=2, max_model_len=64, block_size=4, decode="eager", sampled=True
        )
        self.decoder_options = DecoderOptions(sampling_parameters=True)
        self.ask = {"prompt_token_ids": TOKENS, "max_tokens": 4}

    @cached_property
    def draft_vocab(self) -> Path:
        path = self.folder / "draft-vocab.npy"
        numpy.save(path, numpy.arange(40))
        return path

    @property
    def request(self) -> Request:
        return Request(**self.ask)

    @cached_property
    def caches(self) -> list[sg.KVCache]:
        return sg.allocate_caches(self.head.attention_layers, 40, 4, torch.float32, torch.device("cpu"))

    @cached_property
    def other_cache(self) -> sg.KVCache:
        return sg.KVCache(*(torch.zeros_like(part) for part in self.caches[0]))

    @cached_property
    def sampling(self) -> SamplingBuffers:
        return allocate_sampling(2, self.target.vocab_size, torch.device("cpu"))

    def make_drafter(self) -> sg.Drafter:
        drafter = sg.Drafter(self.head, self.caches, self.platform, self.draft_config)
        drafter.capture()
        return drafter

    def make_decoder(self) -> SpeculativeDecoder:
        decoder = SpeculativeDecoder(self.target, self.head, self.platform, self.decoder_config, self.decoder_options)
        decoder.capture()
        return decoder

    def make_generator(self) -> TextGenerator:
        return specgraph_run.load_generator(
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

    def largest_round(self) -> dict[str, Tensor]:
        """Return the tensors of a round of the largest batch."""
        aux = torch.cat([self.aux[:3], self.aux[:3]])
        return {name: torch.cat([each, each]) for name, each in self.round().items()} | {"aux_hidden": aux}

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


def decoder_calls(thing: str) -> list[Call]:
    def added(world: World, add: Callable[..., int]) -> Callable[..., None]:
        return lambda request: world.finish(getattr(world, thing), add(request))

    return [
        call(f"{thing}.generate", valid=lambda w: {"requests": [w.request, w.request]}),
        call(f"{thing}.stream", use=to_its_end, valid=lambda w: {"requests": [w.request, w.request]}),
        call(f"{thing}.cancel", valid=lambda w: {"request_id": 99}),
        call(f"{thing}.add", use=added, valid=lambda w: {"request": w.request}),
    ]


HEAD = (
    "kind", "attention_layers", "hidden_size", "draft_vocab_size", "aux_layers", "aux_size", "dtype", "draft_to_target",
    "pair_input", "projection", "combine", "forward", "logits", "weights",
)  # fmt: skip
ATTENTION = (
    "name", "host_parameters", "after_advance", "forward", "named_tensors", "preferred_block_size", "cache_dtypes",
    "supports", "supports_trees",
)  # fmt: skip


def changed(head: Any, **members: Any) -> SimpleNamespace:
    """Return a head like another one, with some other members."""
    return SimpleNamespace(**{name: getattr(head, name) for name in HEAD} | members)


def changed_layer(world: World, fields: dict[str, Any]) -> SimpleNamespace:
    return changed(world.head, attention_layers=[attention.AttentionLayer(**fields)])


def drafting(
    made: Callable[[World, dict[str, Any]], dict[str, Any]],
) -> Callable[[World, Callable[..., Any]], Callable[..., Any]]:
    """Make the call that drafts a round, and one of trees, with what `made` makes of its arguments."""

    def use(world: World, make: Callable[..., Any]) -> Callable[..., Any]:
        def draft(**given: Any) -> None:
            tree = sg.DraftTree(num_steps=2, top_k=2, num_draft_tokens=4)
            for config in (world.draft_config, replace(world.draft_config, tree=tree, debug=False)):
                own = {"head": world.head, "caches": world.caches, "platform": world.platform, "config": config}
                drafter = make(**own | made(world, given))
                drafter.capture()
                drafter.prefill(TOKENS, range(5), [1, 2, 3, 4], world.aux)
                drafter.propose(sg.ProposeBatch(**world.round()))
                drafter.close()

        return draft

    return use


def as_text(value: Any) -> str:
    """Return a value as a variable of the environment holds it."""
    try:
        return str(value).replace("\0", "").encode(errors="replace").decode()
    except ValueError:  # too many digits
        return "9" * 5000


def joined_by(_: World, join: Callable[..., Any]) -> Callable[..., None]:
    """Make the call that joins one rank by the variables that are its arguments."""

    def call(**variables: Any) -> None:
        before = dict(os.environ)
        os.environ.update({name: as_text(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
        try:
            join(torch.device("cpu"), 1, timeout=5.0).close()
        finally:
            os.environ.clear()
            os.environ.update(before)

    return call


def alone(method: Callable[[Any], Callable[..., Any]]) -> Callable[[World, Any], Callable[..., Any]]:
    """Make the call of a method of ranks that are one."""

    def use(world: World, _: Any) -> Callable[..., Any]:
        def call(**given: Any) -> None:
            ranks = parallel.join_ranks(
                torch.device("cpu"),
                1,
                timeout=5.0,
                init_method=f"file://{world.folder / str(next(world.numbers))}",
                rank=0,
            )
            try:
                method(ranks)(**given)
            finally:
                ranks.close()

        return call

    return use


def attended(world: World) -> dict[str, Any]:
    """Return the arguments of an attention's forward pass over the rows of a round."""
    layer, metadata = world.head.attention_layers[0], world.drafter.buffers.first.views(1, rows=3)
    query = torch.ones(3, layer.num_heads, layer.head_dim)
    key = torch.ones(3, layer.num_kv_heads, layer.head_dim)
    context = attention.ForwardContext(metadata)
    return {"layer": layer, "query": query, "key": key, "value": key, "cache": world.other_cache, "context": context}


SAMPLING = {"temperature": 0.5, "seed": 3}
RUNNER = {
    "num_speculative_tokens": 3, "max_num_requests": 4, "capture_sizes": [1, 4], "prefill_sizes": [8],
    "decode": "eager", "prefill": "eager", "fallback": "eager", "check_inputs": False, "debug": False, "sampled": True,
    "draft_sampling": "greedy", "max_model_len": 64, "block_size": 4, "draft_schedule": {1: 3, 4: 2},
}  # fmt: skip
DECODER = {
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
    call("DecoderOptions", "none", valid=lambda w: DECODER),
    call("GeneratorOptions", "none", "dtype", valid=lambda w: {
        **RUNNER, **DECODER, "kv_memory": 10.0, "memory_fraction": 0.5, "attention": "auto", "dtype": "float32",
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
    call("read_draft_vocab", "none", valid=lambda w: {"path": w.draft_vocab, "target": None}),
    call("cut_vocabulary", valid=lambda w: {
        "head": specgraph_models.load_drafter(w.draft_folder, w.target),
        "vocabulary": checkpoints.read_draft_vocab(w.draft_vocab)}),
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
        "target": w.target, "head": w.head, "platform": w.platform, "config": w.decoder_config,
        "options": w.decoder_options, "query_len": None, "attention": None, "layout": None}),
    *decoder_calls("decoder"),
    *decoder_calls("generator"),
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
    call("SamplingBuffers", use=lambda w, make: lambda **kw: sg.Drafter(
        w.head, w.caches, w.platform, replace(w.draft_config, sampled=True), sampling=make(**kw)).close(),
        valid=lambda w: w.sampling._asdict()),
    call("SamplingBuffers sliced", use=lambda w, _: w.sampling.sliced, valid=lambda w: {"rows": slice(0, 1)}),
    call("DraftTokens", "none", use=lambda w, make: lambda **kw: make(**kw).clone().query_len,
         valid=lambda w: {
             "token_ids": torch.zeros(2, 3).long(), "probs": torch.ones(2, 3, 5), "parents": torch.zeros(2, 3).long(),
             "confidence": torch.ones(2, 3), "dispatch": w.drafter.dispatch(1)}),
    call("BoundTensors", use=lambda w, make: lambda **kw: make(**kw).sliced(1, 3), valid=lambda w: {
        "number": 1, "tensors": sg.ProposeBatch(**w.largest_round()), "memory": w.drafter.shared,
        "config": w.draft_config}),
    call("BoundTensors fields", use=lambda w, make: lambda **kw: make(
        1, sg.ProposeBatch(**kw), w.drafter.shared, w.draft_config), valid=lambda w: w.largest_round()),
    call("BoundTensors sliced", use=lambda w, make: make(
        1, sg.ProposeBatch(**w.largest_round()), w.drafter.shared, w.draft_config).sliced,
        valid=lambda w: {"num_requests": 1, "query_len": 3}),
    call("ProposeBatch join", use=lambda w, make: lambda **kw: make(**kw).join(0, torch.tensor(3), w.aux[0]),
         valid=lambda w: w.round()),
    call("Drafter head", "none", use=drafting(lambda w, members: {"head": SimpleNamespace(**members)}),
         valid=lambda w: {name: getattr(w.head, name) for name in HEAD}),
    call("Drafter attention", "none", use=drafting(lambda w, members: {"attention": SimpleNamespace(**members)}),
         valid=lambda w: {name: getattr(sg.PagedAttention(), name) for name in ATTENTION}),
    call("Drafter layer", "none", use=drafting(lambda w, fields: {"head": changed_layer(w, fields)}), valid=lambda w: {
        field.name: getattr(w.head.attention_layers[0], field.name)
        for field in dataclasses.fields(attention.AttentionLayer)}),
    call("Drafter two caches", use=lambda w, make: lambda **kw: make(
        changed(w.head, attention_layers=2 * w.head.attention_layers), [*kw.values()], w.platform, w.draft_config
        ).close(),
        valid=lambda w: {"one": w.caches[0], "other": w.other_cache}),
    call("open_platform variables", "integer", "number", "none", "bool", use=lambda w, make: lambda **kw: make(
        environ={name: as_text(value) for name, value in kw.items()}),
        valid=lambda w: {"SPECGRAPH_PLATFORM": "cpu", "LOCAL_RANK": "0"}),
    call("join_ranks variables", "integer", "number", "none", "bool", use=joined_by, valid=lambda w: {
        "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}),
    call("Ranks exchange", use=alone(lambda ranks: ranks.exchange), valid=lambda w: {"what": "a", "values": [1, 2]}),
    call("Ranks same", use=alone(lambda ranks: ranks.same), valid=lambda w: {"what": "a", "values": {"a": 1}}),
    call("Ranks smallest", use=alone(lambda ranks: ranks.smallest), valid=lambda w: {"what": "a", "value": 2}),
    call("Ranks part", use=alone(lambda ranks: ranks.part), valid=lambda w: {"what": "a", "groups": [[0]]}),
    call("ContextParallel", valid=lambda w: {"rank": 0, "size": 2, "group": "a", "gathers_heads": False}),
    call("ExpertParallel", valid=lambda w: {
        "rank": 0, "size": 2, "group": "a", "data_rank": 0, "data_size": 1, "data_group": ""}),
    call("register_ranks", valid=lambda w: {"group": SimpleNamespace(
        name="a", gather_small=lambda what, x: x[None], run=lambda what, function, *tensors: None)}),
    call("unregister_ranks", valid=lambda w: {"name": "none of that name"}),
    call("ranks_named", valid=lambda w: {"name": "none of that name"}),
    call("split_over", "none", valid=lambda w: {"ranks": None}),
    call("TensorParallel", "none", valid=lambda w: {
        "rank": 0, "size": 1, "group": "", "experts": None, "context": None}),
    call("Drafter KVCache", use=lambda w, make: lambda key, value: make(
        w.head, [sg.KVCache(key, value)], w.platform, w.draft_config).close(),
         valid=lambda w: w.caches[0]._asdict()),
    call("OutputProjection logits", "none", use=lambda w, make: lambda hidden, **kw: make(**kw).logits(hidden),
         valid=lambda w: {"norm": torch.ones(4), "eps": 1e-5, "weight": torch.ones(3, 4), "hidden": torch.ones(2, 4)}),
    call("RowLogits tensor", "none", use=lambda w, make: lambda **kw: make(**kw).tensor(), valid=lambda w: {
        "base": torch.ones(2, 3), "x": torch.ones(9, 4), "weight": Weight(torch.ones(3, 4)),
        "row_ids": torch.tensor([1, 8])}),
    call("PagedAttention forward", use=lambda w, make: lambda **kw: make().forward(index=0, **kw),
         valid=attended),
    call("PagedAttention supports", use=lambda w, make: make().supports, valid=lambda w: {
        "layer": w.head.attention_layers[0], "dtype": torch.float32, "block_size": 4}),
    call("AcceptanceMetrics observe", use=lambda w, make: make(3).observe, valid=lambda w: {
        "accepted": [1, 2], "num_speculative_tokens": 3}),
    call("AcceptanceMetrics", valid=lambda w: {"num_speculative_tokens": 3, "num_drafts": 0, "rounds": 1}),
    call("ProposeCounts add", "none", use=lambda w, make: lambda reason, **kw: make(**kw).add(reason), valid=lambda w: {
        "reason": "a", "log": logging.getLogger("specgraph.hostile"), "log_every": 1}),
    call("TensorParallel part", use=lambda w, make: make(0, 2).part, valid=lambda w: {"total": 4}),
    call("TensorParallel check", "none", use=lambda w, make: make(0, 2).check, valid=lambda w: {
        "heads": (4, 2), "inner": 4, "what": "a"}),
    call("drafter.prepare", valid=lambda w: {
        "program": w.drafter.program, "batch": w.drafter.dispatch(1).descriptor, "captured": True}),
    call("drafter.run", "none", valid=lambda w: {
        "ready": w.drafter.prepare(w.drafter.program, w.drafter.dispatch(1).descriptor)}),
    call("drafter.inputs join", "integer", use=lambda w, inputs: inputs(1).join, valid=lambda w: {
        "row": 0, "token_id": torch.tensor(3), "aux_hidden": w.aux[0]}),
]  # fmt: skip
