"""Small models with random weights, made in memory: a target, and a drafter of every kind for it.

The next token depends mostly on the last token, through a permutation that target and chain drafters share, and a
little on the context. Drafts are therefore accepted at many lengths, while every key and value still moves every logit.
Heads of the kinds eagle3, peagle and dflash seldom agree with the target, and `dspark` agrees half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from specgraph.draft.ngram import NgramHead
from specgraph.draft.protocol import DraftHead, Head
from specgraph.ops.linear import Weight
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import AuxWeights
from specgraph_models.dflash import BlockParts, DFlashHead
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.dspark import ConfidenceHead, DSparkHead, MarkovHead
from specgraph_models.eagle import EagleHead
from specgraph_models.eagle3 import Eagle3Head, PEagleHead
from specgraph_models.layers import DecoderLayer
from specgraph_models.llama import LlamaTarget
from specgraph_models.mtp import MtpHead, MtpModule
from torch import Tensor

VOCAB = 64
HIDDEN = 128
MAX_POSITIONS = 1024
MODULES = 5
"""The largest K that `mtp-modules` can draft."""
HEADS = ("eagle", "eagle3", "mtp", "mtp-modules", "dflash", "dspark", "peagle", "draft-model")
AUX_LAYERS = (0, 1, 2)

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    max_position_embeddings=MAX_POSITIONS,
    tie_word_embeddings=False,
    dtype=torch.float32,
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Draws tensors on the CPU, so that every device and precision gets the same values.

    `rounded_to` is the model's dtype, and `dtype` the dtype of the tensors: float64 for an oracle of the model.
    """

    config: ModelConfig
    device: torch.device
    rounded_to: torch.dtype
    dtype: torch.dtype
    generator: torch.Generator

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values times `scale`."""
        return self.place(torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale)

    def weight(self, rows: int, columns: int, scale: float) -> Weight:
        """Return the weight of a linear, of normally distributed values times `scale`."""
        return Weight(self.random(rows, columns, scale=scale))

    def place(self, values: Tensor) -> Tensor:
        """Return `values` rounded to the model's dtype, on the device."""
        return values.to(self.rounded_to).to(self.dtype).to(self.device)


Draw = Callable[[int], Weights]
"""`draw(n)` returns weights with the model's seed plus n."""


def _draw(seed: int, device: torch.device, rounded_to: torch.dtype, dtype: torch.dtype | None, head_dim: int) -> Draw:
    config = replace(CONFIG, head_dim=head_dim)
    return lambda n: Weights(config, device, rounded_to, dtype or rounded_to, torch.Generator().manual_seed(seed + n))


@cache
def make_target(
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    head_dim: int = CONFIG.head_dim,
) -> LlamaTarget:
    """Return a Llama-shaped target with two layers. The arguments are those of `make_head`."""
    return _target(_draw(seed, device, dtype, compute, head_dim))


def _target(draw: Draw) -> LlamaTarget:
    embed, lm_head = _vocabulary(draw(0))
    w = draw(1)
    layers = [_layer(w, HIDDEN, gain=1.2) for _ in range(w.config.num_layers)]
    return LlamaTarget(w.config, embed, layers, w.place(torch.ones(HIDDEN)), lm_head)


def make_head(
    kind: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    head_dim: int = CONFIG.head_dim,
) -> Head:
    """Return a head for `make_target` of the same seed. The caller may change it in place.

    Args:
        kind: one of these.
            `eagle3` has its own vocabulary and three auxiliary hidden states.
            `eagle3-norm-output` is the same, and its draft steps pass normalised states on.
            `mtp` uses its one module in every draft step.
            `mtp-modules` has one module per draft step.
            `mtp-two-modules` has two, for at most two draft tokens.
            `dflash` fills blocks of up to MODULES masks.
            `dspark` draws such a block in order, from its own vocabulary.
            `dspark-gated` and `dspark-rnn` compute more between one token and the next.
            `peagle` drafts from masked rows of one causal pass.
            `draft-model` is a whole small model.
            `draft-model-of-context` is one with tokens that depend more on the context than on the last token.
            `target` is the target itself, which always agrees.
            `ngram` has no weights.
        compute: the dtype of the tensors, with values rounded to `dtype`. None for `dtype`.
        head_dim: of queries, keys and values.
    """
    return deepcopy(_cached_head(kind, seed, device, dtype, compute, head_dim))


@cache
def _cached_head(kind: str, seed: int, *places: Any) -> Head:
    return _HEADS[kind](_draw(seed, *places))


def _eagle(draw: Draw) -> DraftHead:
    embed, lm_head = _vocabulary(draw(0))
    w = draw(2)
    return EagleHead(w.config, embed, _fuse(w), [_layer(w, HIDDEN, gain=0.8)], lm_head)


def _eagle3(draw: Draw) -> Eagle3Head:
    sizes, tensors = _eagle3_parts(draw, 3)
    return Eagle3Head(sizes, tensors, [_layer(draw(7), 2 * HIDDEN, gain=1.5)], AUX_LAYERS)


def _eagle3_norm_output(draw: Draw) -> Eagle3Head:
    head, w = _eagle3(draw), draw(9)
    tensors = replace(head.tensors, norm=w.place(1 + 0.5 * torch.randn(HIDDEN, generator=w.generator)))
    return Eagle3Head(head.sizes, tensors, head.layers, AUX_LAYERS, norm_output=True)


def _peagle(draw: Draw) -> PEagleHead:
    w = draw(8)
    layers = [_layer(w, 2 * HIDDEN, gain=1.5), _layer(w, HIDDEN, gain=1.5)]
    sizes, tensors = _eagle3_parts(draw, 3)
    hidden = w.random(len(AUX_LAYERS) * HIDDEN)
    return PEagleHead(sizes, tensors, layers, AUX_LAYERS, mask_token_id=VOCAB - 1, mask_hidden=hidden)


def _eagle3_parts(draw: Draw, seed: int) -> tuple[ModelConfig, AuxWeights]:
    embed, _ = _vocabulary(draw(0))
    w = draw(seed)
    draft_vocab = VOCAB // 2
    ids = torch.randperm(VOCAB, generator=w.generator)[:draft_vocab].sort().values
    tensors = AuxWeights(
        embed_tokens=embed,
        hidden_norm=w.place(torch.ones(HIDDEN)),
        norm=w.place(torch.ones(HIDDEN)),
        lm_head=w.random(draft_vocab, HIDDEN, scale=0.3),
        fc=w.weight(HIDDEN, len(AUX_LAYERS) * HIDDEN, scale=(len(AUX_LAYERS) * HIDDEN) ** -0.5),
        draft_to_target=(ids - torch.arange(draft_vocab)).to(w.device),
    )
    return w.config, tensors


def _mtp(draw: Draw, num_modules: int = 1) -> MtpHead:
    embed, lm_head = _vocabulary(draw(0))
    w = draw(4)
    one = torch.ones(HIDDEN)
    modules = [
        MtpModule(w.place(one), w.place(one), _fuse(w), _layer(w, HIDDEN, gain=0.8), w.place(one))
        for _ in range(num_modules)
    ]
    return MtpHead(w.config, modules, embed, lm_head)


def _dflash(draw: Draw) -> DFlashHead:
    embed, _ = _vocabulary(draw(0))
    w = draw(5)
    tensors = AuxWeights(
        embed_tokens=embed,
        fc=w.weight(HIDDEN, 2 * HIDDEN, scale=(2 * HIDDEN) ** -0.5),
        hidden_norm=w.place(torch.ones(HIDDEN)),
        norm=w.place(torch.ones(HIDDEN)),
        lm_head=w.random(VOCAB, HIDDEN, scale=0.3),
    )
    layers = [_layer(w, HIDDEN, gain=4) for _ in range(2)]
    return DFlashHead(BlockParts(w.config, tensors, layers, (0, 2), 1 + MODULES, VOCAB - 1))


def _dspark(draw: Draw, variant: str = "vanilla") -> DSparkHead:
    base, (sizes, own) = _dflash(draw), _eagle3_parts(draw, 10)
    _, successor = _vocabulary(draw(0))
    w, rank = draw(11), HIDDEN
    tensors = replace(base.tensors, lm_head=w.place(0.1 * own.lm_head.double()), draft_to_target=own.draft_to_target)
    offsets = own.draft_to_target
    assert offsets is not None
    taken = successor[torch.arange(len(offsets), device=offsets.device) + offsets]

    def biased(rows: int, columns: int) -> Weight:
        return w.weight(rows, columns, scale=columns**-0.5)._replace(bias=w.random(rows))

    markov = MarkovHead(
        embed=base.embed_tokens,
        output=Weight(taken),
        gate=biased(rank, HIDDEN + rank) if variant == "gated" else None,
        cell=biased(3 * rank, 2 * rank + HIDDEN) if variant == "rnn" else None,
    )
    confidence = ConfidenceHead(w.random(1, HIDDEN + rank, scale=0.2).to(own.lm_head.dtype), None)
    confidence = replace(confidence, weight=confidence.weight.to(torch.promote_types(torch.float32, w.dtype)))
    block = BlockParts(sizes, tensors, base.layers, (0, 2), MODULES, VOCAB - 1, sample_from_anchor=True)
    return DSparkHead(block, markov, confidence)


def _draft_model(draw: Draw, gain: float = 0.8) -> DraftModelHead:
    embed, lm_head = _vocabulary(draw(0))
    w = draw(6)
    model = LlamaTarget(w.config, embed, [_layer(w, HIDDEN, gain)], w.place(torch.ones(HIDDEN)), lm_head)
    return DraftModelHead(model, HIDDEN)


_HEADS: dict[str, Callable[[Draw], Head]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "eagle3-norm-output": _eagle3_norm_output,
    "mtp": _mtp,
    "mtp-modules": partial(_mtp, num_modules=MODULES),
    "mtp-two-modules": partial(_mtp, num_modules=2),
    "dflash": _dflash,
    "dspark": _dspark,
    "dspark-gated": partial(_dspark, variant="gated"),
    "dspark-rnn": partial(_dspark, variant="rnn"),
    "peagle": _peagle,
    "draft-model": _draft_model,
    "draft-model-of-context": partial(_draft_model, gain=6),
    "target": lambda draw: DraftModelHead(_target(draw), HIDDEN),
    "ngram": lambda draw: NgramHead(VOCAB, prompt_lookup_max=3),
}


def _fuse(w: Weights) -> Weight:
    """Return a weight [HIDDEN, 2 * HIDDEN] that passes the embedding on and adds a little of the hidden state."""
    mix = torch.randn(HIDDEN, HIDDEN, generator=w.generator, dtype=torch.float64) * (0.8 * HIDDEN**-0.5)
    return Weight(w.place(torch.cat([torch.eye(HIDDEN, dtype=torch.float64), mix], dim=1)))


def _vocabulary(w: Weights) -> tuple[Tensor, Tensor]:
    """Return an embedding, and an output projection that maps a token's embedding to the token's successor."""
    embed = torch.randn(VOCAB, HIDDEN, generator=w.generator, dtype=torch.float64)
    successor = torch.randperm(VOCAB, generator=w.generator)
    lm_head = torch.empty_like(embed)
    lm_head[successor] = embed
    return w.place(embed), w.place(lm_head * (4 / HIDDEN))


def _layer(w: Weights, input_size: int, gain: float) -> DecoderLayer:
    config = w.config
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return DecoderLayer(
        qkv=w.weight(query + 2 * kv, input_size, scale=2 * input_size**-0.5),
        output=w.weight(HIDDEN, query, scale=gain * query**-0.5),
        post_norm=w.place(torch.ones(HIDDEN)),
        gate_up=w.weight(2 * config.intermediate_size, HIDDEN, scale=HIDDEN**-0.5),
        down=w.weight(HIDDEN, config.intermediate_size, scale=gain * config.intermediate_size**-0.5),
        input_norm=w.place(torch.ones(HIDDEN)),
    )
