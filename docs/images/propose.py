"""Draw the propose times of a result of `specgraph bench --json FILE`: propose.png beside this script.

    python docs/images/propose.py benchmarks/results/h200-eagle3-llama3-8b.json

The words are those of README.md; nothing is measured here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLOURS = {
    "eager, torch ops": "#d7dade",
    "eager": "#9aa0a6",
    "piecewise": "#c9a227",
    "step": "#4a90c2",
    "merged": "#1a7f4b",
}


def draw(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw a group of bars per case, a bar per lowering, the floor dashed; a refused lowering has no bar."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if "device_us" in row]
    cases = list(dict.fromkeys((row["shape"], row["requests"], row["k"]) for row in timed))
    lowerings = list(dict.fromkeys(row["lowering"] for row in timed))
    figure = Figure(figsize=(2 + 1.5 * len(cases), 4.2), layout="constrained")
    axes: Any = figure.subplots()
    width = 0.8 / len(lowerings)
    for row in timed:
        group = cases.index((row["shape"], row["requests"], row["k"]))
        left = group - 0.4 + lowerings.index(row["lowering"]) * width
        axes.bar(left + width / 2, row["device_us"], width * 0.92, color=_COLOURS.get(row["lowering"], "#888888"))
        if "device_us_least" in row:
            spread = [row["device_us_least"], row["device_us_most"]]
            axes.plot([left + width / 2] * 2, spread, color="black", linewidth=1)
        axes.text(left + width / 2, row["device_us"], f"{row['device_us']:.0f}", ha="center", va="bottom", fontsize=7)
        if "floor_us" in row:
            axes.plot([group - 0.42, group + 0.42], [row["floor_us"]] * 2, color="black", linewidth=1, linestyle="--")
    labels = [f"{requests} request{'s' * (requests > 1)}\nK = {k}" for _, requests, k in cases]
    axes.set_xticks(range(len(cases)), labels)
    axes.set_ylabel("microseconds per propose")
    axes.set_title(title, fontsize=10)
    kernels = {"eager": "eager, our kernels"} if "eager, torch ops" in lowerings else {}
    handles = [axes.bar(0, 0, color=_COLOURS.get(name, "#888888"), label=kernels.get(name, name)) for name in lowerings]
    if any("floor_us" in row for row in timed):
        handles += axes.plot([], [], color="black", linewidth=1, linestyle="--", label="floor")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    result = Path(sys.argv[1])
    report = json.loads(result.read_text())
    rows = report["rows"]
    about = f"{rows[0]['shape']}, context {rows[0]['context']}, {report['device']}"
    draw(rows, about).savefig(Path(__file__).with_suffix(".png"), dpi=150)
