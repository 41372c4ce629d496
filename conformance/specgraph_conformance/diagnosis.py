"""Groups failures with the same cause, and says where to look. Both follow from the error's text, not from the case
alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specgraph_conformance.report import CaseResult

BEFORE_THE_CASE: tuple[tuple[str, str], ...] = (
    (
        r"NotImplementedError: .*(aten::|torch\.)",
        "an op that torch cannot run on this device, or a recorder that asked for shapes that depend on values",
    ),
    (r"NotImplementedError", "a method of the backend that is not written yet"),
    (r"the capture could not begin", "_begin() of the graph, or the stream that captures run on (capture_stream)"),
)
"""(regular expression over the error, where to look), for errors raised before the case checks its property. The case's
own `cause` would mislead."""

SIGNS: tuple[tuple[str, str], ...] = (
    (
        r"did not finish within",
        "a hang: a wait for an event or an update that never comes; the run's output has the stack",
    ),
    (r"the process died", "a fault of the device or its driver: run the case alone, with the vendor's error checks on"),
    (r"OutOfMemory|out of memory", "memory that an earlier graph, pool or failed capture has not given back"),
    (r"HostReadError", "an op of this device reads a value on the host where others stay on the device"),
    (r"StaleInputError", "a tensor that the graph reads was freed, moved or rebound after its capture"),
    (r"ReadSetError", "captured code touches a tensor that is in no buffer, cache or weight"),
    (r"UpdateError", "host parameters of a captured op: their key, their number, or a replay before its update"),
    (
        r"OrderError",
        "two streams use the same memory and nothing orders them: a missing wait, or a graph that was launched on "
        "another stream than the current one",
    ),
    (r"UnsupportedError", "a capability that is claimed, and refused when it is used"),
    (
        r"\bnan instead of",
        "memory that the replay did not write: freed and used again, or a result that is not recorded",
    ),
    (r"was taken without an error|no error came|DID NOT RAISE", "a check that is missing"),
)
"""(regular expression over the error, where to look). The first match counts, and the case's `cause` is added to it."""


def look_at(result: CaseResult) -> str:
    """Return where to look: the place that the error's text indicates, the case's `cause`, or both."""
    for sign, place in BEFORE_THE_CASE:
        if re.search(sign, result.reason):
            return place
    for sign, place in SIGNS:
        if re.search(sign, result.reason):
            return f"{place}; {result.cause}" if result.cause else place
    return result.cause


def by_cause(failures: Sequence[CaseResult]) -> list[list[CaseResult]]:
    """Return the failures in groups with the same error, each group in the order of the suite.

    Errors are compared without their numbers and quoted names. The parameter sets of one case are therefore one group,
    and so are all cases that fail by the same missing method.
    """
    groups: dict[str, list[CaseResult]] = {}
    for result in failures:
        groups.setdefault(_seen(result), []).append(result)
    return list(groups.values())


def _seen(result: CaseResult) -> str:
    text, _, place = result.reason.partition(" (at ")
    first = text.strip().splitlines()[0] if text.strip() else ""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|-?\d[\d.e+-]*|nan|inf", "_", first)
    return f"{plain} {place or result.id}"
