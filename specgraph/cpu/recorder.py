"""Records every op that a thread dispatches during one capture, instead of running it."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_unflatten

from specgraph.cpu.baking import Baker, map_tensors, tensor_over
from specgraph.cpu.checks.inputs import Inputs
from specgraph.cpu.checks.order import Access, CaptureOrder, Region
from specgraph.cpu.checks.refusals import host_read_error, refusal
from specgraph.cpu.fake import Inferred, infer
from specgraph.cpu.ops import EMPTY, changes_metadata_only, is_composite, written_by
from specgraph.cpu.pool import CpuGraphPool
from specgraph.cpu.tasks import CpuTaskGroup, Task
from specgraph.dispatch_mode import DispatchMode, tensors_in
from specgraph.errors import CaptureError, OrderError
from specgraph.user_code import user_line

if TYPE_CHECKING:
    from specgraph.cpu.platform import CpuPlatform
    from specgraph.cpu.stream import CpuEvent, CpuStream

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class EventNode:
    """An external event that is recorded or waited for at this point of the graph."""

    event: CpuEvent
    kind: Literal["record", "wait"]


class _Call(NamedTuple):
    """A call of an op, as torch dispatches it."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[torch.Tensor]
    """The tensors among its arguments."""


@dataclass(slots=True)
class _HostScalar:
    """The value of a 0-dim tensor argument, kept in case the tensor dies after its op: torch makes such tensors from
    Python numbers."""

    task: Task
    baked: torch.Tensor
    value: torch.Tensor
    storage: weakref.ref[Any]
    key: int

    def put_into_task(self) -> None:
        """Replace the address of the dead tensor in the task by its value."""

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            return self.value if tensor is self.baked else tensor

        self.task.args, self.task.kwargs = map_tensors((self.task.args, self.task.kwargs), swap)


class Recorder(DispatchMode):
    """Records ops into `nodes`, for one capture. `finish` makes the checks that need the whole capture."""

    def __init__(self, platform: CpuPlatform, pool: CpuGraphPool, stream: CpuStream) -> None:
        super().__init__()
        self.pool = pool
        self.nodes: list[Task | EventNode] = []
        self.groups: list[CpuTaskGroup] = []
        self.inputs = Inputs()
        self.constants: list[torch.Tensor] = []
        self.is_recording = True
        self.error: Exception | None = None
        self._platform = platform
        self.order = CaptureOrder(stream)
        self._capture_id = pool.begin_capture()
        self._group: CpuTaskGroup | None = None
        self._baker = Baker()
        self._scalars: list[_HostScalar] = []
        self._owned: set[int] = set()

    # ---- events and groups ---------------------------------------------------------------------------------------

    def add_event(self, event: CpuEvent, kind: Literal["record", "wait"]) -> None:
        """Put an external event into the graph."""
        self.nodes.append(EventNode(event, kind))

    def begin_group(self) -> CpuTaskGroup:
        """Collect the tasks recorded from now on in a new group."""
        if self._group is not None:
            raise CaptureError(f"{self._group} is still open: task groups don't nest")
        self._group = CpuTaskGroup(len(self.groups), user_line())
        self.groups.append(self._group)
        return self._group

    def end_group(self) -> None:
        """Close the open group."""
        self._group = None

    def invalidate(self, error: Exception) -> None:
        """Make the capture fail at its end, even if the caller swallows `error`."""
        self.error = self.error or error

    def finish(self) -> None:
        """Check the capture at its end. Raises CaptureError if it was invalidated, a stream never joined, or an input
        was freed."""
        if self.error is not None:
            raise CaptureError(f"the capture was invalidated by an earlier error: {self.error}") from self.error
        self.order.check_joined()
        for scalar in self._scalars:
            if scalar.storage() is None:
                self.inputs.forget(scalar.key)
                scalar.put_into_task()
                self.constants.append(scalar.value)
        self.inputs.finish()

    # ---- ops -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is _aten.lift_fresh.default:
            return self._host_constant(args[0])
        call = _Call(func, args, kwargs, tensors_in(args, list(kwargs.values())))
        if changes_metadata_only(func):
            self._note_inputs(call)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._record(call)

    def _record(self, call: _Call) -> Any:
        func, args, kwargs, given = call
        if self.error is not None:
            raise CaptureError(f"the capture was invalidated by an earlier error: {self.error}") from self.error
        if (error := refusal(func, args, kwargs, given)) is not None:
            self._fail(error)
        shapes = self._infer(call)
        if not shapes.devices <= {"cpu"}:
            if shapes.devices == {"meta"}:
                return func(*args, **kwargs)
            self._fail(CaptureError(f"{func} at {user_line()} leaves the device"))
        if shapes.outputs and not func._schema.is_mutable and all(a is not None for a in shapes.aliases):
            return self._unannotated_view(call)
        self._note_inputs(call)
        results = [self._result(fake, alias, given) for fake, alias in zip(shapes.outputs, shapes.aliases, strict=True)]
        if func.overloadpacket not in EMPTY:
            self._append(call, results, shapes)
        return tree_unflatten(results, shapes.spec)

    def _append(self, call: _Call, results: list[torch.Tensor | None], shapes: Inferred) -> None:
        """Add the op to the graph, with its arguments and results by address, after a check of its accesses' order."""
        (func, args, kwargs, given), line = call, user_line()
        fresh = [(i, r) for i, (r, a) in enumerate(zip(results, shapes.aliases, strict=True))
                 if a is None and r is not None]  # fmt: skip
        label = f"{func} at {line}"
        written = written_by(func, args, kwargs)
        accesses = [Access(Region.of(t), id(t) in written, label) for t in given]
        accesses += [Access(Region.of(t), True, label) for _, t in fresh]
        try:
            self.order.add(self._platform.current_stream(), accesses)
        except (CaptureError, OrderError) as error:
            self._fail(error)
        custom = func.namespace != "aten"
        baked: dict[int, torch.Tensor] = {}

        def bake(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in baked:
                baked[id(tensor)] = self._baker.bake(tensor, keep_grad=custom)
            return baked[id(tensor)]

        by_address = map_tensors(results, bake)
        baked_args, baked_kwargs = map_tensors((args, kwargs), bake)
        task = Task(
            func=func,
            args=baked_args,
            kwargs=baked_kwargs,
            outputs=[(i, by_address[i]) for i, _ in fresh],
            returns=tree_unflatten(by_address, shapes.spec),
            line=line,
            accesses=accesses,
        )
        self.nodes.append(task)
        if self._group is not None:
            self._group.tasks.append(task)
        for tensor in given:
            storage = tensor.untyped_storage()
            if tensor.dim() == 0 and storage.nbytes() == tensor.element_size() and not self._owns(storage):
                value = tensor_over(torch.UntypedStorage(storage.nbytes()).copy_(storage), tensor)
                key = storage._cdata
                self._scalars.append(_HostScalar(task, baked[id(tensor)], value, weakref.ref(storage), key))

    def _infer(self, call: _Call) -> Inferred:
        func, args, kwargs, _ = call
        try:
            shapes = infer(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self._fail(host_read_error(str(func)), error)
        except (UnsupportedOperatorException, NotImplementedError, RuntimeError) as error:
            if type(error) is RuntimeError and "no fake impl" not in str(error):
                raise  # torch's own message about the arguments
            self._fail(
                CaptureError(
                    f"{func} at {user_line()} has no fake implementation, so its result's shape is unknown without "
                    f"running it: add one with torch.library.register_fake"
                ),
                error,
            )
        if shapes.resized is not None:
            self._fail(
                CaptureError(
                    f"{func} at {user_line()} resizes tensor argument {shapes.resized}: allocate it at its final size"
                )
            )
        if any(out is not None and not isinstance(out, torch.Tensor) for out in shapes.outputs):
            self._fail(host_read_error(f"{func} (it returns a Python value)"))
        return shapes

    def _result(self, fake: Any, alias: int | None, given: list[torch.Tensor]) -> torch.Tensor | None:
        if fake is None:
            return None
        if alias is not None:
            return given[alias]
        stream = self._platform.current_stream()
        storage = self.pool.allocate(fake.untyped_storage().nbytes(), fake.dtype, stream.id)
        return tensor_over(storage, fake)

    def _unannotated_view(self, call: _Call) -> Any:
        func, args, kwargs, given = call
        if func.namespace != "aten":
            self._fail(CaptureError(f"{func} at {user_line()} returns one of its inputs: return a new tensor, or None"))
        self._note_inputs(call)
        result = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in given}
        if any(t.untyped_storage().data_ptr() not in known for t in tensors_in(result)):
            self._fail(CaptureError(f"{func} at {user_line()} can't be captured: its fake says view, it is none"))
        return result

    def _host_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep the value of a 0-dim `torch.tensor(3.0)`. Refuse larger host data, which a device would copy."""
        if tensor.dim():
            self._fail(
                CaptureError(
                    f"host data of shape {list(tensor.shape)} (a list, torch.tensor) at {user_line()} would be copied "
                    f"to the device in a capture: make it a persistent tensor before"
                )
            )
        self.constants.append(tensor)
        self._owned.add(tensor.untyped_storage()._cdata)
        return tensor

    def _owns(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._owned or self.pool.allocated_by(storage.data_ptr()) == self._capture_id

    def _note_inputs(self, call: _Call) -> None:
        line: str | None = None
        for tensor in call.given:
            # A tensor that an earlier capture allocated may be freed during this one, and this pool may reuse its
            # block: graphs that are replayed in order (piecewise segments) pass memory on.
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and self.pool.allocated_by(storage.data_ptr()) is None:
                if self._owns(storage):
                    continue
                line = line or user_line()
                segment = self._platform.memory_count.segments.get(storage.data_ptr())
                if segment is None:
                    self.inputs.add(tensor, str(call.func), line)
                else:
                    self.inputs.add_pool_memory(segment, str(call.func), line)

    def _fail(self, error: Exception, cause: Exception | None = None) -> NoReturn:
        self.invalidate(error)
        raise error from cause
