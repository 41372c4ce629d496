"""Checks that a draft head and an attention backend follow their protocols. They run before a capture.

Without them, a missing method would fail somewhere inside a warm-up. A tensor of a wrong shape might even be broadcast,
and the only symptom would be drafts that are never accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch
from torch import Tensor

from specgraph.attention import AttentionBackend
from specgraph.draft.logits import OutputProjection, whole_rows
from specgraph.draft.protocol import DraftHead, Head
from specgraph.errors import ConfigError
from specgraph.ops.tensor_forms import check_named
from specgraph.user_code import users_code
from specgraph.validation import check

_LOG = logging.getLogger("specgraph")
ATTENTION = ("name", "host_parameters", "after_advance", "forward", "named_tensors")
TREES = ("supports", "supports_trees", "cache_dtypes")
"""Members of an attention backend that draft trees need in addition."""


def check_protocol(
    what: str, thing: Any, protocol: type[Any], members: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Raise ConfigError if `thing` lacks a member of its protocol, or has a property of another type.

    Args:
        what: the word for `thing` in the error, such as "head".
        members: the required members; by default all members of the protocol.
        optional: members that are checked if `thing` has them.
    """
    members = members or [name for name in dir(protocol) if not name.startswith("_")]

    def lacks(member: str) -> bool:
        is_method = callable(getattr(protocol, member))
        return not hasattr(thing, member) or (is_method and not callable(getattr(thing, member)))

    if missing := [member for member in members if lacks(member)]:
        raise ConfigError(
            f"the {what} {type(thing).__name__} lacks {', '.join(missing)}: give it the members of "
            f"specgraph.{protocol.__name__}"
        )
    for member in (*members, *(each for each in optional if not lacks(each))):
        declared = getattr(protocol, member)
        if isinstance(declared, property):
            annotation = get_type_hints(declared.fget, include_extras=True)["return"]
            check(f"{type(thing).__name__}.{member}", getattr(thing, member), annotation)


def tell_unrotated(head: Head, attention: AttentionBackend) -> None:
    """Log a warning if attention layers have no rotary table and don't set `no_rotary`."""
    layers = [
        index for index, layer in enumerate(head.attention_layers) if layer.rotary is None and not layer.no_rotary
    ]
    if layers:
        _LOG.warning(
            "attention layers %s of the head %s have no rotary table, so attention '%s' gets none to rotate queries "
            "and keys by: give AttentionLayer(rotary=...), or no_rotary=True where none is meant",
            layers,
            type(head).__name__,
            attention.name,
        )


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """Calls the methods of one head, and checks their results."""

    head: Any
    rows: int
    device: torch.device
    attended: list[int] = field(default_factory=list[int])
    """The layers that attended in the current `forward`, in order."""

    def forward(self, *arguments: Any) -> Any:
        """Call `forward`. Each layer must attend exactly once, so that it gets the key of every row."""
        self.attended.clear()
        output = self.call("forward", *arguments)
        if sorted(self.attended) != [*range(len(self.head.attention_layers))]:
            raise ConfigError(
                f"{self.name}.forward calls attend for layers {self.attended}: call it once for each of its "
                f"{len(self.head.attention_layers)} attention layer(s), so that each has the keys of all rows"
            )
        return output

    @property
    def name(self) -> str:
        return type(self.head).__name__

    def tensors(self) -> None:
        """Check the head's own tensors: `weights` and `draft_to_target`."""
        head = self.head
        for key, tensor in check_named(f"{self.name}.weights()", self.call("weights")).items():
            if tensor.device.type != self.device.type:
                raise ConfigError(
                    f"{self.name}.weights()['{key}'] is on {tensor.device}; the platform's device is {self.device} "
                    "(load_drafter reads a head to where its target is: target_shape(folder, device=...) for a "
                    "target's folder)"
                )
        if head.draft_to_target is not None:
            self.expect("draft_to_target", head.draft_to_target, head.draft_vocab_size, dtype=torch.int64)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return token ids and the result of `combine`, for `rows` rows."""
        head, rows, device = self.head, self.rows, self.device
        context = self.call("combine", torch.zeros(rows, head.aux_size, dtype=head.dtype, device=device))
        self.expect("combine(aux_hidden)", context, rows, head.hidden_size, dtype=head.dtype)
        return torch.zeros(rows, dtype=torch.int64, device=device), context

    def chain(self) -> None:
        """Check a `DraftHead`: `combine`, `forward` and `logits`."""
        ids, context = self.inputs()
        self.output("forward(...)", self.forward(ids, context, self.attend), self.rows)
        last = torch.tensor([self.rows - 1], device=self.device)
        self.output("forward(..., rows) of one row", self.forward(ids, context, self.attend, last), 1)
        self.logits()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the head. Raises ConfigError, with the method's name, if it fails."""
        shapes = ", ".join(str(list(each.shape)) for each in arguments if isinstance(each, Tensor))
        with users_code(f"{self.name}.{method} failed" + (f" on tensors {shapes}" if shapes else ""), ConfigError):
            return getattr(self.head, method)(*arguments)

    def expect(self, what: str, tensor: Any, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Check the shape, layout, dtype and device of one tensor. what: its name in the error."""
        name = f"{self.name}.{what}"
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name} is a {type(tensor).__name__}; expected a tensor {list(shape)}")
        is_plain = tensor.layout is torch.strided
        if tuple(tensor.shape) != shape or not is_plain or (dtype is not None and tensor.dtype != dtype):
            wanted, layout = "" if dtype is None else f" {dtype}", "" if is_plain else f" {tensor.layout}"
            raise ConfigError(f"{name} is {list(tensor.shape)} {tensor.dtype}{layout}; expected {list(shape)}{wanted}")
        if tensor.device.type != self.device.type:
            raise ConfigError(f"{name} is on {tensor.device}; the platform's device is {self.device}")

    def output(self, what: str, output: Any, rows: int) -> None:
        """Check a `DraftOutput`."""
        if getattr(output, "hidden", None) is None:
            raise ConfigError(f"{self.name}.{what} is a {type(output).__name__}: return DraftOutput(hidden, carry)")
        for name in ("hidden", "carry"):
            tensor = getattr(output, name, None)
            self.expect(f"{what}.{name}", tensor, rows, self.head.hidden_size, dtype=self.head.dtype)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Check the query, key and value of one layer's attention. Returns zeros."""
        self._heads(index, query.shape[0], query=query, key=key, value=value)
        self.attended.append(index)
        return torch.zeros_like(query)

    def store(self, index: int, key: Tensor, value: Tensor) -> None:
        """Check the key and value that one layer stores."""
        self._heads(index, self.rows, key=key, value=value)

    def _heads(self, index: Any, count: int, **tensors: Any) -> None:
        layers = self.head.attention_layers
        if index not in range(len(layers)):
            raise ConfigError(
                f"{self.name} attends as layer {index!r}; it has {len(layers)} attention layer(s), from 0"
            )
        for what, tensor in tensors.items():
            number = layers[index].num_heads if what == "query" else layers[index].num_kv_heads
            self.expect(f"forward's {what} of layer {index}", tensor, count, number, layers[index].head_dim)

    def logits(self) -> None:
        """Check `logits`. It must compute the linear in `projection`, since draft ops use that linear in its place."""
        out: OutputProjection | None = self.head.projection
        hidden = torch.randn(self.rows, self.head.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(self.device, self.head.dtype)
        logits = self.call("logits", hidden)
        self.expect("logits(hidden)", logits, self.rows, self.head.draft_vocab_size)
        if not logits.is_floating_point():
            raise ConfigError(f"{self.name}.logits(hidden) is {logits.dtype}: return floats, which drafts are drawn by")
        if out is None:
            return
        with users_code(f"{self.name}.projection failed", ConfigError):
            wanted = whole_rows(out.logits(hidden), out.tensor_parallel, self.head.draft_vocab_size).float()
        tolerance = 1e-3 if self.head.dtype == torch.float32 else 2e-2
        error = (logits.float() - wanted).abs().max()
        if not bool(error <= tolerance * wanted.abs().max()):
            raise ConfigError(
                f"{self.name}.logits(hidden) is not the linear in {self.name}.projection, which draft ops use instead "
                "of it: set projection = None to have logits called, or give the projection that it computes"
            )


def check_members(attention: Any, head: Any = None, trees: bool = False) -> None:
    """Check the members of an attention backend, and of a head if one is given. Raises ConfigError if a member of the
    protocol is missing or has another type.

    Args:
        trees: check the members that draft trees need, too.
    """
    needed = (*ATTENTION, *TREES) if trees else ATTENTION
    check_protocol("attention backend", attention, AttentionBackend, needed, [*TREES, "preferred_block_size"])
    if head is None:
        return
    check_protocol("head", head, DraftHead, ("kind",))
    check_protocol("head", head, head.kind.protocol)


@torch.no_grad()
def check_passes(head: Any, rows: int, device: torch.device) -> None:
    """Run each method of a head once, on zeros and with attention that only checks shapes, and check its results.

    Raises ConfigError if a method fails, if a tensor has another shape, dtype or device than the protocol demands, or
    if `logits` does not compute the linear in `projection`.
    """
    check = HeadCheck(head, rows, device)
    check.tensors()
    head.kind.check(check)
