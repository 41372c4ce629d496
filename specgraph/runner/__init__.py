"""Capturing and running the programs of one model: the runner, lowerings, prefill passes, host transfers."""

from specgraph.runner.config import RunnerConfig
from specgraph.runner.lowering import GraphMode, Launch, Resolution, StepKind, launches, resolve
from specgraph.runner.model_runner import LengthsAt, ModelRunner, Pass, Program, Work, report_captures
from specgraph.runner.prefill import PrefillBuffers, PrefillProgram, allocate_prefill, uniform_lengths
from specgraph.runner.transfers import HostCopy, write

__all__ = [
    "GraphMode",
    "HostCopy",
    "Launch",
    "LengthsAt",
    "ModelRunner",
    "Pass",
    "PrefillBuffers",
    "PrefillProgram",
    "Program",
    "Resolution",
    "RunnerConfig",
    "StepKind",
    "Work",
    "allocate_prefill",
    "launches",
    "report_captures",
    "resolve",
    "uniform_lengths",
    "write",
]
