"""A small random target and a drafter of every kind for it, made in memory.

The token map dominates: target and chain drafters mostly answer with the same permutation of the last token, while
every key and value still moves every logit. So chain drafts are accepted at many lengths, and a wrong read still shows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import AuxWeights
from specgraph_models.dflash import BlockParts, DFlashHead
from specgraph_models.dflash2 import Convolution, DFlash2Head, Selector
from specgraph_models.domino import Correction, DominoHead
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.dspark import ConfidenceHead, DSparkHead, MarkovHead
from specgraph_models.eagle import EagleHead
from specgraph_models.eagle3 import Eagle3Head, PEagleHead
from specgraph_models.experts import Experts, ExpertsConfig
from specgraph_models.latent import LatentAttention, LatentConfig
from specgraph_models.layers import DecoderLayer
from specgraph_models.llama import LlamaTarget
from specgraph_models.mtp import MtpHead, MtpModule
from torch import Tensor

from specgraph.draft.ngram import NgramHead
from specgraph.draft.protocol import DraftHead, ParallelHead
from specgraph.ops.linear import Weight

VOCAB, HIDDEN, POSITIONS, MODULES = 48, 32, 128, 8
DRAFTERS = ("eagle", "eagle3", "mtp", "mtp-modules", "dflash", "peagle", "draft-model")
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=False,
    dtype=torch.float32,
)


class Draw:
    """Random tensors of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype, gain: float = 0.5) -> None:
        self.g, self.dtype, self.gain = torch.Generator().manual_seed(seed), dtype, gain

    def weight(self, out: int, columns: int) -> Tensor:
        return (torch.randn(out, columns, generator=self.g) * columns**-0.5).to(self.dtype)

    def norm(self, size: int = HIDDEN) -> Tensor:
        return (1 + torch.randn(size, generator=self.g) * 0.1).to(self.dtype)

    def layer(self, inputs: int = HIDDEN, input_norm: bool = True) -> DecoderLayer:
        c = CONFIG
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return DecoderLayer(
            qkv=Weight(self.weight(heads + 2 * kv, inputs) * 2),
            output=Weight(self.weight(HIDDEN, heads) * self.gain),
            post_norm=self.norm(),
            gate_up=Weight(self.weight(2 * c.intermediate_size, HIDDEN)),
            down=Weight(self.weight(HIDDEN, c.intermediate_size) * self.gain),
            input_norm=self.norm() if input_norm else None,
        )

    def gated_layer(self) -> DecoderLayer:
        """A layer of Qwen3-Next: a gate on the attention's output, a mixture whose shared expert has a gate."""
        plain, inner = self.layer(), 12
        config = ExpertsConfig(
            num_experts=3, top_k=2, inner=inner, layers=(True,), shared_inner=inner, shared_gated=True
        )
        shared = [self.weight(2 * inner, HIDDEN), self.weight(HIDDEN, inner), self.weight(1, HIDDEN)]
        gates = self.weight(CONFIG.num_heads * CONFIG.head_dim, HIDDEN)
        return replace(
            plain,
            qkv=Weight(torch.cat((gates, plain.qkv.matrix))),
            gate_up=Weight(torch.stack([self.weight(2 * inner, HIDDEN) for _ in range(3)])),
            down=Weight(torch.stack([self.weight(HIDDEN, inner) * self.gain for _ in range(3)])),
            experts=Experts(config, self.weight(3, HIDDEN), None, None, *shared),
        )


def vocabulary(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Embedding, and a head that reads a token's embedding as another token: its successor."""
    g = torch.Generator().manual_seed(99)
    embed = torch.randn(VOCAB, HIDDEN, generator=g)
    head = torch.empty_like(embed)
    head[torch.randperm(VOCAB, generator=g)] = embed
    return embed.to(dtype), (head * (4 / HIDDEN)).to(dtype)


def make_target(dtype: torch.dtype = torch.float32) -> LlamaTarget:
    """Two layers; most answers are the last token's successor."""
    embed, head = vocabulary(dtype)
    draw = Draw(1, dtype)
    return LlamaTarget(CONFIG, embed, [draw.layer() for _ in range(2)], draw.norm(), head)


def make_head(kind: str, target: LlamaTarget, layers: int = 1) -> DraftHead | ParallelHead | NgramHead:
    """A drafter for `make_target`; `dflash` fills up to 8 masks, `dspark`, `dflash2` and `domino` draw
    such a block in order, `mtp-modules` has 8 modules, `eagle3` has `layers`.

    `latent` is one MTP module with multi-head latent attention (DeepSeek-V3, arXiv:2412.19437).
    """
    dtype = target.dtype
    embed, head = vocabulary(dtype)
    draw = Draw(2, dtype)
    half = torch.cat([torch.eye(HIDDEN), torch.randn(HIDDEN, HIDDEN, generator=draw.g) * 0.12], dim=1).to(dtype)
    if kind == "eagle":
        return EagleHead(CONFIG, embed, Weight(half), [draw.layer(input_norm=False)], head)
    if kind in ("eagle3", "peagle"):
        ids = torch.randperm(VOCAB, generator=draw.g)[: VOCAB // 2].sort().values
        weights = AuxWeights(
            embed_tokens=embed,
            hidden_norm=draw.norm(),
            norm=draw.norm(),
            lm_head=draw.weight(VOCAB // 2, HIDDEN),
            fc=Weight(draw.weight(HIDDEN, 3 * HIDDEN)),
            draft_to_target=ids - torch.arange(VOCAB // 2),
        )
        if kind == "peagle":
            layers = [draw.layer(2 * HIDDEN), draw.layer()]
            hidden = draw.norm(3 * HIDDEN) - 1
            return PEagleHead(CONFIG, weights, layers, (0, 1, 2), mask_token_id=VOCAB - 1, mask_hidden=hidden)
        decoder = [draw.layer(2 * HIDDEN), *(draw.layer() for _ in range(layers - 1))]
        return Eagle3Head(CONFIG, weights, decoder, (0, 1, 2))
    if kind in ("mtp", "mtp-modules"):
        modules = [
            MtpModule(draw.norm(), draw.norm(), Weight(half), make_layer(), draw.norm())
            for make_layer in ([draw.gated_layer] if kind == "mtp" else [draw.layer] * MODULES)
        ]
        return MtpHead(CONFIG, modules, embed, head)
    if kind == "ngram":
        return NgramHead(VOCAB)
    if kind in ("dspark", "dflash2", "domino"):
        return _block(kind, draw, embed, head)
    if kind == "dflash":
        weights = AuxWeights(embed, Weight(draw.weight(HIDDEN, 2 * HIDDEN)), draw.norm(), draw.norm(), head)
        layers = [draw.layer(), draw.layer()]
        return DFlashHead(BlockParts(CONFIG, weights, layers, (1, 2), 9, VOCAB - 1))
    if kind == "latent":
        sizes = LatentConfig(query_rank=None, rank=24, rotated=8, plain=12, value=10)
        up = (
            torch.randn(4, *each, generator=draw.g) / 4
            for each in ((sizes.plain, sizes.rank), (sizes.rank, sizes.value))
        )
        layer = replace(
            draw.layer(),
            qkv=Weight(draw.weight(4 * (sizes.plain + sizes.rotated) + sizes.rank + sizes.rotated, HIDDEN) * 2),
            output=Weight(draw.weight(HIDDEN, 4 * sizes.value)),
            latent=LatentAttention(sizes, draw.norm(sizes.rank), *up, None, None),
        )
        config = replace(
            CONFIG, num_kv_heads=1, head_dim=sizes.rotated + sizes.rank, rotary_dim=sizes.rotated, latent=sizes,
            attention_scale=(sizes.plain + sizes.rotated) ** -0.5,
        )  # fmt: skip
        return MtpHead(config, [MtpModule(draw.norm(), draw.norm(), Weight(half), layer, draw.norm())], embed, head)
    assert kind == "draft-model"
    small = LlamaTarget(CONFIG, embed, [draw.layer()], draw.norm(), head)
    return DraftModelHead(small, HIDDEN)


def _block(kind: str, draw: Draw, embed: Tensor, head: Tensor) -> ParallelHead:
    """A DSpark head with a recurrent cell whose anchor predicts, or a DFlash2 or Domino head whose anchor does not.

    Most answers of the first two are the last token's successor.
    """
    fc = Weight(draw.weight(HIDDEN, 2 * HIDDEN))
    weights = AuxWeights(embed, fc, draw.norm(), draw.norm(), draw.weight(VOCAB, HIDDEN))
    block = BlockParts(CONFIG, weights, [draw.layer(), draw.layer()], (1, 2), 9, VOCAB - 1, kind == "dspark")
    if kind == "dspark":
        cell = Weight(draw.weight(3 * HIDDEN, 3 * HIDDEN), draw.norm(3 * HIDDEN) - 1)
        confidence = ConfidenceHead(draw.weight(1, 2 * HIDDEN).float() * 3, None)
        return DSparkHead(block, MarkovHead(embed, Weight(head), cell=cell), confidence)
    if kind == "domino":
        shapes = (48, HIDDEN), (48, 16), (24, HIDDEN + 16), (VOCAB, 24)
        return DominoHead(block, Correction(*(Weight(draw.weight(*shape)) for shape in shapes)), 1)
    selector = Selector(5, embed, head, Weight(draw.weight(HIDDEN, HIDDEN)))
    convolutions = [
        (Convolution(draw.weight(6, HIDDEN).view(2, 3, HIDDEN), Weight(draw.weight(2 * 3 * 4, HIDDEN))),) * 2
        for _ in block.layers
    ]
    return DFlash2Head(block, convolutions, selector)
