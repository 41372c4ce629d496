"""Every op is a well-behaved registered torch op: its schema tells the truth, its fake knows shapes and dtypes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conformance.test_coverage import ops_named
from specgraph_conformance import op_rows
from specgraph_models.parallel import join_ranks
from specgraph_run.decoder import ops as decoder_ops
from torch.library import opcheck

from specgraph import ops
from specgraph.ops import DeviceLengths, HostLengths, KVCache, Mask, NewRows
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.copies import BatchTensors
from specgraph.ops.library import NAMESPACE, declared, implement, kernel_places, name_kernels, plain_torch, use_kernels
from specgraph.ops.past_rows import PastRows

R, K, Q, V, DV, H, KVH, D = 3, 2, 3, 11, 7, 4, 2, 8


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def f32(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


TABLE = torch.arange(1, 1 + R * 4, dtype=torch.int32).view(R, 4)
OFFSETS = torch.arange(DV) % 3
CACHE = 13, 4, KVH, D


def arguments() -> dict[str, tuple[tuple, dict]]:
    """Fresh arguments for each op, by its registered name."""
    rows = f32(R * Q, H, D), f32(R * Q, KVH, D), f32(R * Q, KVH, D)
    slots, starts, lengths = torch.arange(4, 4 + R * Q), i32(0, 3, 6, 9), i32(5, 0, 9)
    new = NewRows(*rows[1:], f32(20, D), torch.arange(9), slots)
    attend = rows[0], KVCache(f32(*CACHE), f32(*CACHE)), TABLE
    step, ids, drafts = i64(1), i64(R), i64(R, K)
    limits = {"max_model_len": 12, "block_size": 4}
    return {
        "advance": ((i32(3, 0, 9), i64(R), i64(R), step, TABLE, 12, 4), {}),
        "begin_rows": (
            (RowInputs(i64(R), TABLE, i32(1, 0, 3), i64(R, Q)), RowPlan(Q, 12, 4),
             Rows(i64(R * Q), i64(R * Q), i32(1, 1, 1), i64(R * Q), i64(R), i64(R), i32(1, 1, 1), step), None), {},
        ),
        "rotate_and_store": ((rows[0], new, attend[1]), {}),
        "paged_attention": (
            (*attend, DeviceLengths(lengths, starts, Q), Mask(window=3, sinks=f32(H)), new), {"scale": 0.35},
        ),
        "paged_attention_host": (
            (*attend, HostLengths([Q] * R, [5, 0, 9]), Mask(), new), {"scale": 0.35, "out": torch.zeros(R * Q, H, D)},
        ),
        "greedy_next_step": (
            (f32(R, 8), ops.LmHead(f32(8), 1e-5, f32(DV, 8)), ops.Drafts(drafts, OFFSETS, step, ids), lengths, i64(R),
             i64(R), TABLE, *limits.values(), f32(R, 8), ops.PairInput(f32(V, 6), f32(6), f32(8), 1e-5)), {},
        ),
        "keep_rows": (
            (i64(R * Q), f32(R * Q, 8), i64(R * Q), i64(R * Q) - 1, PastRows(i64(13, 2), i64(13, 2), f32(13, 2, 8)), 4),
            {},
        ),
        "shift_token_ids": ((i64(R * Q), torch.tensor([0, 3, 8]), ids, lengths, step), {}),
        "load_batch": (
            (BatchTensors(i64(2, Q) + 5, i32(1, 2), i64(2), f32(2 * Q, 8), TABLE[:2, :3]),
             BatchTensors(i64(R, Q), i32(7, 7, 7), i64(R), f32(R * Q, 8), TABLE.clone())), {},
        ),
        "next_verify": ((i64(R, Q), i32(1, 0, 3), drafts, i64(R), ids, i64(R, K)), {}),
        "take_rows": ((f32(R * Q, 8), i64(R) + 2, f32(R, 8)), {}),
        "all_reduce": ((f32(R, V), "one"), {}),
        "all_gather": ((f32(R, V), "one", 1), {}),
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """The ranks "one", of this process only."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    ranks = join_ranks(torch.device("cpu"), 1, init_method=f"file://{store}", rank=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specgraph.ops.collectives.ranks_named", lambda name: ranks)
        yield
    ranks.close()


def registered() -> set[str]:
    """Names of all ops that our packages have defined, without those of the plugin room (tests/plugin)."""
    names = torch._C._dispatch_get_all_op_names()
    found = {name.partition("::")[2] for name in names if name.startswith(f"{NAMESPACE}::")}
    return found - {name for name, op in declared().items() if op.reference.__module__.startswith("specgraph_plugin.")}


def test_every_op_is_checked_here_or_as_a_row_of_the_op_table():
    rows = [path.read_text() for path in Path(op_rows.__path__[0]).glob("*.py")]
    assert registered() <= set(arguments()).union(*map(ops_named, rows))


@pytest.mark.parametrize("name", arguments())
@pytest.mark.parametrize("inference", [False, True])
def test_schema_and_fake(name, inference):
    op = declared()[name]
    args, kwargs = op.parameters.flatten(*arguments()[name])
    with torch.inference_mode(inference):
        opcheck(op.overload, args, kwargs, test_utils=("test_schema",))
    opcheck(op.overload, args, kwargs, test_utils=("test_faketensor",))


def test_a_wrong_schema_would_be_found():
    """An op that writes an argument it doesn't name as written."""

    def liar(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.clone()

    library = torch.library.Library("specgraph_registration_test", "DEF")
    library.define("liar(Tensor x) -> Tensor")
    library.impl("liar", liar, "CompositeExplicitAutograd")
    torch.library.register_fake("specgraph_registration_test::liar", lambda x: x.new_empty(x.shape), lib=library)
    with pytest.raises(Exception, match=r"mutat|modified"):
        opcheck(torch.ops.specgraph_registration_test.liar.default, (torch.zeros(3),), test_utils=("test_schema",))


def test_implementing_an_op_twice_keeps_the_first():
    calls: list[str] = []

    def make(name: str):
        def kernel(x, group):
            calls.append(name)

        return kernel

    implement("all_reduce", "PrivateUse3", make("first"))  # a key that no test's tensors have
    implement("all_reduce", "PrivateUse3", make("second"))
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)
    torch.ops.specgraph.all_reduce.default.redispatch(key, *arguments()["all_reduce"][0])
    assert calls == ["first"]


def test_an_implementation_takes_the_parameters_of_the_declaration():
    """A swapped pair of names or a lost default would pass the wrong tensor, or none, at a call that leaves it out."""
    for wrong in (
        lambda x, weight, norm, residual=None: None,
        lambda x, norm, weight, residual: None,
        lambda x, norm, weight: None,
    ):
        with pytest.raises(TypeError, match=r"norm_linear takes .* declared with"):
            implement("norm_linear", "PrivateUse3", wrong)


def test_a_declaration_is_the_schema_and_the_documentation():
    schema = ops.advance.overload._schema
    written = {"seq_lens", "positions", "slot_mapping", "draft_step"}
    assert {a.name for a in schema.arguments if a.alias_info} == written
    assert "one token forward" in str(inspect.getdoc(ops.advance))
    assert list(inspect.signature(ops.advance).parameters) == [a.name for a in schema.arguments]


def test_an_implementation_that_declines_leaves_the_call_to_the_reference():
    def declines(token_ids, draft_token_ids, *rest):
        return NotImplemented

    declines.__signature__ = inspect.signature(decoder_ops.next_verify)  # pyright: ignore
    implement("next_verify", "PrivateUse3", declines)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)
    given, expected = arguments()["next_verify"][0], arguments()["next_verify"][0]
    torch.ops.specgraph.next_verify.default.redispatch(key, *given)
    decoder_ops.next_verify.reference(*expected)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_plain_torch_takes_implementations_away_and_gives_them_back():
    calls: list[int] = []

    def kernel(x, norm, weight):
        calls.append(1)
        return x.new_zeros(x.shape[0], weight.matrix.shape[0] // 2)

    key = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)  # a key that no test's tensors have

    given = f32(R, 8), f32(8), 1e-5, f32(10, 8), f32(10), None

    def run() -> torch.Tensor:
        return torch.ops.specgraph.norm_gate_up.default.redispatch(key, *given)

    implement("norm_gate_up", "PrivateUse3", kernel)
    assert run().count_nonzero() == 0
    with plain_torch("PrivateUse3"):
        assert torch.equal(run(), torch.ops.specgraph.norm_gate_up.default(*given))
    assert run().count_nonzero() == 0
    assert len(calls) == 2


def test_an_op_on_a_device_is_what_torch_dispatches_there(monkeypatch):
    """Without implementations the op itself; else the implementation, and under `plain_torch` the op again."""
    op, cpu = ops.take_rows, torch.device("cpu")
    assert op.on(cpu) is op

    def kernel(source, rows, out):
        out.fill_(7)

    monkeypatch.setattr("specgraph.ops.library.dispatch_key_of", lambda device: "PrivateUse3")
    implement("take_rows", "PrivateUse3", kernel)
    op.on(cpu)(*arguments()["take_rows"][0][:2], out := torch.zeros(3, 8))
    assert bool((out == 7).all())
    with plain_torch("PrivateUse3"):
        assert op.on(cpu) is op
    assert op.on(cpu) is not op
    assert ops.advance.on(cpu) is ops.advance


def test_kernels_are_used_whether_they_are_named_before_a_device_asks_or_after(monkeypatch):
    monkeypatch.setattr("specgraph.ops.library._kernels", ["before:KERNELS"])
    monkeypatch.setattr("specgraph.ops.library._uses", [])
    used: list[str] = []
    use_kernels(used.append)
    name_kernels("after:KERNELS")
    name_kernels("after:KERNELS")
    assert used == ["before:KERNELS", "after:KERNELS"] == [*kernel_places()]


def test_each_package_names_its_kernels():
    """In a process of its own: this one has imported all of them."""
    names = "from specgraph.ops.library import declared, import_installed, kernel_places; import specgraph.ops; "
    shown = "print(sorted(declared()), *kernel_places()); "
    command = [sys.executable, "-c", names + shown + "import_installed(); " + shown]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    core, all_parts = run.stdout.splitlines()
    assert core.endswith("] specgraph.kernels.implement:KERNELS")
    assert not {"norm_gate_up", "expert_mlp", "verify_drafts", "next_verify"} & set(re.findall(r"\w+", core))
    assert "'norm_gate_up'" in all_parts
    assert "'verify_drafts'" in all_parts
    packages = ("specgraph_models.kernels", "specgraph_run.decoder.kernels", "specgraph_plugin.kernels")
    assert {f"{package}.implement:KERNELS" for package in packages} < set(all_parts.split())
