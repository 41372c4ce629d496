"""Draft heads over the modules that a host engine has loaded: views of its weights, no copies.

Many host engines hold a Llama-shaped drafter as torch modules of the same names, with packed projections:

    module.config                  hidden_size, vocab_size, hidden_act, draft_vocab_size (EAGLE-3)
    module.lm_head                 weight [>= vocabulary, hidden_size]
    module.model                   embed_tokens, fc, layers; norm, input_norm, fc_norm, norm_output,
                                   num_aux_hidden_states (EAGLE-3)
    module.model.layers[i]         self_attn, mlp, post_attention_layernorm; input_layernorm, hidden_norm (EAGLE-3)
    layer.self_attn                qkv_proj, o_proj, rotary_emb, attn, num_heads, num_kv_heads, head_dim, scaling;
                                   q_norm, k_norm if heads are normalised
    layer.mlp                      gate_up_proj, down_proj; or a mixture of experts, which the engine's module computes

A vocabulary may have padding rows past its size, which are not read. If the host engine has split the module over
ranks, each rank passes its own part: heads, MLP columns, and the same number of rows of each vocabulary. Every function
of this file raises UnsupportedError for an option of a module that a head here does not have, and names the option.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from specgraph.errors import UnsupportedError, first_line
from specgraph.ops.linear import FP8, Weight
from specgraph.validation import checked
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import AuxWeights, DecoderModel
from specgraph_models.eagle import EagleHead
from specgraph_models.eagle3 import Eagle3Head
from specgraph_models.layers import DecoderLayer, EngineMlp
from specgraph_models.parallel import WHOLE, TensorParallel

ROTARY_CLASSES = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)
"""Rotations with a `cos_sin_cache` [positions, rotary_dim]: each row has the cosines, then the sines of a position."""

CallMlp = Callable[[Any, Tensor], Tensor]
"""(a host engine's MLP module, rows [T, hidden_size]) -> the module's result, summed over the ranks.

The function sets up the context that the host engine's modules need."""


@contextmanager
def other_names() -> Generator[None]:
    """Turn an AttributeError into an UnsupportedError with the name that a module lacks."""
    try:
        yield
    except AttributeError as error:
        raise UnsupportedError(f"the module lacks a name of Llama-shaped drafters: {first_line(error)}") from error


@checked
@other_names()
def eagle3_head_from_module(
    module: Any,
    *,
    draft_to_target: Tensor | None = None,
    norm_before_residual: bool = False,
    ranks: TensorParallel = WHOLE,
) -> Eagle3Head:
    """Return an EAGLE-3 head over a loaded module, with the module's own table of cosines and sines.

    Args:
        module: see this file's docstring. Its weights are on the device.
        draft_to_target: int64 [draft_vocab_size], target id minus draft id. None if the drafter has the target's
            vocabulary.
        norm_before_residual: see `Eagle3Head`.
        ranks: the ranks that the host engine has split the module over.

    Raises:
        UnsupportedError: if the module has an option or a tensor that the head does not have, or lacks a name.
    """
    config, inner = module.config, module.model
    model, draft_vocab = config_from_module(module, ranks), int(config.draft_vocab_size)
    if draft_to_target is None and draft_vocab != model.vocab_size:
        raise UnsupportedError(f"{draft_vocab} draft tokens of {model.vocab_size}, and no draft_to_target says which")
    weights = AuxWeights(
        embed_tokens=vocabulary_rows(inner.embed_tokens, model.vocab_size, ranks),
        fc=linear_of(inner.fc),
        hidden_norm=plain(inner.layers[0].hidden_norm.weight),
        norm=plain(inner.norm.weight),
        lm_head=vocabulary_rows(module.lm_head, draft_vocab, ranks),
        draft_to_target=None if draft_to_target is None else plain(draft_to_target),
        input_norm=None if inner.input_norm is None else plain(inner.input_norm.weight),
        fc_norms=() if inner.fc_norm is None else tuple(plain(norm.weight) for norm in inner.fc_norm),
    )
    head = Eagle3Head(
        model,
        weights,
        [layer_from_module(layer, ranks) for layer in inner.layers],
        range(inner.num_aux_hidden_states),  # the host engine's target gives these states; only their number matters
        norm_before_residual=norm_before_residual,
        norm_output=bool(inner.norm_output),
    )
    set_rotary(head, inner.layers[0].self_attn)
    return head


@checked
@other_names()
def eagle_head_from_module(module: Any, ranks: TensorParallel = WHOLE) -> EagleHead:
    """Return an EAGLE-1 head over a loaded module that is split over `ranks`. `lm_head` is the target's."""
    inner, model = module.model, config_from_module(module, ranks)
    head = EagleHead(
        model,
        vocabulary_rows(inner.embed_tokens, model.vocab_size, ranks),
        linear_of(inner.fc),
        [layer_from_module(layer, ranks) for layer in inner.layers],
        vocabulary_rows(module.lm_head, model.vocab_size, ranks),
    )
    set_rotary(head, inner.layers[0].self_attn)
    return head


def config_from_module(
    module: Any, ranks: TensorParallel = WHOLE, rotary_classes: Sequence[str] = ROTARY_CLASSES
) -> ModelConfig:
    """Return the sizes of the layers. Raises ConfigError if the ranks cannot split them.

    `max_position_embeddings` is 1, because `set_rotary` takes the module's own table.
    """
    config, first = module.config, module.model.layers[0]
    if config.hidden_act != "silu":
        raise UnsupportedError(f"hidden_act '{config.hidden_act}'; the drafter's MLP is gated by silu")
    down: Any = getattr(first.mlp, "down_proj", None)
    return ModelConfig(
        architecture="llama",
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=0 if down is None else linear_of(down).matrix.shape[1] * ranks.size,
        num_layers=len(module.model.layers),
        num_heads=first.self_attn.num_heads * ranks.size,
        num_kv_heads=first.self_attn.num_kv_heads if ranks.size == 1 else first.self_attn.total_num_kv_heads,
        head_dim=first.self_attn.head_dim,
        rms_norm_eps=float(first.post_attention_layernorm.variance_epsilon),
        max_position_embeddings=1,
        tie_word_embeddings=False,
        dtype=linear_weight(module.model.embed_tokens).dtype,
        attention_scale=float(first.self_attn.scaling),
        rotary_dim=rotary_from_module(first.self_attn, rotary_classes).shape[1],
    ).split(ranks)


def layer_from_module(layer: Any, ranks: TensorParallel = WHOLE, call: CallMlp | None = None) -> DecoderLayer:
    """Return one decoder layer's weights. Raises UnsupportedError if an option of its attention changes the scores.

    call: runs a mixture of experts. None if none is served.
    """
    attention, mlp, attend = layer.self_attn, layer.mlp, layer.self_attn.attn
    for name in ("sliding_window", "sliding_window_size"):
        if (window := getattr(attend, name, None)) not in (None, -1):
            raise UnsupportedError(f"a sliding window of {window} keys in the drafter")
    if getattr(attend, "logit_cap", 0):
        raise UnsupportedError(f"logit_cap {attend.logit_cap} in the drafter's attention")
    if getattr(attention, "do_llama_4_scaling", False):
        raise UnsupportedError("the drafter scales its queries by position (llama_4_scaling)")
    if getattr(layer, "layer_scale", False):
        raise UnsupportedError("the drafter scales what its attention and MLP add (layer_scale)")
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    first_norm: Any = getattr(layer, "input_layernorm", None)  # EAGLE-1's first layer has one without a weight
    output = linear_of(attention.o_proj)
    gate_up, down, engine_mlp = mlp_from_module(mlp, output, call)
    return DecoderLayer(
        qkv=linear_of(attention.qkv_proj),
        output=output,
        post_norm=norm_of(layer.post_attention_layernorm),
        gate_up=gate_up,
        down=down,
        mlp=engine_mlp,
        input_norm=None if getattr(first_norm, "weight", None) is None else norm_of(first_norm),
        query_norm=None if query_norm is None else norm_of(query_norm),
        key_norm=None if key_norm is None else norm_of(key_norm),
        tensor_parallel=ranks,
    )


def mlp_from_module(mlp: Any, output: Weight, call: CallMlp | None) -> tuple[Weight, Weight, EngineMlp | None]:
    """Return an MLP's two linears and None, or for a mixture of experts empty linears and the `EngineMlp` that runs it.

    output: the empty linears are of its dtype and device.
    """
    if call is None or getattr(mlp, "down_proj", None) is not None:
        return linear_of(mlp.gate_up_proj), linear_of(mlp.down_proj), None
    empty = Weight(output.matrix.new_empty(0))
    return empty, empty, EngineMlp(partial(call, mlp), {name: plain(own) for name, own in mlp.named_parameters()})


def class_name(module: Any) -> str:
    """Return the name of the host engine's class of a module.

    A device's plugin may derive a class of its own from the engine's, in its own package. The engine's package is that
    of the deepest base outside of torch and of the standard library.
    """
    bases = [(base.__module__.partition(".")[0], base.__name__) for base in type(module).__mro__]
    theirs = [(package, name) for package, name in bases if package not in ("torch", *sys.stdlib_module_names)]
    return next((name for package, name in theirs if package == theirs[-1][0]), bases[0][1])


def norm_of(norm: Any) -> Tensor:
    """Return the factors of an RMS norm: its weight, or 1 + weight in float32 if it is a norm of Gemma's kind."""
    weight = plain(norm.weight)
    return weight.float() + 1 if class_name(norm) == "GemmaRMSNorm" else weight


FP8_METHODS = (
    "Fp8LinearMethod",
    "CompressedTensorsLinearMethod",
    "Fp8PerTensorOnlineLinearMethod",
    "Fp8PerBlockOnlineLinearMethod",
    "Fp8PtpcOnlineLinearMethod",
)
"""The quantisation classes of host engines that may have FP8 weights with a scale per tensor, row or block."""


def _quantised_by(module: Any) -> str:
    """Return the name of the class that quantises a linear or an embedding, or "" if none does."""
    method = class_name(getattr(module, "quant_method", None))
    return "" if method in ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod") else method


def linear_weight(module: Any) -> Tensor:
    """Return the plain, unquantised weight [out, in] of a linear or an embedding."""
    weight: Any = getattr(module, "weight", None)
    if method := _quantised_by(module):
        raise UnsupportedError(
            f"a quantised {type(module).__name__} of the drafter ({method}); linears of its layers may be FP8, and "
            "everything else is bfloat16 or float16"
        )
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.stride(1) != 1:
        raise UnsupportedError(f"{type(module).__name__} of the drafter has no plain weight [out, in]")
    return plain(weight)


def vocabulary_rows(module: Any, size: int, ranks: TensorParallel = WHOLE) -> Tensor:
    """Return this rank's rows [size / ranks, hidden_size] of an embedding or an lm_head, without padding."""
    weight = linear_weight(module)
    rows, rest = divmod(size, ranks.size)
    if weight.shape[0] < rows:
        raise UnsupportedError(
            f"{type(module).__name__} of the drafter has {weight.shape[0]} rows for a vocabulary of {size} over "
            f"{ranks.size} ranks"
        )
    if ranks.size > 1 and (rest or weight.shape[0] > rows):
        raise UnsupportedError(
            f"the drafter's vocabulary of {size} is padded to split it over {ranks.size} ranks; served are those that "
            "are split evenly without"
        )
    return weight[:rows]


def linear_of(module: Any) -> Weight:
    """Return the weight of a linear, with its bias if it has one.

    FP8 scales are copied unless they are float32 with one per row: they have another layout here.
    """
    bias: Tensor | None = getattr(module, "bias", None)
    matrix, scale = _fp8(module) if _quantised_by(module) in FP8_METHODS else (linear_weight(module), None)
    return Weight(matrix, None if bias is None else plain(bias), scale)


def _fp8(module: Any) -> tuple[Tensor, Tensor]:
    """Return an FP8 matrix [out, in], and its scales float32 [groups of columns, out].

    For some of its kernels a host engine keeps the matrix as a view [in, out] of the same memory.
    """
    weight: Any = module.weight
    scale: Any = getattr(module, "weight_scale", getattr(module, "weight_scale_inv", None))
    is_fp8 = isinstance(weight, Tensor) and weight.dtype == FP8 and weight.dim() == 2
    if is_fp8 and isinstance(scale, Tensor) and scale.is_floating_point():
        matrix, scale = plain(weight if weight.stride(1) == 1 else weight.t()), plain(scale).float()
        rows, columns = matrix.shape
        given = ("output", rows), ("input", columns)
        sizes = [getattr(module, f"{side}_size_per_partition", size) for side, size in given]
        if sizes != [rows, columns]:
            raise UnsupportedError(
                f"a quantised drafter ({_quantised_by(module)}) with weights [{rows}, {columns}] that are padded, from "
                f"{sizes}; served are sizes that its kernel does not pad, multiples of 16"
            )
        block: Any = getattr(module, "weight_block_size", None)
        if block is None and scale.numel() in (1, rows):
            return matrix, scale.reshape(1, -1).expand(1, rows).contiguous()  # no copy if there is a scale per row
        if block is not None and scale.shape == (-(-rows // block[0]), columns / block[1]):
            return matrix, scale.repeat_interleave(block[0], 0)[:rows].t().contiguous()
        scales = f"{list(scale.shape)} and blocks {block}"
    else:
        scales = f"{getattr(scale, 'dtype', None)}"
    raise UnsupportedError(
        f"a quantised drafter ({_quantised_by(module)}) with weights {getattr(weight, 'dtype', None)} "
        f"{list(getattr(weight, 'shape', []))} and scales {scales}; served are float8_e4m3fn [out, in] with a "
        "scale per tensor, row, or block of whole columns"
    )


def plain(tensor: Tensor) -> Tensor:
    """Return the same memory as a plain Tensor. A host engine's subclass of Parameter would see every call with it."""
    return tensor.detach().as_subclass(Tensor)


def rotary_from_module(attention: Any, classes: Sequence[str] = ROTARY_CLASSES, neox_style: bool = True) -> Tensor:
    """Return the module's own cosines and sines, float32 [positions, rotary_dim], rounded as in the module."""
    rotary = attention.rotary_emb
    if class_name(rotary) not in classes or rotary.is_neox_style != neox_style:
        raise UnsupportedError(
            f"rotary embedding {type(rotary).__name__}, neox style {getattr(rotary, 'is_neox_style', None)}; served "
            f"are {', '.join(classes)}, neox style {neox_style}"
        )
    return rotary.cos_sin_cache.float()


def set_rotary(
    model: DecoderModel, attention: Any, classes: Sequence[str] = ROTARY_CLASSES, neox_style: bool = True
) -> None:
    """Give all layers of the model the rotary table of a module."""
    table = rotary_from_module(attention, classes, neox_style)
    model.attention_layers = tuple(replace(layer, rotary=table) for layer in model.attention_layers)
