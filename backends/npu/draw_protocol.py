"""Draw the update protocol as a timeline: `python draw_protocol.py protocol.svg`. Schematic, not measured."""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HOST, REPLAY, UPDATE = 2.0, 1.0, 0.0
BLUE, GREEN, ORANGE, GREY = "#4c72b0", "#55a868", "#dd8452", "#b0b0b0"


def box(ax, x, width, lane, text, colour, size=7):
    ax.barh(lane, width, left=x, height=0.52, color=colour, edgecolor="white", linewidth=0.8)
    ax.text(x + width / 2, lane, text, ha="center", va="center", fontsize=size, color="white")


def arrow(ax, x0, lane0, x1, lane1, text="", colour="#333333", dx=0.06, dy=0.0):
    style = {"arrowstyle": "->", "color": colour, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=(x1, lane1), xytext=(x0, lane0), arrowprops=style)
    if text:
        ax.text((x0 + x1) / 2 + dx, (lane0 + lane1) / 2 + dy, text, fontsize=6.2, color=colour)


def draw(path: str) -> None:
    fig, ax = plt.subplots(figsize=(11, 3.6))
    # host
    box(ax, 0.0, 0.8, HOST, "copy counts,\nlaunch i", BLUE)
    box(ax, 0.9, 0.8, HOST, "update\nstep 0", ORANGE)
    box(ax, 1.8, 1.5, HOST, "wait for the counts\n(the verify, not the propose)", GREY)
    box(ax, 3.4, 0.9, HOST, "update\nstep 1", ORANGE)
    box(ax, 4.4, 0.9, HOST, "update\nstep 2", ORANGE)
    box(ax, 5.7, 0.8, HOST, "launch\ni + 1", BLUE)
    box(ax, 6.6, 0.8, HOST, "update\nstep 0", ORANGE)
    # replay stream
    box(ax, 0.2, 1.1, REPLAY, "target verify", GREY)
    box(ax, 1.4, 0.9, REPLAY, "step 0:\nup to gate 0", GREEN)
    box(ax, 2.6, 1.2, REPLAY, "attention 0, sample,\nadvance", GREEN)
    box(ax, 4.4, 0.9, REPLAY, "attention 1 ...", GREEN)
    box(ax, 5.5, 1.2, REPLAY, "attention 2 ...", GREEN)
    box(ax, 6.8, 0.5, REPLAY, "done(i)", BLUE)
    box(ax, 7.4, 1.2, REPLAY, "graph i + 1 ...", GREEN)
    # update stream
    box(ax, 0.2, 1.0, UPDATE, "wait\ndone(i - 1)", GREY)
    box(ax, 1.4, 0.9, UPDATE, "rewrite 0,\nopen gate 0", ORANGE)
    box(ax, 3.6, 0.9, UPDATE, "rewrite 1,\nopen gate 1", ORANGE)
    box(ax, 4.6, 0.9, UPDATE, "rewrite 2,\nopen gate 2", ORANGE)
    box(ax, 6.75, 0.65, UPDATE, "wait\ndone(i)", GREY)
    box(ax, 7.5, 0.9, UPDATE, "rewrite 0,\nopen gate 0", ORANGE)

    arrow(ax, 1.3, HOST - 0.28, 1.6, UPDATE + 0.28)
    arrow(ax, 2.3, UPDATE + 0.2, 2.6, REPLAY - 0.26, "gate 0")
    arrow(ax, 1.3, REPLAY + 0.27, 2.5, HOST - 0.28, "accepted counts", dx=-0.2, dy=0.1)
    arrow(ax, 3.9, HOST - 0.28, 3.9, UPDATE + 0.28)
    arrow(ax, 4.8, HOST - 0.28, 5.0, UPDATE + 0.28)
    arrow(ax, 4.4, UPDATE + 0.27, 4.5, REPLAY - 0.26, "gate 1")
    arrow(ax, 5.4, UPDATE + 0.27, 5.6, REPLAY - 0.26, "gate 2")
    arrow(ax, 7.05, REPLAY - 0.27, 7.1, UPDATE + 0.27)

    ax.set_yticks([UPDATE, REPLAY, HOST], ["update stream", "replay stream", "host"], fontsize=8)
    ax.set_xticks([])
    ax.set_xlim(0, 8.7)
    ax.set_ylim(-0.45, 2.45)
    ax.set_title("One merged propose with host parameters (K = 3, one layer): schematic, not measured", fontsize=9)
    for side in ("top", "right", "bottom", "left"):
        ax.spines[side].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "protocol.svg")
