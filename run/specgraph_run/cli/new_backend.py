"""`specgraph new-backend`: writes the skeleton of a backend, a distribution that specgraph finds once installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from specgraph.errors import ConfigError
from specgraph_run.cli.interrupts import finished_first
from specgraph_run.cli.names import installed_backends

_TEMPLATE = Path(__file__).parent / "backend_template"
_SUFFIX = ".in"
_PACKAGE = "package"


def new_backend(
    name: Annotated[str, typer.Argument(help="The platform's name: lower case, one word.")],
    folder: Annotated[Path | None, typer.Option(help="Where to write; ./specgraph-NAME by default.")] = None,
) -> None:
    """Write the skeleton of a new backend: pyproject, platform, graph, declared gaps, CI."""
    if not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise ConfigError(f"'{name}' can't be a platform's name: use lower-case letters and digits, a letter first")
    target = folder or Path(f"specgraph-{name}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder; give another one with --folder")
    if (other := installed_backends().get(name)) is not None:
        raise ConfigError(f"a platform '{name}' is installed already, by {other}; choose another name")
    try:
        with finished_first():
            written = write_backend(name, target)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error}") from error
    for path in written:
        typer.echo(f"  {path}")
    typer.echo(
        f"\nNext:\n  pip install --no-deps -e {target}\n  specgraph platforms\n"
        f"  specgraph conformance {name} --quick\nand begin with the first failing case."
    )


def write_backend(name: str, target: Path) -> list[Path]:
    """Write the filled-in template, and return its files in order. Raises OSError if a file can't be written."""
    words = {"@name@": name, "@Class@": name.capitalize()}
    written: list[Path] = []
    for source in sorted(_TEMPLATE.rglob(f"*{_SUFFIX}")):
        parts = [f"specgraph_{name}" if part == _PACKAGE else part for part in source.relative_to(_TEMPLATE).parts]
        path = target.joinpath(*parts[:-1], parts[-1].removesuffix(_SUFFIX))
        text = source.read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
