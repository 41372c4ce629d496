"""The releases of vLLM that are served, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specgraph.errors import UnsupportedError

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
"""The package of the speculators."""

EAGLE, MTP = ("eagle.speculator", "EagleSpeculator"), ("mtp.speculator", "MTPSpeculator")
DRAFT_MODEL = "standalone_ar.speculator", "StandaloneARSpeculator"


@dataclass(frozen=True, slots=True)
class Shim:
    """The differences between the releases of vLLM that are served."""

    release: str
    """Its first two numbers."""
    init_parameters: tuple[str, ...]
    """The parameters of `init_speculator`."""
    extra_parameters: tuple[str, ...]
    """The parameters of a speculator's `propose` after `seeds`, in order."""
    block_sizes: str
    """The attribute of `BlockTables` with the tokens per entry, by KV cache group."""
    speculators: Mapping[str, tuple[str, str]]
    """Speculative method -> the module in `SPECULATORS`, and the class that `init_speculator` takes."""


_DUMMY = ("dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile")

_METHODS = {"eagle3": EAGLE, "eagle": EAGLE, "mtp": MTP}

SHIMS = (
    Shim("0.26", ("vllm_config", "device"), ("num_tokens_across_dp", *_DUMMY), "kernel_block_sizes", _METHODS),
    Shim(
        "0.33",
        ("vllm_config", "device", "req_states"),
        ("dp_sync_state", *_DUMMY, "num_speculative_tokens"),
        "block_sizes",
        {**_METHODS, "draft_model": DRAFT_MODEL},
    ),
)
"""The releases whose names were checked: tests/test_names.py compares them with the wheels' sources."""


def shim_for(version: str) -> Shim:
    """The shim of an installed version.

    Raises:
        UnsupportedError: the release is not one of those that were checked.
    """
    release = ".".join(version.split(".")[:2])
    for shim in SHIMS:
        if shim.release == release:
            return shim
    served = " and ".join(shim.release for shim in SHIMS)
    raise UnsupportedError(f"vLLM {version}: specgraph-vllm serves {served}; install one of them, or leave the key out")
