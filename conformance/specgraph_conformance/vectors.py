"""The rows of the op table as files: inputs and expected outputs for draft ops that are written in another language.

`write_vectors` writes a safetensors file per row and parameter set, and `vectors.json`, which names the claim, the ops,
and the tensors and numbers of each call. A program reads the inputs and writes a file of the same name with its
outputs. `judge_vectors` then runs each row's own check over them, so that oracle and tolerances are the suite's.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from specgraph.cpu import CpuPlatform
from specgraph.errors import ConfigError
from specgraph.ops.library import Op
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from specgraph_conformance.linear_oracles import TOLERANCE
from specgraph_conformance.op_rows import ROWS
from specgraph_conformance.op_run import run_on
from specgraph_conformance.op_table import Row
from specgraph_conformance.standard import SUITE_VERSION

INDEX = "vectors.json"
MOST_BYTES = 4 << 20
"""A row with more bytes is left out: its sizes are chosen for a device's kernels."""
EXPECTED = "expected."
"""Begins the name of each expected output. A program's own outputs have the name without it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op."""

    op: str
    tensors: list[str]
    """The names of the input tensors in the row's file, `NUMBER.ARGUMENT`, in the order of the arguments."""
    numbers: dict[str, Any]
    """The other arguments by name. Those that are None are left out."""
    outputs: dict[str, float]
    """The names of the outputs, each with the tolerance, absolute plus relative, of its dtype against float64. 0 means
    that all bits count. Most rows allow no more; a row with another oracle may."""


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an argument with their names. Fields of a tuple have their names, others their numbers."""
    if isinstance(value, (tuple, list)) and not (value and all(type(each) is int for each in value)):
        record: Any = value
        for key, each in record._asdict().items() if hasattr(record, "_asdict") else enumerate(record):
            yield from _leaves(f"{name}.{key}", each)
    elif value is not None:
        yield name, value


def _arguments(op: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> list[tuple[str, Any]]:
    """Return the leaves of all arguments with their names."""
    bound = inspect.signature(op).bind(*args, **kwargs).arguments
    return [leaf for name, value in bound.items() for leaf in _leaves(name, value)]


class Vectors:
    """A `Run` on the `cpu` platform that keeps inputs and outputs of each call, or takes the outputs from a file.

    Args:
        given: the outputs of another program, by name. None for the outputs of the reference.
    """

    def __init__(self, given: dict[str, Tensor] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        """The inputs, and the reference's outputs with EXPECTED before their names."""
        self.calls: list[Call] = []
        self._given, self._run = given, run_on(CpuPlatform())

    def __call__(self, op: Callable[..., Any], *args: Any, written: Iterable[Tensor] = (), **kwargs: Any) -> Any:
        number, written = len(self.calls), list(written)
        leaves = _arguments(op, args, kwargs)
        tensors = {f"{number}.{name}": leaf for name, leaf in leaves if torch.is_tensor(leaf)}
        self.tensors |= {name: leaf.detach().clone().contiguous() for name, leaf in tensors.items()}
        results = self._run(op, *args, written=written, **kwargs)
        parts, form = tree_flatten(results)
        memory = {tensor.untyped_storage().data_ptr() for tensor in written}
        outputs = {name: leaf for name, leaf in tensors.items() if leaf.untyped_storage().data_ptr() in memory}
        outputs |= {f"{number}.result.{i}": part for i, part in enumerate(parts) if torch.is_tensor(part)}
        self.tensors |= {EXPECTED + name: leaf.detach().clone().contiguous() for name, leaf in outputs.items()}
        numbers = {name: _plain(leaf) for name, leaf in leaves if not torch.is_tensor(leaf)}
        rounding = {name: TOLERANCE.get(leaf.dtype, 0.0) for name, leaf in outputs.items()}
        self.calls.append(Call(op.name if isinstance(op, Op) else "", [*tensors], numbers, rounding))
        if self._given is not None:
            for name, leaf in outputs.items():
                leaf.copy_(self._taken(name, leaf))
        return tree_unflatten(parts, form)

    def _taken(self, name: str, leaf: Tensor) -> Tensor:
        """Return an output of the other program. Raises AssertionError if it is missing or has another form."""
        assert self._given is not None
        assert name in self._given, f"there is no output {name}"
        found = self._given[name]
        wanted, seen = (f"{each.dtype} {list(each.shape)}" for each in (leaf, found))
        assert seen == wanted, f"output {name} is {seen}, expected {wanted}"
        return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list)) else str(value)


def _rows(cases: Sequence[str]) -> Iterator[tuple[str, Row, dict[str, Any]]]:
    """Yield id, row and parameters of the named cases, all if none is named."""
    found = False
    for row in ROWS:
        for part, parameters in row.parameter_sets():
            id = f"{row.case.id}[{part}]" if part else row.case.id
            if not row.large and (not cases or id in cases or row.case.id in cases):
                found = True
                yield id, row, parameters
    if not found:
        raise ConfigError(f"there are no vectors of {', '.join(cases)}: they are of cases of the group kernels")


def write_vectors(folder: Path, cases: Sequence[str] = (), seed: int = 0) -> int:
    """Write the vectors of the named cases, or of all that fit, and return their number.

    Raises:
        ConfigError: a case has no vectors, or the folder can't be written.
    """
    index = list[dict[str, Any]]()
    left_out = dict[str, str]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for id, row, parameters in _rows(cases):
            run = Vectors()
            with torch.no_grad():
                row.check(run, torch.Generator().manual_seed(seed), **parameters)
            if not all(call.op for call in run.calls):
                left_out[id] = "it calls several ops in one function"
                continue
            if sum(tensor.nbytes for tensor in run.tensors.values()) > MOST_BYTES:
                left_out[id] = f"it has more than {MOST_BYTES} bytes"
                continue
            name = re.sub(r"[^\w.-]", "_", id) + ".safetensors"
            save_file(run.tensors, folder / name)
            about = {"id": id, "claim": row.case.property, "file": name}
            index.append({**about, "calls": [asdict(call) for call in run.calls]})
        whole = {"suite": SUITE_VERSION, "seed": seed, "torch": torch.__version__, "left_out": left_out, "cases": index}
        (folder / INDEX).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror or error}") from error
    return len(index)


def judge_vectors(folder: Path, results: Path) -> dict[str, str | None]:
    """Check the outputs in `results`, and return "" or the reason of a failure by case. None if there is no file of it.

    Raises:
        ConfigError: `folder` has no vectors, or those of another suite or of another torch, whose inputs differ.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / INDEX} is no index of vectors: {error}") from error
    if index.get("suite") != SUITE_VERSION:
        raise ConfigError(
            f"{folder} has vectors of suite {index.get('suite')}, this is {SUITE_VERSION}: write them again"
        )
    listed, found = {case["id"]: case["file"] for case in index["cases"]}, dict[str, str | None]()
    for id, row, parameters in _rows([*listed]):
        if not (path := results / listed[id]).exists():
            found[id] = None
            continue
        run = Vectors(load_file(path))
        try:
            with torch.no_grad():
                row.check(run, torch.Generator().manual_seed(index["seed"]), **parameters)
            found[id] = ""
        except (AssertionError, RuntimeError) as error:
            found[id] = str(error).partition("\n")[0] or type(error).__name__
        stored = load_file(folder / listed[id])
        for name, tensor in run.tensors.items():
            if not name.startswith(EXPECTED) and not torch.equal(_bits(tensor), _bits(stored[name])):
                raise ConfigError(
                    f"{folder} was written with another torch ({index['torch']}): write the vectors again"
                )
    return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def command(folders: Sequence[Path], cases: Sequence[str] = (), seed: int = 0) -> bool:
    """Write the vectors to one folder, or judge the results of the second folder by the vectors of the first.

    Returns:
        False if results are wrong, or none are there.
    """
    if len(folders) == 1:
        print(f"{folders[0]}: vectors of {write_vectors(folders[0], cases, seed)} cases; {INDEX} describes them")
        return True
    found = judge_vectors(*folders)
    wrong = {id: reason for id, reason in found.items() if reason}
    for id, reason in wrong.items():
        print(f"wrong: {id}: {reason}")
    right = sum(reason == "" for reason in found.values())
    missing = len(found) - right - len(wrong)
    print(f"{folders[1]}: {right} cases right, {len(wrong)} wrong, {missing} without a file")
    return right > 0 and not wrong
