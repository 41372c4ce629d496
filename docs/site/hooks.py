"""Adds pages from outside docs/ to the site, makes the reference pages, and rewrites links.

mkdocs calls the functions `on_*` (https://www.mkdocs.org/dev-guide/plugins/#events). Links in the pages are relative to
the repository, so that they work in a checkout too. Here they become links within the site. If a page links to a file
that is no page, the file is copied into the site.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import reference  # noqa: E402  # beside this file

ELSEWHERE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "concepts.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "results/index.md",
    "benchmarks/LESSONS.md": "results/lessons.md",
    "examples/tiny-python/README.md": "results/tiny-python.md",
    "models/README.md": "models.md",
    "run/README.md": "run.md",
    "conformance/README.md": "suite.md",
    "backends/accelerator/README.md": "devices/accelerator.md",
    "backends/cuda/README.md": "devices/cuda.md",
    "backends/npu/README.md": "devices/npu.md",
    "backends/npu/simulator/README.md": "devices/npu-simulator.md",
    "backends/musa/README.md": "devices/musa.md",
    "integrations/plugin/README.md": "engines/plugin.md",
    "integrations/transformers/README.md": "engines/transformers.md",
    "integrations/vllm/README.md": "engines/vllm.md",
    "integrations/vllm_ascend/README.md": "engines/vllm-ascend.md",
    "integrations/sglang/README.md": "engines/sglang.md",
    "drafters/smollm2/README.md": "results/smollm2.md",
    "examples/smollm2/README.md": "results/smollm2-training.md",
    "backends/musa/specgraph_musa/policy.md": "devices/musa-policy.md",
}
"""Pages outside docs/: path in the repository -> path in the site."""

WRITTEN = {"reference/api.md": reference.api_page, "reference/commands.md": reference.commands_page}
"""Pages made from the code: path in the site -> the function that writes the page."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_page_content(html: str, **_: object) -> str:
    """Mark inline code that is one word with hyphens, so that the style sheet keeps it on one line."""
    return re.sub(r"<code>(?=[^\s<]*-[^\s<]*</code>)", '<code class="word">', html)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `folder/` in the navigation by the folder's pages, and append the pages that it leaves out."""
    nav: Any = _expanded(config.nav)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    if more := sorted(pages - set(_pages(nav))):
        nav.append({"More": more})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `ELSEWHERE` and `WRITTEN`, and every other file that a page links to."""
    for source, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for place, write in WRITTEN.items():
        files.append(File.generated(config, place, content=write()))
    pages = [file for file in files if file.src_uri.endswith(".md") and file.src_uri not in WRITTEN]
    for target in sorted({target for page in pages for target in _linked(_source(page.src_uri))}):
        place = _place(target)
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the repository into links within the site."""
    if page.file.src_uri in WRITTEN:
        return markdown
    source = _source(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        image, text, address = found.groups()
        path, anchor, fragment = address.partition("#")
        if "://" in address or not path:
            return found[0]
        target = os.path.normpath(source.parent / path)
        if (ROOT / target).is_dir():
            return text  # a folder has no page
        place = os.path.relpath(_place(target), os.path.dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({quote(place)}{anchor}{fragment})"

    return _outside_code(markdown, lambda text: _LINK.sub(link, text))


def _outside_code(markdown: str, change: Any) -> str:
    """Apply `change` to everything but code blocks. Inline code is changed too, since it may be in a link."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _linked(source: Path) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    found: list[str] = []

    def collect(text: str) -> str:
        for _, _, address in _LINK.findall(text):
            path = address.partition("#")[0]
            target = os.path.normpath(source.parent / path)
            if path and "://" not in address and (ROOT / target).is_file():
                found.append(target)
        return text

    _outside_code((ROOT / source).read_text(encoding="utf-8"), collect)
    yield from found


def _source(place: str) -> Path:
    """Return the path in the repository of a page of the site."""
    return Path(next((source for source, to in ELSEWHERE.items() if to == place), f"docs/{place}"))


def _place(target: str) -> str:
    """Return the path in the site of a file of the repository."""
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"


def _pages(nav: Any) -> Iterator[str]:
    """Yield all pages of a navigation."""
    if isinstance(nav, str):
        yield nav
    for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _pages(each)


def _expanded(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_expanded(each) for each in nav]
    if isinstance(nav, dict):
        return {name: _expanded(each) for name, each in nav.items()}
    if isinstance(nav, str) and nav.endswith("/"):
        own = [f"{nav}{path.name}" for path in (ROOT / "docs" / nav).glob("*.md")]
        return sorted([*own, *(place for place in ELSEWHERE.values() if place.startswith(nav))])
    return nav
