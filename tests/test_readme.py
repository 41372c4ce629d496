"""The README's Python blocks run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_readme_has_both_examples():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, capsys, monkeypatch):
    monkeypatch.delenv("SPECGRAPH_PLATFORM", raising=False)
    names = {}
    exec(compile(block, str(README), "exec"), names)
    if "generator" in names:
        assert names["generator"].decoder.metrics.mean_acceptance_length > 1.5
    if "tokens" in names:
        assert tuple(names["tokens"].shape) == (1, 4)
