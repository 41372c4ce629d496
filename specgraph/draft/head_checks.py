"""Whether a draft head and an attention backend have the methods and shapes of their protocols, checked before capture.

A head that lacks a method, or returns a tensor of another shape, would otherwise fail somewhere inside a warm-up, or be
broadcast into drafts that are never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import ConfigError, SpecgraphError, first_line

_HEAD = (
    "attention_layers", "hidden_size", "draft_vocab_size", "aux_layers", "aux_size", "dtype", "draft_to_target",
    "combine", "forward", "logits", "weights",
)  # fmt: skip
_PARALLEL = (*_HEAD, "store_context", "max_speculative_tokens", "mask_token_id")
_MASKED = (*_HEAD, "mask_token_id", "mask_hidden")
_ATTENTION = ("name", "host_parameters", "forward", "named_tensors")


def check_members(head: Any, attention: Any) -> None:
    """Refuse a head or an attention backend that is a class, or lacks members of its protocol.

    Raises:
        ConfigError: naming the object, what it lacks, and the protocol.
    """
    for what, thing in (("head", head), ("attention backend", attention)):
        if isinstance(thing, type):
            raise ConfigError(f"the {what} is the class {thing.__name__}: give an object of it")
    if hasattr(head, "store_context"):
        protocol, members = "ParallelHead", _PARALLEL
    elif hasattr(head, "mask_hidden") or hasattr(head, "mask_token_id"):
        protocol, members = "MaskedHead", _MASKED
    elif getattr(head, "num_modules", 1) > 1:
        protocol, members = "StepwiseHead", (*_HEAD, "forward_step")
    else:
        protocol, members = "DraftHead", _HEAD
    for what, thing, needed, name in (
        ("head", head, members, protocol),
        ("attention backend", attention, _ATTENTION, "AttentionBackend"),
    ):
        if missing := [member for member in needed if not hasattr(thing, member)]:
            raise ConfigError(
                f"the {what} {type(thing).__name__} lacks {', '.join(missing)}: give it the members of specgraph.{name}"
            )


@torch.no_grad()
def check_passes(head: Any, rows: int, device: torch.device) -> None:
    """Run each method of a head once over zeros, with attention that only checks shapes, and check what it returns.

    Args:
        rows: rows of one request in a round, K + 1.
        device: the platform's.

    Raises:
        ConfigError: a tensor has another shape, dtype or device than the protocol says, or a method fails.
    """
    name, layers = type(head).__name__, head.attention_layers

    def expect(what: str, tensor: Any, *shape: int, dtype: torch.dtype | None = None) -> None:
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name}.{what} is a {type(tensor).__name__}; expected a tensor {list(shape)}")
        if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
            wanted = "" if dtype is None else f" {dtype}"
            raise ConfigError(f"{name}.{what} is {list(tensor.shape)} {tensor.dtype}; expected {list(shape)}{wanted}")
        if tensor.device.type != device.type:
            raise ConfigError(f"{name}.{what} is on {tensor.device}; the platform's device is {device}")

    def called(method: str, *arguments: Any) -> Any:
        try:
            return getattr(head, method)(*arguments)
        except (SpecgraphError, torch.OutOfMemoryError):
            raise
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:  # what wrong shapes raise
            shapes = ", ".join(str(list(each.shape)) for each in arguments if isinstance(each, Tensor))
            raise ConfigError(
                f"{name}.{method} failed on tensors {shapes}: {type(error).__name__}: {first_line(error)}"
            ) from error

    def heads(index: Any, count: int, **tensors: Any) -> None:
        if index not in range(len(layers)):
            raise ConfigError(f"{name} attends as layer {index!r}; it has {len(layers)} attention layer(s), from 0")
        for what, tensor in tensors.items():
            number = layers[index].num_heads if what == "query" else layers[index].num_kv_heads
            expect(f"forward's {what} of layer {index}", tensor, count, number, layers[index].head_dim)

    def attend_over(count: int) -> Any:
        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            heads(index, count, query=query, key=key, value=value)
            return torch.zeros_like(query)

        return attend

    def store(index: int, key: Tensor, value: Tensor) -> None:
        heads(index, rows, key=key, value=value)

    for key, tensor in head.weights().items():
        if not isinstance(tensor, Tensor) or tensor.device.type != device.type:
            where = tensor.device if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"{name}.weights()['{key}'] is on {where}; the platform's device is {device} (load_drafter reads a "
                "head to where its target is: target_shape(folder, device=...) for a target's folder)"
            )
    if head.draft_to_target is not None:
        expect("draft_to_target", head.draft_to_target, head.draft_vocab_size, dtype=torch.int64)
    if hasattr(head, "mask_hidden"):
        expect("mask_hidden", head.mask_hidden, head.hidden_size, dtype=head.dtype)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    context = called("combine", torch.zeros(rows, head.aux_size, dtype=head.dtype, device=device))
    expect("combine(aux_hidden)", context, rows, head.hidden_size, dtype=head.dtype)
    if hasattr(head, "store_context"):
        called("store_context", context, store)
        hidden = called("forward", ids, attend_over(rows))
        expect("forward(...)", hidden, rows, head.hidden_size, dtype=head.dtype)
    else:
        last = torch.tensor([rows - 1], device=device)
        outputs: Sequence[tuple[str, Any, int]]
        if getattr(head, "num_modules", 1) > 1:
            outputs = [
                (f"forward_step({module}, ...)", called("forward_step", module, ids, context, attend_over(rows)), rows)
                for module in range(head.num_modules)
            ]
        else:
            outputs = [
                ("forward(...)", called("forward", ids, context, attend_over(rows)), rows),
                ("forward(..., rows) of one row", called("forward", ids, context, attend_over(rows), last), 1),
            ]
        for what, output, count in outputs:
            for field in ("hidden", "carry"):
                expect(f"{what}.{field}", getattr(output, field, None), count, head.hidden_size, dtype=head.dtype)
        hidden = outputs[0][1].hidden
    expect("logits(hidden)", called("logits", hidden), rows, head.draft_vocab_size)
