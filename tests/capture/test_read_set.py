"""The read-set guard: what a capture may touch, and what it must not."""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from torch import Tensor

from specgraph.capture import ReadSetGuard, fingerprint
from specgraph.errors import ReadSetError, StaleInputError

CPU = torch.device("cpu")


@pytest.fixture
def named() -> dict[str, Tensor]:
    return {
        "buffers.tokens": torch.arange(8),
        "buffers.out": torch.zeros(8),
        "weights.w": torch.randn(8, 8),
        "kv_cache.0.key": torch.zeros(3, 4, 2),
    }


def guard(named, device=CPU) -> ReadSetGuard:
    return ReadSetGuard(named, device)


def test_named_tensors_their_views_and_what_is_made_inside_are_allowed(named):
    with guard(named) as g:
        x = named["weights.w"][:4] @ named["weights.w"].T[:, 2:]
        y = torch.softmax(x, -1) + torch.arange(6)
        named["buffers.out"][:6].copy_(y[0])
        named["kv_cache.0.key"].view(-1, 2).index_copy_(0, named["buffers.tokens"][:1], y[:1, :2])
    assert g.touched == set(named)


@pytest.mark.parametrize(
    ("touch", "op"),
    [
        (lambda named, stray: named["buffers.out"] + stray, "aten.add.Tensor"),
        (lambda named, stray: named["buffers.out"].copy_(stray), "aten.copy_.default"),
        (lambda named, stray: stray.copy_(named["buffers.out"]), "aten.copy_.default"),
        (lambda named, stray: torch.stack([named["buffers.out"], stray]), "aten.stack|aten.cat|aten.unsqueeze"),
        (lambda named, stray: stray.zero_(), "aten.zero_.default"),
        (lambda named, stray: stray[2:].sum(), "aten.slice|aten.sum"),
    ],
)
def test_a_stray_tensor_is_an_error_naming_op_and_tensor(named, touch, op):
    stray = torch.ones(8)
    with (
        guard(named),
        pytest.raises(ReadSetError, match=rf"({op})\S* touches the tensor 'stray' \[\d\] torch.float32") as caught,
    ):
        touch(named, stray)
    assert "named buffer" in str(caught.value)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = torch.ones(8)
        self.register_buffer("scale", torch.ones(8))
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x, which):
        if which == "plain":
            return x * self.plain[2:].sum()
        return x * (self.scale if which == "scale" else self.weight)


@pytest.mark.parametrize("which", ["plain", "scale", "weight"])
def test_the_message_has_the_line_the_variable_and_what_to_do(named, which):
    """A tensor of a model that its `weights()` leave out."""
    module = Scaled()
    with torch.no_grad(), guard(named), pytest.raises(ReadSetError) as caught:
        module(named["buffers.out"], which)
    lines, start = inspect.getsourcelines(Scaled.forward)
    place = start + next(i for i, line in enumerate(lines) if "self.plain" in line) + (0 if which == "plain" else 1)
    message = str(caught.value)
    assert message.startswith(f"{__file__}:{place}: aten.")
    assert f"the tensor 'self.{which}' [8]" in message
    assert "weights()" in message


def test_a_tensor_that_no_variable_holds_has_no_name(named):
    make = [torch.ones(3)].pop
    with guard(named), pytest.raises(ReadSetError, match=r"touches a tensor \[3\]"):
        make().sum()


def test_an_op_of_our_own_is_seen_as_one_op(named):
    from specgraph import ops

    stray = torch.zeros(8, 3, dtype=torch.int64)
    with guard(named), pytest.raises(ReadSetError, match=r"specgraph\.draft_from_logits"):
        ops.draft_from_logits(
            named["weights.w"], ops.Drafts(stray, None, named["buffers.tokens"][:1], named["buffers.tokens"])
        )


def test_a_tensor_elsewhere_than_the_device_would_be_baked(named):
    """The capturing device is another one than the host: a host tensor's value would never change again."""
    host = torch.ones(8)
    with guard({}, torch.device("meta")), pytest.raises(ReadSetError, match=r"for meta: its value would be baked"):
        host + 1


def test_a_number_written_into_a_tensor_is_no_read(named):
    """On a GPU `x[:, -1] = 2.5` fills from a tensor without dimensions that torch makes of the number on the host."""
    held = torch.tensor(1.5)
    with guard({}, torch.device("meta")):
        x = torch.empty(4, 2, device="meta")
        number = torch.tensor(2.5)
        x[:, -1].fill_(number)
        memory = weakref.ref(number.untyped_storage())
        del number
        assert memory() is not None, "another tensor may get the address of a number that was allowed"
        with pytest.raises(ReadSetError, match="its value would be baked"):
            x.fill_(held)
        with pytest.raises(ReadSetError, match="its value would be baked"):
            x[0].copy_(torch.tensor([1.5, 2.5]))


def test_entering_again_continues_the_same_capture(named):
    g = guard(named)
    with g:
        made = named["weights.w"] * 2
    with g:
        named["buffers.out"].copy_(made[0])
    with guard(named), pytest.raises(ReadSetError):
        made.sum()


def test_empty_tensors_are_no_reads(named):
    empty = torch.empty(0, 8)
    with guard(named) as g:
        torch.cat([empty, named["weights.w"]])
    assert g.touched == {"weights.w"}


def test_a_fingerprint_holds_while_tensors_are_written_in_place(named):
    mark = fingerprint(named, {"buffers.tokens", "weights.w"})
    named["buffers.tokens"].add_(5)
    named["kv_cache.0.key"] = torch.zeros(1)  # not touched: not the graph's business
    mark.check(named, "propose[4]")


@pytest.mark.hazard("weights-moved")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda named: named.update({"weights.w": named["weights.w"].clone()}), "'weights.w' was reassigned or moved"),
        (lambda named: named.update({"weights.w": named["weights.w"][:4]}), r"now \[4, 8\] .* captured \[8, 8\]"),
        (lambda named: named.update({"weights.w": named["weights.w"].T}), "'weights.w' was reassigned"),
        (lambda named: named.update({"weights.w": named["weights.w"][1:]}), "'weights.w'"),
        (lambda named: named.pop("weights.w"), "'weights.w', which it reads, is no longer in the read-set"),
    ],
)
def test_a_fingerprint_names_what_moved(named, change, says):
    mark = fingerprint(named, {"buffers.tokens", "weights.w"})
    change(named)
    with pytest.raises(StaleInputError, match=rf"graph propose\[4\]: .*{says}"):
        mark.check(named, "propose[4]")


def test_views_of_touched_memory_are_watched_too(named):
    """Named views share storage with what was touched under another name."""
    both = named | {"buffers.tokens_sliced": named["buffers.tokens"][:4]}
    mark = fingerprint(both, {"buffers.tokens"})
    both["buffers.tokens_sliced"] = both["buffers.tokens"][1:5]
    with pytest.raises(StaleInputError, match="tokens_sliced"):
        mark.check(both, "step")
