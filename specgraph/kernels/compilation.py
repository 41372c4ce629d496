"""Compiles kernels in processes of their own before a capture needs them, and keeps them in Triton's cache folder.

Run as a program, this module is such a process: it reads compilations, and answers each with an error or "".
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from specgraph.validation import environment_number

_MOST_PROCESSES = 16
"""A process takes about 1 GB of host memory."""
_FILE = "compiled"

_log = logging.getLogger("specgraph")


def digest(*parts: object) -> str:
    """Return a name for a result that depends on these parts alone."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel to compile once, and to find in Triton's cache folder from then on."""

    key: str
    """A `digest` of everything that the result depends on."""
    compile: Callable[[], bytes] = field(compare=False)
    """Returns the result. It can be pickled, and so run in any process."""

    def kept(self) -> bytes | None:
        """Return the result from the cache folder. None if it is not there."""
        path = get_cache_manager(self.key).get_file(_FILE)
        return None if path is None else Path(path).read_bytes()

    def result(self) -> bytes:
        """Return the result. Compile it now if it was not kept."""
        found = None
        with suppress(OSError):
            found = self.kept()
        if found is None:
            found = self.compile()
            with suppress(OSError):  # the folder can't be written
                get_cache_manager(self.key).put(found, _FILE)
        return found


def compile_all(work: Iterable[Compilation], progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Compile the kernels that are not kept, in up to one process per CPU core.

    A kernel that fails here raises nothing: its first launch compiles it again, and fails.

    Args:
        progress: called with the number of kernels compiled so far and the number of all.
    """
    try:
        missing = [each for each in dict.fromkeys(work) if each.kept() is None]
        _compile_missing(missing, progress)
    except OSError as error:
        _log.debug("not all kernels are compiled ahead: %s", error)


def _compile_missing(missing: list[Compilation], progress: Callable[[int, int], None]) -> None:
    """Compile these kernels, unless they are too few to start processes for."""
    random.Random(os.getpid()).shuffle(missing)  # ranks of one machine need the same kernels, and so share the work
    cores = _cores() // environment_number("LOCAL_WORLD_SIZE", 1, least=1)
    count = min(len(missing) // 2, cores, _MOST_PROCESSES)  # a process takes seconds to start
    if count < 2:
        return
    answers: SimpleQueue[str | None] = SimpleQueue()
    left = iter(missing)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    with ExitStack() as ended, ThreadPoolExecutor(count) as threads, ExitStack() as killed:
        for _ in range(count):
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=path, start_new_session=True)
            ended.callback(process.communicate)
            killed.callback(process.kill)  # also after an interrupt, before the threads are waited for
            threads.submit(_have_compiled, process, left, answers)
        done = 0
        while count:
            if (error := answers.get()) is None:
                count -= 1
                continue
            if error:
                _log.debug("a kernel was not compiled ahead: %s", error)
            progress(done := done + 1, len(missing))


def _cores() -> int:
    """Return the number of CPU cores that this process may use. On a system without affinity, that is all of them."""
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _have_compiled(
    process: subprocess.Popen[bytes], left: Iterator[Compilation], answers: SimpleQueue[str | None]
) -> None:
    """Have a process compile one kernel after the other from `left`, which all processes share, until it dies.

    Put each answer, an error or "", into `answers`, and None after the last one.
    """
    try:
        for work in left:
            pickle.dump(work, process.stdin)
            process.stdin.flush()
            answers.put(pickle.load(process.stdout))
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")
    finally:
        answers.put(None)


def _answer() -> None:
    """Read compilations from standard input until it ends, and run them. Compilers print to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            work: Compilation = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        error = ""
        try:
            work.result()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        pickle.dump(error, answers)
        answers.flush()


@dataclass(frozen=True, slots=True)
class Name:
    """A `@triton.jit` function by name: Triton's own objects can't be pickled."""

    module: str
    name: str

    def found(self) -> Any:
        """Return the function."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True, slots=True)
class Pointer:
    """The properties of a tensor argument that Triton compiles different code for."""

    dtype: torch.dtype
    is_aligned: bool
    """True if its address is a multiple of 16 bytes."""

    def tensor(self) -> torch.Tensor:
        """Return a meta tensor with these properties."""
        return torch.empty(2, dtype=self.dtype, device="meta")[0 if self.is_aligned else 1 :]


def compilation_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], target: Any) -> Compilation:
    """Return the compilation that the launch `kernel[grid](*arguments, **options)` needs.

    Args:
        arguments: tensors among them need no memory.
        target: the result of Triton's `driver.active.get_current_target()`.
    """
    named = (
        tuple(_number(_specialised(each)) for each in arguments),
        tuple((name, _specialised(each)) for name, each in options.items()),
    )
    sources = [each.cache_key for each in (kernel, *options.values()) if isinstance(each, triton.JITFunction)]
    key = digest(triton.__version__, target, sources, named)
    return Compilation(key, partial(_compile, _specialised(kernel), *named, target))


def _specialised(value: Any) -> Any:
    """Return a value that stands for all arguments with the same compiled code. It can be pickled."""
    if isinstance(value, triton.JITFunction):
        return Name(value.fn.__module__, value.fn.__qualname__)
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr() % 16 == 0)
    return value


def _number(value: Any) -> Any:
    """Return an integer with the same compiled code. Triton tells apart 1, multiples of 16, and 32 and 64 bits."""
    if type(value) is not int or value == 1:
        return value
    return (0 if -(2**31) <= value < 2**31 else 2**40) + (16 if value % 16 == 0 else 3)


def _compile(kernel: Name, arguments: tuple[Any, ...], options: tuple[tuple[str, Any], ...], target: Any) -> bytes:
    """Compile a kernel for a target, and its launcher if this machine has a driver. The device is not opened."""
    launcher = None
    with suppress(RuntimeError):  # no driver: this machine has no such device
        launcher = driver.active.launcher_cls
    driver.set_active(_Target(target, launcher))

    def given(value: Any) -> Any:
        return value.found() if isinstance(value, Name) else value.tensor() if isinstance(value, Pointer) else value

    made = kernel.found().warmup(*map(given, arguments), grid=(1,), **{name: given(each) for name, each in options})
    if launcher is not None:
        launcher(made.src, made.metadata)
    return made.hash.encode()


@dataclass(frozen=True, slots=True)
class _Target:
    """A Triton driver that has a target and no device."""

    target: Any
    launcher_cls: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


if __name__ == "__main__":
    _answer()
