"""The place that the code of a report came from: commit, local changes and a digest of each distribution's package.

The digest is made of git's blob hashes, so that a checkout of the commit can be compared with it without the files.
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
"""Files of a package that decide what it does."""


@dataclass(frozen=True, slots=True)
class Source:
    """One distribution as it was when the suite ran."""

    distribution: str
    version: str
    package: str
    """The package's folder in its repository; its name where it was installed from a wheel."""
    state: str
    """`commit`: in a git repository; `wheel`: installed, with a list of its files; `unknown`: neither."""
    commit: str
    """The commit that was checked out, else empty."""
    changed: tuple[str, ...]
    """Files that differ from the commit or from the wheel."""
    digest: str
    """SHA-256 over the package's files, see `digest_of`."""


def source_of(name: str, package: str) -> Source:
    """The state of an importable package that belongs to the distribution `name`."""
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
    """Return the SHA-256 over (path in the package, git's hash of the content) of each file that is no cache."""
    lines = sorted(f"{path} {blob}\n" for path, blob in files if path.endswith(SUFFIXES))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def blob_hash(content: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def digest_at(checkout: Path, commit: str, package: str) -> str | None:
    """`Source.digest` of a package at a commit; None where the checkout does not have that commit."""
    listed = _git(checkout, "ls-tree", "-r", "--full-tree", commit, "--", f"{package}/")
    if not listed:
        return None
    rows = [line.split("\t") for line in listed.splitlines()]
    return digest_of((path.removeprefix(f"{package}/"), about.split()[2]) for about, path in rows)


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.suffix in SUFFIXES and "__pycache__" not in p.parts]


def _git(folder: Path, *arguments: str) -> str | None:
    """Standard output; None where git is missing or says no."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _altered_since_installation(name: str, package: str) -> list[str] | None:
    """Files whose hash is not that of the wheel; None where the installation lists none of the package's files."""
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
