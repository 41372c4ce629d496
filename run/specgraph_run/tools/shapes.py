"""Draft heads by name, with random weights. Their speed depends on their shapes only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from specgraph_models.config import ModelConfig, RotaryConfig
from specgraph_models.decoder import AuxWeights
from specgraph_models.dflash import BlockParts, DFlashHead
from specgraph_models.dflash2 import Convolution, DFlash2Head, Selector
from specgraph_models.domino import Correction, DominoHead
from specgraph_models.dspark import DSparkHead, MarkovHead
from specgraph_models.eagle import EagleHead
from specgraph_models.eagle3 import Eagle3Head
from specgraph_models.experts import Experts, ExpertsConfig
from specgraph_models.layers import DecoderLayer
from specgraph_models.mtp import MtpHead, MtpModule
from torch import Tensor

from specgraph.attention import AttentionBackend, allocate_caches
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter
from specgraph.draft.protocol import Head
from specgraph.ops.linear import Weight, quantised
from specgraph_run.options import StoredWeights

RandomHead = Eagle3Head | EagleHead | MtpHead | DFlashHead


@dataclass(frozen=True, slots=True)
class BenchShape:
    """The sizes of a draft head, or of a target."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int = 3
    """The target's hidden states per token that the head combines. 0 if the head takes the last one unchanged."""
    rope_theta: float = 500000.0
    kind: Literal["eagle3", "eagle1", "mtp", "dflash", "dspark", "dflash2", "domino"] = "eagle3"
    num_layers: int = 1
    block_size: int = 16
    """Rows per block of a DFlash, DSpark, DFlash2 or Domino head."""
    rank: int = 256
    """The size of the vector that a DSpark, DFlash2 or Domino head has for the token before."""
    experts: ExpertsConfig | None = None
    """The mixture in place of the layer's MLP."""


_LLAMA3 = BenchShape(4096, 14336, 32, 8, 128, 128256, 32000)
_QWEN3 = BenchShape(4096, 12288, 32, 8, 128, 151936, 32000, rope_theta=1000000.0)
_DFLASH = replace(_QWEN3, kind="dflash", draft_vocab_size=151936, num_aux=5, num_layers=5)
_GLM = ExpertsConfig(
    num_experts=128, top_k=8, inner=1408, layers=(True,), scoring="sigmoid", shared_inner=1408
)  # fmt: skip

SHAPES: dict[str, BenchShape] = {
    "eagle3-tiny-python": BenchShape(192, 512, 6, 2, 32, 2048, 1024, rope_theta=10000.0),
    "eagle3-tiny-128": BenchShape(256, 512, 2, 1, 128, 2048, 1024, rope_theta=10000.0),
    "eagle3-llama3-8b": _LLAMA3,
    "eagle3-qwen3-8b": _QWEN3,
    "eagle3-llama3-70b": replace(_LLAMA3, hidden_size=8192, intermediate_size=28672, num_heads=64),
    "eagle1-llama3-8b": replace(_LLAMA3, kind="eagle1", draft_vocab_size=128256, num_aux=0),
    "mtp-7b": BenchShape(4096, 11008, 32, 8, 128, 151680, 151680, num_aux=0, kind="mtp"),
    "mtp-qwen3.5-27b": BenchShape(5120, 17408, 24, 4, 256, 248320, 248320, num_aux=0, rope_theta=1e7, kind="mtp"),
    "mtp-glm-4.5-air": BenchShape(4096, 10944, 96, 8, 128, 151552, 151552, num_aux=0, kind="mtp", experts=_GLM),
    "dflash-qwen3-8b": _DFLASH,
    "dspark-qwen3-8b": replace(_DFLASH, kind="dspark"),
    "dflash2-qwen3-8b": replace(_DFLASH, kind="dflash2"),
    "domino-qwen3-8b": replace(_DFLASH, kind="domino", rank=1024),
}
"""Shapes that `specgraph bench --shape` knows."""


class RandomWeights:
    """Makes normally distributed weights with variance 1 / columns, so that activations keep their size."""

    def __init__(self, device: torch.device, dtype: torch.dtype, weights: StoredWeights = "plain") -> None:
        self._device, self._dtype, self.weights = device, dtype, weights
        self._g = torch.Generator(device=device).manual_seed(0)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return weights [rows, columns]."""
        values = torch.randn(rows, columns, generator=self._g, device=self._device)
        return (values * columns**-0.5).to(self._dtype)

    def linear(self, rows: int, columns: int) -> Weight:
        """Return a linear's weights [rows, columns], quantised if `weights` is not "plain"."""
        weight = self.matrix(rows, columns)
        return Weight(weight) if self.weights == "plain" else quantised(weight, None if self.weights == "fp8" else 128)

    def norm(self, size: int) -> Tensor:
        """Return a norm's weights [size], all 1."""
        return torch.ones(size, device=self._device, dtype=self._dtype)

    def vocabulary(self, shape: BenchShape) -> Tensor | None:
        """Return the map of draft ids to target ids, int64 [draft_vocab_size], as offsets (a checkpoint's `d2t`).

        None if the head drafts the whole vocabulary.
        """
        if shape.draft_vocab_size == shape.vocab_size:
            return None
        # Drawn on the host: not every device permutes and sorts.
        chosen = torch.randperm(shape.vocab_size, generator=torch.Generator().manual_seed(0))
        chosen = chosen[: shape.draft_vocab_size].sort().values
        return (chosen - torch.arange(shape.draft_vocab_size)).to(self._device)

    def layer(self, shape: BenchShape, input_size: int, input_norm: bool = True) -> DecoderLayer:
        """Make one decoder layer."""
        hidden, inner, own = shape.hidden_size, shape.intermediate_size, shape.experts
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return DecoderLayer(
            qkv=self.linear(query + 2 * kv, input_size),
            output=self.linear(hidden, query),
            post_norm=self.norm(hidden),
            gate_up=self.linear(2 * inner, hidden) if own is None else self.stacked(own, 2 * own.inner, hidden),
            down=self.linear(hidden, inner) if own is None else self.stacked(own, hidden, own.inner),
            experts=None if own is None else self.router(own, hidden),
            input_norm=self.norm(hidden) if input_norm else None,
        )

    def stacked(self, experts: ExpertsConfig, rows: int, columns: int) -> Weight:
        """Return a linear of all experts, [num_experts, rows, columns]."""
        return Weight(torch.stack([self.matrix(rows, columns) for _ in range(experts.num_experts)]))

    def router(self, experts: ExpertsConfig, hidden: int) -> Experts:
        """Return a mixture's router and shared expert, without its routed experts."""
        shared = experts.shared_inner
        gate_up, down = (self.matrix(2 * shared, hidden), self.matrix(hidden, shared)) if shared else (None, None)
        return Experts(experts, self.matrix(experts.num_experts, hidden), shared_gate_up=gate_up, shared_down=down)

    def block_head(self, shape: BenchShape, block: BlockParts) -> DFlashHead:
        """Return a DFlash, DSpark, DFlash2 or Domino head."""
        hidden, rank, vocab = shape.hidden_size, shape.rank, shape.vocab_size
        if shape.kind == "dspark":
            markov = MarkovHead(self.matrix(vocab, rank), self.linear(shape.draft_vocab_size, rank))
            return DSparkHead(block, markov, None)
        if shape.kind == "domino":
            taken, kept = self.linear(3 * rank, hidden), self.linear(3 * rank, rank)
            inner, output = self.linear(256, hidden + rank), self.linear(shape.draft_vocab_size, 256)
            return DominoHead(block, Correction(taken, kept, inner, output), 0)
        if shape.kind == "dflash2":
            convolutions = [(self._convolution(hidden), self._convolution(hidden)) for _ in block.layers]
            tables = self.matrix(vocab, rank), self.matrix(vocab, rank)
            return DFlash2Head(block, convolutions, Selector(16, *tables, self.linear(rank, hidden)))
        return DFlashHead(block)

    def _convolution(self, hidden: int) -> Convolution:
        taps = 2
        return Convolution(
            self.matrix(2 * taps, hidden).view(2, taps, -1), self.linear(2 * taps * hidden // 16, hidden)
        )


def random_head(
    shape: BenchShape, device: torch.device, dtype: torch.dtype, max_model_len: int, weights: StoredWeights = "plain"
) -> RandomHead:
    """Return a draft head of this shape for `max_model_len` positions. `weights` does not change its random numbers."""
    make, hidden = RandomWeights(device, dtype, weights), shape.hidden_size
    model = model_config(shape, dtype, max_model_len)
    if shape.kind == "eagle1":
        layer = make.layer(shape, hidden, input_norm=False)
        table, fc = make.matrix(shape.vocab_size, hidden), make.linear(hidden, 2 * hidden)
        head = make.matrix(shape.vocab_size, hidden)
        return EagleHead(model, table, fc, [layer], head)
    if shape.kind == "mtp":
        norms, projection = [make.norm(hidden) for _ in range(3)], make.linear(hidden, 2 * hidden)
        module = MtpModule(norms[0], norms[1], projection, make.layer(shape, hidden), norms[2])
        table, head = make.matrix(shape.vocab_size, hidden), make.matrix(shape.vocab_size, hidden)
        return MtpHead(model, [module], table, head)
    aux = tuple(range(shape.num_aux))
    if shape.kind != "eagle3":
        layers = [make.layer(shape, hidden) for _ in range(shape.num_layers)]
        table, fc = make.matrix(shape.vocab_size, hidden), make.linear(hidden, shape.num_aux * hidden)
        weights_of_block = AuxWeights(
            table, fc, make.norm(hidden), make.norm(hidden), make.matrix(shape.draft_vocab_size, hidden),
            make.vocabulary(shape),
        )  # fmt: skip
        return make.block_head(shape, BlockParts(model, weights_of_block, layers, aux, shape.block_size, 0))
    layer = make.layer(shape, 2 * hidden)
    table, fc = make.matrix(shape.vocab_size, hidden), make.linear(hidden, shape.num_aux * hidden)
    tensors = AuxWeights(
        embed_tokens=table,
        hidden_norm=make.norm(hidden),
        norm=make.norm(hidden),
        lm_head=make.matrix(shape.draft_vocab_size, hidden),
        fc=fc,
        draft_to_target=make.vocabulary(shape),
    )
    return Eagle3Head(model, tensors, [layer], aux)


def model_config(shape: BenchShape, dtype: torch.dtype, max_model_len: int) -> ModelConfig:
    """Return the `ModelConfig` of a Llama of this shape."""
    return ModelConfig(
        architecture="llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
        dtype=dtype,
        rotary=RotaryConfig(theta=shape.rope_theta),
    )


def lone_drafter(
    platform: Platform, head: Head, config: DraftConfig, attention: AttentionBackend, cached: torch.dtype | None = None
) -> Drafter:
    """Return a drafter without a target, with KV caches for its largest batch.

    Args:
        cached: the dtype of the KV caches. None is the head's dtype.
    """
    per_request = -(-(config.max_model_len + config.scratch_tokens) // config.block_size)
    blocks, dtype = 1 + config.max_num_requests * per_request, cached or head.dtype
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, dtype, platform.device)
    return Drafter(head, caches, platform, config, attention=attention)
