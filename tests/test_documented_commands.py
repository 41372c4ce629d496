"""The commands that the pages tell a reader to type exist: subcommands, options, values, make targets, parts."""

import re
import shlex
from itertools import pairwise

import pytest
from specgraph_run.cli import app
from test_readme import PAGES, ROOT
from typer.main import get_command

TYPED = re.compile(r"(specgraph|make|torchrun|pip install) ")
MAKEFILES = "".join(path.read_text() for path in [ROOT / "Makefile", *ROOT.glob("*/*.mk"), *ROOT.glob("*/*/*.mk")])


def commands(text: str) -> list[str]:
    """Lines of a page's code blocks, and code within its sentences."""
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
    blocks = [block.replace("\\\n", " ") for language, block in fence.findall(text) if language in ("", "sh", "bash")]
    lines = [re.sub(r"\s+#.*", "", line) for line in "\n".join(blocks).splitlines()]
    lines += re.findall(r"`([^`]+)`", fence.sub("", text))
    return [line for line in (" ".join(line.split()) for line in lines) if TYPED.match(line)]


def refusal(line: str) -> str:
    """Return why a command can't be run as it is written; empty when it can. Nothing is run."""
    first, *words = [word for word in shlex.split(re.sub(r"\bN\b", "8", line)) if word != "..."]
    if first == "torchrun":
        words = words[words.index("specgraph_run") + 1 :] if "specgraph_run" in words else []
    if first == "make":
        targets = [word for word in words if "=" not in word and not word.startswith("-")]
        return "".join(f"no target {each}" for each in targets if not re.search(rf"^{each}:", MAKEFILES, re.MULTILINE))
    if first == "pip":
        folders = [word.partition("[")[0] for before, word in pairwise(words) if before == "-e"]
        return "".join(f"no part {each}" for each in folders if not (ROOT / each / "pyproject.toml").exists())
    if not words or words[0].startswith("-"):
        return ""
    known = get_command(app).commands
    if words[0] not in known:
        return f"no command {words[0]}"
    if words[1:] not in ([], ["--help"]):
        try:
            known[words[0]].make_context(words[0], words[1:])
        except Exception as error:  # click's: typer has a copy of its own, or not, by its version
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page(page):
    found = {line: reason for line in commands(page.read_text()) if (reason := refusal(line))}
    assert found == {}


def test_commands_are_found_and_wrong_ones_are_refused():
    assert sum(len(commands(page.read_text())) for page in PAGES) > 100
    page = "  ```\n  specgraph bench \\\n  --nope 3   # why\npip install -e ./gone\n  ```\n"
    page += "`make nothing`, `specgraph\ndance`"
    assert commands(page) == ["specgraph bench --nope 3", "pip install -e ./gone", "make nothing", "specgraph dance"]
    reasons = [refusal(line) for line in commands(page)]
    assert "--nope" in reasons[0]
    assert reasons[1:] == ["no part ./gone", "no target nothing", "no command dance"]
    assert "integer" in refusal("specgraph bench --repeats many")
    assert "--tensor-paralel" in refusal("torchrun --nproc-per-node 2 -m specgraph_run generate --tensor-paralel 2")
