"""Checks that the parts work where only their wheels are installed; `make installed` runs it outside of the checkout.

Every part must import from the environment, every backend be discovered, and the shipped pair generate through graphs.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path

from specgraph_run import load_generator

from specgraph import __version__
from specgraph.device import discover


def main() -> None:
    """Print what works; an assertion that fails names the part."""
    parts = {each.name: each.version for each in distributions() if each.name.startswith("specgraph-")}
    left_out = sys.version_info < (3, 11)  # specgraph-transformers, as transformers itself
    assert len(parts) >= 13 - left_out, f"installed are only {', '.join(parts)}"
    assert set(parts.values()) == {__version__}, parts
    for name in sorted(parts):
        module = import_module("specgraph" if name == "specgraph-core" else name.replace("-", "_"))
        place = Path(str(module.__file__))
        assert place.is_relative_to(sys.prefix), f"{name} is imported from {place}, not from its wheel"
    assert {"cpu", "cuda", "npu", "musa", "accelerator"} <= set(discover()), list(discover())
    with load_generator(platform="cpu", max_model_len=128, prefill_sizes=[32]) as generator:
        (text,) = generator.text(["def main():\n"], max_tokens=24)
        assert text, "no text"
        length = generator.decoder.metrics.mean_acceptance_length
        assert length > 1.5, f"acceptance length {length}"
    command = [Path(sys.prefix) / "bin" / "specgraph", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert said == f"specgraph {__version__}"
    print(f"{len(parts)} parts of {__version__} work: Python {sys.version.split()[0]}, torch {version('torch')}")


if __name__ == "__main__":
    main()
