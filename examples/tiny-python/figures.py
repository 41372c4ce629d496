"""figures.json: what each script measured, with the command, the versions and the hardware it ran on."""

import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers


def environment(device: torch.device) -> dict[str, Any]:
    """The command line, the versions and the hardware of this run."""
    hardware = f"{os.cpu_count()} x {platform.machine()}"
    if device.type != "cpu":
        hardware = torch.get_device_module(device).get_device_name(device)
    return {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": hardware,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def record(file: Path, key: str, values: dict[str, Any], device: torch.device) -> None:
    """Put `values` under `key` in `file`, and leave the file's other keys alone."""
    known = json.loads(file.read_text()) if file.exists() else {}
    known[key] = {**values, "environment": environment(device)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known, indent=2) + "\n")
