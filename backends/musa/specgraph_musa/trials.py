"""Capabilities of the device at hand: each is claimed only if a computation that needs it gave the right numbers there.

A device fault ends the process instead of raising an exception, so the trials first run in a process of their own, and
what they found is kept in the user's cache folder per device and version.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from specgraph.errors import ConfigError, PlatformError, first_line
from specgraph.platforms import Capabilities, Support, no, quirk, trial, yes

from specgraph_musa.graph import release_share
from specgraph_musa.policy import RULES, Policy
from specgraph_musa.triton_ops import agree_with_reference, why_absent

if TYPE_CHECKING:
    from specgraph_musa.platform import MusaPlatform

VARIABLE = "SPECGRAPH_MUSA_TRIALS"
"""Environment variable. "skip": run the trials in this process and keep nothing. "again": ignore what was kept."""

Findings = Mapping[str, str]
"""Trial -> what is wrong, "" if nothing; "release" -> `MusaPlatform.release`."""

_TRIAL_BYTES = 32 << 20
_LONGEST_S = 900
_log = logging.getLogger(__name__)


def random_goes_on(platform: MusaPlatform) -> str | None:
    """Compare what two replays draw with what two eager calls draw."""
    musa, device, index = platform.musa, platform.device, platform.index
    saved = musa.get_rng_state(index)
    graph = platform.graph()
    try:
        eager = [trial.on_host(torch.rand(8, device=device)) for _ in range(2)]
        musa.set_rng_state(saved, index)
        with graph.capture():
            drawn = torch.rand(8, device=device)
        replayed: list[torch.Tensor] = []
        for _ in eager:
            graph.replay()
            replayed.append(trial.on_host(drawn))
        if torch.equal(*replayed):
            return "two replays drew the same numbers"
        same = torch.equal(torch.stack(eager), torch.stack(replayed))
        return None if same else "replays draw other numbers than eager does"
    finally:
        graph.close()
        musa.set_rng_state(saved, index)


TRIALS: Mapping[str, Callable[[Any], str | None]] = {
    "graphs": trial.replays_follow_their_input,
    "shared_pool": trial.graphs_share_a_pool,
    "merged_loop": trial.a_loop_in_one_graph,
    "random_in_graph": random_goes_on,
    "triton": agree_with_reference,
}
"""In this order, after `find_release`; the kernels that a toolchain compiles here and now come last."""


def find_release(platform: MusaPlatform) -> str:
    """Capture 32 MiB into a pool, drop the graph, and see what it takes for the memory to come back: a value of
    `MusaPlatform.release`. Raises the runtime's RuntimeError where it can't capture at all."""
    musa, index = platform.musa, platform.index
    musa.empty_cache()
    before = musa.memory_reserved(index)
    graph = platform.graph()
    with graph.capture():
        torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=platform.device).fill_(0)
    handle = graph.pool_handle
    graph.close()
    if musa.memory_reserved(index) - before < _TRIAL_BYTES:
        return "by_reset"
    try:
        release_share(index, handle)
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.warning("closed graphs keep their memory: this torch_musa can't give pools back (%s)", first_line(error))
        return "never"
    musa.empty_cache()
    return "by_own_call" if musa.memory_reserved(index) - before < _TRIAL_BYTES else "never"


def run(platform: MusaPlatform, name: str) -> str:
    """Run one trial, or "release"; what `Findings` holds for it."""
    try:
        if name == "release":
            platform.release = find_release(platform)
            return platform.release
        return TRIALS[name](platform) or ""
    except Exception as error:
        return "never" if name == "release" else f"{type(error).__name__}: {first_line(error)}"


def findings(platform: MusaPlatform) -> Findings:
    """What the trials found on this device: from the cache folder, else from a process of their own.

    Raises:
        ConfigError: SPECGRAPH_MUSA_TRIALS has an unknown value.
        PlatformError: the device can't be opened in another process.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "skip", "again"):
        raise ConfigError(f"{VARIABLE}={asked!r}: it may be skip or again")
    names = ["release", *TRIALS]
    if asked == "skip":
        return {name: run(platform, name) for name in names}
    key = " | ".join([platform.info.device_name, *(f"{k} {v}" for k, v in platform.info.versions.items())])
    kept = {} if asked == "again" else _kept().get(key, {})
    if kept.keys() == set(names) and (kept["triton"] or why_absent(platform) is None):
        return kept
    found: dict[str, str] = {}
    while remaining := names[len(found) :]:
        found |= _run_apart(platform.index, remaining)
    _keep(key, found)
    return found


def _run_apart(index: int, names: list[str]) -> dict[str, str]:
    """Run trials in a process of their own, as far as it gets: the one that ends it is found wrong."""
    command = [sys.executable, "-m", "specgraph_musa.trials", str(index), *names]
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
            f"MUSA device {index} can't be opened: a process that tried it {how}. {VARIABLE}=skip opens it without "
            "that trial"
        )
    if found[last := [*found][-1]] is None:
        found[last] = "never" if last == "release" else f"its trial {how}; {VARIABLE}=again retries"
    return found


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgraph" / "musa-trials.json"


def _kept() -> dict[str, dict[str, str]]:
    """What the cache file holds; nothing where it is missing, broken or another user's."""
    try:
        file = _cache_file()
        if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
            return {}
        kept = json.loads(file.read_text())
        return {k: v for k, v in kept.items() if isinstance(v, dict) and all(isinstance(t, str) for t in v.values())}
    except (OSError, ValueError, RuntimeError, AttributeError):
        return {}


def _keep(key: str, found: Findings) -> None:
    """Add to the cache file, which is replaced as a whole so that no reader sees half of it."""
    try:
        file = _cache_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:
            json.dump({**_kept(), key: dict(found)}, written, indent=1)
        os.replace(written.name, file)
    except (OSError, RuntimeError) as error:
        _log.warning("what the trials found is not kept: %s", first_line(error))


def capabilities(found: Findings, policy: Policy, collectives: bool) -> Capabilities:
    """The claims that `found` supports and `policy` allows, and what is not claimed, with reasons. `collectives`:
    torch.distributed has several ranks."""

    def claim(name: str, reason: str = "") -> Support:
        wrong = found["graphs"] or found[name]
        return no(f"a trial on this device failed: {wrong}") if wrong else yes(reason)

    merged = claim("merged_loop") and policy.merged_loop(collectives)
    return Capabilities(
        graphs=claim("graphs"),
        shared_pool=claim("shared_pool", "capture the largest graph first"),
        external_events=no("not claimed: torch.musa.Event(external=True) exists since 2.9.1 and was never tried"),
        task_update=no("torch.musa.MUSAGraph updates no captured task; attention here reads lengths from the device"),
        merged_loop=merged,
        collectives_in_graph=no(
            "not claimed: captured collectives lost their barrier state on one toolchain (vllm-musa #50)"
        ),
        random_in_graph=claim("random_in_graph")
        and quirk("the default generator only: torch.musa registers no other with a graph"),
        host_read_detection=no("not claimed: its trial is a failed capture, after which torch_musa does not clean up"),
        order_detection=no("the runtime reports nothing; run on the cpu platform for that"),
        notes={"triton": no(f"{found['triton']}. The plain torch ops run, slower") if found["triton"] else yes()},
        max_live_graphs=policy.max_live_graphs,
        update_order="before_replay",
        default_lowering="merged" if merged else "step",
        rules=RULES,
    )


if __name__ == "__main__":  # INDEX TRIAL...: prints one JSON line as a trial begins, and one as it ends
    from specgraph_musa.platform import MusaPlatform

    opened = MusaPlatform(int(sys.argv[1]), found={})
    for name in sys.argv[2:]:
        print(json.dumps({name: None}), flush=True)
        text = run(opened, name)
        opened.synchronize()
        print(json.dumps({name: text}), flush=True)
