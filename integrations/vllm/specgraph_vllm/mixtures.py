"""The context that vLLM's mixtures of experts run in, within draft graphs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from specgraph_models.parallel import TensorParallel
from specgraph_plugin.sums import sums_in_graph

from specgraph.errors import UnsupportedError


def summed_in_graph(
    forward_context: Callable[..., AbstractContextManager[None]], group: Any, ranks: TensorParallel
) -> Callable[..., AbstractContextManager[None]]:
    """Return `forward_context` combined with `sums_in_graph`, for the sums of vLLM's modules.

    The context raises UnsupportedError at its end if the modules summed nothing by the group's all_reduce.

    Args:
        forward_context: vLLM's `set_forward_context`.
        group, ranks: see `sums_in_graph`.
    """

    @contextmanager
    def context(*args: Any, **options: Any) -> Generator[None]:
        with sums_in_graph(group, ranks) as sums, forward_context(*args, **options):
            yield
        if not sums:
            raise UnsupportedError(
                f"a mixture of experts over {ranks.size} ranks that does not add up its result by the all_reduce of "
                "vLLM's tensor parallel group"
            )

    return context
