"""Cases as files: inputs and expected outputs for draft ops and drafters that are written in another language.

`write_vectors` writes a safetensors file per row of the op table and parameter set, one per kind of drafter for a whole
propose, and `vectors.json`, which names the claim, the ops, and the tensors and numbers of each call. A program reads
the inputs and writes a file of the same name with its outputs. `judge_vectors` then runs each case's own check over
them, so that oracle and tolerances are the suite's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from specgraph.cpu import CpuPlatform
from specgraph.draft import DraftTokens
from specgraph.errors import ConfigError
from specgraph.ops.library import NAMESPACE, declared
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specgraph_conformance.draft_comparison import TOLERANCE as OF_DRAFTS
from specgraph_conformance.draft_comparison import away_from_the_end, expect_oracle, float64_head
from specgraph_conformance.draft_rig import DraftRig, HostBatch, close_rigs, make_batches, make_config
from specgraph_conformance.linear_oracles import TOLERANCE
from specgraph_conformance.op_rows import ROWS
from specgraph_conformance.op_run import run_on
from specgraph_conformance.rig import expect_close
from specgraph_conformance.standard import SUITE_VERSION
from specgraph_conformance.tiny_models import CONFIG, HEADS, make_head

INDEX = "vectors.json"
MOST_BYTES = 8 << 20
"""A row with more bytes is left out: its sizes are chosen for a device's kernels."""
EXPECTED = "expected."
"""Begins the name of each expected output. A program's own outputs have the name without it."""
PROPOSE = "propose"
"""The group of the cases of whole proposes, `propose.HEAD`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op, or one propose."""

    op: str
    tensors: dict[str, str]
    """The input tensors in the case's file, `NUMBER.ARGUMENT`, with dtype and shape, in the order of the arguments."""
    numbers: dict[str, Any]
    """The other arguments by name. Those that are None are left out."""
    outputs: dict[str, dict[str, Any]]
    """The outputs, each with its `dtype` and with the `tolerance`, absolute plus relative, of the dtype against
    float64. 0 means that all bits count. Most rows allow no more; a row with another oracle may."""


class Vectors(TorchDispatchMode):
    """A `Run` on the `cpu` platform that keeps inputs and outputs of each op, or takes the outputs from a file.

    A function that calls several ops gives several calls.

    Args:
        stored: the tensors of the case's file and `given`, the outputs of another program, by name. None to keep the
            outputs of the reference.

    Raises:
        ConfigError: the inputs are not those of the file.
    """

    def __init__(self, stored: dict[str, Tensor] | None = None, given: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        """The inputs, and the reference's outputs with EXPECTED before their names."""
        self.calls: list[Call] = []
        self._stored, self._given = stored, given or {}
        self._run = run_on(CpuPlatform())
        self._follows = True  # so far, outputs were bit for bit the reference's, and inputs therefore are the file's
        self._unseen: list[tuple[str, Tensor, Tensor, float]] = []
        """The outputs of the last call in a function, as given and as expected: the row sees them if none follows."""

    def __call__(self, op: Callable[..., Any], *args: Any, written: Iterable[Tensor] = (), **kwargs: Any) -> Any:
        with self:
            self._unseen = []
            return self._run(op, *args, written=written, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != NAMESPACE:
            return func(*args, **(kwargs or {}))
        op = declared()[func._schema.name.partition("::")[2]]
        kwargs, names = kwargs or {}, dict[str, str]()
        for parameter in op.parameters.all:
            fields = parameter.record.__annotations__ if parameter.record else ("",)
            names |= {flat: f"{parameter.name}.{f}".rstrip(".") for flat, f in zip(parameter.flat, fields, strict=True)}
        flat = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: flat[each] for each, name in names.items() if flat.get(each) is not None}
        written = [names[each] for each in op.parameters.written if flat.get(each) is not None]
        return self.call(op.name, given, written, lambda: func(*args, **kwargs))

    def call(
        self, op: str, arguments: dict[str, Any], written: Iterable[str], run: Callable[[], Any], near: float = 0.0
    ) -> Any:
        """Run one call and return its results. Keep or replace them and the arguments in `written`.

        Args:
            near: the tolerance of floating outputs. 0 for that of linears in their dtype.
        """
        before = f"{len(self.calls)}."
        for name, seen, wanted, most in self._unseen:
            kept = ~wanted.double().isnan()
            expect_close(seen.double()[kept], wanted.double()[kept], most, f"output {name}")
        self._unseen = []
        inputs = {before + name: each for name, each in arguments.items() if torch.is_tensor(each)}
        kept = {name: _copy(each) for name, each in inputs.items()}
        if self._stored is not None and self._follows:
            for name, each in kept.items():
                if name not in self._stored or not torch.equal(_bits(each), _bits(self._stored[name])):
                    raise ConfigError("the vectors were written with another torch: write them again")
        self.tensors |= kept
        results = run()
        parts = [each for each in tree_leaves(results) if torch.is_tensor(each)]
        outputs = {before + name: inputs[before + name] for name in written}
        outputs |= {f"{before}result.{number}": each for number, each in enumerate(parts)}
        self.tensors |= {EXPECTED + name: _copy(each) for name, each in outputs.items()}
        tolerance = {
            name: (near or TOLERANCE.get(each.dtype, 0.0)) if each.is_floating_point() else 0.0
            for name, each in outputs.items()
        }
        self.calls.append(
            Call(
                op,
                {name: f"{_dtype(each)} {list(each.shape)}" for name, each in inputs.items()},
                {name: _plain(each) for name, each in arguments.items() if not torch.is_tensor(each)},
                {n: {"dtype": _dtype(each), "tolerance": tolerance[n]} for n, each in outputs.items()},
            )
        )
        for name, each in outputs.items() if self._stored is not None else ():
            taken = self._taken(name, each)
            self._unseen.append((name, taken, _copy(each), tolerance[name]))
            self._follows = self._follows and torch.equal(_bits(taken), _bits(_copy(each)))
            each.copy_(taken)
        return results

    def _taken(self, name: str, leaf: Tensor) -> Tensor:
        """Return an output of the other program. Raises AssertionError if it is missing or has another form."""
        assert name in self._given, f"there is no output {name}"
        found = self._given[name]
        wanted, seen = (f"{each.dtype} {list(each.shape)}" for each in (leaf, found))
        assert seen == wanted, f"output {name} is {seen}, expected {wanted}"
        return found


class _Rig(DraftRig):
    """A drafter whose proposes are calls of `Vectors`."""

    vectors: Vectors

    def propose(self, batch: HostBatch, **options: Any) -> DraftTokens:
        handed, drafts = batch.on(self.platform.device, self.head.dtype), list[DraftTokens]()
        given: dict[str, Any] = {name: getattr(handed, name) for name in HANDED}
        named = self.drafter.read_set()
        caches = {name: each for name, each in named.items() if name.startswith("kv_cache.")}
        given |= caches | {name: each for name, each in named.items() if name.startswith("weights.")}
        given |= {name: getattr(self.config, name) for name in LIMITS} | {name: getattr(CONFIG, name) for name in SIZES}
        given |= {"position_offset": self.drafter.position_offset, "mask_token_id": CONFIG.vocab_size - 1}

        def run() -> Tensor:
            drafts.append(DraftRig.propose(self, batch, **options))
            return drafts[0].token_ids

        self.vectors.call(PROPOSE, given, caches, run, OF_DRAFTS[self.head.dtype])
        return drafts[0]


HANDED = ("sampled_token_ids", "num_sampled", "start_positions", "aux_hidden", "block_table")
LIMITS = ("num_speculative_tokens", "block_size", "max_model_len")
SIZES = ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps")


def check_propose(kind: str, vectors: Vectors, g: torch.Generator) -> None:
    """Check one propose, of three requests with random keys, against the head in float64."""
    config = make_config(max_num_requests=3, capture_sizes=(3,))
    try:
        made = _Rig(CpuPlatform(), make_head(kind, 1, torch.device("cpu")), config)
        made.vectors = vectors
        (batch,) = make_batches(config, made.head.aux_size, g.initial_seed(), [3])
        expect_oracle(made, away_from_the_end(config, batch), float64_head(made, kind))
    finally:
        close_rigs()


Check = Callable[[Vectors, torch.Generator], None]


def _cases(wanted: Sequence[str]) -> Iterator[tuple[str, str, Check]]:
    """Yield id, claim and check of the named cases, all if none is named."""
    found = False
    for id, claim, check in _all_cases():
        if not wanted or id in wanted or id.partition("[")[0] in wanted:
            found = True
            yield id, claim, check
    if not found:
        raise ConfigError(
            f"there are no vectors of {', '.join(wanted)}: they are of cases of the group kernels, and of proposes "
            f"({', '.join(f'{PROPOSE}.{kind}' for kind in HEADS)})"
        )


def _all_cases() -> Iterator[tuple[str, str, Check]]:
    for row in ROWS:
        for part, parameters in () if row.large else row.parameter_sets():
            yield f"{row.case.id}[{part}]" if part else row.case.id, row.case.property, partial(row.check, **parameters)
    for kind in HEADS:
        claim = (
            f"A propose of the head '{kind}' drafts the tokens that it drafts in float64, and writes those keys and "
            "values. Another token is right too if its logit falls short of the best by less than their tolerance."
        )
        yield f"{PROPOSE}.{kind}", claim, partial(check_propose, kind)


def write_vectors(folder: Path, cases: Sequence[str] = (), seed: int = 0) -> int:
    """Write the vectors of the named cases, or of all that fit, and return their number.

    Raises:
        ConfigError: a case has no vectors, or the folder can't be written.
    """
    index, left_out = list[dict[str, Any]](), dict[str, str]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for id, claim, check in _cases(cases):
            vectors = Vectors()
            with torch.no_grad():
                check(vectors, torch.Generator().manual_seed(seed))
            if not vectors.calls:
                left_out[id] = "it runs plain torch"
                continue
            if sum(tensor.nbytes for tensor in vectors.tensors.values()) > MOST_BYTES and not id.startswith(PROPOSE):
                left_out[id] = f"it has more than {MOST_BYTES} bytes"
                continue
            name = re.sub(r"[^\w.-]", "_", id) + ".safetensors"
            save_file(vectors.tensors, folder / name)
            calls = [asdict(call) for call in vectors.calls]
            index.append({"id": id, "claim": claim, "file": name, "calls": calls})
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
    for id, _, check in _cases([*listed]):
        if not (path := results / listed[id]).exists():
            found[id] = None
            continue
        try:
            with torch.no_grad():
                check(
                    Vectors(load_file(folder / listed[id]), load_file(path)),
                    torch.Generator().manual_seed(index["seed"]),
                )
            found[id] = ""
        except (AssertionError, RuntimeError) as error:
            found[id] = str(error).partition("\n")[0] or type(error).__name__
    return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, list)) else str(value)


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
