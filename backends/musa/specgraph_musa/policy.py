"""What this backend does differently from what the device would let it do: data, each with its reason and source.

`RULES` is what a person reads (`specgraph explain` shows it, the README's table is made from it); `Policy` holds the
numbers and choices that the code reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specgraph.errors import ConfigError
from specgraph.platforms import LoweringName, Rule, Support, no, quirk

MERGED_VARIABLE = "SPECGRAPH_MUSA_MERGED"

MergedLoop = Literal["off", "on", "forced"]

_MERGED_VALUES: Mapping[str, MergedLoop] = {"": "off", "0": "off", "1": "on", "force": "forced"}


RULES: tuple[Rule, ...] = (
    Rule(
        "default lowering",
        f"`auto` resolves to `step`, one full graph a draft step, unless {MERGED_VARIABLE} allows the merged loop",
        "on a device, one graph a step was faster than the whole loop in one graph (+10.2 % against +8.2 % over no "
        "graphs) and kept eager's acceptance (47.95 %)",
        "vllm-musa #50",
        "`Policy.default_lowering`",
    ),
    Rule(
        "merged loop",
        f"off unless {MERGED_VARIABLE}=1, which also makes `auto` take it",
        "one capture of the whole loop gave equal acceptance on one toolchain and corrupted state on the next (mcc "
        "5.1.0): acceptance fell to 3.49 %, positions 1 to 4 to 0 %, and devices rebooted",
        "vllm-musa #43, #50",
        "`Policy.merged_loop`",
    ),
    Rule(
        "merged loop with collectives",
        f"refused even with {MERGED_VARIABLE}=1 once torch.distributed has more than one rank; "
        f"{MERGED_VARIABLE}=force overrides",
        "the corruption was in the collectives' barrier state, baked between the steps of one capture",
        "vllm-musa #50",
        "`Policy.merged_loop`",
    ),
    Rule(
        "collectives in graphs",
        "not claimed; in piecewise, collectives stay between the graphs",
        "see the merged loop",
        "vllm-musa #50",
        "`probes.probe_capabilities`",
    ),
    Rule(
        "live graphs",
        "at most 1900 a process, every library's counted",
        "the runtime fails late, at instantiation, near 2048; 1900 is where torchada starts to rotate",
        "torchada 0.1.103",
        "`MusaGraph.capture`",
    ),
    Rule(
        "pools",
        "a closed graph gives its share of the pool back by an own call, where a probe shows that reset() does not",
        "in 2.7.1 the release in reset() is commented out",
        "torch_musa 2.7.1, MUSAGraph.cpp",
        "`pools.find_release`",
    ),
    Rule(
        "failed captures",
        "the pool's recording is ended and its share given back by own calls, the stream is put back, and the next "
        "capture gets a new handle of the pool",
        "in 2.7.1 capture_end() stops at the first error, before both, and graph() then leaves its stream current; "
        "newer torch also has a host allocator that can't be told",
        "torch_musa 2.7.1, MUSAGraph.cpp and graphs.py; torch 2.11 on the simulator over torch.cuda",
        "`MusaGraph.capture`",
    ),
    Rule(
        "threads",
        "one thread captures at a time; another's capture is refused, and cached memory stays until it is over",
        "graph() waits for the device and empties the cache first, which can break a capture that is under way",
        "torch_musa 2.7.1, graphs.py",
        "`MusaGraph.capture`",
    ),
    Rule(
        "garbage collection",
        "not before each capture: the process's objects are frozen meanwhile",
        "graph() collects before each capture, which takes as long as there are objects: more than half of the CPU "
        "time of a start with 78 graphs",
        "torch_musa 2.7.1, graphs.py; measured on the simulator over the CPU",
        "`MusaGraph.capture`",
    ),
    Rule(
        "debug dump",
        "a dumped graph's handle is never destroyed: it costs one live graph until the process ends",
        "debug_dump() destroys the graph, and reset() and the destructor destroy it once more",
        "torch_musa 2.7.1, MUSAGraph.cpp",
        "`MusaGraph.debug_dump`",
    ),
    Rule(
        "handles",
        "only torch.musa's own streams and events are passed down",
        "events cast what they are given without a check: a torch.Stream there corrupts memory",
        "torch_musa 2.7.1, Event.cpp",
        "`handles.handle_types`",
    ),
    Rule(
        "external events, task updates",
        "absent",
        "torch.musa.Event has no external flag, and MUSAGraph neither task groups nor updates of its executable",
        "torch_musa 2.7.1, stream.py and graphs.py",
        "`probes.probe_capabilities`",
    ),
    Rule(
        "strides",
        "op arguments are made contiguous before a Triton kernel of ours sees them",
        "a paged kernel failed on block tables whose last stride is not 1",
        "vllm-musa",
        "`kernels.canonical_arguments`",
    ),
    Rule(
        "parallel drafters",
        "captured at multiples of 1 + K rows, from the smallest on (K = 8: 9, 18, 36, 72)",
        "rows that are no multiple of 1 + K gave an illegal access; with only large sizes, 9 tokens were padded to 72 "
        "(35 tok/s instead of 48)",
        "vllm-musa #52",
        "the core: sizes count requests, so rows are requests x (1 + K), and its ladder starts at 1",
    ),
    Rule(
        "verify on hybrid models",
        "refused: a full graph over more than one row a request, where a target has recurrent layers",
        "such a graph corrupted the verify pass",
        "vllm-musa #97",
        "the core: it loads no target with recurrent layers",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The choices in force for one platform."""

    merged: MergedLoop = "off"
    max_live_graphs: int = 1900

    def merged_loop(self, collectives: bool) -> Support:
        """Whether the whole loop may be one graph.

        Args:
            collectives: several ranks take part, so captured code may communicate.
        """
        seen = "with toolchain mcc 5.1.0 acceptance fell to 3.49 % (vllm-musa #50)"
        if self.merged == "off":
            return no(f"opt-in on this platform: {seen}; set {MERGED_VARIABLE}=1 to allow it and compare with eager")
        if collectives and self.merged != "forced":
            return no(
                "several ranks are at work, and a whole-loop capture corrupted the state of collectives: "
                f"{seen}; {MERGED_VARIABLE}=force overrides"
            )
        return quirk(f"allowed by {MERGED_VARIABLE}; compare acceptance with eager on your toolchain: {seen}")

    def default_lowering(self, collectives: bool) -> LoweringName:
        """What `auto` resolves to."""
        return "merged" if self.merged_loop(collectives) else "step"


def policy_from(environ: Mapping[str, str] = os.environ) -> Policy:
    """The policy that the environment asks for.

    Raises:
        ConfigError: the variable has a value that means nothing.
    """
    asked = environ.get(MERGED_VARIABLE, "")
    if asked not in _MERGED_VALUES:
        raise ConfigError(f"{MERGED_VARIABLE}={asked!r}: it may be 0, 1 or force")
    return Policy(merged=_MERGED_VALUES[asked])


def rules_as_markdown() -> str:
    """The table of the README."""
    lines = ["| what | decision | reason | seen in | held by |", "|---|---|---|---|---|"]
    lines += [f"| {r.name} | {r.decision} | {r.reason} | {r.source} | {r.held_by} |" for r in RULES]
    return "\n".join(lines)


if __name__ == "__main__":
    print(rules_as_markdown())
