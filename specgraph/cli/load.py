"""Loads the target and the drafter that a command generates with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph.errors import ConfigError
from specgraph.options import EngineOptions, Progress

if TYPE_CHECKING:
    from specgraph.device import Platform
    from specgraph.engine.text import TextGenerator

_SMALL = 64 * 2**20
"""Bytes of a target's folder up to which one thread of the CPU is fastest."""


def check_folders(target: Path | None, draft: Path | None) -> None:
    """Refuse folders that are not there, before torch is imported.

    Raises:
        ConfigError: there is no such folder.
    """
    for option, folder in (("--target", target), ("--draft", draft)):
        if folder is not None and not folder.exists():
            raise ConfigError(f"{option} {folder}: there is no such file or folder")


def load_pair(
    target: Path | None,
    draft: Path | None,
    platform: str | None,
    options: EngineOptions,
    progress: Progress,
) -> tuple[TextGenerator, str]:
    """Open the platform, load the pair and capture its graphs; return the generator, and a line that describes it.

    Raises:
        ConfigError: a folder is not there; see `check_folders`.
    """
    check_folders(target, draft)
    from specgraph.device import open_platform
    from specgraph.engine.load import load_generator, shipped_pair

    opened = open_platform(platform)
    threads = choose_threads(opened, target or shipped_pair()[0])
    generator = load_generator(target, draft, platform=opened, progress=progress, options=options)
    return generator, f"[dim]{generator.description}{threads}[/]"


def choose_threads(platform: Platform, folder: Path) -> str:
    """Use one CPU thread for a model whose weights fit a core's cache, unless OMP_NUM_THREADS says otherwise.

    The ops of so small a model take microseconds, less than it takes to wake other threads.

    Args:
        folder: the target's; the size of its files decides.

    Returns:
        A remark for people; empty where nothing was chosen.
    """
    import torch

    if platform.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ or not folder.is_dir():
        return ""
    if sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) < _SMALL:
        torch.set_num_threads(1)
    return f"; CPU threads: {torch.get_num_threads()} (OMP_NUM_THREADS sets another number)"
