"""The cases of several ranks: `run_ranks` starts one process per device, and each process runs tasks as one rank.

python -m specgraph_conformance.rank PLATFORM RANK WORLD_SIZE STORE SEED TASK      (`run_ranks` starts this)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from specgraph import ops
from specgraph.device import Platform, open_platform
from specgraph_models.parallel import Ranks, join_ranks
from torch import Tensor

from specgraph_conformance.rig import captured, expect_close, expect_equal, on_host, replay_and_wait
from specgraph_conformance.shared_experts import SCENARIOS, run_scenarios
from specgraph_conformance.split_models import SPLIT, run_split
from specgraph_conformance.timeouts import load_factor

ROWS, WIDTH, REPLAYS = 8, 64, 5
COMMAND = (sys.executable, "-u", "-m", "specgraph_conformance.rank")
"""The command that starts one rank, without its arguments."""
CHAIN = "chain"
"""The task that runs `check_chain`. The other tasks are scenarios of `shared_experts` and `split_models`."""
RANK_TIMEOUT = 120.0
"""The seconds that a rank of a scenario waits for the other rank."""


@contextmanager
def process_group(platform: Platform, rank: int, world_size: int, store: str) -> Generator[Ranks]:
    """Join the ranks over the device's own communication library. `store` is a file that all ranks share."""
    ranks = join_ranks(platform.device, world_size, init_method=f"file://{store}", rank=rank)
    try:
        yield ranks
    finally:
        ranks.close()


def check_chain(platform: Platform, ranks: Ranks, count: int, seed: int) -> None:
    """Check a chain of `count` times a matmul, an all-reduce and an all-gather, captured in one graph.

    Raises:
        AssertionError: a replay differs from float64 by more than rounding, or has other bits than eager.
    """
    rank, world = ranks.rank, ranks.size
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(WIDTH, WIDTH, generator=generator) / 8
    weight = w.to(platform.device)
    x, out = (torch.zeros(ROWS, WIDTH, device=platform.device) for _ in range(2))

    def chain() -> Tensor:
        y = x
        for _ in range(count):
            y = torch.tanh(y @ weight)
            ops.all_reduce(y, ranks.name)
            y = ops.all_gather(y * (rank + 1), ranks.name, world).view(world, ROWS, WIDTH).mean(dim=0)
        return y

    def dense(inputs: list[Tensor]) -> Tensor:
        ys = [each.double() for each in inputs]
        for _ in range(count):
            total = torch.stack([torch.tanh(y @ w.double()) for y in ys]).sum(dim=0)
            ys = [total * (world + 1) / 2] * world
        return ys[rank]

    chain()
    platform.synchronize()
    graph = captured(platform, lambda: out.copy_(chain()))
    for _ in range(REPLAYS):
        inputs = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(world)]
        x.copy_(inputs[rank])
        out.zero_()
        replay_and_wait(platform, graph)
        seen = on_host(out)
        expect_close(seen, dense(inputs), 2e-2, f"the chain of {count} on rank {rank}")
        expect_equal(seen, on_host(chain()))
    graph.close()


def run_ranks(platforms: Sequence[str], store: str, seed: int, seconds: float, tasks: Sequence[str]) -> dict[str, str]:
    """Run tasks on several platforms, NAME:INDEX, with one process and rank each.

    Returns:
        The error of each task, by name. Empty if the task passed.
    """
    rest = [str(len(platforms)), store, str(seed), ",".join(tasks)]
    ranks = [
        subprocess.Popen([*COMMAND, name, str(rank), *rest], stderr=subprocess.PIPE, text=True, errors="replace")
        for rank, name in enumerate(platforms)
    ]
    begin, ended = time.monotonic(), ""
    try:
        # The other ranks would wait for a rank that failed, so the first failure ends all.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks) and not ended:
            time.sleep(0.1)
            if time.monotonic() - begin > seconds * load_factor():
                ended = f"the ranks did not end within {seconds:g} s"
        for number, rank in enumerate(ranks):
            if rank.poll() and not ended:
                assert rank.stderr is not None
                ended = f"rank {number}: {' '.join(rank.stderr.read().strip().splitlines()[-3:])}"
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()
            rank.communicate()
    found = [_read(Path(f"{store}.{rank}.json")) for rank in range(len(ranks))]
    missing = ended or "a rank ended without it"
    return {name: next(filter(None, (each.get(name, missing) for each in found)), "") for name in tasks}


def main(platform: str, rank: str, world_size: str, store: str, seed: str, tasks: str) -> None:
    """Run tasks, separated by commas, as one rank. Each task's error is written to `store`.RANK.json at once."""
    opened, names, found = open_platform(platform), tasks.split(","), dict[str, str]()
    with torch.no_grad(), process_group(opened, int(rank), int(world_size), store) as ranks:
        for name, wrong in _run(opened, ranks, names, int(seed)):
            found[name] = wrong
            Path(f"{store}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    opened.close()


def _run(platform: Platform, ranks: Ranks, names: Sequence[str], seed: int) -> Generator[tuple[str, str], None, None]:
    """Yield each task's name and error. The chain comes last, so that a device that hangs in it has done the others."""
    yield from run_scenarios(platform, [name for name in names if name in SCENARIOS], seed, RANK_TIMEOUT)
    for name in SPLIT:
        if name in names:
            yield name, run_split(platform, name, seed, RANK_TIMEOUT)
    if CHAIN in names:
        for count in (1, 2, 8):
            check_chain(platform, ranks, count, seed)
        yield CHAIN, ""


def _read(path: Path) -> dict[str, str]:
    """Return the tasks that a rank has finished, with their errors."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


if __name__ == "__main__":
    main(*sys.argv[1:])
