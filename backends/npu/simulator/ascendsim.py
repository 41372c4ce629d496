"""Load the simulated Ascend runtime into this process, and drive it from tests.

    runtime = ascendsim.load("build", flavour="values", devices=2)   # before torch_npu is imported
    import torch_npu
    runtime.schedule(seed=3, delay_us=500, percent=20)
    ...
    assert runtime.report()["violations"] == []

A run on the simulator proves that our calls drive the vendor's own adapter through a consistent protocol. It proves
nothing about kernel numerics or speed, nor that a real CANN accepts the same calls.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Flavour = Literal["values", "events"]
"""`values` has aclrtValueWait and aclrtValueWrite, from which torch_npu builds its external events; `events` has
neither."""

_PRELOADED = (
    "ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi", "nnopbase", "atb",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Runtime:
    """The loaded runtime's control functions."""

    library: ctypes.CDLL

    def report(self) -> dict[str, Any]:
        """Return the calls per API since the last reset (`calls`), live handles by kind, device bytes, streams used and
        violations."""
        size = self.library.ascendsim_report(None, 0)
        while True:
            buffer = ctypes.create_string_buffer(size + 256)
            needed = self.library.ascendsim_report(buffer, len(buffer))
            if needed <= len(buffer):
                return json.loads(buffer.value)
            size = needed

    def reset_report(self) -> None:
        """Set all counters to 0 and forget the violations."""
        self.library.ascendsim_reset_report()

    def schedule(self, seed: int, delay_us: int = 500, percent: int = 20) -> None:
        """Delay `percent` of all tasks by up to `delay_us` from now on, and run graph nodes in any allowed order."""
        self.library.ascendsim_schedule(ctypes.c_ulong(seed), delay_us, percent)

    def hang_seconds(self, seconds: float) -> None:
        """Set the time without any progress after which a host wait returns an error."""
        self.library.ascendsim_hang_seconds(ctypes.c_double(seconds))

    def limits(self) -> list[dict[str, Any]]:
        """Return the refusals that a public source documents for a device. Each has a name, a rule, a source, and
        `on`."""
        return self.report()["limits"]

    def strict(self, *names: str) -> None:
        """Turn limits on, by name, or "all"."""
        self._set(names, on=True)

    def lenient(self, *names: str) -> None:
        """Turn limits off, by name, or "all"."""
        self._set(names, on=False)

    def _set(self, names: Iterable[str], on: bool) -> None:
        for name in names:
            if self.library.ascendsim_limit(name.encode(), int(on)):
                raise ValueError(f"no limit '{name}'; there are {', '.join(each['name'] for each in self.limits())}")


def environment(build: str | Path, flavour: Flavour = "values", **options: int | str) -> dict[str, str]:
    """Return the environment variables with which a process finds this runtime instead of CANN.

    `options` become ASCENDSIM_<NAME>: devices, soc, streams, memory_mib, seed, delay_us, delay_percent, hang_seconds,
    trace and lenient. `lenient` names the limits to turn off, separated by commas, or "all" (see `Runtime.limits`).
    """
    root = Path(build).resolve() / flavour
    if not (root / "done").exists():
        raise FileNotFoundError(f"the simulated runtime is not built in {root}: make -C backends/npu/simulator")
    return {
        "ASCEND_HOME_PATH": str(root),
        "ASCEND_OPP_PATH": str(root / "opp"),
        "LD_LIBRARY_PATH": str(root / "lib64"),
        **{f"ASCENDSIM_{name.upper()}": str(value) for name, value in options.items()},
    }


def load(build: str | Path, flavour: Flavour = "values", **options: int | str) -> Runtime:
    """Load the runtime's libraries into this process. Call it before torch_npu is imported."""
    variables = environment(build, flavour, **options)
    variables.pop("LD_LIBRARY_PATH")  # this process no longer reads it: the libraries are loaded by path below
    os.environ.update(variables, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    importlib.import_module("torch")  # libopapi needs torch's libraries in the process

    folder = Path(variables["ASCEND_HOME_PATH"]) / "lib64"
    libraries = {name: ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in _PRELOADED}
    libraries["opapi"].ascendsim_forget_shared_settings()
    runtime = libraries["ascendcl"]
    runtime.ascendsim_report.restype = ctypes.c_size_t
    return Runtime(runtime)
