"""Parts of the suite for what is no whole backend: an attention backend, a draft head, a plain `pytest` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from conformance.third_party import install, specgraph
from specgraph_conformance import draft_rig, session
from specgraph_conformance.case import GROUPS
from specgraph_conformance.head_checks import check_head
from torch import Tensor

from specgraph import AttentionLayer, DraftOutput, SpecgraphError, open_platform
from specgraph.attention import Attend
from specgraph.draft import ChainKind
from specgraph.errors import HostReadError

ATTENTION = """
    from specgraph.attention import PagedAttention

    class Mine(PagedAttention):
        name = "mine"

    class Broken(Mine):
        def forward(self, layer, index, query, *rest):
            return super().forward(layer, index, query * 1.05, *rest)

    def make(platform):
        return Mine()

    def broken(platform):
        return Broken()
"""


class OneLayer:
    """A draft head of a reader's own: one attention layer over the sum of token embedding and hidden state."""

    kind = ChainKind()
    projection = pair_input = ranks = None
    aux_layers: Sequence[int] = ()
    draft_to_target: Tensor | None = None
    hidden_size = aux_size = 64
    draft_vocab_size = 64

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int, scale: float) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return values.to(torch.float32).to(dtype).to(device)

        self.dtype = dtype
        self.embed, self.qkv = random(64, 64, scale=1), random(192, 64, scale=0.2)
        self.lm_head = random(64, 64, scale=0.3)
        self.attention_layers = [AttentionLayer(1, 1, 64, 64**-0.5)]

    def combine(self, aux_hidden: Tensor) -> Tensor:
        return aux_hidden

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        x = self.embed[token_ids] + hidden
        query, key, value = (x @ self.qkv.T).view(-1, 3, 1, 64).unbind(1)
        out = torch.tanh(x + attend(0, query, key, value).reshape(-1, 64))
        out = out if rows is None else out[rows]
        return DraftOutput(out, out)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.T

    def weights(self) -> Mapping[str, Tensor]:
        return {"embed": self.embed, "qkv": self.qkv, "lm_head": self.lm_head}


class ReadsTheHost(OneLayer):
    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        if int(token_ids[0]) < 0:
            raise ValueError
        return super().forward(token_ids, hidden, attend, rows)


class CountsCalls(OneLayer):
    """Different at each call in Python: a replay has the value of the capture."""

    calls = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().logits(hidden).roll(self.calls, dims=-1)


class OwnPrecision(OneLayer):
    """Rounds its hidden states, which float64 does not."""

    def combine(self, aux_hidden: Tensor) -> Tensor:
        return aux_hidden if aux_hidden.dtype == torch.float64 else aux_hidden.round()


def test_a_head_of_one_s_own() -> None:
    with torch.no_grad():
        assert check_head(open_platform("cpu"), OneLayer) == ["piecewise", "step", "merged"]


@pytest.mark.parametrize(
    ("head", "error"), [(ReadsTheHost, HostReadError), (CountsCalls, AssertionError), (OwnPrecision, AssertionError)]
)
def test_a_head_that_does_not_fit_a_graph(head: type[OneLayer], error: type[Exception]) -> None:
    with torch.no_grad(), pytest.raises((error, SpecgraphError) if error is HostReadError else error):
        check_head(open_platform("cpu"), head)
    assert not draft_rig._OPEN, "its graphs and caches live on"


def test_attention_of_one_s_own(tmp_path: Path) -> None:
    folder = install(tmp_path / "site")
    (folder / "my_attention.py").write_text(dedent(ATTENTION))
    words = ["acme", "--case", "attention.equals-float64", "--json", "report.json"]
    done = specgraph(folder, *words, "--attention", "mine=my_attention:make", "-k", "mine and keys")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["attention"] == ["mine"]
    assert any("mine" in id for id in report["passed"]["attention"])
    assert not report["cases"]
    broken = specgraph(folder, *words, "--attention", "mine=my_attention:broken", "-k", "mine and keys")
    assert broken.returncode == 1
    assert "off by more than the dtype's rounding" in broken.stdout


def test_attention_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attention_of_this_folder.py").write_text("def make(platform):\n    return 'made'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".")])
    assert session._attention("mine=attention_of_this_folder:make")(open_platform("cpu")) == "made"
    assert "" not in sys.path


@pytest.mark.parametrize("word", ["mine", "paged=a:b", "mine=my_attention", "mine=nowhere_of_that_name:make"])
def test_bad_attention_is_one_error(word: str, tmp_path: Path) -> None:
    done = specgraph(install(tmp_path / "site"), "acme", "--attention", word)
    assert done.returncode == 2
    assert done.stderr.startswith(f"specgraph: attention '{word}' ")


def test_pytest_without_a_path_runs_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_mine.py").write_text("def test_of_this_folder(): raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    words = ["-q", "--specgraph-platform", "cpu", "--specgraph-case", "discovery.api-number"]
    assert pytest.main(words) == 0
    last = " ".join(capsys.readouterr().out.split())
    left_out = ", ".join(group for group in GROUPS if group != "discovery")
    assert "cpu passes the cases that were run: 1 passed, 0 declared gaps, 0 absent; " in last
    assert f"it ran none of {left_out} and a part of discovery" in last
