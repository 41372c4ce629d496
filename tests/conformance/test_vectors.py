"""Vectors of the draft ops as files: what another program writes is judged by the rows' own checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import command
import pytest
import torch
from safetensors.torch import load_file, save_file
from specgraph_conformance.vectors import EXPECTED, INDEX, judge_vectors, write_vectors
from torch import Tensor

from specgraph.errors import ConfigError

ADVANCE, FILE = "kernels.advance[9]", "kernels.advance_9_.safetensors"


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    assert write_vectors(folder, [ADVANCE, "kernels.draft-greedy", "kernels.draft-gumbel"]) == 4
    return folder


def answer(vectors: Path, results: Path, change: Callable[[dict[str, Tensor]], object] = lambda outputs: None) -> Path:
    """Write the expected outputs of all files as another program's, after `change`."""
    results.mkdir()
    for path in vectors.glob("*.safetensors"):
        given = load_file(path).items()
        outputs = {name.removeprefix(EXPECTED): each for name, each in given if name.startswith(EXPECTED)}
        if path.name == FILE:
            change(outputs)
        save_file(outputs, results / path.name)
    return results


def test_expected_outputs_are_right(vectors: Path, tmp_path: Path) -> None:
    found = judge_vectors(vectors, answer(vectors, tmp_path / "results"))
    assert set(found.values()) == {""}
    index = json.loads((vectors / INDEX).read_text())
    (call, *_) = next(case for case in index["cases"] if case["id"] == ADVANCE)["calls"]
    assert (call["op"], call["numbers"]) == ("advance", {"max_model_len": 40, "block_size": 16})
    assert "0.block_table" in call["tensors"]
    assert "0.block_table" not in call["outputs"]
    assert set(call["outputs"].values()) == {0.0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda outputs: outputs["1.positions"].add_(1), "positions: 9 of 9 values differ"),
        (lambda outputs: outputs.pop("2.seq_lens"), "there is no output 2.seq_lens"),
        (
            lambda outputs: outputs.update({"0.positions": outputs["0.positions"].int()}),
            r"output 0.positions is torch.int32 \[9\], expected torch.int64 \[9\]",
        ),
    ],
    ids=["wrong", "missing", "dtype"],
)
def test_another_output_is_wrong(
    vectors: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    found = judge_vectors(vectors, answer(vectors, tmp_path / "results", change))
    assert {id for id, reason in found.items() if reason} == {ADVANCE}
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found[ADVANCE])


def test_the_command(vectors: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    done = command.specgraph("conformance", "vectors", tmp_path / "new", "--case", ADVANCE)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'new'}: vectors of 1 cases; {INDEX} describes them\n")
    done = command.specgraph("conformance", "verify-vectors", tmp_path / "new", results)
    assert (done.returncode, done.stdout) == (1, f"{results}: 0 cases right, 0 wrong, 1 without a file\n")
    done = command.specgraph(
        "conformance", "verify-vectors", tmp_path / "new", answer(tmp_path / "new", tmp_path / "right")
    )
    assert done.returncode == 0, done.stdout
    for words, said in (
        (["vectors"], "name the folder: specgraph conformance vectors FOLDER"),
        (["verify-vectors", tmp_path], "name the folders"),
        (["verify-vectors", results, results], "is no index of vectors"),
        (["vectors", tmp_path / "none", "--case", "replay.random-graphs"], "there are no vectors of replay.random"),
    ):
        done = command.specgraph("conformance", *words)
        assert done.returncode == 2
        assert done.stderr.startswith("specgraph: ")
        assert said in done.stderr


def test_vectors_of_another_suite_or_with_other_inputs_are_refused(vectors: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    write_vectors(folder, [ADVANCE])
    results = answer(folder, tmp_path / "results")
    stored = load_file(folder / FILE)
    save_file({**stored, "0.block_table": torch.zeros_like(stored["0.block_table"])}, folder / FILE)
    with pytest.raises(ConfigError, match="another torch"):
        judge_vectors(folder, results)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"suite": "', '"suite": "1'))
    with pytest.raises(ConfigError, match=r"vectors of suite 1\d\.\d"):
        judge_vectors(folder, results)
