"""Tiles of linears as `specgraph tune` measured them on one GPU, kept in the user's cache.

A file holds the tiles of one device and Triton version, by shape. Shapes that it lacks take the tiles that the device's
backend ships.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specgraph.ops.triton.launch import ChooseTile, Tile

_LOG = logging.getLogger("specgraph")


class LinearShape(NamedTuple):
    """The sizes that the tile of a linear is chosen by; see `ChooseTile`."""

    kind: str
    rows: int
    columns: int
    depth: int


@dataclass(frozen=True, slots=True)
class TileTable:
    """Chooses tiles (a `ChooseTile`), and keeps which shapes were asked for."""

    otherwise: ChooseTile
    """Asked for shapes that are not in `tiles`."""
    tiles: dict[LinearShape, Tile | None] = field(default_factory=dict[LinearShape, "Tile | None"])
    """The tiles by shape; None where a library matmul is faster."""
    asked: dict[LinearShape, None] = field(default_factory=dict[LinearShape, None])
    """Shapes so far, in order."""

    def __call__(self, kind: str, rows: int, columns: int, depth: int) -> Tile | None:
        """See `ChooseTile`."""
        shape = LinearShape(kind, rows, columns, depth)
        self.asked[shape] = None
        return self.tiles[shape] if shape in self.tiles else self.otherwise(*shape)

    @contextmanager
    def using(self, tiles: Mapping[LinearShape, Tile | None]) -> Generator[None]:
        """Within it the tiles are these: what is captured is compared with captures of other tiles."""
        kept = dict(self.tiles)
        try:
            self.tiles.clear()
            self.tiles.update(tiles)
            yield
        finally:
            self.tiles.clear()
            self.tiles.update(kept)


def cache_file(device_name: str, triton_version: str) -> Path:
    """Return the file in which the tiles of a device are kept: in $XDG_CACHE_HOME, by default ~/.cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^a-z0-9.]+", "-", f"tiles {device_name} triton {triton_version}".lower())
    return folder / "specgraph" / f"{name}.json"


def read_tiles(path: Path) -> dict[LinearShape, Tile | None]:
    """Return the tiles in a file; none if there is no such file, or if it is not readable, which is logged."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["tiles"]
        found: dict[LinearShape, Tile | None] = {}
        for row in rows:
            tile = row["tile"]
            found[LinearShape(*row["shape"])] = None if tile is None else Tile(**tile)
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning(
            "the tiles in %s are not used: %s; run `specgraph tune` again, or remove the file",
            path,
            f"{type(error).__name__}: {error}",
        )
        return {}


def write_tiles(path: Path, tiles: Mapping[LinearShape, Tile | None], about: Mapping[str, Any]) -> None:
    """Write a file that `read_tiles` reads; a reader never sees half of it.

    Args:
        about: device, versions and command, for a person.
    """
    rows = [{"shape": list(shape), "tile": None if tile is None else asdict(tile)} for shape, tile in tiles.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    half.write_text(json.dumps({**about, "tiles": rows}, indent=1))
    half.replace(path)
