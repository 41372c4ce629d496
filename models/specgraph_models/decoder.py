"""The base classes of targets and draft heads: decoder layers between an embedding and an output projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend, AttentionLayer
from specgraph.draft.logits import OutputProjection, whole_rows
from specgraph.ops.draft_sampling import to_target_ids
from specgraph.ops.linear import PairInput, Weight
from specgraph_models import ops as model_ops
from specgraph_models.config import ModelConfig
from specgraph_models.delta import DeltaConfig, Recur
from specgraph_models.layers import DecoderLayer, decoder_blocks, rms_norm
from specgraph_models.parallel import TensorParallel
from specgraph_models.rotary import rotary_table
from specgraph_models.split import embedding, table_rows


class DecoderModel:
    """Decoder layers, an embedding and an output projection. Subclasses implement `forward` around the layers."""

    def __init__(
        self,
        sizes: ModelConfig,
        embed_tokens: Tensor,
        layers: Sequence[DecoderLayer],
        lm_head: Tensor,
        *,
        output_norm: Tensor | None = None,
        causal: bool = True,
    ) -> None:
        """
        Args:
            sizes: the sizes of the layers.
            embed_tokens: [vocab_size, hidden_size], or this rank's rows.
            lm_head: [output_vocab_size, hidden_size], or this rank's rows. The same tensor if they are tied.
            output_norm: [hidden_size]: a norm that `logits` applies, fused with the projection. None if there is none.
            causal: rows see only the rows before them.
        """
        self.sizes, self.embed_tokens, self.layers, self.lm_head = sizes, embed_tokens, tuple(layers), lm_head
        self.output_norm, self._causal = output_norm, causal
        self.hidden_size, self.dtype = sizes.hidden_size, embed_tokens.dtype
        self.vocab_size = self.output_vocab_size = sizes.vocab_size
        self.tensor_parallel = sizes.tensor_parallel
        self._attention_layers: tuple[AttentionLayer, ...] | None = None

    @property
    def ranks(self) -> TensorParallel | None:
        """Return the split of the model over ranks. None if it is whole."""
        return self.tensor_parallel if self.tensor_parallel.has_collectives else None

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Return the attention of each layer that has it.

        Rotary tables are made at the first use, so that `shorten` can come first.
        """
        if self._attention_layers is None:
            self._attention_layers = self.attention_shapes(self.sizes.max_position_embeddings)
        return self._attention_layers

    @attention_layers.setter
    def attention_layers(self, layers: Sequence[AttentionLayer]) -> None:
        self._attention_layers = tuple(layers)

    def attention_shapes(self, positions: int = 0) -> tuple[AttentionLayer, ...]:
        """Return the attention of each layer that has it, with rotary tables of `positions` rows.

        Layers of one rotation share a table.
        """
        sizes, device = self.sizes, self.embed_tokens.device
        dim = sizes.rotary_dim or sizes.head_dim
        table = rotary_table(sizes.rotary, positions, dim, device)
        local = table
        if sizes.sliding_rotary is not None:
            local = rotary_table(sizes.sliding_rotary, positions, dim, device)
        return tuple(
            AttentionLayer(
                num_heads=sizes.local_heads,
                num_kv_heads=sizes.local_kv_heads,
                head_dim=sizes.head_dim,
                scale=sizes.attention_scale or sizes.head_dim**-0.5,
                rotary=local if any(sizes.sliding[index : index + 1]) else table,
                causal=self._causal,
                window=sizes.window(index),
                latent=sizes.latent is not None,
                latent_first=sizes.latent is not None and sizes.latent.latent_first,
                sinks=layer.sinks,
                ranks=sizes.context,
            )
            for index, layer in enumerate(self.layers)
            if layer.delta is None
        )

    @property
    def recurrent_layers(self) -> tuple[DeltaConfig, ...]:
        """Return the sizes of each layer that has a state in place of attention."""
        return tuple(layer.delta.config for layer in self.layers if layer.delta is not None)

    def shorten(self, max_model_len: int) -> None:
        """Run with fewer positions. The rotary table gets shorter, and a window that hides no position is dropped."""
        self.sizes = replace(self.sizes, max_position_embeddings=max_model_len)
        self._attention_layers = None

    def run_layers(
        self,
        x: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        first_qkv: Tensor | None = None,
        recur: Recur | None = None,
    ) -> list[Tensor]:
        """Return the output of each layer; see `decoder_blocks`."""
        eps = self.sizes.rms_norm_eps
        return decoder_blocks(x, self.layers, self.attention_layers, attend, eps, rows, first_qkv, recur=recur)

    def cut_output(self, ids: Tensor) -> None:
        """Copy the rows of lm_head for some outputs, int64 [n], and use the copy in its place.

        Ranks that split lm_head call this together. They split the copy too, if they can split it evenly.
        """
        ranks, ids = self.tensor_parallel, ids.to(self.lm_head.device)
        rows = embedding(ids, self.lm_head, ranks, self.output_vocab_size)
        if ranks.vocabulary(len(ids)) is not None:
            begin, end = ranks.part(len(ids))
            rows = rows[begin:end].clone()
        self.lm_head, self.output_vocab_size = rows, len(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [N, hidden_size] to logits [N, output_vocab_size]."""
        return whole_rows(self._output.logits(hidden), self.tensor_parallel, self.output_vocab_size)

    @property
    def projection(self) -> OutputProjection | None:
        return self._output

    @property
    def _output(self) -> OutputProjection:
        eps = self.sizes.rms_norm_eps
        return OutputProjection(self.output_norm, eps, self.lm_head, self.output_vocab_size, self.tensor_parallel)

    def weights(self) -> Mapping[str, Tensor]:
        """Return every tensor that the model reads, also rotary tables. Subclasses put their own tensors first."""
        named = {"embed_tokens": self.embed_tokens, "lm_head": self.lm_head}
        named |= named_tensors(self.layers, "layers")
        for index, shape in enumerate(self.attention_layers):
            if shape.rotary is not None and all(shape.rotary is not table for table in named.values()):
                named["rotary" if index == 0 else f"rotary.{index}"] = shape.rotary
        return named

    def rank_parts(self) -> frozenset[str]:
        """Return the names of the tensors in `weights` that are split over ranks. Every rank has the others whole."""
        parts = {id(tensor) for tensor in named_tensors(self._rank_parts()).values()}
        return frozenset(name for name, tensor in self.weights().items() if id(tensor) in parts)

    def _rank_parts(self) -> tuple[Any, ...]:
        """Return the tensors that are split over ranks, in records of any form. Subclasses add their own."""
        embeds_part = self.embed_tokens.shape[0] != self.sizes.vocab_size
        return (
            self.embed_tokens if embeds_part else None,
            self.lm_head if self._output.split_over else None,
            *(layer.rank_parts() for layer in self.layers),
        )


class DraftDecoder(DecoderModel):
    """A draft head of decoder layers. By default its input is the target's final hidden state."""

    def __init__(
        self,
        sizes: ModelConfig,
        embed_tokens: Tensor,
        layers: Sequence[DecoderLayer],
        lm_head: Tensor,
        *,
        aux_layers: Sequence[int] = (),
        aux_size: int | None = None,
        draft_to_target: Tensor | None = None,
        output_norm: Tensor | None = None,
        causal: bool = True,
    ) -> None:
        """
        Args:
            sizes, embed_tokens, layers, lm_head, output_norm, causal: as in `DecoderModel`. `sizes.vocab_size` is the
                target's.
            aux_layers, aux_size: see `Head`. The default of aux_size is hidden_size.
            draft_to_target: int64 [draft_vocab_size], target id minus draft id. None if the draft vocabulary is the
                target's.
        """
        super().__init__(sizes, embed_tokens, layers, lm_head, output_norm=output_norm, causal=causal)
        self.aux_layers, self.aux_size = tuple(aux_layers), aux_size or sizes.hidden_size
        self.draft_to_target = draft_to_target
        if draft_to_target is not None:
            self.output_vocab_size = draft_to_target.shape[0]
        self.pair_input: PairInput | None = None

    @property
    def draft_vocab_size(self) -> int:
        return self.output_vocab_size

    def keep_tokens(self, draft_ids: Tensor) -> None:
        """See `CutHead.keep_tokens`. Subclasses with other tensors of draft tokens cut these too."""
        self.draft_to_target = cut_offsets(draft_ids, self.draft_to_target).to(self.lm_head.device)
        self.cut_output(draft_ids)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        return aux_hidden

    def takes_pairs(self, given: PairInput, weight: Weight) -> None:
        """Set `pair_input` to the input of the first linear, or to None if that is FP8 or ranks split the model."""
        self.pair_input = given if self.tensor_parallel.size == 1 and weight.scale is None else None

    def pair_linear(
        self, token_ids: Tensor, hidden: Tensor, given: PairInput, weight: Weight, pair: Tensor | None
    ) -> Tensor:
        """Run a linear over the embedding of a token and a hidden state.

        Args:
            token_ids: int64 [T].
            hidden: [T, hidden_size].
            given: how the linear's input is made. Its table is the model's embedding.
            pair: the input, if the op that picked the tokens has made it already.
        """
        if pair is not None:
            return ops.norm_linear(pair, None, weight)
        ids, table = table_rows(token_ids, given.table, self.tensor_parallel, self.sizes.vocab_size)
        return model_ops.pair_linear(ids, hidden, given._replace(table=table), weight)

    def weights(self) -> Mapping[str, Tensor]:
        offsets = {} if self.draft_to_target is None else {"draft_to_target": self.draft_to_target}
        return {**offsets, **super().weights()}


def cut_offsets(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Return the `draft_to_target` of a head that keeps these of its draft tokens: int64 [n] on the CPU.

    draft_to_target: the head's own before.
    """
    ids = draft_ids.cpu()
    return to_target_ids(ids, None if draft_to_target is None else draft_to_target.cpu()) - torch.arange(len(ids))


@dataclass(frozen=True, slots=True)
class AuxWeights:
    """The tensors of an `AuxDecoder` besides its decoder layers."""

    embed_tokens: Tensor
    """[vocab_size, hidden_size]: the target's tensor if it is shared."""
    fc: Weight | None
    """[hidden_size, aux_size]. None if the head takes the target's hidden states unchanged."""
    hidden_norm: Tensor
    """[hidden_size]"""
    norm: Tensor
    """[hidden_size]"""
    lm_head: Tensor
    """[draft_vocab_size, hidden_size]"""
    draft_to_target: Tensor | None = None
    """int64 [draft_vocab_size], target id minus draft id. None if the vocabularies are the same."""
    input_norm: Tensor | None = None
    """[aux_size]: one norm over all aux states (`norm_before_fc`)."""
    fc_norms: tuple[Tensor, ...] = ()
    """A norm per aux state (`fc_norm`), [target hidden_size] each."""


class AuxDecoder(DraftDecoder):
    """A draft head that takes hidden states of several target layers (EAGLE-3, DFlash)."""

    def __init__(
        self,
        sizes: ModelConfig,
        weights: AuxWeights,
        layers: Sequence[DecoderLayer],
        aux_layers: Sequence[int],
        causal: bool = True,
    ) -> None:
        """aux_layers: see `Head`."""
        super().__init__(
            sizes,
            weights.embed_tokens,
            layers,
            weights.lm_head,
            aux_layers=aux_layers,
            aux_size=None if weights.fc is None else weights.fc.matrix.shape[1],
            draft_to_target=weights.draft_to_target,
            output_norm=weights.norm,
            causal=causal,
        )
        self.tensors = weights

    def keep_tokens(self, draft_ids: Tensor) -> None:
        super().keep_tokens(draft_ids)
        self.tensors = replace(self.tensors, lm_head=self.lm_head, draft_to_target=self.draft_to_target)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        tensors, eps = self.tensors, self.sizes.rms_norm_eps
        if tensors.input_norm is not None:
            aux_hidden = rms_norm(aux_hidden, tensors.input_norm, eps)
        if tensors.fc_norms:
            parts = aux_hidden.chunk(len(tensors.fc_norms), dim=-1)
            aux_hidden = torch.cat(
                [rms_norm(part, norm, eps) for part, norm in zip(parts, tensors.fc_norms, strict=True)], dim=-1
            )
        return aux_hidden if tensors.fc is None else ops.norm_linear(aux_hidden, None, tensors.fc)

    def weights(self) -> Mapping[str, Tensor]:
        return {**named_tensors(self.tensors), **super().weights()}


def named_tensors(part: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a dataclass of weights, or of a tuple or mapping of such, by dotted name.

    The read set uses these names.
    """
    if isinstance(part, torch.Tensor):
        return {prefix: part}
    if isinstance(part, Weight):
        return part.named_tensors(prefix)
    items: list[tuple[object, Any]] = []
    if isinstance(part, tuple):
        items = list(enumerate(cast("tuple[Any, ...]", part)))
    elif isinstance(part, Mapping):
        items = list(cast("Mapping[str, Any]", part).items())
    elif is_dataclass(part):
        items = [(field.name, getattr(part, field.name)) for field in fields(part)]
    named: dict[str, Tensor] = {}
    for name, value in items:
        named |= named_tensors(value, f"{prefix}.{name}" if prefix else str(name))
    return named
