"""The README's Python blocks run, and the links of every page lead to a file of the repository."""

import json
import re
import runpy
from pathlib import Path

import pytest
from torch.nn.functional import silu

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/adr/*.md"),
    *ROOT.glob("docs/integrations/*.md"),
    *ROOT.glob("integrations/*/README.md"),
    *ROOT.glob("benchmarks/*.md"),
    *ROOT.glob("backends/*/README.md"),
]
BLOCKS = [
    "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
    for page in (README, ROOT / "docs/writing-a-drafter.md")
]
"""The Python blocks of each page: later ones use names of the earlier ones."""


def test_both_pages_have_examples():
    assert all(BLOCKS)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, capsys, caplog, monkeypatch):
    monkeypatch.delenv("SPECGRAPH_PLATFORM", raising=False)
    names = {}
    exec(compile(block, str(README), "exec"), names)
    if "generator" in names:
        assert names["generator"].decoder.metrics.mean_acceptance_length > 1.5
    if "MyHead" in names:
        assert tuple(names["drafter"].propose(names["batch"]).token_ids.shape) == (1, 3)
        assert all(layer.rotary is not None for layer in names["head"].attention_layers)
    if "Medusa" in names:
        medusa, state = names["medusa"], names["batch"].aux_hidden[0]
        want = [((state + silu(each @ state)) @ medusa.lm_head.T).argmax() for each in medusa.heads]
        assert names["drafter_of_medusa"].propose(names["batch"]).token_ids.tolist() == [want]
    assert not [record.message for record in caplog.records if record.levelname == "WARNING"]
    if "tokens" in names:
        assert tuple(names["tokens"].shape) == (1, 4)


def test_the_picture_of_a_chat_loads_nothing_from_elsewhere():
    picture = (ROOT / "docs/images/chat.svg").read_text().replace("&#160;", " ")
    assert "url(http" not in picture
    for shown in ("specgraph chat", "text from accepted draft tokens looks"):
        assert shown in picture


def test_the_picture_of_acceptance_shows_the_table():
    """`python docs/images/acceptance.py` draws it from docs/acceptance.md."""
    script = runpy.run_path(str(ROOT / "docs/images/acceptance.py"))
    page = script["PAGE"].read_text()
    wanted = re.findall(r"^\| (\w[\w-]*) \|[^|]*\| 5 \| \*\*([\d.]+)\*\* \|", page, flags=re.MULTILINE)
    assert len(wanted) >= 5
    axes = script["draw"](page).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["eagle3: 4.00"] == [0.794, 0.639, 0.569, 0.517, 0.478]
    assert "eagle3, tree of 16 rows: 4.44" in lines
    for name, length in wanted:
        assert f"{name}: {length}" in lines
        assert f">{name}: {length}<" in script["PICTURE"].read_text()


def test_the_picture_of_proposes_has_a_bar_per_row():
    """`python docs/images/propose.py FILE` draws it from a result of `specgraph bench`."""
    script = runpy.run_path(str(ROOT / "docs/images/propose.py"))
    rows = json.loads((ROOT / "benchmarks/results/h200-eagle3-llama3-8b.json").read_text())["rows"]
    axes = script["draw"](rows, "proposes").axes[0]
    drawn = sorted(bar.get_height() for bar in axes.patches if bar.get_height())
    assert drawn == sorted(row["device_us"] for row in rows if "device_us" in row)


def test_tables_are_those_of_the_result_files():
    """`python benchmarks/write_tables.py` writes them."""
    script = runpy.run_path(str(ROOT / "benchmarks/write_tables.py"))
    marked = 0
    for page in script["PAGES"]:
        text = page.read_text()
        assert script["written"](text) == text, page.name
        marked += len(script["MARKED"].findall(text))
    assert marked >= 5
    page = (ROOT / "benchmarks/README.md").read_text()
    changed = re.sub(r"(?m)^\| 1 \| \d+ \|", "| 1 | 7 |", page, count=1)
    assert script["written"](changed) == page != changed


def test_the_readme_is_one_page():
    prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL))
    assert len(README.read_text().split()) <= 900
    assert len(re.findall(r"(?<![\w.-])\d+(?:\.\d+)*", prose)) <= 60


def dead_links(page: Path) -> list[str]:
    """Links to files that don't exist; links to other sites are not followed."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    return [link for link in links if link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "page.md").write_text("[here](page.md#top), [there](gone.md), `[code](x.md)`, [web](https://a.b/c)")
    assert dead_links(tmp_path / "page.md") == ["gone.md"]
