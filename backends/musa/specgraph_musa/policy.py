"""The decisions that this backend makes itself. `policy.md` lists all of them; `Policy` holds the adjustable ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specgraph.device import Rule, Support, no, quirk
from specgraph.errors import ConfigError

TABLE = Path(__file__).with_name("policy.md")
"""One row per decision: its reason, the place where the reason was seen, and the code that implements it."""

RULES = tuple(Rule(*map(str.strip, row.strip("|").split("|"))) for row in TABLE.read_text().splitlines()[2:])
"""The rows of `TABLE`, for `specgraph explain`."""

MERGED_VARIABLE = "SPECGRAPH_MUSA_MERGED"
_SEEN = "with toolchain mcc 5.1.0 acceptance fell to 3.49 % (vllm-musa #50)"

MergedLoop = Literal["off", "on", "forced"]
_MERGED_VALUES: Mapping[str, MergedLoop] = {"": "off", "0": "off", "1": "on", "force": "forced"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The adjustable decisions, for one platform."""

    merged: MergedLoop = "off"
    max_live_graphs: int = 1900
    """The most live graphs per process, the graphs of other libraries included."""

    @property
    def merged_loop(self) -> Support:
        """Return whether the whole draft loop may be one graph."""
        if self.merged == "off":
            return no(f"opt-in on this platform: {_SEEN}; set {MERGED_VARIABLE}=1 to allow it and compare with eager")
        return quirk(f"allowed by {MERGED_VARIABLE}; compare acceptance with eager of the same toolchain: {_SEEN}")

    @property
    def collectives_in_graph(self) -> Support:
        """Return whether graphs may hold collectives."""
        if self.merged != "forced":
            return no(f"a capture corrupted the state of collectives: {_SEEN}; {MERGED_VARIABLE}=force overrides")
        return quirk(f"allowed by {MERGED_VARIABLE}=force, although a capture corrupted their state: {_SEEN}")


def policy_from(environ: Mapping[str, str] = os.environ) -> Policy:
    """Return the policy set in the environment. Raises ConfigError if SPECGRAPH_MUSA_MERGED has an unknown value."""
    asked = environ.get(MERGED_VARIABLE, "")
    if asked not in _MERGED_VALUES:
        raise ConfigError(f"{MERGED_VARIABLE}={asked!r}: it may be 0, 1 or force")
    return Policy(merged=_MERGED_VALUES[asked])
