"""vLLM's mixtures of experts within the draft graphs: the context that they are called in."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from specgraph import ops
from specgraph.errors import UnsupportedError
from specgraph.parallel import TensorParallel


def summed_in_graph(
    forward_context: Callable[..., AbstractContextManager[None]], group: Any, ranks: TensorParallel
) -> Callable[..., AbstractContextManager[None]]:
    """Return a context in which vLLM's modules add up over the ranks by the op that the draft graphs record.

    vLLM's own all-reduce is a kernel over buffers that its ranks tell each other when vLLM's own captures end; within
    another capture it reads addresses that nobody has written, and in a warm-up it returns what nobody has computed.

    Args:
        forward_context: vLLM's `set_forward_context`.
        group: vLLM's group of ranks, whose `all_reduce` is another one within the context.
        ranks: the same ranks.
    """

    @contextmanager
    def context(*args: Any, **options: Any) -> Generator[None]:
        sums = 0

        def all_reduce(x: Tensor) -> Tensor:
            nonlocal sums
            sums += 1
            out = x.contiguous()
            ops.all_reduce(out, ranks.group)
            return out

        group.all_reduce = all_reduce
        try:
            with forward_context(*args, **options):
                yield
        finally:
            del group.all_reduce
        if not sums:
            raise UnsupportedError(
                f"a mixture of experts over {ranks.size} ranks that does not add up its result by the all_reduce of "
                "vLLM's tensor parallel group"
            )

    return context
