"""Dense attention for models under test, and tiny random checkpoints written by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from changed_folders import FIXTURES
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_run.decoder import Request, SpeculativeDecoder
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer, PagedAttention, PagedHostAttention
from specgraph.cpu import CpuPlatform

DenseAttend = Callable[..., Attend]


def rotated(x: Tensor, layer: AttentionLayer, positions: Tensor) -> Tensor:
    """x [T, heads, head_dim], turned pairwise (i, i + head_dim / 2) by the layer's table."""
    if layer.rotary is None:
        return x
    cos, sin = layer.rotary[positions].to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    turned, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """`copied(name)`: a fixture's folder, to be changed."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name, tmp_path / name))

    return copy


@pytest.fixture
def dense_attend() -> DenseAttend:
    """`dense_attend(layers, positions)`: one sequence, every row attends to rows at or before it (all if not causal).

    `caches`, a dict, keeps rotated keys and values between calls, as a decode loop would.
    """

    def make(layers, positions: Tensor, caches: dict[int, tuple[Tensor, Tensor]] | None = None) -> Attend:
        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            layer = layers[index]
            query, key = rotated(query, layer, positions), rotated(key, layer, positions)
            if caches is not None:
                if index in caches:
                    key, value = torch.cat((caches[index][0], key)), torch.cat((caches[index][1], value))
                caches[index] = (key, value)
            repeat = layer.num_heads // layer.num_kv_heads
            keys, values = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
            scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.scale
            if layer.causal:
                rows, columns = query.shape[0], keys.shape[0]
                visible = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
                if layer.window is not None:
                    visible = visible.triu(columns - rows - layer.window + 1)
                scores = scores.masked_fill(~visible, float("-inf"))
            if layer.sinks is not None:
                sinks = layer.sinks[:, None, None].expand(-1, query.shape[0], 1)
                weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
                return torch.einsum("hqk,khd->qhd", weights, values)
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

        return attend

    return make


@pytest.fixture
def dense_store() -> Callable:
    """`dense_store(layers, positions, caches)`: rotates keys and appends both to what `dense_attend` reads."""

    def make(layers, positions: Tensor, caches: dict[int, tuple[Tensor, Tensor]]):
        def store(index: int, key: Tensor, value: Tensor) -> None:
            key = rotated(key, layers[index], positions)
            if index in caches:
                key, value = torch.cat((caches[index][0], key)), torch.cat((caches[index][1], value))
            caches[index] = (key, value)

        return store

    return make


@pytest.fixture
def chain_logits(dense_attend) -> Callable:
    """`chain_logits(head, ids, states, row, steps)`: logits at `row` of a prompt's pass, then of steps of one row.

    `ids` are the tokens after each row, 0 beyond them.
    """

    def run(head, ids: Tensor, states: Tensor, row: int, steps: int) -> list[Tensor]:
        caches: dict[int, tuple[Tensor, Tensor]] = {}
        attend = dense_attend(head.attention_layers, torch.arange(row + 1), caches)
        out = head.forward(ids[: row + 1], head.combine(states)[: row + 1], attend)
        logits = [head.logits(out.hidden)[-1]]
        for place in range(row + 1, row + steps):
            token = ids[place : place + 1] if place < len(ids) else torch.tensor([0])
            out = head.forward(
                token, out.carry[-1:], dense_attend(head.attention_layers, torch.tensor([place]), caches)
            )
            logits.append(head.logits(out.hidden)[0])
        return logits

    return run


@pytest.fixture
def block_rows(dense_attend, dense_store) -> Callable:
    """`block_rows(head, token, states, anchor, masks)`: what leaves a block at `anchor`, behind the rows before it."""

    def run(head, token: int, states: Tensor, anchor: int, masks: int) -> Tensor:
        caches: dict[int, tuple[Tensor, Tensor]] = {}
        layers, rows = head.attention_layers, torch.arange(anchor, anchor + 1 + masks)
        head.store_context(head.combine(states)[:anchor], dense_store(layers, torch.arange(anchor), caches))
        ids = torch.tensor([token, *[head.mask_token_id] * masks])
        return head.forward(ids, dense_attend(layers, rows, caches))

    return run


@pytest.fixture
def block_logits(block_rows) -> Callable:
    """`block_logits(head, token, states, anchor, masks)`: the logits of `block_rows`."""
    return lambda head, *block: head.logits(block_rows(head, *block))


@pytest.fixture
def decoded() -> Callable:
    """`decoded(target, head, prompts, max_tokens, **options)`: greedy tokens of each prompt, and the closed decoder.

    K = 3, 32 positions and eager prefill passes unless told. Without a head it decodes at the shape of the verify pass,
    which gives the same bits.
    """

    def run(target, head, prompts, max_tokens: int, attention: str = "device", **options):
        platform = CpuPlatform()
        sizes = {"num_speculative_tokens": 3, "max_num_requests": 2, "max_model_len": 32, "block_size": 4}
        passes = {"prefill": "eager", "prefill_sizes": [8]}
        config, chosen = decoder_settings(**{**sizes, "capture_sizes": [2], **passes, **options})
        backend = PagedHostAttention(platform) if attention == "host" else PagedAttention()
        decoder = SpeculativeDecoder(
            target, head, platform, config, chosen, query_len=config.query_len, attention=backend
        )
        decoder.capture()
        requests = [Request(prompt_token_ids=list(prompt), max_tokens=max_tokens) for prompt in prompts]
        results = decoder.generate(requests)
        decoder.close()
        platform.close()
        return [result.token_ids for result in results], decoder

    return run


TINY = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def random_model() -> Callable:
    """`random_model(architecture, folder, **config)`: a transformers model with all weights random, saved to folder."""
    transformers = pytest.importorskip("transformers")

    def make(architecture: str, folder: Path, **config):
        shard = config.pop("max_shard_size", "1GB")
        torch.manual_seed(0)
        model_class = getattr(transformers, f"{architecture}ForCausalLM")
        named = "Gemma3Text" if architecture == "Gemma3" else architecture
        settings = getattr(transformers, f"{named}Config")(**{**TINY, "pad_token_id": 0, **config})
        settings._attn_implementation = "eager"
        model = model_class(settings).to(torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases start as ones and zeros: make them matter
                parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 4)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(-1.0, 0.2)  # most corrected scores are below 0, the score of no expert
        model.save_pretrained(folder, max_shard_size=shard)
        return model

    return make
