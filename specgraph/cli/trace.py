"""`specgraph trace`: a timeline of some rounds for Perfetto."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from specgraph.cli.env import environment
from specgraph.cli.load import check_processes, choose_folders, load_pair
from specgraph.cli.options import DraftOption, PlatformOption, TargetOption, with_engine_options
from specgraph.cli.output import check_output, write_json
from specgraph.cli.prompts import DEFAULT
from specgraph.cli.waiting import waiting


@with_engine_options(without=("sampled", "sampling_parameters", "logprobs"))
def trace(
    output: Annotated[Path, typer.Option(help="File to write, in Chrome's trace format (JSON).")],
    target: TargetOption = None,
    draft: DraftOption = None,
    prompt: Annotated[str, typer.Option(help="The prompt of every request.", show_default="some Python")] = DEFAULT,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to trace; prompts are prefilled in the first.")] = 8,
    options: Any = None,
    platform: PlatformOption = None,
) -> None:
    """Write a timeline of some rounds, --max-num-requests at a time; open it in https://ui.perfetto.dev.

    It shows rounds, passes, graph launches, task updates, waits and ops, nested as they were called, and the kernels
    of the device. A click on a round shows its launches, and what the platform counted in it.
    """
    check_output("--output", output)
    check_processes(options)
    target, draft = choose_folders(target, draft)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints while it records
    with waiting() as captured:
        from specgraph.tools.trace import trace as record

        generator, _ = load_pair(target, draft, platform, options, captured)
        most = (rounds + 1) * (generator.decoder.config.num_speculative_tokens + 1)
        requests = [generator.request(prompt, max_tokens=most) for _ in range(options.max_num_requests)]
        for request in requests:
            generator.decoder.check(request)
        generator.generate([replace(request, max_tokens=2) for request in requests])  # what runs once only
    with generator:
        report = record(generator.decoder, requests, rounds, output)
    report["otherData"] = environment(generator.platform)
    write_json(report, str(output))
    print(f"{output}: {len(report['traceEvents'])} events")
    print("open it in https://ui.perfetto.dev (the file stays in your browser) or chrome://tracing")
