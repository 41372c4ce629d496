"""A plot of propose times, with the words that README.md uses."""

from __future__ import annotations

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


def plot_rows(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG of propose times: a group of bars per case, a bar per lowering, the floor dashed. Needs matplotlib.

    Args:
        rows: as `bench_propose` returns them; rows without a time (refused lowerings) are left out.
    """
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
    figure.savefig(path, dpi=150)
