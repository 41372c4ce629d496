"""Seeded mutations of good folders: each loads and computes finite logits, or is refused with one line of ours.

A folder gets one to three of the mutations.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from changed_folders import FIXTURES
from folder_mutations import MUTATIONS
from quantised_folders import BLOCKS, quantise
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target
from specgraph_models.checkpoints.tokens import read_tokenizer, sampling_defaults, stop_token_ids
from specgraph_run.text.load import shipped_pair

from specgraph.draft import BlockKind, ParallelKind
from specgraph.errors import CapacityError, SpecgraphError

HEADS = ("eagle", "eagle3-llama", "eagle3-qwen3", "peagle", "mtp", "dflash")
TARGETS = ("target", "latents in FP8")
BATCHES, BATCH = 5, 100
MEMORY = 1 << 20
"""KiB that the process may grow by while a batch is loaded."""


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
    if head.kind in (ParallelKind(), BlockKind()):
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


def test_a_file_that_no_memory_holds(tmp_path, monkeypatch):
    """A sparse file of 1 TB does that in a process of less address space."""

    def mapped(*arguments):
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr("safetensors.safe_open", mapped)
    with pytest.raises(CapacityError, match=r"model.safetensors \(\d+ bytes\) does not fit into this process's memory"):
        load_target(tiny_checkpoints.write_target(tmp_path))
