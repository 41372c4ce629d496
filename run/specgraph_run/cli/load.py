"""Loads the target and drafter of a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph_models.errors import how_to_fetch

from specgraph.device import Platform, Progress
from specgraph.errors import ConfigError
from specgraph.validation import environment_number
from specgraph_run.cli.named_models import find_model
from specgraph_run.options import NGRAM, GeneratorOptions

if TYPE_CHECKING:
    from specgraph_run.text.generator import TextGenerator

_SMALL = 64 * 2**20
"""A target with fewer bytes than this runs fastest on one CPU thread."""


def choose_folders(
    target: Path | None, draft: Path | None, model: str | None = None
) -> tuple[Path | None, Path | None]:
    """Return the target and the drafter that the options name, without importing torch.

    A target of None stands for the shipped target. A drafter of None stands for the shipped drafter if the target is
    None too, and otherwise for decoding without drafts.

    Raises ConfigError if a file or folder is not there, or if the options contradict each other.
    """
    if model is not None:
        if target is not None:
            raise ConfigError(f"--model {model} is a target: leave out --target {target}")
        target, own = find_model(model)
        draft = draft or own
    if target is None and draft not in (None, NGRAM):
        raise ConfigError(f"--draft {draft}: give its target too (--target or --model)")
    for option, folder in (("--target", target), ("--draft", draft)):
        if folder not in (None, NGRAM):
            if not folder.exists():
                raise ConfigError(f"{option} {folder}: there is no such file or folder{how_to_fetch(folder)}")
            if folder.is_dir() and not (folder / "config.json").exists():
                raise ConfigError(f"{option} {folder}: give a folder of a model, with a config.json, or a GGUF file")
    return target, draft


def check_processes(options: GeneratorOptions) -> None:
    """Raise ConfigError, with the command to use, if the number of started processes is not the number of ranks.

    It needs no torch.
    """
    started, data = environment_number("WORLD_SIZE", 1, least=1), options.data_parallel
    if started != (size := options.tensor_parallel * data):
        processes = f"{started} process{'es were' if started > 1 else ' was'} started"
        given = f"--tensor-parallel is {options.tensor_parallel}" + (f", --data-parallel {data}" if data > 1 else "")
        how = f"torchrun --nproc-per-node {size} -m specgraph_run ..." if size > 1 else f"--tensor-parallel {started}"
        raise ConfigError(f"{processes}, and {given}: use {how}")


def load_pair(
    target: Path | None, draft: Path | None, platform: str | None, options: GeneratorOptions, progress: Progress
) -> tuple[TextGenerator, str]:
    """Open the platform, load the target and drafter from `choose_folders`, and capture their graphs.

    Returns the generator, and a line for people that describes it.
    """
    from specgraph.device import open_platform
    from specgraph_run.text.load import load_generator, shipped_pair

    opened = open_platform(platform)
    threads = choose_threads(opened, target or shipped_pair()[0])
    speculate = target is None or draft is not None
    generator = load_generator(target, draft, platform=opened, speculate=speculate, progress=progress, options=options)
    drafts = "" if speculate else "; no drafter, so decoding without drafts (--draft names one, ngram needs none)"
    return generator, f"[dim]{generator.description}{drafts}{threads}[/]"


def choose_threads(platform: Platform, folder: Path) -> str:
    """Use one CPU thread for a model of less than 64 MiB, unless OMP_NUM_THREADS is set.

    An op of so small a model takes microseconds, less than it takes to wake other threads.

    Returns a remark for people about the number of threads; "" if the platform is no CPU or OMP_NUM_THREADS is set.
    """
    import torch

    if platform.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return ""
    files = folder.iterdir() if folder.is_dir() else [folder]
    if sum(file.stat().st_size for file in files if file.is_file()) < _SMALL:
        torch.set_num_threads(1)
    return f"; CPU threads: {torch.get_num_threads()} (OMP_NUM_THREADS sets another number)"
