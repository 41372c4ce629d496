"""Every torch_npu name and keyword that the backend uses exists in the published wheels it claims.

The wheels are read, not installed: Python names from their sources, op schemas from the text inside libtorch_npu.so.
ASCENDSIM_WHEELS is a folder of them (`make npu-wheels`); `python test_wheel_names.py FOLDER` prints the table.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
from specgraph_npu.host_ops import HOST_OPS, HostOp
from specgraph_npu.probe import _TASK_NAMES, KNOWN_WHEELS

PACKAGE = Path(__file__).resolve().parents[1] / "specgraph_npu"
FOLDER = Path(os.environ.get("ASCENDSIM_WHEELS", "/nonexistent"))


def wheel_files(folder: Path) -> dict[str, Path]:
    """Wheel by version."""
    return {path.name.split("-")[1]: path for path in sorted(folder.glob("torch_npu-*.whl"))}


def names_used() -> tuple[set[str], set[str]]:
    """(names of torch.npu, names of torch_npu._C) in the backend's sources."""
    text = "\n".join(path.read_text() for path in PACKAGE.glob("*.py"))
    code = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.S)
    public = set(re.findall(r"\bnpu\.(?!npu_)([A-Za-z]\w+)", code)) - {"py"}
    private = set(re.findall(r"(?:_C|vendor)\.(_\w+)", code)) | set(re.findall(r'vendor, "(_\w+)"', code))
    quoted = set(_TASK_NAMES)
    return public | quoted, private


def keywords(row: HostOp) -> set[str]:
    """All names that the row's op is called with, except outputs and workspace."""
    names = {row.renamed.get(name, name) for name in row.arguments} | {*row.host, *row.fixed, row.lse_flag}
    return names - {""}


class Wheel:
    """Names that can be read off one wheel."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            sources = [n for n in archive.namelist() if n.startswith("torch_npu/npu/") and n.endswith(".py")]
            self.python = "\n".join(archive.read(name).decode("utf-8", "replace") for name in sources)
            binaries = [n for n in archive.namelist() if n.endswith("libtorch_npu.so") or "/_C." in n]
            self.binary = b"\n".join(archive.read(name) for name in binaries)
            atb = [n for n in archive.namelist() if n.endswith("libop_plugin_atb.so")]
            self.binary += b"\n".join(archive.read(name) for name in atb)

    def has_public(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self.python) is not None

    def has_private(self, name: str) -> bool:
        return name.encode() + b"\0" in self.binary

    def arguments(self, op: str) -> set[str]:
        """Argument names of all overloads of an op; empty when its schema is not readable text in the wheel."""
        found: set[str] = set()
        start = 0
        while (start := self.binary.find(op.encode(), start)) >= 0:
            text = self.binary[start : self.binary.find(b"\0", start)].decode("utf-8", "replace")
            start += len(op)
            if schema := re.match(r"\w+(?:\.\w+)?\((.*)\) ?->", text):
                found |= set(re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", schema[1]))
        return found


RENAMED = {"_npu_endAllocateToPool", "_npu_endAllocateCurrentStreamToPool"}
"""The names of one function in newer and in older wheels: the backend takes the one that is there."""


def missing_names(wheel: Wheel) -> list[str]:
    """Names that the backend uses and the wheel lacks."""
    public, private = names_used()
    missing = [f"torch.npu.{name}" for name in sorted(public) if not wheel.has_public(name)]
    missing += [f"torch_npu._C.{name}" for name in sorted(private - RENAMED) if not wheel.has_private(name)]
    if sum(wheel.has_private(name) for name in RENAMED & private) != 1:
        missing += [f"torch_npu._C.{name}" for name in sorted(RENAMED & private)]
    write = {"cache_mode"} - wheel.arguments("npu_scatter_pa_kv_cache")
    missing += [f"npu_scatter_pa_kv_cache({name}=)" for name in write]
    for row in HOST_OPS.values():
        missing += [name for name in (row.op, row.workspace_op) if not wheel.has_private(name)]
        known = wheel.arguments(row.op)
        if row.namespace == "npu":  # the schema of the ATB row is no contiguous text: its name is all that can be read
            missing += [f"{row.op}({name}=)" for name in sorted((keywords(row) | {"workspace", "out"}) - known)]
    return missing


@pytest.mark.parametrize("version", KNOWN_WHEELS)
def test_names_exist_in_the_wheel(version):
    path = wheel_files(FOLDER).get(version)
    if path is None:
        pytest.skip("no such wheel in ASCENDSIM_WHEELS")
    wheel = Wheel(path)
    assert missing_names(wheel) == []
    # Names near those that are there are missing
    assert not wheel.has_public("graph_task_group_began")
    assert not wheel.has_private("_npu_releasePools")
    assert "actual_seq_length_kv" not in wheel.arguments("npu_fused_infer_attention_score")
    assert "actual_seq_lengths_kv" in wheel.arguments("npu_fused_infer_attention_score")


if __name__ == "__main__":
    for number, path in wheel_files(Path(sys.argv[1])).items():
        print(f"| {number} | {', '.join(missing_names(Wheel(path))) or 'none'} |")
