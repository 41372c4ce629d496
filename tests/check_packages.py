"""Checks that built wheels and source distributions are fit to be published; `make packages` builds and checks them.

    python tests/check_packages.py FOLDER

A wheel must hold every file of its package. Each must hold the licence, require its own version of the other parts, and
have a description whose links and pictures hold on an index page.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
LICENCE = (ROOT / "LICENSE").read_bytes()
RELATIVE = re.compile(r"\]\((?!https?://|#)[^)]*\)")
"""A link or picture in Markdown that leads to a file of the repository."""


def contents(path: Path) -> dict[str, bytes]:
    """The files of a wheel or source distribution by name."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(path) as source:
        return {each.name: file.read() for each in source if (file := source.extractfile(each)) is not None}


def packaged(wheel: Path) -> list[str]:
    """The files that a wheel must hold: those of its package in the checkout, such as weights, lists and py.typed."""
    name = wheel.name.partition("-")[0]
    package = "specgraph" if name == "specgraph_core" else name
    (root,) = [mark.parents[1] for mark in typed_packages(ROOT) if mark.parent.name == package]
    files = [path for path in (root / package).rglob("*") if path.is_file() and is_source(path)]
    return [path.relative_to(root).as_posix() for path in files]


def typed_packages(root: Path) -> list[Path]:
    """Return the py.typed of every package. No environment is walked through: another process may be installing it."""
    deep = ("[!.]*/py.typed", "[!.]*/*/py.typed", "[!.]*/*/*/py.typed")
    return [path for pattern in deep for path in root.glob(pattern) if path.relative_to(root).parts[0] != "build"]


def is_source(path: Path) -> bool:
    """Return whether a file of the checkout is none that Python or a build left."""
    folders = path.relative_to(ROOT).parts[:-1]
    return not any(name in ("__pycache__", "build") or name.startswith(".venv") for name in folders)


def problems(path: Path) -> list[str]:
    """Return what is wrong with one file, each in one line."""
    files, found = contents(path), list[str]()
    texts = [text for name, text in files.items() if re.fullmatch(r"[^/]+(\.dist-info/METADATA|/PKG-INFO)", name)]
    if len(texts) != 1:
        return [f"{path.name}: {len(texts)} metadata files"]
    about = Parser().parsestr(texts[0].decode())
    if not any(re.search(r"(^|/)LICENSE$", name) and text == LICENCE for name, text in files.items()):
        found.append(f"{path.name}: no LICENSE")
    if links := RELATIVE.findall(about.get_payload()):
        found.append(f"{path.name}: links of the description lead nowhere on an index page: {', '.join(links[:3])}")
    for required in about.get_all("Requires-Dist", []):
        name, _, rest = required.partition("==")
        if name.startswith("specgraph-") and rest.partition(";")[0].strip() != about["Version"]:
            found.append(f"{path.name}: requires {required}")
    if path.suffix == ".whl" and (missing := [name for name in packaged(path) if name not in files]):
        found.append(f"{path.name}: lacks {', '.join(missing[:3])}")
    others = tuple(
        f"/{each}/" for each in ("backends", "conformance", "drafters", "integrations", "models", "run", "tests")
    )
    if path.name.startswith("specgraph_core") and (wrong := [n for n in files if n[n.find("/") :].startswith(others)]):
        found.append(f"{path.name}: holds files of other parts: {', '.join(wrong[:3])}")
    return found


def main(folder: Path) -> int:
    """Print what is wrong; the number of problems."""
    paths = [*sorted(folder.glob("*.whl")), *sorted(folder.glob("*.tar.gz"))]
    found = [problem for path in paths for problem in problems(path)]
    print("\n".join(found) or f"{len(paths)} packages are fit to be published")
    return len(found) + (not paths)


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]))))
