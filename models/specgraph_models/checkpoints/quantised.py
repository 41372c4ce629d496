"""Quantised checkpoints: FP8, MXFP4 and GGUF weights, turned into floating point while they are read.

FP8 (e4m3) matrices [out, in] have scales beside them: one per tensor, one per row, or one per block of rows and columns
(128 x 128 in DeepSeek's folders). MXFP4 (gpt-oss) stores 32 values of 4 bits and one power of two per block. Everything
is computed in the dtype that the folder is loaded with: no activation is quantised. With `keep_fp8` the matrices of
dense layers stay FP8 in memory (`CheckpointFolder.matrix`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.files import shown

_LOG = logging.getLogger("specgraph")

FP8 = ("F8_E4M3", "torch.float8_e4m3fn")
"""The stored dtypes that need a scale."""
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the 16 codes of 4 bits (e2m1)."""

IGNORED = {
    r".*\.(input_scale|input_global_scale)": "of activations, which are not quantised here",
    r".*\.(k_scale|v_scale|q_scale|output_scale)": "of a quantised KV cache or output, which is not quantised here",
}
"""Pattern of tensor names -> the reason why a quantised folder is loaded without them."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The storage format of the weights of a folder or a GGUF file."""

    kind: Literal["fp8", "mxfp4", "gguf"]
    method: str
    """The method and its scales, to be read by a person."""
    block: tuple[int, int] | None = None
    """Rows and columns that share one FP8 scale. None if scales are per tensor or per row."""


def quantisation(source: ConfigSource) -> Quantisation | None:
    """Read `quantization_config` (or `compression_config`). None if the weights are plain floating point."""
    found = None
    if types := source.strings("gguf_types"):
        return Quantisation("gguf", f"GGUF ({', '.join(types)})")
    for key in ("quantization_config", "compression_config"):
        if not source.has(key):
            continue
        section = source.section(key)
        method = section.values.get("quant_method") or section.values.get("format") or "an unnamed method"
        block = section.integers("weight_block_size")
        if method == "mxfp4":
            found = Quantisation("mxfp4", "MXFP4")
        elif method == "fp8":
            found = _fp8(section, "FP8", block)
        elif method == "compressed-tensors":
            found = _compressed(section)
        else:
            problem = f"says the weights are quantised by {shown(method)}; read are fp8, compressed-tensors and mxfp4"
            raise source.fail(key, f"{problem}: give one of these, or an unquantised checkpoint")
        section.taken.update(section.values)  # the rest is about activations, or repeats facts of the tensors
    return found


def announce(found: Quantisation | None, name: str, dtype: torch.dtype, kept: int = 0) -> None:
    """Log that a folder's weights take more memory than stored, except `kept` matrices that stayed FP8.

    It is a warning, except for GGUF files: no option keeps their weights as they are stored.
    """
    if found is None:
        return
    to = str(dtype).removeprefix("torch.")
    what = f"{kept} matrices stay in {found.method}, other quantised" if kept else found.method
    _LOG.log(
        logging.INFO if found.kind == "gguf" else logging.WARNING,
        "%s: %s weights are turned into %s while they are read, where they take more memory than stored; products are "
        "computed in %s", name, what, to, to,
    )  # fmt: skip


def scale_shapes(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that the scale of an FP8 tensor [..., out, in] may have. Stacked experts are its first axis."""
    if block is not None:
        return ((*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])),)
    leading = [(shape[:n], len(shape) - n) for n in range(1, len(shape))]
    return ((), (1,), (1, 1), *((*each, *[1] * ones) for each, left in leading for ones in range(left + 1)))


def scales_by_row(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int] | None) -> Tensor:
    """Return a stored scale as float32 [..., out, groups of columns]. Without blocks it is [..., 1 or out, 1]."""
    scale = scale.to(torch.float32)
    if block is None:
        return scale.view(*scale.shape, *(1 for _ in range(len(shape) - scale.dim())))
    return scale.repeat_interleave(min(block[0], shape[-2]), -2)[..., : shape[-2], :]


def from_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return weight, float8 [..., out, in], times its `scales_by_row`, as float32."""
    if block is not None:
        columns = weight.shape[-1]
        scale = scale.repeat_interleave(min(block[1], columns), -1)[..., :columns]
    return weight.to(torch.float32).mul_(scale)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return float32 [..., out, in] of blocks uint8 [..., out, in / 32, 16] and scales uint8 [..., out, in / 32].

    A byte has two values; the lower 4 bits are the first one. A block's values are multiplied by 2 ** (scale - 127).
    """
    table = torch.tensor(MXFP4_VALUES)
    pairs = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(pairs, scales.int().unsqueeze(-1) - 127).flatten(-2)


def _fp8(section: ConfigSource, method: str, block: tuple[int, ...] | None) -> Quantisation:
    section.require({"fmt": "e4m3"})
    if block is None:
        return Quantisation("fp8", f"{method} (one scale per tensor or row)")
    if len(block) != 2 or min(block) < 1:
        raise section.fail("weight_block_size", f"is {shown(list(block))}; it should be rows and columns of a block")
    return Quantisation("fp8", f"{method} (blocks of {block[0]} x {block[1]})", (block[0], block[1]))


def _compressed(section: ConfigSource) -> Quantisation | None:
    """Read the format of the package compressed-tensors: groups of layers, each with its own kind of weights."""
    groups, found = section.section("config_groups"), None
    for key in ("sparsity_config", "transform_config"):
        inner = section.section(key)
        inner.taken.update(inner.values)
        if inner.values and inner.values.get("format", "transform") != "dense":
            raise section.fail(key, f"is {shown(inner.values)}; pruned or rotated weights are not supported")
    for name in groups.values:
        group = groups.section(name)
        group.taken.update(group.values)
        weights = group.section("weights")
        weights.taken.update(weights.values)
        asked = [weights.values.get(key) for key in ("num_bits", "type", "strategy")]
        symmetric = weights.values.get("symmetric", True)
        if asked[:2] != [8, "float"] or asked[2] not in ("tensor", "channel", "block") or symmetric is not True:
            kind = f"{shown(asked[1])} of {shown(asked[0])} bits by {shown(asked[2])}"
            raise group.fail("weights", f"are {kind}; only float of 8 bits by tensor, channel or block is supported")
        block = weights.integers("block_structure") if asked[2] == "block" else None
        if asked[2] == "block" and block is None:
            raise weights.fail("block_structure", "is missing; it should be rows and columns of a block")
        now = _fp8(weights, "FP8 of compressed-tensors", block)
        if found is not None and found != now:
            raise groups.fail(name, "has other scales than the group before; one kind per folder is supported")
        found = now
    return found
