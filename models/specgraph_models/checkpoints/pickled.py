"""Reads the tensors of `pytorch_model.bin` without running its pickle.

torch.save writes a zip archive. `data.pkl` describes the tensors, and `data/KEY` is the memory of a storage, not
compressed. Unpickling, also with `weights_only`, may allocate more than the file has: for a bytearray of any length,
for a place in the memo, for a tensor that is longer than its storage. So `data.pkl` is read here opcode by opcode, and
only the calls that rebuild a tensor over its storage are followed. Every size is compared with the file.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph_models.checkpoints.files import shown

LIMIT = 2 << 20
"""The most bytes of the archive's directory, and of `data.pkl`: 20 times the size for a thousand tensors."""

_DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""Name in torch of a class of storage or of a dtype -> dtype."""
_UNTYPED = "torch.storage UntypedStorage"
_MARK = object()
_VALUES = frozenset(("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Mapping[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
"""Opcodes by the value that they put on the stack."""


class NotPlain(ValueError):
    """The archive holds something besides a mapping of names to plain tensors."""


@dataclass(frozen=True, slots=True)
class _Global:
    """The name of a class or function, "module name". It is never imported."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor of an archive, not read yet."""

    path: Path
    begin: int
    """The first byte of the tensor's storage in the file."""
    length: int
    """Bytes of the tensor's storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        """Return the tensor over a mapping of the file. Writes to it stay in memory."""
        import numpy as np

        if not self.length:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = np.memmap(self.path, dtype=np.uint8, mode="c", offset=self.begin, shape=(self.length,))
        return torch.from_numpy(raw).view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class _BoundedFile(io.FileIO):
    """A file that reads at most LIMIT bytes at once, also if the archive's headers name more."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > LIMIT:
            raise NotPlain(f"{size} bytes are no directory of a file of tensors")
        return super().read(LIMIT if size is None or size < 0 else size)


def pickled_tensors(path: Path) -> dict[str, PickledTensor]:
    """Return the tensors of an archive of torch.save by name.

    Raises:
        NotPlain: it holds something else, which the text names.
        Exception: the archive is damaged; the error may be of any type.
    """
    with _BoundedFile(path) as file, zipfile.ZipFile(file) as archive:
        found = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1:
            raise NotPlain("it has no data.pkl")
        prefix = found[0].removesuffix("data.pkl")
        if f"{prefix}byteorder" in archive.namelist() and _record(archive, f"{prefix}byteorder") != b"little":
            raise NotPlain("its byte order is not little-endian")
        made = partial(_tensor, path, archive, prefix)
        loaded = _unpickled(_record(archive, found[0]), made)
    if not isinstance(loaded, dict):
        raise NotPlain(f"it holds {_kind(loaded)}, not a mapping of names to tensors")
    tensors: dict[str, Any] = loaded
    for name, tensor in tensors.items():
        if not isinstance(tensor, PickledTensor):
            raise NotPlain(f"{shown(name)} is {_kind(tensor)}, not a tensor")
    return tensors


def _kind(value: object) -> str:
    return value.name if isinstance(value, _Global) else type(value).__name__


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > LIMIT:
        raise NotPlain(f"{name} is compressed, or has {entry.file_size} bytes and not at most {LIMIT}")
    return archive.read(entry)


def _unpickled(data: bytes, made: Any) -> Any:
    """Return the value of a pickle of dictionaries, lists, tuples, numbers, texts and tensors.

    Args:
        made: makes a tensor from (storage, offset, shape, stride, dtype or None).
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        place = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[place + 1 :]
        del stack[place:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME", "STOP"):
            continue
        if name == "MARK":
            stack.append(_MARK)
        elif name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_Global(str(argument)))
        elif name == "BINPERSID":
            what, kind, key, *_ = stack.pop()
            if what != "storage" or type(key) is not str or not isinstance(kind, _Global):
                raise NotPlain("it holds a reference that is no storage")
            stack.append(_Storage(kind.name, key))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_called(stack.pop(), arguments, made))
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) is not str:
                    raise NotPlain(f"{shown(key)} is no name of a tensor")
                stack[-1][key] = value
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else since_mark()
            stack[-1].extend(items)
        elif name == "BUILD" and isinstance(stack[-2], dict):
            stack.pop()  # attributes of a state dict: the versions of its modules
        else:
            raise NotPlain(f"it needs the opcode {name}")
    (value,) = stack
    return value


def _called(function: Any, arguments: Any, made: Any) -> Any:
    """Return the result of a call in the pickle."""
    name = function.name if isinstance(function, _Global) else type(function).__name__
    if name == "collections OrderedDict" and not any(arguments):
        return dict[str, Any]()
    if name == "torch Size":
        return tuple(arguments[0])
    if name == "torch._utils _rebuild_parameter":
        return arguments[0]
    versions = {"torch._utils _rebuild_tensor_v2": 6, "torch._utils _rebuild_tensor_v3": 7}
    if name not in versions:
        raise NotPlain(f"it calls {name}")
    storage, offset, shape, stride, *_ = arguments
    if any(arguments[versions[name] :]):  # a conjugated or negated view
        raise NotPlain("it holds a tensor that is a lazy view")
    return made(storage, offset, shape, stride, arguments[6].name if versions[name] == 7 else None)


def _tensor(
    path: Path, archive: zipfile.ZipFile, prefix: str, storage: Any, offset: Any, shape: Any, stride: Any, kind: Any
) -> PickledTensor:
    """Return a tensor over a storage of the archive. Raises NotPlain unless it has a place for each element."""
    if not isinstance(storage, _Storage):
        raise NotPlain(f"it holds a tensor over {_kind(storage)}")
    named = storage.kind if kind is None else kind
    dtype = _DTYPES.get(named.removeprefix("torch ")) if kind is None or storage.kind == _UNTYPED else None
    if dtype is None:
        raise NotPlain(f"it holds a tensor of {shown(named)}")
    numbers = [offset, *shape, *stride]
    if len(shape) != len(stride) or len(shape) > 8 or any(type(n) is not int or n < 0 for n in numbers):
        raise NotPlain(f"it holds a tensor of shape {shown(shape)} and stride {shown(stride)}")
    entry = archive.getinfo(f"{prefix}data/{storage.key}")
    header = _header(archive, entry)
    begin, length = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:])), entry.file_size
    count, last = prod(shape), offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    elements = length // dtype.itemsize
    whole = entry.compress_type == zipfile.ZIP_STORED and begin + length <= path.stat().st_size
    if not whole or count > elements or (count and last >= elements):
        raise NotPlain(f"it holds a tensor of shape {shown(list(shape))} over {length} bytes")
    read = elements * dtype.itemsize if count else 0
    return PickledTensor(path, begin, read, dtype, tuple(shape), tuple(stride), offset)


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return the header before an entry. Its last numbers are the lengths of the entry's name and extra field."""
    file: Any = archive.fp
    file.seek(entry.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile("an entry has no header")
    return header
