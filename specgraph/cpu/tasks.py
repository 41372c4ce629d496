"""Recorded ops, and groups of recorded ops whose host parameters can be rewritten between replays."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode

from specgraph.cpu.baking import map_tensors
from specgraph.cpu.checks.order import Access
from specgraph.cpu.fake import infer
from specgraph.cpu.ops import changes_metadata_only, is_composite
from specgraph.dispatch_mode import DispatchMode, tensors_in
from specgraph.errors import UpdateError
from specgraph.open_generator import GeneratorRef, is_open
from specgraph.user_code import user_line


@dataclass(slots=True)
class Task:
    """One recorded op: its baked arguments, the blocks of its results, and the line that issued it."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tuple[int, torch.Tensor]]
    returns: Any
    """The op's result at its captured address. The op also returns it in a task update."""
    line: str
    accesses: list[Access]
    call: Callable[[], Any] = field(init=False)
    """Runs the op again. Set by `compile`."""

    def compile(self) -> None:
        """Set `call`, which runs the op and leaves its results in `outputs`.

        The op writes there directly if `out_variant` finds an overload. Otherwise its results are copied.
        """
        if not self.outputs:
            self.call = partial(self.func._op, *self.args, **self.kwargs)
            return
        is_sequence = isinstance(self.returns, (list, tuple))
        count = len(self.returns) if is_sequence else 1
        if len(self.outputs) == count and not self.func._schema.is_mutable and (out := out_variant(self.func)):
            overload, names = out
            blocks = dict(zip(names, (block for _, block in self.outputs), strict=True))
            self.call = partial(overload._op, *self.args, **self.kwargs, **blocks)
        else:
            self.call = partial(self._run_and_copy, is_sequence)

    def _run_and_copy(self, is_sequence: bool) -> None:
        result = self.func._op(*self.args, **self.kwargs)
        for index, block in self.outputs:
            block.copy_(result[index] if is_sequence else result)


@cache
def out_variant(func: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """Return the overload with the same arguments that writes all results into given tensors, and the names of its out
    arguments. None if there is none, and for losses: they resize a given tensor to the unreduced loss on the way."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    if ("reduction", "int") in wanted:
        return None
    if func.namespace != "aten" or any(str(r.type) != "Tensor" for r in func._schema.returns):
        return None
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = [a for a in overload._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        if len(outs) == len(func._schema.returns) and rest == wanted:
            return overload, tuple(a.name for a in outs)
    return None


class CpuTaskGroup:
    """The captured tasks between two points of a capture. Made by `CpuPlatform.task_group()`."""

    def __init__(self, number: int, line: str) -> None:
        self.number = number
        self.line = line
        self.tasks: list[Task] = []
        self.is_live = True
        self.is_updated = False

    def __str__(self) -> str:
        ops = ", ".join(str(t.func) for t in self.tasks[:3]) + (", ..." if len(self.tasks) > 3 else "")
        return f"task group {self.number} ({ops or 'empty'}; captured at {self.line})"

    def require_update(self) -> None:
        """Raise UpdateError if the group had no update since the last replay."""
        if not self.is_updated:
            raise UpdateError(
                f"{self} has had no update since the last replay: a real device would hang here. Issue one "
                f"platform.task_update(group) before every replay"
            )


class BlockMode(DispatchMode):
    """A dispatch mode for one `with` block, made by `entered`.

    An interrupt while torch enters or leaves a mode may leave it on torch's stack. `is_over` is True after the block,
    and the mode then passes ops on.
    """

    block: GeneratorRef | None = None

    @property
    def is_over(self) -> bool:
        return self.block is not None and not is_open(self.block)


class UpdateMode(BlockMode):
    """Matches the issued ops with a group's tasks. `commit` rewrites the baked host values, all or none."""

    def __init__(self, group: CpuTaskGroup) -> None:
        super().__init__()
        self._group = group
        self._new: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_over:
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if changes_metadata_only(func):
            return func(*args, **kwargs)
        number = len(self._new)
        if number >= len(self._group.tasks):
            raise UpdateError(
                f"update of {self._group}: op {number} ({func} at {user_line()}) is one more than the captured "
                f"{len(self._group.tasks)}"
            )
        task = self._group.tasks[number]
        self._new.append(self._match(task, number, func, args, kwargs))
        return task.returns

    def _match(
        self, task: Task, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        where = f"update of {self._group}, op {number}"
        if func is not task.func:
            raise UpdateError(f"{where}: captured {task.func}, the update issued {func} at {user_line()}")
        given, baked = tensors_in(args, list(kwargs.values())), tensors_in(task.args, list(task.kwargs.values()))
        if _tensor_places(func, args, kwargs) != _tensor_places(func, task.args, task.kwargs):
            raise UpdateError(f"{where}: the update gives {func} tensors for other arguments than it was captured with")
        for index, (new, old) in enumerate(zip(given, baked, strict=True)):
            if (new.data_ptr(), new.size(), new.stride(), new.dtype) != (
                old.data_ptr(), old.size(), old.stride(), old.dtype
            ):  # fmt: skip
                raise UpdateError(
                    f"{where}: tensor argument {index} of {func} is not the captured one (captured {list(old.shape)} "
                    f"{old.dtype} at {old.data_ptr():#x}, given {list(new.shape)} {new.dtype} at {new.data_ptr():#x}). "
                    f"An update changes host values only"
                )
        if task.outputs:
            shapes = infer(func, args, kwargs).outputs
            for i, block in task.outputs:
                if shapes[i].shape != block.shape:
                    raise UpdateError(
                        f"{where}: with these values {func} returns {list(shapes[i].shape)}, captured "
                        f"{list(block.shape)}"
                    )
        remaining = iter(baked)

        def captured(_: torch.Tensor) -> torch.Tensor:
            return next(remaining)

        return map_tensors((args, kwargs), captured)

    def commit(self) -> None:
        """Rewrite the group's tasks. Raises UpdateError, and rewrites none, if fewer ops were issued than captured."""
        tasks = self._group.tasks
        if len(self._new) != len(tasks):
            raise UpdateError(
                f"update of {self._group} issued {len(self._new)} op(s), {len(tasks)} were captured: the first "
                f"missing one is {tasks[len(self._new)].func} captured at {tasks[len(self._new)].line}"
            )
        self._group.is_updated = False  # after an interrupt midway every replay is refused
        for task, (args, kwargs) in zip(tasks, self._new, strict=True):
            task.args, task.kwargs = args, kwargs
            task.compile()
        self._group.is_updated = True


def entered(mode: BlockMode) -> AbstractContextManager[None]:
    """Return a `with` block in which `mode` is active."""
    block = _entered(mode)
    mode.block = ref(block.gen)
    return block


@contextmanager
def _entered(mode: BlockMode) -> Generator[None]:
    while isinstance(top := _get_current_dispatch_mode(), BlockMode) and top.is_over:
        _pop_mode()  # left by an interrupt
    depth = torch._C._len_torch_dispatch_stack()
    try:
        with mode:
            yield
    finally:
        while torch._C._len_torch_dispatch_stack() > depth:
            _pop_mode()


def _tensor_places(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
    """Return the number of tensors in each argument that has any, by name. Host values may be given or left out."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return {name: count for name, value in named.items() if (count := len(tensors_in(value)))}
