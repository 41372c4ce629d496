"""Seeded mutations of good folders: each loads and computes finite logits, or is refused with one line of ours.

The folders are written with json, safetensors and torch, without the code under test. One mutation is a function of a
random generator and a folder; a folder gets one to three of them.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from quantised_folders import BLOCKS, quantise
from safetensors.torch import load, save_file

from specgraph.checkpoints import drafter_format, load_drafter, load_target
from specgraph.checkpoints.tokens import read_tokenizer, sampling_defaults, stop_token_ids
from specgraph.decoding.load import shipped_pair
from specgraph.errors import SpecgraphError
from specgraph.models.protocol import ParallelHead

FIXTURES = Path(__file__).parent / "speculators_fixtures"
HEADS = ("eagle", "eagle3-llama", "eagle3-qwen3", "peagle", "mtp", "dflash")
TARGETS = ("target", "latents in FP8")
BATCHES, BATCH = 42, 50
MEMORY = 1 << 20
"""KiB that the process may grow by while a batch is loaded."""


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
        value.view(-1)[rng.randrange(value.numel())] = rng.choice(numbers)
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
    """What a file holds; nothing where it is no file any more, or one that an earlier mutation made huge."""
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


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Folders by name, with the good target that each head is loaded for."""
    root = tmp_path_factory.mktemp("good")
    folders = {name: Path(shutil.copytree(FIXTURES / name, root / name)) for name in ("target", *HEADS)}
    folders["authors' target"] = tiny_checkpoints.write_target(root / "tiny-target")
    folders["authors' eagle3"] = tiny_checkpoints.write_eagle3(root / "tiny-head")
    folders["latents in FP8"] = write_latents(root / "latents")
    for name in (*TARGETS, "authors' target"):
        shutil.copy(shipped_pair()[0] / "tokenizer.json", folders[name])
    targets = {name: load_target(folders[name]) for name in ("target", "authors' target")}
    return folders, targets


def write_latents(folder: Path) -> Path:
    """A small DeepSeek-V3 by transformers: latents, a mixture, yarn with mscale; its linears in blocks of FP8."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_rope_head_dim=8,
        qk_nope_head_dim=6, v_head_dim=14, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, num_mtp_layers=0, max_position_embeddings=128, pad_token_id=0,
        rope_parameters={**rope, "mscale": 1.0, "mscale_all_dim": 0.8},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM(config).float().save_pretrained(folder)
    quantise(folder, BLOCKS, "scale_inv")
    return folder


def check_target(folder: Path, dense_attend) -> None:
    read_tokenizer(folder)
    sampling_defaults(folder)
    model = load_target(folder)
    stop_token_ids(folder, model.vocab_size)
    rows = min(3, model.max_model_len)
    attend = dense_attend(model.attention_layers, torch.arange(rows))
    assert model.logits(model.forward(torch.zeros(rows, dtype=torch.int64), attend).hidden).isfinite().all()


def check_drafter(folder: Path, target, dense_attend, dense_store) -> None:
    drafter_format(folder)
    head = load_drafter(folder, target)
    context = head.combine(torch.ones(3, head.aux_size))
    layers, rows = head.attention_layers, torch.arange(3)
    if isinstance(head, ParallelHead):
        caches = {}
        head.store_context(context, dense_store(layers, rows, caches))
        hidden = head.forward(torch.tensor([1, head.mask_token_id]), dense_attend(layers, torch.tensor([3, 4]), caches))
    else:
        hidden = head.forward(torch.tensor([1, 2, 3]), context, dense_attend(layers, rows)).hidden
    assert head.logits(hidden).isfinite().all()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(BATCHES))
@torch.no_grad()
def test_a_mutated_folder(batch, good, tmp_path, dense_attend, dense_store):
    folders, targets = good
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = []
    for number in range(BATCH):
        rng = random.Random(batch * BATCH + number)
        name = rng.choice([*TARGETS * 3, *HEADS, "authors' eagle3"])
        folder = tmp_path / str(number)
        folder.mkdir()
        for path in folders[name].iterdir():
            os.link(path, folder / path.name)
        mutations = [rng.choice(MUTATIONS) for _ in range(rng.choice([1, 1, 2, 3]))]
        for mutation in mutations:
            mutation(rng, folder)
        try:
            if name in TARGETS:
                check_target(folder, dense_attend)
            else:
                check_drafter(
                    folder, targets["authors' target" if "authors" in name else "target"], dense_attend, dense_store
                )
            outcomes.append("loaded")
        except SpecgraphError as error:
            message = str(error)
            assert "\n" not in message, (batch, number, message)
            assert len(message) <= 400, (batch, number, message)
            assert "weights_only=False" not in message, (batch, number, message)
            message.encode()  # can be printed
            outcomes.append("refused")
        except Exception as error:
            raise AssertionError(f"batch {batch}, folder {number} ({name}): {error!r}") from error
        shutil.rmtree(folder)
    assert "refused" in outcomes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY
