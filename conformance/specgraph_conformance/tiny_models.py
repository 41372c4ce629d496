"""Small models with random weights, made in memory: a target, and a drafter of every kind for it (`HEADS`).

The next token depends mostly on the last token, through a permutation that target and chain drafters share, and a
little on the context. Drafts are therefore accepted at many lengths, while every key and value still moves every logit.
Heads of the kinds eagle3, peagle and dflash seldom agree with the target, and `dspark` agrees half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from specgraph.draft import Kind, NgramHead
from specgraph.draft.protocol import DraftHead, Head
from specgraph.ops.linear import Weight
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import AuxWeights
from specgraph_models.delta import DeltaConfig, DeltaNet
from specgraph_models.dflash import BlockParts, DFlashHead
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.dspark import ConfidenceHead, DSparkHead, MarkovHead
from specgraph_models.eagle import EagleHead
from specgraph_models.eagle3 import Eagle3Head, PEagleHead
from specgraph_models.layers import DecoderLayer
from specgraph_models.llama import LlamaTarget
from specgraph_models.mtp import MtpHead, MtpModule
from specgraph_models.ops.delta import DeltaWeights
from torch import Tensor

VOCAB = 64
HIDDEN = 128
MAX_POSITIONS = 1024
MODULES = 5
"""The largest K that `mtp-modules` can draft."""
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

DELTA = DeltaConfig(key_heads=2, value_heads=4, key_size=16, value_size=16, kernel=4)
"""The sizes of a recurrent target's layer."""


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

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def vocab(self) -> int:
        return self.config.vocab_size

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed values times `scale`."""
        return self.place(torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale)

    def norm(self, size: int) -> Tensor:
        """Return the weights of an RMSNorm."""
        return self.place(torch.ones(size))

    def weight(self, rows: int, columns: int, scale: float) -> Weight:
        """Return the weight of a linear, of normally distributed values times `scale`."""
        return Weight(self.random(rows, columns, scale=scale))

    def place(self, values: Tensor) -> Tensor:
        """Return `values` rounded to the model's dtype, on the device."""
        return values.to(self.rounded_to).to(self.dtype).to(self.device)


Draw = Callable[[int], Weights]
"""`draw(n)` returns weights with the model's seed plus n."""


def draw_of(seed: int, device: torch.device, rounded_to: torch.dtype, dtype: torch.dtype | None, head_dim: int) -> Draw:
    config = replace(CONFIG, head_dim=head_dim)
    return lambda n: Weights(config, device, rounded_to, dtype or rounded_to, torch.Generator().manual_seed(seed + n))


@cache
def make_target(
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    head_dim: int = CONFIG.head_dim,
    *,
    recurrent: bool = False,
) -> LlamaTarget:
    """Return a Llama-shaped target with two layers.

    Args:
        recurrent: the first layer has a gated delta net in place of attention. The other arguments are those of
            `make_head`.
    """
    return (recurrent_target_of if recurrent else target_of)(draw_of(seed, device, dtype, compute, head_dim))


def target_of(draw: Draw) -> LlamaTarget:
    """Return the target with weights of `draw`."""
    embed, lm_head = vocabulary(draw(0))
    w = draw(1)
    layers = [layer(w, w.hidden, gain=1.2) for _ in range(w.config.num_layers)]
    return LlamaTarget(w.config, embed, layers, w.norm(w.hidden), lm_head)


def recurrent_target_of(draw: Draw) -> LlamaTarget:
    """Return the target whose first layer has a gated delta net, with weights of `draw`."""
    embed, lm_head = vocabulary(draw(0))
    w, sizes = draw(12), DELTA
    rows = sizes.channels + sizes.values + 2 * sizes.value_heads

    def spread(first: float, last: float, count: int) -> Tensor:
        return torch.linspace(first, last, count, dtype=torch.float32).to(w.device)  # made on the host, as all weights

    net = DeltaNet(
        config=sizes,
        weights=DeltaWeights(
            conv=w.random(sizes.channels, sizes.kernel, scale=0.6),
            decay=-spread(0.02, 0.8, sizes.value_heads),
            dt_bias=spread(-1.0, 1.0, sizes.value_heads),
        ),
        norm=spread(0.6, 1.4, sizes.value_size),
    )
    recurrent = replace(
        layer(w, w.hidden, gain=1.2),
        qkv=w.weight(rows, w.hidden, scale=2 * w.hidden**-0.5),
        output=w.weight(w.hidden, sizes.values, scale=1.2 * sizes.values**-0.5),
        delta=net,
    )
    config = replace(w.config, delta=sizes, recurrent=(True, False))
    layers = [recurrent, layer(w, w.hidden, gain=1.2)]
    return LlamaTarget(config, embed, layers, w.norm(w.hidden), lm_head)


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
        kind: one of `HEADS` or `VARIANTS`.
        compute: the dtype of the tensors, with values rounded to `dtype`. None for `dtype`.
        head_dim: of queries, keys and values.
    """
    return deepcopy(_cached_head(kind, seed, device, dtype, compute, head_dim))


@cache
def _cached_head(kind: str, seed: int, *places: Any) -> Head:
    return (HEADS | VARIANTS)[kind](draw_of(seed, *places))


def _eagle(draw: Draw) -> DraftHead:
    embed, lm_head = vocabulary(draw(0))
    w = draw(2)
    return EagleHead(w.config, embed, fuse(w), [layer(w, w.hidden, gain=0.8)], lm_head)


def _eagle3(draw: Draw) -> Eagle3Head:
    (sizes, tensors), w = _eagle3_parts(draw, 3), draw(7)
    return Eagle3Head(sizes, tensors, [layer(w, 2 * w.hidden, gain=1.5)], AUX_LAYERS)


def _eagle3_norm_output(draw: Draw) -> Eagle3Head:
    head, w = _eagle3(draw), draw(9)
    tensors = replace(head.tensors, norm=w.place(1 + 0.5 * torch.randn(w.hidden, generator=w.generator)))
    return Eagle3Head(head.sizes, tensors, head.layers, AUX_LAYERS, norm_output=True)


def _peagle(draw: Draw) -> PEagleHead:
    w = draw(8)
    layers = [layer(w, 2 * w.hidden, gain=1.5), layer(w, w.hidden, gain=1.5)]
    sizes, tensors = _eagle3_parts(draw, 3)
    hidden = w.random(len(AUX_LAYERS) * w.hidden)
    return PEagleHead(sizes, tensors, layers, AUX_LAYERS, mask_token_id=w.vocab - 1, mask_hidden=hidden)


def _eagle3_parts(draw: Draw, seed: int) -> tuple[ModelConfig, AuxWeights]:
    embed, _ = vocabulary(draw(0))
    w = draw(seed)
    draft_vocab = w.vocab // 2
    ids = torch.randperm(w.vocab, generator=w.generator)[:draft_vocab].sort().values
    tensors = AuxWeights(
        embed_tokens=embed,
        hidden_norm=w.norm(w.hidden),
        norm=w.norm(w.hidden),
        lm_head=w.random(draft_vocab, w.hidden, scale=0.3),
        fc=w.weight(w.hidden, len(AUX_LAYERS) * w.hidden, scale=(len(AUX_LAYERS) * w.hidden) ** -0.5),
        draft_to_target=(ids - torch.arange(draft_vocab)).to(w.device),
    )
    return w.config, tensors


def _mtp(draw: Draw, num_modules: int = 1) -> MtpHead:
    embed, lm_head = vocabulary(draw(0))
    w = draw(4)
    modules = [
        MtpModule(w.norm(w.hidden), w.norm(w.hidden), fuse(w), layer(w, w.hidden, gain=0.8), w.norm(w.hidden))
        for _ in range(num_modules)
    ]
    return MtpHead(w.config, modules, embed, lm_head)


def _dflash(draw: Draw, masks: int = MODULES) -> DFlashHead:
    embed, _ = vocabulary(draw(0))
    w = draw(5)
    tensors = AuxWeights(
        embed_tokens=embed,
        fc=w.weight(w.hidden, 2 * w.hidden, scale=(2 * w.hidden) ** -0.5),
        hidden_norm=w.norm(w.hidden),
        norm=w.norm(w.hidden),
        lm_head=w.random(w.vocab, w.hidden, scale=0.3),
    )
    layers = [layer(w, w.hidden, gain=4) for _ in range(2)]
    return DFlashHead(BlockParts(w.config, tensors, layers, (0, 2), 1 + masks, w.vocab - 1))


def _dspark(draw: Draw, variant: str = "vanilla", rows: int = MODULES) -> DSparkHead:
    base, (sizes, own) = _dflash(draw), _eagle3_parts(draw, 10)
    _, successor = vocabulary(draw(0))
    w = draw(11)
    rank = w.hidden
    tensors = replace(base.tensors, lm_head=w.place(0.1 * own.lm_head.double()), draft_to_target=own.draft_to_target)
    offsets = own.draft_to_target
    assert offsets is not None
    taken = successor[torch.arange(len(offsets), device=offsets.device) + offsets]

    def biased(rows: int, columns: int) -> Weight:
        return w.weight(rows, columns, scale=columns**-0.5)._replace(bias=w.random(rows))

    markov = MarkovHead(
        embed=base.embed_tokens,
        output=Weight(taken),
        gate=biased(rank, w.hidden + rank) if variant == "gated" else None,
        cell=biased(3 * rank, 2 * rank + w.hidden) if variant == "rnn" else None,
    )
    confidence = ConfidenceHead(w.random(1, w.hidden + rank, scale=0.2).to(own.lm_head.dtype), None)
    confidence = replace(confidence, weight=confidence.weight.to(torch.promote_types(torch.float32, w.dtype)))
    block = BlockParts(sizes, tensors, base.layers, (0, 2), rows, w.vocab - 1, sample_from_anchor=True)
    return DSparkHead(block, markov, confidence)


def _draft_model(draw: Draw, gain: float = 0.8) -> DraftModelHead:
    embed, lm_head = vocabulary(draw(0))
    w = draw(6)
    model = LlamaTarget(w.config, embed, [layer(w, w.hidden, gain)], w.norm(w.hidden), lm_head)
    return DraftModelHead(model, w.hidden)


HEADS: dict[str, Callable[[Draw], Head]] = {
    "eagle": _eagle,
    "mtp": _mtp,
    "eagle3": _eagle3,
    "mtp-modules": partial(_mtp, num_modules=MODULES),
    "dflash": _dflash,
    "dspark": _dspark,
    "peagle": _peagle,
    "draft-model": _draft_model,
}
"""The head of each name. The suite's cases about all kinds of drafters, and the tests' about all, run every one.

- `eagle3` has its own vocabulary and three auxiliary hidden states.
- `mtp` uses its one module in every draft step.
- `mtp-modules` has one module per draft step.
- `dflash` fills blocks of up to MODULES masks.
- `dspark` draws such a block in order, from its own vocabulary.
- `peagle` drafts from masked rows of one causal pass.
- `draft-model` is a whole small model."""
VARIANTS: dict[str, Callable[[Draw], Head]] = {
    "eagle3-norm-output": _eagle3_norm_output,
    "mtp-two-modules": partial(_mtp, num_modules=2),
    "dspark-gated": partial(_dspark, variant="gated"),
    "dspark-rnn": partial(_dspark, variant="rnn"),
    "draft-model-of-context": partial(_draft_model, gain=6),
    "target": lambda draw: DraftModelHead(target_of(draw), draw(0).hidden),
    "ngram": lambda draw: NgramHead(draw(0).vocab, prompt_lookup_max=3),
}
"""Further heads, for cases of their own.

- `eagle3-norm-output`: its draft steps pass normalised states on.
- `mtp-two-modules` has two modules, for at most two draft tokens.
- `dspark-gated` and `dspark-rnn` compute more between one token and the next.
- `draft-model-of-context` has tokens that depend more on the context than on the last token.
- `target` is the target itself, which always agrees.
- `ngram` has no weights."""


def fuse(w: Weights) -> Weight:
    """Return a weight [hidden_size, 2 * hidden_size] that passes the embedding on, and adds a little of the hidden
    state."""
    mix = torch.randn(w.hidden, w.hidden, generator=w.generator, dtype=torch.float64) * (0.8 * w.hidden**-0.5)
    return Weight(w.place(torch.cat([torch.eye(w.hidden, dtype=torch.float64), mix], dim=1)))


def vocabulary(w: Weights) -> tuple[Tensor, Tensor]:
    """Return an embedding, and an output projection that maps a token's embedding to the token's successor."""
    embed = torch.randn(w.vocab, w.hidden, generator=w.generator, dtype=torch.float64)
    successor = torch.randperm(w.vocab, generator=w.generator)
    lm_head = torch.empty_like(embed)
    lm_head[successor] = embed
    return w.place(embed), w.place(lm_head * (4 / w.hidden))


def layer(w: Weights, input_size: int, gain: float) -> DecoderLayer:
    """Return a decoder layer whose queries, keys and values read `input_size` columns."""
    config = w.config
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return DecoderLayer(
        qkv=w.weight(query + 2 * kv, input_size, scale=2 * input_size**-0.5),
        output=w.weight(w.hidden, query, scale=gain * query**-0.5),
        post_norm=w.norm(w.hidden),
        gate_up=w.weight(2 * config.intermediate_size, w.hidden, scale=w.hidden**-0.5),
        down=w.weight(w.hidden, config.intermediate_size, scale=gain * config.intermediate_size**-0.5),
        input_norm=w.norm(w.hidden),
    )


KINDS: Mapping[str, Kind[Any]] = {name: make_head(name, 0, torch.device("cpu")).kind for name in HEADS}
"""The kind of each head of `HEADS`."""
PROGRAMS = tuple({kind: name for name, kind in KINDS.items()}.values())
"""One head per kind: the last one of `HEADS`. Cases about what a program alone decides run these."""
STEPPING = tuple({KINDS[name].chains: name for name in reversed(PROGRAMS) if not KINDS[name].is_one_pass}.values())
"""One head per program of several draft steps."""
TREES = tuple({kind: name for name, kind in reversed(KINDS.items()) if kind.trees is not None}.values())
"""One head per kind that drafts trees: the first one of `HEADS`."""
