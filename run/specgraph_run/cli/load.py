"""Loads the target and the drafter that a command generates with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph.device import Platform, Progress
from specgraph.errors import ConfigError, how_to_fetch
from specgraph.validation import environment_number
from specgraph_run.cli.named_models import find_model
from specgraph_run.options import NGRAM, GeneratorOptions

if TYPE_CHECKING:
    from specgraph_run.text.generator import TextGenerator

_SMALL = 64 * 2**20
"""Bytes of a target's folder up to which one thread of the CPU is fastest."""


def choose_folders(
    target: Path | None, draft: Path | None, model: str | None = None
) -> tuple[Path | None, Path | None]:
    """Return the target and the drafter that the options name, before torch is imported; ConfigError where there are
    none, or options do not go together.

    A target of None is the shipped one; a drafter of None is the shipped target's, and any other's none.
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
    """Raise ConfigError, before torch is imported, for ranks that were not started, saying how to start them."""
    started, data = environment_number("WORLD_SIZE", 1, least=1), options.data_parallel
    if started != (size := options.tensor_parallel * data):
        processes = f"{started} process{'es were' if started > 1 else ' was'} started"
        given = f"--tensor-parallel is {options.tensor_parallel}" + (f", --data-parallel {data}" if data > 1 else "")
        how = f"torchrun --nproc-per-node {size} -m specgraph_run ..." if size > 1 else f"--tensor-parallel {started}"
        raise ConfigError(f"{processes}, and {given}: use {how}")


def load_pair(
    target: Path | None, draft: Path | None, platform: str | None, options: GeneratorOptions, progress: Progress
) -> tuple[TextGenerator, str]:
    """Open the platform, load what `choose_folders` chose (a target alone decodes without drafts) and capture its
    graphs; return the generator, and a line that describes it.
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
    """Use one CPU thread for a model whose weights fit a core's cache, unless OMP_NUM_THREADS says otherwise; return a
    remark for people, empty where nothing was chosen.

    The ops of so small a model take microseconds, less than it takes to wake other threads.
    """
    import torch

    if platform.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return ""
    files = folder.iterdir() if folder.is_dir() else [folder]
    if sum(file.stat().st_size for file in files if file.is_file()) < _SMALL:
        torch.set_num_threads(1)
    return f"; CPU threads: {torch.get_num_threads()} (OMP_NUM_THREADS sets another number)"
