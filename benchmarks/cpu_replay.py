"""What a replay on the `cpu` platform costs beside eager: one decoder step with a paged KV cache, per recorded op.

Eager and replay take turns in one run, so that both see the same machine; the least CPU time of each counts (one
thread; waiting for other processes is left out). At this size the host's cost per op rules, as it does in a drafter's
decode step.

    python benchmarks/cpu_replay.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import platform as host
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from specgraph.cli.env import cpu_name
from specgraph.device.cpu import CpuPlatform

REQUESTS, BLOCKS, BLOCK, HEADS, DIM, VOCAB = 3, 16, 4, 4, 16, 97
WIDTH = HEADS * DIM

State = dict[str, torch.Tensor]


def make(dtype: torch.dtype, layers: int) -> tuple[State, State]:
    """Weights and state of the decoder."""
    torch.manual_seed(0)

    def init(*size: int) -> torch.Tensor:
        return (torch.randn(*size) / math.sqrt(size[-1])).to(dtype)

    weights = {"embed": init(VOCAB, WIDTH), "head": init(VOCAB, WIDTH), "norm": init(WIDTH)}
    state = {
        "ids": torch.randint(0, VOCAB, (REQUESTS,)),
        "positions": torch.tensor([2, 5, 0]),
        "table": torch.randperm(BLOCKS)[: REQUESTS * 4].view(REQUESTS, 4),
    }
    for i in range(layers):
        weights |= {f"qkv{i}": init(3 * WIDTH, WIDTH), f"o{i}": init(WIDTH, WIDTH), f"n{i}": init(WIDTH)}
        weights |= {f"up{i}": init(4 * WIDTH, WIDTH), f"down{i}": init(WIDTH, 4 * WIDTH), f"m{i}": init(WIDTH)}
        state |= {f"{c}{i}": torch.randn(BLOCKS, BLOCK, HEADS, DIM).to(dtype) for c in "kv"}
    return weights, state


def step(w: State, s: State, layers: int) -> torch.Tensor:
    """One token per request."""
    n, length = REQUESTS, 4 * BLOCK
    x = F.embedding(s["ids"], w["embed"])
    slot = s["table"].gather(1, (s["positions"] // BLOCK)[:, None])[:, 0] * BLOCK + s["positions"] % BLOCK
    for i in range(layers):
        h = F.rms_norm(x, (WIDTH,), w[f"n{i}"])
        q, k, v = F.linear(h, w[f"qkv{i}"]).view(n, 3, HEADS, DIM).unbind(1)
        s[f"k{i}"].view(-1, HEADS, DIM).index_put_((slot,), k)
        s[f"v{i}"].view(-1, HEADS, DIM).index_put_((slot,), v)
        keys, values = (s[f"{c}{i}"][s["table"]].view(n, length, HEADS, DIM).transpose(1, 2) for c in "kv")
        mask = (torch.arange(length)[None, :] <= s["positions"][:, None])[:, None, None, :]
        a = F.scaled_dot_product_attention(q[:, :, None, :], keys, values, attn_mask=mask)
        x = x + F.linear(a.transpose(1, 2).reshape(n, -1), w[f"o{i}"])
        h = F.rms_norm(x, (WIDTH,), w[f"m{i}"])
        x = x + F.linear(F.silu(F.linear(h, w[f"up{i}"])), w[f"down{i}"])
    logits = F.linear(F.rms_norm(x, (WIDTH,), w["norm"]), w["head"])
    s["ids"].copy_(logits.argmax(-1))
    s["positions"].add_(1)
    return logits


def least_times(rounds: int, *bodies: Callable[[], object]) -> list[float]:
    """Least CPU time of each body in microseconds, the bodies taking turns."""
    best = [math.inf] * len(bodies)
    for _ in range(rounds):
        for i, body in enumerate(bodies):
            start = time.thread_time()
            for _ in range(10):
                body()
            best[i] = min(best[i], (time.thread_time() - start) / 10 * 1e6)
    return best


def measure(dtype: torch.dtype, layers: int, steps: int, grad_mode: type, rounds: int) -> dict[str, object]:
    """One row: eager in `grad_mode` against a replay of the same steps."""
    weights, live = make(dtype, layers)
    eager = {k: v.clone() for k, v in live.items()}
    graph = CpuPlatform().graph()
    with grad_mode():
        with graph.capture():
            captured = [step(weights, live, layers) for _ in range(steps)]

        def replay() -> None:
            live["positions"].fill_(2)
            graph.replay()

        def run() -> list[torch.Tensor]:
            eager["positions"].fill_(2)
            return [step(weights, eager, layers) for _ in range(steps)]

        replay()
        assert all(map(torch.equal, captured, run())), "replay and eager differ"
        eager_us, replay_us = least_times(rounds, run, replay)
    ops = graph.num_tasks
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "eager": grad_mode.__name__,
        "layers": layers,
        "steps": steps,
        "ops": ops,
        "eager_us_per_op": round(eager_us / ops, 2),
        "replay_us_per_op": round(replay_us / ops, 2),
        "ratio": round(replay_us / eager_us, 3),
    }


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--rounds", type=int, default=150)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(dtype, 2, steps, grad_mode, arguments.rounds // steps)
        for dtype in (torch.float32, torch.bfloat16)
        for grad_mode in (torch.no_grad, torch.inference_mode)
        for steps in (1, 4)
    ]
    print(f"{'dtype':10}{'eager in':16}{'steps':>6}{'ops':>6}{'eager us/op':>13}{'replay us/op':>14}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['dtype']:10}{row['eager']:16}{row['steps']:>6}{row['ops']:>6}"
            f"{row['eager_us_per_op']:>13}{row['replay_us_per_op']:>14}{row['ratio']:>8}"
        )
    if arguments.json:
        versions = {"torch": torch.__version__, "python": host.python_version()}
        device = {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
        result = {"platform": "cpu", "device": device, "versions": versions, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
