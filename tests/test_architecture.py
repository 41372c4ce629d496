"""The rooms stay apart: imports point one way, no vendor's name is in the library, and docstrings are sentences."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = {
    "specgraph": ROOT / "specgraph",
    "specgraph_models": ROOT / "models/specgraph_models",
    "specgraph_plugin": ROOT / "integrations/plugin/specgraph_plugin",
    "specgraph_run": ROOT / "run/specgraph_run",
}
"""The core, and the distributions that stand on it: package -> folder."""
CORE = sorted(LIBRARY["specgraph"].rglob("*.py"))
FILES = [path for folder in LIBRARY.values() for path in sorted(folder.rglob("*.py"))]
WRITTEN = [
    *CORE,
    *sorted((ROOT / "models").glob("specgraph_*/**/*.py")),
    *sorted((ROOT / "run").glob("specgraph_*/**/*.py")),
    *sorted(ROOT.glob("conformance/specgraph_*/**/*.py")),
    *sorted(ROOT.glob("backends/*/specgraph_*/**/*.py")),
    *sorted(ROOT.glob("integrations/*/specgraph_*/**/*.py")),
]

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "buffers": set(),
    "dispatch_mode": set(),
    "open_generator": set(),
    "user_code": {"errors"},
    "validation": {"errors"},
    "config": {"validation", "errors"},
    "device": {"dispatch_mode", "open_generator", "validation", "errors"},
    "parallel": {"validation", "errors"},
    "ops": {"buffers", "dispatch_mode", "parallel", "validation", "errors"},
    "cpu": {"device", "dispatch_mode", "open_generator", "user_code", "errors"},
    "kernels": {"ops", "dispatch_mode", "validation", "errors"},
    "attention": {"buffers", "config", "device", "ops", "parallel", "validation", "user_code", "errors"},
    "capture": {
        "buffers", "config", "dispatch_mode", "device", "attention", "ops", "parallel", "validation", "user_code",
        "errors",
    },
    "draft": {
        "buffers", "config", "capture", "device", "attention", "ops", "parallel", "validation", "user_code", "errors",
    },
    "models": {"draft", "attention", "capture", "device", "kernels", "ops", "parallel", "validation", "errors"},
    "checkpoints": {"draft", "attention", "device", "models", "parallel", "validation", "errors"},
    "plugin": {
        "buffers", "draft", "capture", "device", "attention", "kernels", "ops", "models", "parallel", "validation",
        "errors",
    },
    "options": {"config", "device", "models", "validation", "errors"},
    "decoder": {
        "buffers", "options", "config", "parallel", "draft", "capture", "device", "attention", "kernels", "ops",
        "models", "validation", "errors", "open_generator",
    },
    "text": {
        "options", "config", "parallel", "draft", "capture", "device", "attention", "ops", "models", "checkpoints",
        "validation", "errors", "open_generator", "decoder",
    },
}  # fmt: skip
"""Rooms from the bottom to the top, and what each may import besides itself: only rooms that are listed before it, so
that there can be no circle. Those from `models` on are distributions of their own."""

FREE = {"api", "tools", "cli", "__init__", "__main__"}
"""Above all rooms: these may import everything, and no room may import them."""

VENDOR_WORD = re.compile(
    r"cuda|\bnpu|npu\b|musa"  # devices
    r"|nvidia|ascend(?!ing)|mthreads|\brocm|\bcann\b|aclnn|\b[hnm]ccl|cublas|cudnn"  # vendors and their libraries
    r"|\bptx|griddepcontrol|inline_asm|\bsm_\d|\bwgmma|launch_pdl",  # one device's instructions
    re.IGNORECASE,
)


OPENINGS = {"What", "Of", "Whether", "By", "As", "Those", "How", "When", "Where", "Which", "Who", "Why"}
"""Words that a docstring doesn't begin with: a sentence has a subject and a verb, and an attribute's begins with its
noun."""


def room_of(module: str) -> str:
    """Return the room of a module of ours, such as `capture`, `checkpoints` or `decoder`."""
    package, *rest = module.split(".")
    if package in ("specgraph", "specgraph_run"):
        return rest[0] if rest else ""
    room = package.removeprefix("specgraph_")
    return rest[0] if rest and rest[0] in ("checkpoints", "__init__") else room


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports(source: str) -> list[str]:
    """All modules of ours that a file imports, also inside functions."""
    found: list[str] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            found += [f"{node.module}.{alias.name}" if node.module == "specgraph" else str(node.module)
                      for alias in node.names]  # fmt: skip
    return [m for m in found if m.split(".")[0] in LIBRARY]


def wrong_imports(room: str, source: str) -> list[str]:
    allowed = MAY_IMPORT.get(room)
    return [] if allowed is None else [m for m in imports(source) if room_of(m) not in allowed | {room}]


def vendor_words(source: str) -> list[str]:
    """Vendor words in names, strings and comments, not in docstrings."""
    if not VENDOR_WORD.search(source):
        return []
    tree = parsed(source)
    documentation = {
        (node.body[0].value.lineno, node.body[0].value.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    }  # fmt: skip
    return [
        f"line {token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT) and token.start not in documentation
        and VENDOR_WORD.search(token.string)
    ]  # fmt: skip


def slotted_dataclasses(source: str) -> set[str]:
    """Return the names of the classes of a file that `dataclass` makes with slots."""
    return {
        node.name
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(d, ast.Call) and any(k.arg == "slots" for k in d.keywords) for d in node.decorator_list)
    }


def repeated_slots(source: str, slotted: set[str]) -> list[str]:
    """Slotted dataclasses that derive from one: before Python 3.11 they repeat its slots, and so clash with another."""
    return [
        node.name
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.ClassDef)
        and node.name in slotted_dataclasses(source)
        and any(ast.unparse(base).rpartition(".")[2] in slotted for base in node.bases)
    ]


def room(path: Path) -> str:
    folder = next(folder for folder in LIBRARY.values() if path.is_relative_to(folder))
    return room_of(".".join(path.relative_to(folder.parent).with_suffix("").parts))


def in_files(paths: list[Path], wrong: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return the errors of each file by its path, without the files that have none."""
    return {str(path.relative_to(ROOT)): found for path in paths if (found := wrong(path))}


def test_imports_point_one_way():
    assert in_files(FILES, lambda path: wrong_imports(room(path), path.read_text())) == {}


def test_no_vendor_word_in_the_library():
    assert in_files(FILES, lambda path: vendor_words(path.read_text())) == {}


def names_of_one_device(source: str) -> list[str]:
    """Return the places of a plugin that ask for one vendor's device: a plugin asks the device of its tensors."""
    return re.findall(r"torch\.cuda\b|\bis_cuda\b|\"cuda:", source)


def test_no_plugin_asks_for_one_vendor_s_device():
    plugins = sorted(ROOT.glob("integrations/*/specgraph_*/**/*.py"))
    assert in_files(plugins, lambda path: names_of_one_device(path.read_text())) == {}
    assert names_of_one_device('open_platform(f"cuda:{i}"); torch.cuda.Event(); x.is_cuda') != []


def test_no_slotted_dataclass_derives_from_one():
    slotted = set().union(*(slotted_dataclasses(path.read_text()) for path in WRITTEN))
    assert in_files(WRITTEN, lambda path: repeated_slots(path.read_text(), slotted)) == {}


def test_repeated_slots_are_seen():
    source = "@dataclass(slots=True)\nclass A: ...\n@dataclass(slots=True)\nclass B(A): ...\nclass C(A): ..."
    assert repeated_slots(source, slotted_dataclasses(source)) == ["B"]


def docstrings(source: str) -> list[str]:
    """Return the docstrings of modules, classes and functions, and the strings behind attributes."""
    nodes = (node.value for node in ast.walk(parsed(source)) if isinstance(node, ast.Expr))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def wrong_openings(source: str) -> list[str]:
    return [
        text.strip()[:60] for text in docstrings(source) if re.split(r"\W", text.strip(), maxsplit=1)[0] in OPENINGS
    ]


def test_docstrings_are_sentences():
    assert in_files(WRITTEN, lambda path: wrong_openings(path.read_text())) == {}


def test_docstrings_of_tests_are_sentences():
    wrong = re.compile(f'"""({"|".join(sorted(OPENINGS))})\\b')
    assert [path for path in ROOT.glob("tests/**/*.py") if wrong.search(path.read_text())] == []


def test_an_opening_is_seen():
    source = "'''What it is.'''\nclass A:\n    '''Asks.'''\n    x: int\n    '''Of rows.'''\n"
    assert wrong_openings(source) == ["What it is.", "Of rows."]


def listed_too_late(may_import: dict[str, set[str]]) -> dict[str, set[str]]:
    """Per room, what it may import although it is not listed before it."""
    names = list(may_import)
    late = {name: allowed - set(names[:place]) for place, (name, allowed) in enumerate(may_import.items())}
    return {name: rooms for name, rooms in late.items() if rooms}


def test_a_room_imports_rooms_listed_before_it():
    assert listed_too_late(MAY_IMPORT) == {}


def test_a_circle_of_two_rooms_is_seen():
    assert listed_too_late({"attention": {"graphs"}, "graphs": {"attention"}}) == {"attention": {"graphs"}}


def test_every_room_is_known():
    rooms = {room(p) for p in FILES}
    assert rooms <= MAY_IMPORT.keys() | FREE


CORE_LINES = 11_000
"""The most lines of the core without the `cpu` platform and the Triton kernels, docstrings and blank lines included."""
INTERFACE_LINES = 3_500
"""The most lines of the device interface, captures and the interface of attention: the part to read first."""


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_lines_of_the_core_without_cpu_and_kernels():
    assert num_lines([path for path in CORE if room(path) not in ("cpu", "kernels")]) <= CORE_LINES


def test_lines_of_device_capture_and_the_attention_interface():
    interface = LIBRARY["specgraph"] / "attention/interface.py"
    assert (
        num_lines([path for path in CORE if room(path) in ("device", "capture") or path == interface])
        <= INTERFACE_LINES
    )


CORE_NEEDS = {"torch", "pluggy"}
"""All that the core imports besides the standard library and itself."""


def packages(source: str) -> set[str]:
    """Return the top package of every import of a file at run time, also inside functions: without those that only a
    type checker sees."""
    found: set[str] = set()
    nodes: list[ast.AST] = [parsed(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


def foreign_packages(room: str, source: str) -> list[str]:
    """Return the packages that a file of the core imports and that the core does not need."""
    own = {"specgraph"} | CORE_NEEDS | ({"triton"} if room == "kernels" else set())
    return sorted(packages(source) - own - sys.stdlib_module_names)


def test_the_core_imports_torch_and_pluggy_alone():
    assert in_files(CORE, lambda path: foreign_packages(room(path), path.read_text())) == {}


def test_the_core_is_installed_with_torch_and_pluggy_alone():
    project = (ROOT / "pyproject.toml").read_text().partition("[project]")[2]
    listed = project.partition("\ndependencies = [")[2].partition("]")[0]
    assert {re.split(r"\W", each, maxsplit=1)[0] for each in re.findall('"(.+)"', listed)} == CORE_NEEDS


@pytest.mark.parametrize(
    ("where", "source", "wrong"),
    [
        ("draft", "import numpy as np", ["numpy"]),
        ("draft", "def f():\n    from triton import language", ["triton"]),
        ("kernels", "from triton import language", []),
        ("ops", "def f():\n    from specgraph_models.ops import act_and_mul", ["specgraph_models"]),
        ("device", "import torch.cuda, os.path, typing_extensions", ["typing_extensions"]),
        ("config", "if TYPE_CHECKING:\n    from typing_extensions import Self", []),
    ],
)
def test_the_check_of_packages_can_fail(where, source, wrong):
    assert foreign_packages(where, source) == wrong


@pytest.mark.parametrize(
    ("where", "source", "wrong"),
    [
        ("capture", "from specgraph_run.decoder import generate", ["specgraph_run.decoder"]),
        ("ops", "import specgraph.device.interface", ["specgraph.device.interface"]),
        ("device", "def f():\n    from specgraph import draft", ["specgraph.draft"]),
        ("attention", "from specgraph.capture import GraphRunner", ["specgraph.capture"]),
        ("draft", "from specgraph_models import Target", ["specgraph_models"]),
        ("decoder", "from specgraph import open_platform", ["specgraph.open_platform"]),
        ("capture", "from specgraph.device import Graph\nimport torch", []),
    ],
)
def test_the_import_check_can_fail(where, source, wrong):
    assert wrong_imports(where, source) == wrong


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = torch.cuda.is_available()", 1),
        ("x = 'npu:0'", 1),
        ("import torch_musa", 1),
        ("use_cuda_graph = True", 1),
        ("'''Runs on CUDA too.'''\nx = 1  # as on an NPU", 1),
        ("x = input", 0),
        ("sizes = 'in ascending order'", 0),
        ("tl.inline_asm_elementwise('griddepcontrol.wait;')", 2),
        ("target = 'sm_90'", 1),
        ("group = dist.new_group(backend='hccl')", 1),
        ("def f():\n    '''npu'''\n    return 'musa'", 1),
    ],
)
def test_the_vendor_check_can_fail(source, count):
    assert len(vendor_words(source)) == count
