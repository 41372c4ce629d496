"""Tries specgraph and its plugin on an NPU, and writes one JSON: python try_npu.py OUT.json

Run it in the environment of vllm-ascend with specgraph installed, on a machine with an NPU. `--target` and `--draft`
are folders of a target and its EAGLE-3 drafter; without them no prompt is served. `--engine` has further arguments of
vLLM's `LLM` as JSON. Each part runs in a process of its own, so one that fails or hangs does not hide the others. Send
the file to whoever asked you to run this.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

DISTRIBUTIONS = (
    "torch", "torch_npu", "vllm", "vllm-ascend", "triton-ascend", "specgraph-core", "specgraph-npu",
    "specgraph-vllm-ascend",
)  # fmt: skip
SUITE = [sys.executable, "-m", "specgraph_run", "conformance", "npu"]
GROUPS = ("streams", "capture", "replay", "task_update", "attention")


def versions() -> dict[str, Any]:
    """Return versions of distributions, of CANN and of the driver."""
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if shutil.which("npu-smi") is None:
        return found | {"npu-smi": None}
    done = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=60)
    return found | {"npu-smi": done.stdout}


def signatures() -> dict[str, Any]:
    """Return the parameters of the names of torch_npu and vllm-ascend that are called, and those that are missing."""
    names = importlib.import_module("specgraph_vllm_ascend.names")
    npu: Any = importlib.import_module("torch_npu").npu
    importlib.import_module("vllm_ascend.worker.worker")  # as vLLM does; without it the runner's imports are circular
    runner: Any = importlib.import_module(names.RUNNER_MODULE)
    tasks = [f"graph_task_{name}" for name in ("group_begin", "group_end", "update_begin", "update_end")]
    found = {name: str(signature(getattr(npu, name))) for name in tasks}
    make = runner.get_spec_decode_method
    proposer: Any = runner.AscendEagleProposer
    return found | {"get_spec_decode_method": str(signature(make)), "_propose": str(signature(proposer._propose))}


def device() -> dict[str, Any]:
    """Return the platform's capabilities: each is tried out on the device."""
    from specgraph import open_platform

    opened = open_platform("npu:0")
    claims = opened.capabilities
    made = {name: str(getattr(claims, name)) for name in ("graphs", "merged_loop", "task_update", "external_events")}
    made |= {name: str(support) for name, support in claims.notes.items()}
    return made | {"info": str(opened.info), "attention": list(opened.attention_backends())}


def served(target: str, draft: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Serve prompts by vllm-ascend's own drafts and by specgraph's, in one engine."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8, "additional_config": {"specgraph": {}},
        "speculative_config": {"method": "eagle3", "model": draft, "num_speculative_tokens": 3},
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
    }  # fmt: skip
    llm: Any = LLM(target, **settings | engine)
    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4,"]
    made: dict[str, Any] = {}
    for name, drafter.use_vllm in (("specgraph", False), ("stock", True)):
        done = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
        made[name] = [list(each.outputs[0].token_ids) for each in done]
    return made | {"counts": dict(drafter.counts.by_reason), "equal": made["specgraph"] == made["stock"]}


def tried(part: str, arguments: list[str], timeout: int) -> dict[str, Any]:
    """Run one part of this file in a process of its own."""
    command = [sys.executable, __file__, "--part", part, *arguments, "-"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        return {"error": f"not done after {timeout} s", "output": str(late.stdout)[-4000:]}
    last = done.stdout.strip().splitlines()[-1:] or [""]
    try:
        return json.loads(last[0])
    except ValueError:
        return {"error": f"exit code {done.returncode}", "output": (done.stdout + done.stderr)[-6000:]}


def suite(chosen: list[str]) -> dict[str, Any]:
    """Run some cases of the conformance suite. Its report is part of the result."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*SUITE, *chosen, "--json", str(report)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        except subprocess.TimeoutExpired:
            return {"error": "not done after 1800 s"}
        text = json.loads(report.read_text()) if report.exists() else None
        return {"exit code": done.returncode, "output": (done.stdout + done.stderr)[-3000:], "report": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="")
    parser.add_argument("--draft", default="")
    parser.add_argument("--engine", default="{}")
    parser.add_argument("--quick", action="store_true", help="of the suite only its quick run, without whole groups")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "versions": versions, "signatures": signatures, "device": device,
        "served": lambda: served(given.target, given.draft, json.loads(given.engine)),
    }  # fmt: skip
    if given.part:
        print(json.dumps(parts[given.part]()))
        return
    result: dict[str, Any] = {}

    def note(name: str, found: dict[str, Any]) -> None:
        result[name] = found
        given.out.write_text(json.dumps(result, indent=1))
        print(name, found.get("exit code", "failed" if "error" in found else "done"), flush=True)

    for part in parts:
        if part != "served" or (given.target and given.draft):
            arguments = ["--target", given.target, "--draft", given.draft, "--engine", given.engine]
            note(part, tried(part, arguments, timeout=1800))
    note("suite quick", suite(["--quick"]))
    for group in () if given.quick else GROUPS:
        note(f"suite {group}", suite(["--group", group]))


if __name__ == "__main__":
    main()
