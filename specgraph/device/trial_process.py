"""Trials in a process of their own, for devices whose faults end the process instead of raising an exception.

A trial that ends its process has failed, and the remaining trials go on in a new one. The findings are kept in the
user's cache folder, per device and versions. The backend names a module, which calls `answer` when run as a program.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specgraph.device.interface import Platform
from specgraph.device.trial import Trial, outcome
from specgraph.errors import ConfigError, PlatformError, first_line

Findings = Mapping[str, str]
"""The fault that each trial found, by the trial's name. Empty if it found none."""

_LONGEST_S = 900
_log = logging.getLogger(__name__)


def findings(platform: Platform, index: int, module: str, trials: Mapping[str, Trial]) -> Findings:
    """Return the findings of the trials on this device, from the cache folder or else from a process of their own.

    Args:
        platform: the device. Only its `info` is used if another process runs the trials.
        index: the number of the device that the other process opens.
        module: run as `python -m MODULE INDEX TRIAL...`.
        trials: by name, in the order in which they run.

    The environment variable SPECGRAPH_<NAME>_TRIALS may be "skip" (run the trials in this process and keep no findings)
    or "again" (ignore the kept findings).

    Raises:
        ConfigError: the variable has another value.
        PlatformError: the device can't be opened in another process.
    """
    variable = f"SPECGRAPH_{platform.info.name.upper()}_TRIALS"
    asked = os.environ.get(variable, "")
    if asked not in ("", "skip", "again"):
        raise ConfigError(f"{variable}={asked!r}: it may be skip or again")
    if asked == "skip":
        return {name: outcome(platform, trial) for name, trial in trials.items()}
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgraph"
    file /= f"{platform.info.name}-trials.json"
    key = " | ".join([platform.info.device_name, *(f"{k} {v}" for k, v in platform.info.versions.items())])
    if asked != "again" and (kept := read(file).get(key, {})).keys() == trials.keys():
        return kept
    found: dict[str, str] = {}
    while remaining := [*trials][len(found) :]:
        found |= _run_apart(module, index, remaining, variable)
    keep(file, key, found)
    return found


def answer(platform: Platform, trials: Mapping[str, Trial], names: Iterable[str]) -> None:
    """Run trials in the process that was started for them. Print a JSON line when each begins, and one when it ends."""
    for name in names:
        print(json.dumps({name: None}), flush=True)
        text = outcome(platform, trials[name])
        platform.synchronize()
        print(json.dumps({name: text}), flush=True)


def _run_apart(module: str, index: int, names: list[str], variable: str) -> dict[str, str]:
    """Run trials in a new process and return their findings. A trial that ends it has failed, and is the last one."""
    command = [sys.executable, "-m", module, str(index), *names]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
        output, code = done.stdout, done.returncode
        how = f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        how += f" ({(done.stderr.strip().splitlines() or ['nothing on stderr'])[-1]})"
    except subprocess.TimeoutExpired as late:
        output, how = (late.stdout or b"").decode(errors="replace"), f"took more than {_LONGEST_S} s (killed)"
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith('{"'):
            found |= json.loads(line)
    if not found:
        raise PlatformError(
            f"device {index} can't be opened: a process that tried it {how}. {variable}=skip tries it in this process"
        )
    if found[last := [*found][-1]] is None:
        found[last] = f"its trial {how}; {variable}=again retries"
    return found


def read(file: Path) -> dict[str, dict[str, str]]:
    """Return the findings in a cache file, by device and versions. Empty if it is missing, broken or another user's."""
    try:
        if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
            return {}
        kept = json.loads(file.read_text())
        return {k: v for k, v in kept.items() if isinstance(v, dict) and all(isinstance(t, str) for t in v.values())}
    except (OSError, ValueError, AttributeError):
        return {}


def keep(file: Path, key: str, found: Findings) -> None:
    """Add findings to the cache file. The file is replaced as a whole, so that no reader sees half of it."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:
            json.dump({**read(file), key: dict(found)}, written, indent=1)
        os.replace(written.name, file)
    except OSError as error:
        _log.warning("what the trials found is not kept: %s", first_line(error))
