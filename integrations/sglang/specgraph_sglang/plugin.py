"""The entry point: SGLang calls `register` in every process. It adds `--speculative-algorithm SPECGRAPH` and
`SPECGRAPH_EAGLE`.

SGLang is imported in functions only, so that this package can be tested without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from specgraph.errors import UnsupportedError
from specgraph_sglang.config import ALGORITHMS, unsupported_arguments
from specgraph_sglang.names import (
    RESERVE,
    ROW_HEADROOM,
    SCHEDULER,
    SIZING_MODULE,
    TAKEN,
    TENSOR_PARALLEL,
    WORKER_MODULE,
    differences,
)
from specgraph_sglang.worker import draft_worker_class, worker_class

_OWN = ("create_worker", "register", "from_string")


def register() -> None:
    """Add the algorithms to SGLang's registry, and reserve KV slots for drafting at the end of a round.

    SGLang calls this in any installation with the plugin. Its own algorithms are not changed.
    """
    spec_info: Any = importlib.import_module("sglang.srt.speculative.spec_info")
    registry: Any = importlib.import_module("sglang.srt.speculative.spec_registry")
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    algorithm = spec_info.SpeculativeAlgorithm
    for name, own in ALGORITHMS.items():
        algorithm.register(
            name,
            supports_overlap=True,
            validate_server_args=check_arguments,
            spec_class=answering_as(registry.CustomSpecAlgo, algorithm, own),
        )(make_worker_class)
    runtime: Any = importlib.import_module("sglang.srt.runtime_context")
    for name in (RESERVE, ROW_HEADROOM):
        hooks.HookRegistry.register(f"{SIZING_MODULE}.{name}", more_slots(runtime.get_spec), hooks.HookType.AROUND)


def check_arguments(server_args: Any) -> None:
    """Refuse arguments that the plugin does not serve, while SGLang reads them.

    Raises:
        UnsupportedError: an option is not served. The message names it.
    """
    if (reason := unsupported_arguments(server_args)) is not None:
        raise UnsupportedError(
            f"specgraph does not draft for this configuration: {reason}. "
            f"--speculative-algorithm {ALGORITHMS[server_args.speculative_algorithm]} is SGLang's own drafting"
        )


def answering_as(custom: Any, algorithm: Any, own: str) -> Any:
    """Return a subclass of `CustomSpecAlgo` that behaves as SGLang's own algorithm, but makes specgraph's worker.

    Args:
        custom, algorithm: SGLang's `CustomSpecAlgo` and `SpeculativeAlgorithm`.
        own: the name of a member of `algorithm`.
    """

    def answer(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            return getattr(algorithm[own], name)(*args, **options)

        return method

    names = [name for name, value in vars(algorithm).items() if callable(value) and not name.startswith("_")]
    return type("SpecgraphAlgorithm", (custom,), {name: answer(name) for name in names if name not in _OWN})


def make_worker_class(server_args: Any) -> Any:
    """Return the class of the worker. SGLang calls this as the algorithm's factory.

    Raises:
        UnsupportedError: this release has other names than the plugin uses.
    """
    worker: Any = importlib.import_module(WORKER_MODULE)
    if found := differences(worker, importlib.import_module(SIZING_MODULE)):
        raise UnsupportedError(f"this release of SGLang is not served: {'; '.join(found)}")
    taken = SimpleNamespace(**{name: getattr(worker, name) for name in TAKEN}, tp_group=None)
    if server_args.tp_size > 1:
        module, name = TENSOR_PARALLEL
        taken.tp_group = getattr(importlib.import_module(module), name)
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    # Hooked here, in the scheduler's process, before the scheduler binds its methods. Other processes don't import it.
    hooks.HookRegistry.register(f"{SCHEDULER}.get_internal_state", with_counts, hooks.HookType.AFTER)
    hooks.HookRegistry.register(f"{SCHEDULER}.set_internal_state", switched, hooks.HookType.AROUND)
    hooks.HookRegistry.apply_hooks()
    return worker_class(worker.EAGLEWorkerV2, draft_worker_class(worker.EagleDraftWorker, taken))


def with_counts(answer: Any, scheduler: Any, request: Any) -> Any:
    """Add `ProposeCounts.by_reason` to the scheduler's answer to `/server_info`. A hook after SGLang's method."""
    answer.internal_state["specgraph"] = dict(scheduler.draft_worker._draft_worker.specgraph.counts.by_reason)
    return answer


def switched(stock: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Let `/set_internal_state` switch drafting. A hook around the scheduler's method.

    `specgraph` 0 leaves every propose from now on to SGLang; 1 lets specgraph draft again.
    """
    if (on := request.server_args.pop("specgraph", None)) is not None:
        scheduler.draft_worker._draft_worker.specgraph.use_sglang = not on
    return stock(scheduler, request)


def more_slots(current: Callable[[], Any]) -> Callable[..., int]:
    """Return a hook that adds K to one of SGLang's two numbers of KV slots (`RESERVE` and `ROW_HEADROOM`).

    The numbers are the slots that a decode round reserves per request, and the columns of `req_to_token` past the
    context's end. SGLang drafts a round's tokens after it has reserved that round's slots. specgraph drafts at the end
    of the round before, which reaches K slots further. The known start is one round late, so drafts reach up to
    3 * K + 2 slots after the known length.

    Args:
        current: returns SGLang's speculative options, for a call without `ServerArgs` (0.5.23 never has them).
    """

    def reserve(stock: Callable[..., int], *given: Any) -> int:
        args = given[0] if given and given[0] is not None else current()
        more = int(args.speculative_num_steps or 0) if args.speculative_algorithm in ALGORITHMS else 0
        return stock(*given) + more

    return reserve
