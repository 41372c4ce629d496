"""The origin of the code that a report tested: commit, local changes and a digest of each distribution's package.

The digest is made of git's blob hashes. A clone that has the commit can thus be compared with it without a checkout.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

SUFFIXES = (".py", ".toml", ".json", ".ini")
"""The endings of the files that determine a package's behaviour."""


@dataclass(frozen=True, slots=True)
class Source:
    """The state of one distribution when the suite ran."""

    distribution: str
    version: str
    package: str
    """The package's folder in its repository. If it was installed from a wheel, the package's name."""
    state: str
    """`commit` for a git repository, `wheel` for an installation with a list of its files, otherwise `unknown`."""
    commit: str
    """The checked-out commit. Empty outside of a git repository."""
    changed: tuple[str, ...]
    """The files that differ from the commit or from the wheel."""
    digest: str
    """The SHA-256 over the package's files; see `digest_of`."""


def source_of(name: str, package: str) -> Source:
    """Return the state of an importable package of the distribution `name`."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is not importable"
    assert spec.origin is not None, f"{package} has no __init__.py"
    folder = Path(spec.origin).parent
    try:
        version = distribution(name).version
    except PackageNotFoundError:
        version = ""
    digest = digest_of((path.relative_to(folder).as_posix(), blob_hash(path.read_bytes())) for path in _files(folder))
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = (_git(folder, "rev-parse", "HEAD") or "").strip()
        where = (_git(folder, "rev-parse", "--show-prefix") or "").strip().rstrip("/")
        status = _git(folder, "status", "--porcelain", "--untracked-files=all", "--", ".") or ""
        changed = tuple(sorted(line[3:] for line in status.splitlines() if line.endswith(SUFFIXES)))
        return Source(name, version, where, "commit" if commit else "unknown", commit, changed, digest)
    altered = _altered_since_installation(name, package)
    state = "unknown" if altered is None else "wheel"
    return Source(name, version, package, state, "", tuple(altered or ()), digest)


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 over `files`, given as (path in the package, git's hash of the content).

    Only files with an ending in SUFFIXES count.
    """
    lines = sorted(f"{path} {blob}\n" for path, blob in files if path.endswith(SUFFIXES))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def blob_hash(content: bytes) -> str:
    """Return git's hash of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def digest_at(checkout: Path, commit: str, package: str) -> str | None:
    """Return the `Source.digest` of a package at a commit. None if the checkout does not have the commit."""
    listed = _git(checkout, "ls-tree", "-r", "--full-tree", commit, "--", f"{package}/")
    if not listed:
        return None
    rows = [line.split("\t") for line in listed.splitlines()]
    return digest_of((path.removeprefix(f"{package}/"), about.split()[2]) for about, path in rows)


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.suffix in SUFFIXES and "__pycache__" not in p.parts]


def _git(folder: Path, *arguments: str) -> str | None:
    """Run git and return its standard output. None if git is missing or fails."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _altered_since_installation(name: str, package: str) -> list[str] | None:
    """Return the files with other hashes than in the wheel. None if the installation lists no file of the package."""
    try:
        listed = [f for f in distribution(name).files or () if f.parts[0] == package and f.hash is not None]
    except PackageNotFoundError:
        return None
    altered: list[str] = []
    for file in listed:
        assert file.hash is not None
        path = Path(str(file.locate()))
        content = path.read_bytes() if path.is_file() else b""
        digest = hashlib.new(file.hash.mode, content).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            altered.append(file.as_posix())
    return altered if listed else None
