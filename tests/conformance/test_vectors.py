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

ADVANCE, PROPOSE = "kernels.advance[9]", "propose.mtp"
ATTENTION, BY_HOST = "kernels.attention-ops[causal-device-apart]", "kernels.windowed-attention[20-sinks-host]"
FILES = {ADVANCE: "kernels.advance_9_", PROPOSE: PROPOSE, BY_HOST: "kernels.windowed-attention_20-sinks-host_"}
FILES |= {ATTENTION: "kernels.attention-ops_causal-device-apart_"}
FILE = f"{FILES[ADVANCE]}.safetensors"


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    assert write_vectors(folder, [*FILES, "kernels.draft-greedy", "kernels.draft-gumbel", "kernels.draft-best"]) == 10
    return folder


def answer(
    vectors: Path,
    results: Path,
    change: Callable[[dict[str, Tensor]], object] = lambda outputs: None,
    changed: str = ADVANCE,
) -> Path:
    """Write the expected outputs of all files as another program's, after `change` of the case `changed`."""
    results.mkdir()
    for path in vectors.glob("*.safetensors"):
        given = load_file(path).items()
        outputs = {name.removeprefix(EXPECTED): each for name, each in given if name.startswith(EXPECTED)}
        if path.stem == FILES[changed]:
            change(outputs)
        save_file(outputs, results / path.name)
    return results


def test_expected_outputs_are_right(vectors: Path, tmp_path: Path) -> None:
    found = judge_vectors(vectors, answer(vectors, tmp_path / "results"))
    assert set(found.values()) == {""}
    calls = {case["id"]: case["calls"] for case in json.loads((vectors / INDEX).read_text())["cases"]}
    call = calls[ADVANCE][0]
    assert (call["op"], call["numbers"]) == ("advance", {"max_model_len": 40, "block_size": 16})
    assert call["tensors"]["0.block_table"] == "int32 [9, 6]"
    assert "0.block_table" not in call["outputs"]
    assert call["outputs"]["0.seq_lens"] == {"dtype": "int32", "tolerance": 0.0}
    assert [call["op"] for call in calls[ATTENTION][:2]] == ["rotate_and_store", "paged_attention"]
    assert calls[ATTENTION][1]["outputs"]["1.result.0"] == {"dtype": "float32", "tolerance": 1e-3}
    (call,) = calls[BY_HOST]
    assert call["op"] == "paged_attention_host"
    assert call["numbers"]["lengths.seq_lens"] == [4, 37, 0, 90, 16, 17]
    (call,) = calls[PROPOSE]
    assert (call["op"], call["numbers"]["num_speculative_tokens"]) == ("propose", 3)
    assert {"0.aux_hidden", "0.weights.lm_head", "0.kv_cache.0.key"} <= call["tensors"].keys()
    assert call["outputs"]["0.kv_cache.0.key"] == {"dtype": "float32", "tolerance": 0.02}


@pytest.mark.parametrize(
    ("changed", "change", "said"),
    [
        (ADVANCE, lambda outputs: outputs["0.seq_lens"].add_(1), "seq_lens: 9 of 9 values differ"),
        (ADVANCE, lambda outputs: outputs.pop("2.seq_lens"), "there is no output 2.seq_lens"),
        (
            ADVANCE,
            lambda outputs: outputs.update({"0.positions": outputs["0.positions"].int()}),
            r"output 0.positions is torch.int32 \[9\], expected torch.int64 \[9\]",
        ),
        (ATTENTION, lambda outputs: outputs["1.result.0"][3].add_(0.01), "output of request 0 of 9"),
        (ATTENTION, lambda outputs: outputs["0.cache.value"].mul_(2), "output 0.cache.value: .* values are off"),
        (ATTENTION, lambda outputs: outputs["1.cache.value"].mul_(2), "was written at place"),
        (BY_HOST, lambda outputs: outputs["0.out"].mul_(1.01), "output of request"),
        (PROPOSE, lambda outputs: outputs["0.result.0"][1, 2:].add_(1).remainder_(64), "request 1: logits of drafts"),
        (PROPOSE, lambda outputs: outputs["0.kv_cache.0.value"].mul_(2), "values of layer 0 of request 0"),
    ],
    ids=["wrong", "missing", "dtype", "attention", "unseen", "cache", "host-attention", "draft", "keys-of-a-propose"],
)
def test_another_output_is_wrong(
    vectors: Path, tmp_path: Path, changed: str, change: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    found = judge_vectors(vectors, answer(vectors, tmp_path / "results", change, changed))
    assert {id for id, reason in found.items() if reason} == {changed}
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found[changed])


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
