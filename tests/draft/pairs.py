"""A smaller target than the suite's, and a drafter of every kind for it, by the builders of the suite's tiny models.

Norms have weights of their own here, and there are heads that the suite leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from specgraph_conformance import tiny_models
from specgraph_conformance.tiny_models import Draw, Head, Weights, fuse, layer
from specgraph_models.decoder import AuxWeights
from specgraph_models.dflash import BlockParts
from specgraph_models.dflash2 import Convolution, DFlash2Head, Selector
from specgraph_models.domino import Correction, DominoHead
from specgraph_models.eagle3 import Eagle3Head
from specgraph_models.experts import Experts, ExpertsConfig
from specgraph_models.latent import LatentAttention, LatentConfig
from specgraph_models.layers import DecoderLayer
from specgraph_models.llama import LlamaTarget
from specgraph_models.mtp import MtpHead, MtpModule
from torch import Tensor

from specgraph.ops.linear import Weight

DRAFTERS = tuple(tiny_models.HEADS)
CONFIG = replace(
    tiny_models.CONFIG,
    vocab_size=48,
    hidden_size=32,
    intermediate_size=40,
    head_dim=8,
    max_position_embeddings=128,
)
VOCAB, HIDDEN, POSITIONS, MODULES = CONFIG.vocab_size, CONFIG.hidden_size, CONFIG.max_position_embeddings, 8


class Normed(Weights):
    """Weights with norms that are not 1."""

    def norm(self, size: int) -> Tensor:
        return self.place(1 + 0.1 * torch.randn(size, generator=self.generator))


def draw_of(seed: int, dtype: torch.dtype) -> Draw:
    """Weights of one seed. Those of float64 are the values of float32."""
    rounded = torch.float32 if dtype == torch.float64 else dtype
    return lambda n: Normed(CONFIG, torch.device("cpu"), rounded, dtype, torch.Generator().manual_seed(seed + n))


def vocabulary(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embedding, and a head that reads a token's embedding as another token: its successor."""
    return tiny_models.vocabulary(draw_of(3, dtype)(0))


def make_target(dtype: torch.dtype = torch.float32) -> LlamaTarget:
    """Two layers; most answers are the last token's successor."""
    return tiny_models.target_of(draw_of(3, dtype))


def make_head(kind: str, target: LlamaTarget) -> Head:
    """A drafter for `make_target`: of `HEADS`, or one of those below."""
    return HEADS[kind](draw_of(3, target.dtype))


def _gated(w: Weights) -> DecoderLayer:
    """A layer of Qwen3-Next: a gate on the attention's output, a mixture whose shared expert has a gate."""
    plain, inner, hidden = layer(w, w.hidden, gain=0.8), 12, w.hidden
    config = ExpertsConfig(num_experts=3, top_k=2, inner=inner, layers=(True,), shared_inner=inner, shared_gated=True)

    def of(rows: int, columns: int) -> Tensor:
        return w.random(rows, columns, scale=columns**-0.5)

    shared = [of(2 * inner, hidden), of(hidden, inner), of(1, hidden)]
    gates = of(CONFIG.num_heads * CONFIG.head_dim, hidden)
    return replace(
        plain,
        qkv=Weight(torch.cat((gates, plain.qkv.matrix))),
        gate_up=Weight(torch.stack([of(2 * inner, hidden) for _ in range(3)])),
        down=Weight(torch.stack([of(hidden, inner) * 0.5 for _ in range(3)])),
        experts=Experts(config, of(3, hidden), None, None, *shared),
    )


def _mtp(draw: Draw, make_layer: Callable[[Weights], DecoderLayer], modules: int = 1) -> MtpHead:
    w, (embed, lm_head) = draw(4), tiny_models.vocabulary(draw(0))
    made = [MtpModule(w.norm(HIDDEN), w.norm(HIDDEN), fuse(w), make_layer(w), w.norm(HIDDEN)) for _ in range(modules)]
    return MtpHead(CONFIG, made, embed, lm_head)


def _latent(draw: Draw) -> MtpHead:
    """One MTP module with multi-head latent attention (DeepSeek-V3, arXiv:2412.19437)."""
    w = draw(12)
    sizes = LatentConfig(query_rank=None, rank=24, rotated=8, plain=12, value=10)
    up = (w.random(4, *each, scale=0.25) for each in ((sizes.plain, sizes.rank), (sizes.rank, sizes.value)))
    rows = 4 * (sizes.plain + sizes.rotated) + sizes.rank + sizes.rotated

    def latent(w: Weights) -> DecoderLayer:
        return replace(
            layer(w, HIDDEN, gain=0.8),
            qkv=w.weight(rows, HIDDEN, scale=2 * HIDDEN**-0.5),
            output=w.weight(HIDDEN, 4 * sizes.value, scale=(4 * sizes.value) ** -0.5),
            latent=LatentAttention(sizes, w.norm(sizes.rank), *up, None, None),
        )

    head = _mtp(draw, latent)
    config = replace(
        CONFIG, num_kv_heads=1, head_dim=sizes.rotated + sizes.rank, rotary_dim=sizes.rotated, latent=sizes,
        attention_scale=(sizes.plain + sizes.rotated) ** -0.5,
    )  # fmt: skip
    return MtpHead(config, head.modules, head.embed_tokens, head.lm_head)


def _block(draw: Draw) -> tuple[Weights, BlockParts]:
    """A block whose anchor predicts nothing."""
    w, (embed, _) = draw(13), tiny_models.vocabulary(draw(0))
    fc, lm_head = w.weight(HIDDEN, 2 * HIDDEN, (2 * HIDDEN) ** -0.5), w.random(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
    weights = AuxWeights(embed, fc, w.norm(HIDDEN), w.norm(HIDDEN), lm_head)
    return w, BlockParts(CONFIG, weights, [layer(w, HIDDEN, gain=0.5) for _ in range(2)], (1, 2), 9, VOCAB - 1)


def _domino(draw: Draw) -> DominoHead:
    w, block = _block(draw)
    shapes = (48, HIDDEN), (48, 16), (24, HIDDEN + 16), (VOCAB, 24)
    return DominoHead(block, Correction(*(w.weight(*shape, scale=shape[1] ** -0.5) for shape in shapes)), 1)


def _dflash2(draw: Draw) -> DFlash2Head:
    w, block = _block(draw)
    embed, lm_head = tiny_models.vocabulary(draw(0))
    scale = HIDDEN**-0.5
    selector = Selector(5, embed, lm_head, w.weight(HIDDEN, HIDDEN, scale))
    convolutions = [
        (Convolution(w.random(2, 3, HIDDEN, scale=scale), w.weight(2 * 3 * 4, HIDDEN, scale)),) * 2
        for _ in block.layers
    ]
    return DFlash2Head(block, convolutions, selector)


def eagle3_of(layers: int, draw: Draw) -> Eagle3Head:
    """The head `eagle3`, with more layers."""
    head, w = tiny_models.HEADS["eagle3"](draw), draw(14)
    assert isinstance(head, Eagle3Head)
    more = [layer(w, HIDDEN, gain=0.8) for _ in range(layers - 1)]
    return Eagle3Head(CONFIG, head.tensors, [*head.layers, *more], head.aux_layers)


HEADS = {
    **tiny_models.HEADS,
    **tiny_models.VARIANTS,
    "mtp": partial(_mtp, make_layer=_gated),
    "mtp-modules": partial(_mtp, make_layer=lambda w: layer(w, HIDDEN, gain=0.8), modules=MODULES),
    "dflash": partial(tiny_models.HEADS["dflash"], masks=MODULES),
    "dspark": partial(tiny_models.HEADS["dspark"], rows=1 + MODULES),
    "latent": _latent,
    "domino": _domino,
    "dflash2": _dflash2,
    "eagle3-two-layers": partial(eagle3_of, 2),
}
