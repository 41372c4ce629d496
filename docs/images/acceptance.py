"""Write docs/images/acceptance.svg: how often each drafter's token is accepted, by its position in the draft.

    python docs/images/acceptance.py

The figures are those of docs/acceptance.md; nothing is measured here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "acceptance.md"
PICTURE = Path(__file__).parent / "acceptance.svg"


def rows(page: str) -> dict[str, tuple[float, list[float]]]:
    """Return (mean length, share by position) of the drafts of 5 steps, by drafter, trees of 16 rows apart."""
    found: dict[str, tuple[float, list[float]]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 9 or cells[2] not in ("5", "tree 5, 4, 16"):
            continue
        name = cells[0] if cells[2] == "5" else f"{cells[0]}, tree of 16 rows"
        found[name] = float(cells[3].strip("*")), [float(share) for share in cells[4:9]]
    return found


def draw(page: str) -> Any:
    """Draw one line per drafter, the best on top; a tree is dashed, in the colour of its drafter's chain."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes: Any = figure.subplots()
    colours: dict[str, Any] = {}
    by_length = sorted(rows(page).items(), key=lambda row: (", tree" in row[0], -row[1][0]))
    for name, (length, shares) in by_length:
        if ", tree" in name and not name.startswith("eagle3"):
            continue
        style = {"color": colours[name.partition(",")[0]], "linestyle": "--"} if ", tree" in name else {}
        (line,) = axes.plot(range(1, 6), shares, marker="o", markersize=4, label=f"{name}: {length:.2f}", **style)
        colours[name] = line.get_color()
    axes.set_xticks(range(1, 6))
    axes.set_ylim(0, 1)
    axes.set_xlabel("position of the draft token")
    axes.set_ylabel("share of drafts accepted there")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", title="drafter: acceptance length", frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    matplotlib.rcParams["svg.hashsalt"] = "specgraph"  # the same file each time
    draw(PAGE.read_text()).savefig(PICTURE, metadata={"Date": None})
