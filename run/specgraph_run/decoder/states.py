"""The states of a target's recurrent layers: a slot in each layer's tensors per running request.

A request that joins takes the lowest slot that no running request has. Its slot is written beside its first KV block,
so passes find it by the block table, wherever the request's row moves. Nothing is cleared: a pass at position 0 starts
from zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod

import torch
from specgraph_models import ops as model_ops
from specgraph_models.delta import DeltaConfig, Recur
from specgraph_models.ops.delta import NULL_STATE, DeltaState, DeltaWeights, StateRows
from torch import Tensor

from specgraph.capture import write
from specgraph.errors import CapacityError, first_line

GIB = 1 << 30


def bytes_per_request(layers: Sequence[DeltaConfig], most_rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of one request's states in all recurrent layers.

    Args:
        most_rows: rows per request of the largest verify.
        dtype: the model's dtype, which the inputs of convolutions have.
    """
    shapes = [(_shapes(layer, 1, most_rows), (*[torch.float32] * 4, dtype)) for layer in layers]
    return sum(prod(shape) * kind.itemsize for each, kinds in shapes for shape, kind in zip(each, kinds, strict=True))


def _shapes(layer: DeltaConfig, slots: int, most_rows: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of `DeltaState`, in order."""
    ring = slots, 2 * most_rows
    return [
        (slots, layer.value_heads, layer.key_size, layer.value_size),
        (*ring, layer.key_heads, layer.key_size),
        (*ring, layer.value_heads, layer.value_size),
        (*ring, layer.value_heads),
        (slots, layer.kernel - 1 + most_rows, layer.channels),
    ]


class RequestStates:
    """The states of all requests of one decoder."""

    def __init__(
        self,
        layers: Sequence[DeltaConfig],
        *,
        max_num_requests: int,
        most_rows: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            most_rows, dtype: as in `bytes_per_request`.
            num_blocks: blocks of each KV cache.

        Raises:
            CapacityError: the device has not enough memory.
        """
        slots = max_num_requests + 1
        self._most_rows = most_rows
        try:
            self.layers = [
                DeltaState(
                    *(torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes[:-1]),
                    window=torch.zeros(shapes[-1], dtype=dtype, device=device),
                )
                for shapes in (_shapes(layer, slots, most_rows) for layer in layers)
            ]
        except (RuntimeError, MemoryError) as error:  # torch's errors of all devices are RuntimeErrors
            wanted = slots * bytes_per_request(layers, most_rows, dtype) / GIB
            raise CapacityError(
                f"the recurrent states of {max_num_requests} requests take {wanted:.2f} GiB, which could not be "
                f"allocated; lower max_num_requests or num_speculative_tokens ({first_line(error)[:120]})"
            ) from error
        self.covered = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64 [slots]: the number of tokens that each slot's states cover."""
        self.slot_of_block = torch.full((num_blocks,), NULL_STATE, dtype=torch.int64, device=device)
        """int64 [num_blocks]: the slot of the request that has this block as its first one."""

    def take(self, block: int, slot: int) -> None:
        """Give a request its slot. block: the first KV block of the request."""
        write(self.slot_of_block[block : block + 1], [slot])

    def named_tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in the read set."""
        named = {"states.covered": self.covered, "states.slot_of_block": self.slot_of_block}
        for index, layer in enumerate(self.layers):
            named |= {f"states.{index}.{name}": tensor for name, tensor in layer._asdict().items()}
        return named

    def begin(
        self, start_positions: Tensor, counts: Tensor | None, block_table: Tensor, rows: int, commits: bool
    ) -> Recur:
        """Begin a pass on the device, and return the callable of its recurrent layers.

        Args:
            start_positions, counts, block_table, rows, commits: see `find_states`.
        """
        found = model_ops.find_states(
            start_positions, counts, block_table, self.slot_of_block, self.covered, rows, self._most_rows, commits
        )
        return partial(self._recur, StateRows(*found), commits)

    def _recur(
        self, at: StateRows, commits: bool, index: int, mixed: Tensor, gates: Tensor, weights: DeltaWeights
    ) -> Tensor:
        return model_ops.gated_delta_rule(mixed, gates, weights, self.layers[index], at, commits)


def free_slot(taken: Iterable[int]) -> int:
    """Return the lowest slot that no running request has. taken: the slots of all running requests."""
    used = set(taken)
    return next(slot for slot in range(NULL_STATE + 1, len(used) + 2) if slot not in used)
