"""Serves prompts in one way and writes what was seen: python served.py WAY MODELS OUT.json.

The ways are the functions of this file that `WAYS` names. The tests are in `test_served.py`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from engine import RUNTIME, Engine, K
from mirror import Mirror, differing
from prompts import schedule, some_prompts
from specgraph_npu.task_groups import NpuTaskGroup

PROMPTS, NEW = some_prompts(16, longest=150), 24
WATCHED = {
    "launches": ("aclmdlRIExecuteAsync",),
    "updates": ("aclmdlRICaptureTaskUpdateBegin",),
    "device waits": ("aclrtSynchronizeDevice", "aclrtSynchronizeDeviceWithTimeout"),
    "stream waits": ("aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout"),
    "event waits": ("aclrtSynchronizeEvent", "aclrtSynchronizeEventWithTimeout"),
    "copies to the host": ("copy_device_to_host",),
    "operators": (),
}


def seen() -> Counter[str]:
    """Return the runtime's counters so far."""
    done = RUNTIME.report()["calls"]
    made = Counter({name: sum(done.get(call, 0) for call in calls) for name, calls in WATCHED.items()})
    made["operators"] = sum(
        n for call, n in done.items() if call.startswith("aclnn") and "GetWorkspaceSize" not in call
    )
    return made


def watch(drafter: Any) -> list[dict[str, Any]]:
    """Count what each propose does, from now on."""
    rounds: list[dict[str, Any]] = []
    propose = drafter._propose

    def counted(**given: Any) -> Any:
        before, who = seen(), drafter.counts.by_reason.copy()
        result = propose(**given)
        path = next(iter(drafter.counts.by_reason - who))
        drafts = given["scheduler_output"].scheduled_spec_decode_tokens
        decode = all(given["scheduler_output"].num_scheduled_tokens[i] == len(drafts.get(i, ())) + 1
                     for i in drafter.runner.input_batch.req_ids)  # fmt: skip
        rounds.append({"by": path, "decode": decode, **(seen() - before)})
        return result

    drafter._propose = counted
    return rounds


def plain(models: Path) -> dict[str, Any]:
    """Serve without drafts: each prompt's own tokens."""
    return {"tokens": Engine(models, None).serve(PROMPTS, [NEW] * len(PROMPTS), [0] * len(PROMPTS))}


def greedy(models: Path) -> dict[str, Any]:
    """Serve with EAGLE-3: one prompt after the other, at random times, and with counts of specgraph and of stock."""
    engine = Engine(models, "eagle3", {})
    drafter, fast = engine.drafter, engine.drafter.fast_path.drafter
    result: dict[str, Any] = {"lowering": fast.resolution.explain(), "attention": fast.attention.name}
    mirror = Mirror(drafter, models, "eagle3")
    result["tokens"] = engine.serve(PROMPTS, [NEW] * len(PROMPTS), [3 * i for i in range(len(PROMPTS))])
    result["rounds"] = list(mirror.rounds)
    rounds, schedules = watch(drafter), list[dict[str, Any]]()
    for seed in range(20):
        chosen, tokens, arrivals = schedule(seed, len(PROMPTS))
        RUNTIME.schedule(seed, delay_us=100, percent=20)
        first, at = len(mirror.rounds), len(rounds)
        made = engine.serve([PROMPTS[i] for i in chosen], tokens, arrivals)
        decode = [each["by"] for each in rounds[at:] if each["decode"]]
        found = {"proposes": len(mirror.rounds) - first, "differing": differing(mirror.rounds[first:])}
        schedules.append({"prompts": chosen, "tokens": made, "decode": decode, **found})
    RUNTIME.schedule(0, 0, 0)
    result["schedules"] = schedules
    mirror.pause()
    return result | in_both_ways(engine, rounds)


def in_both_ways(engine: Engine, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve four prompts by specgraph and by vllm-ascend's own code, and count. rounds: the result of `watch`."""
    result: dict[str, Any] = {}
    for name, engine.drafter.use_vllm in (("specgraph", False), ("stock", True)):
        del rounds[:]
        before = seen()
        result[f"{name} tokens"] = engine.serve(PROMPTS[:4], [NEW] * 4, [0] * 4)
        result[f"{name} proposes"], result[f"{name} whole"] = list(rounds), dict(seen() - before)
    return result


def faults(models: Path) -> dict[str, Any]:
    """Serve requests that sample, then put faults in, one after the other. The last one ends in an error."""
    engine = Engine(models, "eagle3", {})
    mirror, fast = Mirror(engine.drafter, models, "eagle3"), engine.drafter.fast_path
    result: dict[str, Any] = {}

    def serve(name: str, **sampling: Any) -> None:
        del mirror.rounds[:]
        result[name] = {"error": ""}
        try:
            result[name]["tokens"] = engine.serve(PROMPTS[:4], [NEW] * 4, [0] * 4, **sampling)
        except Exception as error:
            result[name]["error"] = f"{type(error).__name__}: {error}"
        result[name]["differing"] = differing(mirror.rounds)

    serve("none")
    serve("sampled", temperature=6.0, seed=5, top_k=20, top_p=0.95)
    result["violations before"] = RUNTIME.report()["violations"]
    update = mirror.update
    mirror.update = lambda n, starts, counts: update(n, [max(at - 3, 0) for at in starts], counts)
    serve("a length that is 3 too short")
    mirror.update = update
    with swapped(fast, (1, 0), (2, 0)):
        serve("swapped ops of draft steps 1 and 2")
    serve("none again")
    skip_an_update()
    serve("a skipped update")
    return result


@contextlib.contextmanager
def swapped(fast: Any, one: tuple[int, int], other: tuple[int, int]) -> Generator[None]:
    """Let the updates of two ops issue each other's op within the block. one, other: draft step and layer of each."""

    def swap() -> None:
        for captured in fast.drafter.graphs._captured.values():
            tasks = captured.updates.tasks
            if len(tasks) == K:  # not a graph of prompts
                (step, layer), (to_step, to_layer) = one, other
                first, second = tasks[step][layer], tasks[to_step][to_layer]
                tasks[step][layer] = first._replace(prepare=second.prepare)
                tasks[to_step][to_layer] = second._replace(prepare=first.prepare)

    swap()
    try:
        yield
    finally:
        swap()


def skip_an_update() -> None:
    """Leave out the next update of a graph's second task group."""
    update, skipped = NpuTaskGroup.update, list[Any]()

    def all_but_one(group: Any) -> Any:
        if group.number == 1 and not skipped:
            skipped.append(group)
            return contextlib.nullcontext()
        return update(group)

    NpuTaskGroup.update = all_but_one  # type: ignore[method-assign]


def mirrored(engine: Engine, mirror: Mirror) -> dict[str, Any]:
    """Serve with drafts, which are also made on the cpu platform."""
    tokens = engine.serve(PROMPTS, [NEW] * len(PROMPTS), [3 * i for i in range(len(PROMPTS))])
    made = {"tokens": tokens, "differing": differing(mirror.rounds), "proposes": len(mirror.rounds)}
    made["sampled"] = sorted({count for each in mirror.rounds for count in each["sampled"]})
    return made | {"counts": dict(engine.drafter.counts.by_reason)}


def shorter(models: Path, drafts: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    engine = Engine(models, drafts, settings, **options)
    return mirrored(engine, Mirror(engine.drafter, models, drafts))


def asynchronous(models: Path) -> dict[str, Any]:
    """Serve with asynchronous scheduling: the host learns accepted counts late."""
    return shorter(models, "eagle3", {}, async_scheduling=True)


def eagle(models: Path) -> dict[str, Any]:
    """Serve with an EAGLE drafter of two layers. Then swap their ops in the update of one draft step."""
    engine = Engine(models, "eagle", {})
    mirror = Mirror(engine.drafter, models, "eagle")
    result = mirrored(engine, mirror)
    del mirror.rounds[:]
    with swapped(engine.drafter.fast_path, (1, 0), (1, 1)):
        tokens = engine.serve(PROMPTS[:4], [NEW] * 4, [0] * 4)
    result["swapped layers"] = {"tokens": tokens, "differing": differing(mirror.rounds)}
    mirror.pause()
    return result | in_both_ways(engine, watch(engine.drafter))


MIMO: dict[str, Any] = {"target": "mtp", "speculative_config": {"enforce_eager": True}}
"""vLLM's own MiMo module can't be captured: it indexes rows by a mask, for which torch_npu waits for the stream."""


def mtp(models: Path) -> dict[str, Any]:
    """Serve a target of MiMo's layout with its MTP module."""
    engine = Engine(models, "mtp", {}, **MIMO)
    mirror = Mirror(engine.drafter, models, "mtp")
    result = mirrored(engine, mirror)
    mirror.pause()
    return result | in_both_ways(engine, watch(engine.drafter))


def vocabulary(models: Path) -> dict[str, Any]:
    """Serve with an MTP module that drafts half of the target's tokens."""
    path = models / "draft_vocab.npy"
    np.save(path, np.arange(2, 66))
    engine = Engine(models, "mtp", {"draft_vocab": str(path)}, **MIMO)
    mirror = Mirror(engine.drafter, models, "mtp", path)
    result = mirrored(engine, mirror)
    drafted = {token for each in mirror.rounds for request in each["device"] for token in request}
    return result | {"drafted": sorted(drafted)}


def few(models: Path) -> dict[str, Any]:
    """Capture fewer sizes than there are requests: vllm-ascend drafts for larger batches."""
    return shorter(models, "eagle3", {"capture_sizes": [1, 2, 3]})


WAYS = (plain, greedy, faults, asynchronous, eagle, mtp, vocabulary, few)

if __name__ == "__main__":
    made = {way.__name__: way for way in WAYS}[sys.argv[1]](Path(sys.argv[2]))
    made["violations"] = RUNTIME.report()["violations"]
    Path(sys.argv[3]).write_text(json.dumps(made))
