# SGLang is not there where types are checked.
# pyright: reportPrivateUsage=false, reportMissingImports=false, reportUntypedBaseClass=false
"""Times of decode rounds, taken inside SGLang's scheduler process: both ways in turns over the same requests."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from sglang_engine import map_dummy_ids, when_the_worker_is_made

WAYS = ("stock", "specgraph")
WARM, MEASURED = 4, 12
SLEEP = 40_000_000
"""Cycles that the GPU waits in a primed round: longer than the host takes to issue what follows."""


class RoundTimer:
    """Events around the two halves of drafting, `draft` and `_draft_extend_for_decode`, of rounds of a wanted size.

    Each phase is WARM + MEASURED rounds of one way; every second pair of phases is primed, so that its events hold
    device time alone. Rows are written as JSON lines, where there is a file.
    """

    def __init__(self, worker: Any, sizes: list[int], out: Path | None) -> None:
        self.draft_worker, self.sizes, self.out = worker._draft_worker, sizes, out
        self.size, self.count, self.marks, self.active = 0, 0, [], False
        forward = worker.forward_batch_generation
        dw, draft, extend = self.draft_worker, worker._draft_worker.draft, worker._draft_worker._draft_extend_for_decode

        def forward_batch_generation(batch: Any, *args: Any, **options: Any) -> Any:
            self.marks = []
            self.active = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
            self.begin(len(batch.seq_lens)) if self.active else None
            result = forward(batch, *args, **options)
            self.end() if self.active else None
            return result

        worker.forward_batch_generation = forward_batch_generation
        dw.draft = self.timed(draft)
        dw._draft_extend_for_decode = self.timed(extend)
        self.rows, self.starts, self.seen = [], [], 0

    def timed(self, call: Any) -> Any:
        """`call` between two events, with the time that it holds the host."""

        def between(*args: Any, **options: Any) -> Any:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            host = time.perf_counter()
            result = call(*args, **options)
            host = time.perf_counter() - host
            last.record()
            self.marks.append((first, last, host))
            return result

        return between

    def begin(self, size: int) -> None:
        """Before a decode round."""
        if size != self.size:
            self.size, self.count, self.rows, self.starts = size, 0, [], []
        phase = self.count // (WARM + MEASURED)
        self.way, self.primed = WAYS[phase % 2], phase // 2 % 2 == 1
        self.draft_worker.specgraph.use_sglang = self.way == "stock"
        if self.primed and size in self.sizes:
            torch.cuda._sleep(SLEEP)
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        self.starts.append(start)

    def end(self) -> None:
        """After it; a finished phase is written."""
        at = self.count % (WARM + MEASURED)
        self.count += 1
        if self.size not in self.sizes:
            return
        if at >= WARM:
            self.rows.append(self.marks)
        if at == WARM + MEASURED - 1:
            torch.cuda.synchronize()
            starts = self.starts[WARM:]
            row = {
                "requests": self.size,
                "way": self.way,
                "primed": self.primed,
                "draft_us": [m[0][0].elapsed_time(m[0][1]) * 1e3 for m in self.rows],
                "extend_us": [m[1][0].elapsed_time(m[1][1]) * 1e3 for m in self.rows],
                "host_us": [(m[0][2] + m[1][2]) * 1e6 for m in self.rows],
                "round_us": [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(starts)],
            }
            if self.out is not None:
                with self.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            self.rows, self.starts = [], []


def run_scheduler_process(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *args: Any) -> Any:
    """SGLang's, with a timer on its worker. SPECGRAPH_TIMES names the numbers of requests, and the file of rank 0."""
    from sglang.srt.managers import scheduler

    asked: dict[str, Any] = json.loads(os.environ["SPECGRAPH_TIMES"])

    def act(worker: Any) -> None:
        RoundTimer(worker, asked["requests"], None if tp_rank else Path(asked["out"]))

    when_the_worker_is_made(act)
    map_dummy_ids()
    return scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *args)
