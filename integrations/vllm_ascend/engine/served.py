"""Serves prompts in one way and writes what was seen: python served.py WAY MODELS OUT.json.

The ways are the functions of this file that `WAYS` names. The tests are in `test_served.py`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from engine import RUNTIME, Engine
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
    for name, drafter.use_vllm in (("specgraph", False), ("stock", True)):
        del rounds[:]
        before = seen()
        result[f"{name} tokens"] = engine.serve(PROMPTS[:4], [NEW] * 4, [0] * 4)
        result[f"{name} proposes"], result[f"{name} whole"] = list(rounds), dict(seen() - before)
    result["counts"] = dict(drafter.counts.by_reason)
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
    swap_ops(fast)
    serve("swapped ops of draft steps 1 and 2")
    swap_ops(fast)
    serve("none again")
    skip_an_update()
    serve("a skipped update")
    return result


def swap_ops(fast: Any) -> None:
    """Let the updates of draft steps 1 and 2 issue each other's op."""
    for captured in fast.drafter.graphs._captured.values():
        tasks = captured.updates.tasks
        if {1, 2} <= tasks.keys():
            one, two = tasks[1][0], tasks[2][0]
            tasks[1][0], tasks[2][0] = one._replace(prepare=two.prepare), two._replace(prepare=one.prepare)


def skip_an_update() -> None:
    """Leave out the next update of a graph's second task group."""
    update, skipped = NpuTaskGroup.update, list[Any]()

    def all_but_one(group: Any) -> Any:
        if group.number == 1 and not skipped:
            skipped.append(group)
            return contextlib.nullcontext()
        return update(group)

    NpuTaskGroup.update = all_but_one  # type: ignore[method-assign]


def shorter(models: Path, drafts: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Serve with drafts, which are also made on the cpu platform."""
    engine = Engine(models, drafts, settings, **options)
    mirror = Mirror(engine.drafter, models, drafts)
    tokens = engine.serve(PROMPTS, [NEW] * len(PROMPTS), [3 * i for i in range(len(PROMPTS))])
    made = {"tokens": tokens, "differing": differing(mirror.rounds), "proposes": len(mirror.rounds)}
    return made | {"counts": dict(engine.drafter.counts.by_reason)}


def asynchronous(models: Path) -> dict[str, Any]:
    """Serve with asynchronous scheduling: the host learns accepted counts late."""
    return shorter(models, "eagle3", {}, async_scheduling=True)


def eagle(models: Path) -> dict[str, Any]:
    """Serve with an EAGLE drafter of random weights."""
    return shorter(models, "eagle", {})


def few(models: Path) -> dict[str, Any]:
    """Capture fewer sizes than there are requests: vllm-ascend drafts for larger batches."""
    return shorter(models, "eagle3", {"capture_sizes": [1, 2, 3]})


WAYS = {"plain": plain, "greedy": greedy, "faults": faults, "asynchronous": asynchronous, "eagle": eagle, "few": few}

if __name__ == "__main__":
    made = WAYS[sys.argv[1]](Path(sys.argv[2]))
    made["violations"] = RUNTIME.report()["violations"]
    Path(sys.argv[3]).write_text(json.dumps(made))
