"""The scripts of this folder share this: the engines and their versions."""

from __future__ import annotations

import importlib
import platform
from typing import Any

import torch

ENGINES = ("vllm", "sglang")


def engine_class(name: str) -> Any:
    """`Engine` of vllm_engine.py or sglang_engine.py: they have the same methods."""
    return importlib.import_module(f"{name}_engine").Engine


def environment(name: str) -> dict[str, str]:
    """Versions and the GPU, for a result file."""
    versions = {module: importlib.import_module(module).__version__ for module in (name, "torch", "triton")}
    return versions | {"python": platform.python_version(), "gpu": torch.cuda.get_device_name()}
