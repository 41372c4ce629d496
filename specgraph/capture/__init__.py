"""The capture and replay of device work: programs, lowerings, dispatch to sizes, task updates, the read-set guard."""

from specgraph.capture.attend import AttentionStack, MakeAttend
from specgraph.capture.dispatch import BatchDescriptor, Dispatch, Phase, dispatch, padded_size
from specgraph.capture.graph_runner import Body, GraphRunner, Recording
from specgraph.capture.lowering import Resolution, resolve
from specgraph.capture.model_runner import LengthsAt, ModelRunner, Pass
from specgraph.capture.prefill import PrefillBuffers, PrefillProgram, allocate_prefill
from specgraph.capture.program import Program, StepKind, Work
from specgraph.capture.read_set import Fingerprint, ReadSetGuard, fingerprint
from specgraph.capture.transfers import HostCopy, write
from specgraph.capture.update_plan import UpdatePlan

__all__ = [
    "AttentionStack",
    "BatchDescriptor",
    "Body",
    "Dispatch",
    "Fingerprint",
    "GraphRunner",
    "HostCopy",
    "LengthsAt",
    "MakeAttend",
    "ModelRunner",
    "Pass",
    "Phase",
    "PrefillBuffers",
    "PrefillProgram",
    "Program",
    "ReadSetGuard",
    "Recording",
    "Resolution",
    "StepKind",
    "UpdatePlan",
    "Work",
    "allocate_prefill",
    "dispatch",
    "fingerprint",
    "padded_size",
    "resolve",
    "write",
]
