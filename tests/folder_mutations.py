"""Mutations of checkpoint folders, written with json, safetensors and torch, without the code under test.

Each is a function of a random generator and a folder. A file may be a link into the good folder, so it is written anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load, save_file


def hostile(rng: random.Random, depth: int = 0):
    """A JSON value that does not belong where it is put."""
    kind = rng.randrange(12)
    if kind == 0 and depth < 3:
        return [hostile(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 1 and depth < 3:
        return {rng.choice(["a", "factor", "", "rope_type", "weight_map"]): hostile(rng, depth + 1)}
    if kind == 2:
        return nested(rng.choice([3, 50]))
    numbers = [0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**300, 1e30, 1e-30, 0.5, float("inf"), float("-inf"), float("nan")]
    strings = ["", "x", "\ud800", "a\nb", "../x", "9" * 5000, "llama", "eagle3", "yarn", "full_attention"]
    return rng.choice([*numbers, *strings, None, True, False])


def nested(depth: int):
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def mutate_json(rng: random.Random, value):
    """Change one place of a JSON value, in place where it can be."""
    holder, key = None, None
    place = value
    while isinstance(place, dict | list) and place and (holder is None or rng.random() < 0.7):
        holder, key = place, rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place = place[key]
    if holder is None:
        return hostile(rng)
    action = rng.randrange(6)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice(["unknown", "num_local_experts", "sliding_window", "rope_scaling", key + "_"])] = hostile(rng)
    elif action == 2 and isinstance(place, int | float):
        holder[key] = rng.choice([place + 1, place * 2, -place, place * 1e30, str(place), [place]])
    else:
        holder[key] = hostile(rng)
    return value


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Cut, overwrite or deepen the bytes of a text file."""
    cut = rng.randrange(len(data) + 1)
    noise = bytes(rng.randrange(256) for _ in range(rng.choice([1, 4, 64])))
    deep = b'{"a":' * 30000 if rng.random() < 0.5 else b"[" * 100000
    choices = [data[:cut], data[:cut] + noise + data[cut + 1 :], b"", deep, data.decode("latin-1").encode("utf-16")]
    return rng.choice([*choices, b"null", b"[]", b"5", b'"text"', b"\0" * 100])


def change_json_file(name: str) -> Callable[[random.Random, Path], None]:
    def change(rng: random.Random, folder: Path) -> None:
        path = folder / name
        data = small(path) or b'{"eos_token_id": 1, "weight_map": {}}'
        if rng.random() < 0.75:
            try:
                data = json.dumps(mutate_json(rng, json.loads(data))).encode()
            except (ValueError, RecursionError):  # an earlier mutation's
                data = mutate_text(rng, data)
        else:
            data = mutate_text(rng, data)
        replace(path, data)

    return change


def change_header(rng: random.Random, folder: Path) -> None:
    """The JSON header of a safetensors file, or its length, or the bytes after it."""
    path = folder / "model.safetensors"
    data = small(path)
    if len(data) < 8 or rng.random() < 0.3:
        return replace(path, mutate_text(rng, data))
    length = min(struct.unpack("<Q", data[:8])[0], len(data))
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):  # an earlier mutation's
        return replace(path, data[: rng.randrange(len(data))])
    if rng.random() < 0.5 and isinstance(header, dict) and header:
        entry = header[rng.choice(list(header))]
        if isinstance(entry, dict):
            entry["dtype"] = rng.choice(["F4", "F8_E8M0", "F8_E4M3", "U16", "I32", "C64", "F16", "XX", 5])
    else:
        header = mutate_json(rng, header)
    text = json.dumps(header).encode()
    size = rng.choice([len(text), len(text), len(text) + 1, 0, 2**40, 2**63])
    replace(path, struct.pack("<Q", size) + text + data[8 + length :])


def change_tensors(rng: random.Random, folder: Path) -> None:
    """One tensor: gone, renamed, of another dtype or shape, or with a value that no weight has."""
    path = folder / "model.safetensors"
    tensors = tensors_of(folder)
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    value = tensors.pop(name)
    kind = rng.randrange(7)
    if kind == 1:
        name = rng.choice([name + "x", "model." + name, name.replace("0", "9"), "\n", "mask_hidden", "fc.weight"])
    elif kind == 2:
        dtypes = [torch.int8, torch.bool, torch.float64, torch.float16, torch.float8_e4m3fn, torch.complex64]
        value = value.to(rng.choice(dtypes))
    elif kind == 3:
        value = rng.choice([value[:-1], value[..., None], value.flatten(), value.new_zeros(0), value.float().sum()])
    elif kind == 4:
        numbers = [float("nan"), float("inf"), 1e30, 5e4, -7.5] if value.is_floating_point() else [0, 1, 100]
        numbers += [-1, 10**6, -(2**62)] if value.dtype == torch.int64 else []
        number = torch.tensor(rng.choice(numbers))  # torch 2.7 casts no large number to FP8 by itself
        value.view(-1)[rng.randrange(value.numel())] = number.to(value.dtype)
    elif kind == 5:
        value = value.new_zeros(value.shape)
    if kind:
        tensors[name] = value
    if kind == 6:
        tensors["extra.weight"] = torch.ones(3)
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "new")
    except Exception:  # two names for one tensor, a name that cannot be saved
        return
    replace(path, (folder / "new").read_bytes())
    (folder / "new").unlink()


def change_to_pickle(rng: random.Random, folder: Path) -> None:
    """pytorch_model.bin of some kind in the place of safetensors."""
    tensors = tensors_of(folder)
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    one = tensors[name]
    replaced = [torch.ones(1).expand(10**6, 10**6), one.float().to_sparse(), one.to("meta"), print]
    others = [
        {"state_dict": tensors},
        list(tensors.values()),
        torch.nn.Linear(2, 2),
        dict(enumerate(tensors.values())),
        7,
    ]
    content = rng.choice([tensors, *others, *({**tensors, name: value} for value in replaced)])
    remove(folder / "model.safetensors")
    path = folder / "pytorch_model.bin"
    remove(path)
    torch.save(content, path, _use_new_zipfile_serialization=rng.random() < 0.8)
    if rng.random() < 0.3:
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def change_index(rng: random.Random, folder: Path) -> None:
    """An index of shards that leads somewhere."""
    names = list(tensors_of(folder)) or ["a"]
    shards = [
        "model.safetensors",
        "../x",
        "/etc/passwd",
        "x" * 5000,
        "a\0b",
        "",
        "..",
        "config.json",
        5,
        None,
        "\ud800",
    ]
    mapping = {name: rng.choice(shards[:1] if rng.random() < 0.9 else shards) for name in names}
    if rng.random() < 0.3:
        mapping.pop(rng.choice(names))
    replace(folder / "model.safetensors.index.json", json.dumps({"weight_map": mapping}).encode())


def change_kind_of_file(rng: random.Random, folder: Path) -> None:
    """Something that is no regular file, or is far too large, under a name that is read."""
    names = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"]
    path = folder / rng.choice([*names, "model.safetensors.index.json", "adapter_config.json"])
    remove(path)
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.symlink_to(folder / "gone")
    elif kind == 4:
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)  # sparse: it takes no room


MUTATIONS = [
    *[change_json_file("config.json")] * 5,
    change_json_file("generation_config.json"),
    change_json_file("tokenizer.json"),
    *[change_header] * 2,
    *[change_tensors] * 4,
    change_to_pickle,
    change_index,
    change_kind_of_file,
]


def small(path: Path) -> bytes:
    """Return what a file holds; nothing where it is no file any more, or one that an earlier mutation made huge."""
    return path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else b""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors; none where an earlier mutation has spoilt it."""
    try:
        return load(small(folder / "model.safetensors"))
    except Exception:
        return {}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Write a file anew: what was there may be a link into the good folder."""
    remove(path)
    path.write_bytes(data)
