"""Calls of the CUDA driver through cuda.bindings, an optional package: checked results, and the launch of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]


def launcher(executable: int) -> Callable[[int], None]:
    """Return a function that launches this executable graph on a stream. Graph and stream are the driver's handles."""
    graph = cu.CUgraphExec(executable)

    def launch(stream: int) -> None:
        (status,) = cu.cuGraphLaunch(graph, stream)
        if status:
            checked((status,))

    return launch


def checked(answer: tuple[Any, ...]) -> Any:
    """Return the results of a driver call: None, the only result, or a tuple of several.

    Raises RuntimeError, with the driver's status as its text, if the call failed.
    """
    status, *results = answer
    if status != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return results[0] if len(results) == 1 else tuple(results) or None
