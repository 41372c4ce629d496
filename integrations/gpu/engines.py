"""The host engines that the scripts of this folder run, and their versions."""

from __future__ import annotations

import importlib
import platform
from typing import Any

import torch

ENGINES = ("vllm", "sglang")


def engine_class(name: str) -> Any:
    """Return the class `Engine` of vllm_engine.py or sglang_engine.py. Both have the same methods."""
    return importlib.import_module(f"{name}_engine").Engine


def environment(name: str) -> dict[str, str]:
    """Return the versions and the GPU, for a result file."""
    versions = {module: importlib.import_module(module).__version__ for module in (name, "torch", "triton")}
    return versions | {"python": platform.python_version(), "gpu": torch.cuda.get_device_name()}
