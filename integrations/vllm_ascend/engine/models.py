"""Makes a small target and its drafters, in the shapes that an NPU takes: python models.py FOLDER (two minutes).

The target learns a made-up language, in which a token follows from the one before and from the last token that names a
table. So its best token leads the second one clearly, by far more than bfloat16 rounds off, and depends on keys far
back. The EAGLE-3 head is trained on the target's states for a short while: some of its drafts are accepted, and some
are not. The EAGLE head has random weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/training"))
from head import Eagle3Head

VOCAB, TABLES, FIRST = 128, 4, 2
"""Tokens FIRST to FIRST + TABLES - 1 name a table."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "attention_bias": False,
}  # fmt: skip
LAYERS, AUX = 4, [1, 2, 3]
BATCH, LENGTH = 24, 48


def language(seed: int = 7) -> torch.Tensor:
    """Return the next token by table and token, int64 [TABLES, VOCAB]."""
    g = torch.Generator().manual_seed(seed)
    tables = torch.stack([torch.randperm(VOCAB - FIRST, generator=g) + FIRST for _ in range(TABLES)])
    return torch.cat([torch.full((TABLES, FIRST), FIRST), tables], dim=1)


def texts(tables: torch.Tensor, count: int, length: int, g: torch.Generator, strays: float) -> torch.Tensor:
    """Return texts [count, length] of the language. A token is a random one with the probability `strays`."""
    table = torch.randint(TABLES, (count,), generator=g)
    token, made = table + FIRST, [table + FIRST]
    for _ in range(length - 1):
        stray = torch.randint(FIRST, VOCAB, (count,), generator=g)
        token = torch.where(torch.rand(count, generator=g) < strays, stray, tables[table, token])
        table = torch.where(token < FIRST + TABLES, token - FIRST, table)
        made.append(token)
    return torch.stack(made, dim=1)


def train_target(steps: int) -> LlamaForCausalLM:
    g, tables = torch.Generator().manual_seed(1), language()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**SIZES, num_hidden_layers=LAYERS, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        batch = texts(tables, BATCH, LENGTH, g, strays=0.15)
        loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print("target", step, round(loss.item(), 3), flush=True)
    return model


def train_head(model: LlamaForCausalLM, steps: int, draft_steps: int = 3) -> Eagle3Head:
    g, tables = torch.Generator().manual_seed(2), language()
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": AUX}
    config = {**SIZES, "draft_vocab_size": VOCAB, "eagle_config": eagle, "num_hidden_layers": 1}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16"}
    config |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(3)
    head = Eagle3Head(config)
    embedding = model.get_input_embeddings().weight.detach()

    def seen(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out = model(batch, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer] for layer in AUX], dim=-1), out.logits.argmax(-1)

    aux, _ = seen(texts(tables, BATCH, LENGTH, g, 0.1))
    head.begin(torch.arange(VOCAB), model.lm_head.weight.detach(), model.model.norm.weight.detach(), aux.flatten(0, 1))
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        batch = texts(tables, BATCH, LENGTH, g, strays=0.1)
        aux, answer = seen(batch)
        loss = torch.zeros(())
        for k, state in enumerate(head.unroll(embedding[batch], aux, draft_steps)):
            rows = state.shape[1] - 1
            loss = loss + F.cross_entropy(
                head.lm_head(state[:, :rows]).flatten(0, 1), answer[:, k + 1 : k + 1 + rows].flatten()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print("head", step, round(loss.item() / draft_steps, 3), flush=True)
    return head


def write_random(folder: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any], seed: int) -> None:
    """Write a drafter of random weights; vectors are ones."""
    g = torch.Generator().manual_seed(seed)
    made = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=g) * shape[1] ** -0.5
        for name, shape in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.bfloat16() for name, tensor in made.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def layer(prefix: str, inputs: int = 256) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of an EAGLE drafter's first layer, which has no norm before attention."""
    shapes = {"q": (256, inputs), "k": (128, inputs), "v": (128, inputs), "o": (256, 256)}
    made: dict[str, tuple[int, ...]] = {f"{prefix}.self_attn.{n}_proj.weight": shape for n, shape in shapes.items()}
    made |= {f"{prefix}.mlp.{n}_proj.weight": (256, 256) for n in ("gate", "up", "down")}
    return made | {f"{prefix}.post_attention_layernorm.weight": (256,)}


def main(folder: Path) -> None:
    quick = int(os.environ.get("STEPS", "360"))
    target = train_target(quick)
    target.to(torch.bfloat16).save_pretrained(folder / "target")
    head = train_head(target.float(), quick // 3)
    head.save(folder / "eagle3")
    base = {**SIZES, "num_hidden_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    eagle = {**layer("layers.0"), "fc.weight": (256, 512)}
    write_random(folder / "eagle", eagle, base | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, 4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
