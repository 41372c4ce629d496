"""The CUDA driver through cuda.bindings, an optional package: its answers, and the launch of an executable graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]


def launcher(executable: int) -> Callable[[int], None]:
    """Return the function that launches an executable graph on a stream, both given as the driver's handles."""
    graph = cu.CUgraphExec(executable)

    def launch(stream: int) -> None:
        (status,) = cu.cuGraphLaunch(graph, stream)
        if status:
            checked((status,))

    return launch


def checked(answer: tuple[Any, ...]) -> Any:
    """Return the results of a driver call: one, a tuple of several, or None. Raises RuntimeError with the driver's
    status."""
    status, *results = answer
    if status != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return results[0] if len(results) == 1 else tuple(results) or None
