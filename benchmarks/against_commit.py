"""An earlier commit against today's tree, in turns in one run: proposes, whole rounds, and what both take the host.

    mkdir old && git archive d5ac211 | tar x -C old
    python benchmarks/against_commit.py --old old --commit d5ac211 --platform cuda --json FILE

Each commit runs in a process of its own; only one has work at a time, and the order is drawn anew in each turn. All
weights are random and equal in both. Rows, medians over the turns, K = 5:

propose: an EAGLE-3 head for an 8B target, lowering `merged`: time on the device of the graph, and on the host of a
`Drafter.propose` that is handed a batch.
rounds: targets of a 1B and an 8B Llama's shape with that head, draft tokens accepted with chance 0.7, lowerings
`merged` and `round`: time of a round, and the part of it that the host does not wait for tokens.
shipped: whole requests of the shipped pair, one after the other: tokens per second.

`same_tokens` compares the drafts, and the tokens of the shipped pair, of all turns of both commits.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from python_prompts import PROMPTS

K, ACCEPTANCE, CONTEXT, ROUNDS, CALLS = 5, 0.7, 1024, 20, 50
"""ROUNDS, CALLS: rounds and proposes of one turn."""
ROOMS = {"device": "platforms", "draft": "drafting", "engine": "decoding", "capture": "runner", "tools": "benchmarking"}
"""Rooms that had another name until d5ac211."""
OPTIONS = {"decode": "lowering"}
"""Options that had another name then, by their name today."""


class Worker:
    """One commit in a process of its own."""

    def __init__(self, platform, folder):
        """folder: the commit's tree; None takes what this process imports."""
        environment = dict(os.environ)
        if folder is not None:
            folders = [folder, *map(str, Path(folder, "backends").glob("*")), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(folders)
        command = [sys.executable, "-u", __file__, "--worker", "--platform", platform]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, case):
        """The answer of one turn of this case."""
        print(json.dumps(case), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the process of a commit ended with {self.process.wait()} when asked for {case}")


class Commit:
    """The library that a worker's process imports, under today's names."""

    def __init__(self, platform):
        self.old = importlib.util.find_spec("specgraph.tools") is None
        self.on_cpu = platform == "cpu"  # to try this file; the entry point that is installed is today's
        if self.on_cpu:
            self.platform = (self.room("reference") if self.old else self.room("device", "cpu")).CpuPlatform()
        else:
            self.platform = self.room("device").open_platform(platform)
        self.models = {}

    def room(self, name, *more):
        """A room, or a module in it."""
        return importlib.import_module(".".join(["specgraph", ROOMS.get(name, name) if self.old else name, *more]))

    def options(self, **options):
        """Options under the names of this commit."""
        return {OPTIONS.get(name, name) if self.old else name: value for name, value in options.items()}

    def shape(self, name):
        """The sizes of a target and of its head."""
        import torch

        shapes = self.room("tools", "shapes").SHAPES
        shape, layers = shapes["eagle3-tiny-128" if self.on_cpu else "eagle3-llama3-8b"], 2 if self.on_cpu else 32
        if name == "llama-1b" and not self.on_cpu:
            shape, layers = replace(shape, hidden_size=2048, intermediate_size=8192, head_dim=64), 16
        return shape, layers, torch.float32 if self.on_cpu else torch.bfloat16

    def case(self, kind, name, requests, lowering):
        """A function that runs one turn of the case and returns what it found, and one that frees what it holds."""
        made = {"propose": self.propose, "rounds": self.rounds, "shipped": self.shipped}
        return made[kind](name, requests, lowering)

    def propose(self, name, requests, lowering):
        """Proposes from a batch that is handed over in each."""
        import torch

        propose, timing = self.room("tools", "propose"), self.room("tools", "timing")
        shape, _, dtype = self.shape(name)
        context = 64 if self.on_cpu else CONTEXT
        length = context + 2 * (K + 1)
        head = self.room("tools", "shapes").random_head(shape, self.platform.device, dtype, length)
        attention = self.room("attention").choose_attention("auto", self.platform, head.attention_layers, dtype).backend
        config = self.room("draft").DraftConfig(**self.options(
            num_speculative_tokens=K, max_num_requests=requests, max_model_len=length, decode=lowering,
            block_size=attention.preferred_block_size, capture_sizes=[requests],
        ))  # fmt: skip
        blocks = 1 + requests * -(-length // config.block_size)
        place = config.block_size, head.dtype, self.platform.device
        caches = self.room("engine").allocate_caches(head.attention_layers, blocks, *place)
        g = torch.Generator(self.platform.device).manual_seed(0)
        for cache in caches:
            for part in cache:
                part.normal_(generator=g)
        drafter = self.room("draft").Drafter(head, caches, self.platform, config, attention=attention)
        drafter.capture()
        named = "eagle3-tiny-128" if self.on_cpu else "eagle3-llama3-8b"
        case = propose.BenchCase(shape=named, requests=requests, k=K, context=context)
        batch = propose.propose_batch(head, case, self.platform.device, config.block_size)

        inputs = drafter.inputs(requests)

        def turn():
            tokens = drafter.propose(batch).token_ids.tolist()  # leaves the batch in the drafter's memory
            device = timing.device_time(self.platform, lambda: drafter.propose(inputs, copy=False), repeats=CALLS)
            host = timing.host_time(self.platform, lambda: drafter.propose(batch), repeats=CALLS)
            return {"device_us": statistics.median(device), "host_us": statistics.median(host), "tokens": tokens}

        return turn, drafter.close

    def rounds(self, name, requests, lowering):
        """Stretches of rounds in which nobody joins or ends; requests join anew for each."""
        import torch

        rounds, shapes = self.room("tools", "rounds"), self.room("tools", "shapes")
        shape, layers, dtype = self.shape(name)
        context = 32 if self.on_cpu else 512
        length = context + (ROUNDS + 16) * (K + 1)
        if name not in self.models:
            self.models.clear()
            target = rounds.random_target(replace(shape, num_layers=layers), self.platform.device, dtype, length)
            self.models[name] = target, shapes.random_head(shape, self.platform.device, dtype, length)
        target, head = self.models[name]
        decoder = rounds.captured_decoder(self.platform, target, head, **self.options(
            num_speculative_tokens=K, max_num_requests=requests, max_model_len=length, decode=lowering,
            synthetic_acceptance=ACCEPTANCE,
        ))  # fmt: skip
        g = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, target.vocab_size, (requests, context), generator=g).tolist()
        copy, waited = self.room("capture").HostCopy, [0.0]
        read = copy.read

        def timed_read(own):
            start = time.perf_counter()
            values = read(own)
            waited[0] += time.perf_counter() - start
            return values

        def turn():
            rounds.add_prompts(decoder, prompts)
            for _ in range(6):
                decoder.step()
            waited[0], copy.read = 0.0, timed_read
            start = time.perf_counter()
            for _ in range(ROUNDS):
                decoder.step()
            running = list(decoder.rounds.running)  # brings the requests' tokens up to date
            wall = time.perf_counter() - start
            copy.read = read
            for one in running:
                decoder.cancel(one.index)
            while decoder.num_unfinished:
                decoder.step()
            return {"round_us": wall / ROUNDS * 1e6, "host_us": (wall - waited[0]) / ROUNDS * 1e6}

        return turn, decoder.close

    def shipped(self, name, requests, lowering):
        """Passes over four prompts with 100 tokens each."""
        from specgraph import load_generator

        options = self.options(num_speculative_tokens=K, decode=lowering)
        generator = load_generator(platform=self.platform, **options)

        def turn():
            asked = [generator.request(prompt, max_tokens=100) for prompt in PROMPTS]
            start = time.perf_counter()
            tokens = [list(generator.generate([request])[0].token_ids) for request in asked]
            seconds = time.perf_counter() - start
            return {"tokens_per_second": sum(map(len, tokens)) / seconds, "tokens": tokens}

        return turn, generator.close


def answers(platform_name):
    """In the process of a commit: read cases, print what one turn of each found."""
    import torch

    import specgraph

    commit, made = Commit(platform_name), {}
    with torch.inference_mode():
        for line in sys.stdin:
            case = json.loads(line)
            same = case["kind"], case["name"], case["requests"]
            if made and next(iter(made))[:3] != same:  # another case: free what the last one held
                for _, close in made.values():
                    close()
                made.clear()
            key = *same, case["lowering"]
            if key not in made:
                made[key] = commit.case(*key)
            turn, _ = made[key]
            print(json.dumps({**turn(), "from": str(Path(specgraph.__file__).parent)}), flush=True)


def compare(workers, cases, turns, keep):
    """A row per case and lowering: medians of both commits, their ratio, and whether tokens agree."""
    rows, order = [], random.Random(0)
    for kind, name, requests in cases:
        lowerings = ("merged",) if kind == "propose" else ("merged", "round")
        ways = [(worker, lowering) for lowering in lowerings for worker in workers]
        case = {"kind": kind, "name": name, "requests": requests}
        found = {way: [] for way in ways}
        for worker, lowering in ways:  # load, capture and warm up
            workers[worker].ask({**case, "lowering": lowering})
        for _ in range(turns):
            for worker, lowering in order.sample(ways, len(ways)):
                found[worker, lowering].append(workers[worker].ask({**case, "lowering": lowering}))
        tokens = [answer.get("tokens") for each in found.values() for answer in each]
        for lowering in lowerings:
            row = {**case, "lowering": lowering}
            for figure in found["new", lowering][0].keys() - {"tokens", "from"}:
                old, new = ([a[figure] for a in found[worker, lowering]] for worker in ("old", "new"))
                before, now = statistics.median(old), statistics.median(new)
                row[figure] = {"earlier": round(before, 1), "today": round(now, 1), "ratio": round(now / before, 3)}
                row[figure]["turns"] = {"earlier": [round(v, 1) for v in old], "today": [round(v, 1) for v in new]}
            if tokens[0] is not None:
                row["same_tokens"] = all(each == tokens[0] for each in tokens)
            rows.append(row)
            short = {f: {n: v for n, v in row[f].items() if n != "turns"} for f in row if isinstance(row[f], dict)}
            print({**row, **short}, flush=True)
        keep(rows)


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="folder of the earlier commit's tree")
    parser.add_argument("--commit", default="d5ac211", help="its name, for the result")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument(
        "--cases",
        default="propose:8b:1,8,32,64;rounds:llama-1b:1,8;rounds:llama3-8b:1,8,32,64;shipped:pair:1",
        help="kind:name:requests,...; separated by semicolons",
    )
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        answers(asked.platform)
        return
    from specgraph.cli.env import environment
    from specgraph.device import open_platform

    report = {**environment(open_platform(asked.platform)), "command": " ".join(["python", *sys.argv])}
    report |= {"earlier": asked.commit}

    def keep(rows):
        if asked.json is not None:
            asked.json.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")

    cases = [
        (kind, name, int(count))
        for kind, name, counts in (case.split(":") for case in asked.cases.split(";"))
        for count in counts.split(",")
    ]
    workers = {"old": Worker(asked.platform, asked.old), "new": Worker(asked.platform, None)}
    try:
        compare(workers, cases, asked.turns, keep)
    finally:
        for worker in workers.values():
            worker.process.stdin.close()
            worker.process.wait()


if __name__ == "__main__":
    main()
