"""Applies the code blocks of docs/writing-a-backend.md to a skeleton, as a reader would."""

from __future__ import annotations

import ast
import re
from pathlib import Path

BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(guide: str) -> list[tuple[str, str]]:
    """(file, code) of each block that names its file in the first line."""
    return BLOCK.findall(guide)


def apply(source: str, code: str) -> str:
    """`source` with the imports of `code` added, and its methods and assignments put in place of those of that name."""
    tree = ast.parse(code)
    for node in tree.body:
        text = ast.get_source_segment(code, node)
        assert text is not None
        if isinstance(node, ast.ImportFrom):
            source = source.replace("from specgraph.platforms import", f"{text}\nfrom specgraph.platforms import", 1)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                assert isinstance(method, ast.FunctionDef)
                source = _put_method(source, node.name, method, _segment(code, method))
        else:
            source = f"{source}\n\n{text}\n"
    return source


def _segment(source: str, node: ast.FunctionDef) -> str:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _put_method(source: str, class_name: str, method: ast.FunctionDef, text: str) -> str:
    owner = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == class_name)
    lines = source.splitlines()
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == method.name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = text.splitlines()
            break
    else:
        assert owner.end_lineno is not None
        lines[owner.end_lineno : owner.end_lineno] = ["", *text.splitlines()]
    return "\n".join(lines) + "\n"


def follow(guide: str, folder: Path) -> None:
    """Apply every block, in order, to the files under `folder`."""
    for name, code in blocks(guide):
        path = folder / name
        path.write_text(apply(path.read_text(), code))
