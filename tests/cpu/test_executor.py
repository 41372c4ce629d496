"""A Python binding stands in for an overload only if it reaches that very overload with those very arguments."""

from __future__ import annotations

import pytest
import torch

from specgraph.device.cpu.executor import bind, out_variant

aten = torch.ops.aten


def bound(func, *args, outputs=1, **kwargs):
    blocks = [(i, torch.zeros(2, 3)) for i in range(outputs)]
    return bind(func, args, kwargs, blocks, outputs > 1, outputs), blocks


def test_the_fast_way_is_found():
    binding, _ = bound(aten.add.Tensor, torch.ones(2, 3), 2.0)
    assert binding.function is torch._C._VariableFunctions.add
    assert binding.out_names == ("out",)
    assert not binding.copies


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mul.Scalar, (torch.ones(2, 3), 2)),  # torch.mul reaches mul.Tensor
        (aten.sub.Scalar, (torch.ones(2, 3), 2)),
        (aten.pow.Scalar, (2, torch.ones(2, 3))),
    ],
)
def test_a_binding_that_reaches_another_overload_is_not_taken(func, args):
    binding, blocks = bound(func, *args)
    binding.call(args, {}, blocks)()
    assert torch.equal(blocks[0][1], func(*args))
    if func is not aten.pow.Scalar:
        assert isinstance(binding.function, type(aten.mul.Scalar._op)), "the overload itself"
        assert binding.function not in (torch.mul, torch.sub)


def test_a_custom_op_is_called_itself():
    library = torch.library.Library("specgraph_test_executor", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    func = torch.ops.specgraph_test_executor.twice.default
    binding, blocks = bound(func, torch.ones(2, 3))
    assert binding.copies
    binding.call((torch.ones(2, 3),), {}, blocks)()
    assert (blocks[0][1] == 2).all()


def test_out_variants():
    assert out_variant(aten.mm.default)[0] is aten.mm.out
    assert out_variant(aten.topk.default)[1] == ("values", "indices")
    assert out_variant(aten.add_.Tensor) is None
