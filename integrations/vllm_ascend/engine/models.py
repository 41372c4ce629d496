"""Makes a small target and its drafters, in the shapes that an NPU takes: python models.py FOLDER (two minutes).

The target learns a made-up language, in which a token follows from the one before and from the last token that names a
table. So its best token leads the second one clearly, by far more than bfloat16 rounds off, and depends on keys far
back. The drafters are trained on the target's states for a short while: some of their drafts are accepted, and some are
not. They are an EAGLE-3 head, an EAGLE head of two layers, and an MTP module in a copy of the target, in MiMo's layout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/training"))
from head import DecoderLayer, Eagle3Head, rotate

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


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose words are the numbers of the tokens. Any other word is token FIRST."""
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCAB)}, unk_token=str(FIRST)))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=str(FIRST)).save_pretrained(folder)


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


class PairDrafter(torch.nn.Module):
    """An EAGLE drafter or an MTP module: layers over a pair, the embedded next token and the target's state."""

    def __init__(self, layers: int, *, mtp: bool) -> None:
        """mtp: with the norms of MiMo's module. EAGLE has none but those within its layers."""
        super().__init__()
        size, eps = SIZES["hidden_size"], SIZES["rms_norm_eps"]
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            torch.nn.RMSNorm(size, eps=eps) if mtp else torch.nn.Identity() for _ in range(3)
        )
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList(DecoderLayer(SIZES, size) for _ in range(layers))
        if not mtp:
            self.layers[0].input_layernorm = torch.nn.Identity()

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states [B, R, H] of rows with embedded next tokens and states of the target, [B, R, H] each."""
        x = self.fc(torch.cat([self.token_layernorm(embeds), self.hidden_layernorm(hidden)], dim=-1))
        positions = torch.arange(x.shape[1])[None]
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            query, key, value = (
                layer.self_attn[f"{name}_proj"](normed).unflatten(-1, (-1, SIZES["head_dim"])).transpose(1, 2)
                for name in "qkv"
            )
            query, key = (rotate(each, positions, SIZES["rope_theta"]) for each in (query, key))
            key, value = (each.expand_as(query) for each in (key, value))
            x = layer.finish(F.scaled_dot_product_attention(query, key, value, is_causal=True), x)
        return self.final_layernorm(x)


def train_pairs(model: LlamaForCausalLM, drafter: PairDrafter, steps: int, *, normed: bool) -> PairDrafter:
    """Train one draft step on the target's states. normed: the states after its last norm, not those before."""
    g, tables, seen = torch.Generator().manual_seed(4), language(), list[torch.Tensor]()
    embedding, norm = model.get_input_embeddings().weight.detach(), model.model.norm
    hook = norm.register_forward_hook(lambda _, given, after: seen.append(after if normed else given[0]))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        batch = texts(tables, BATCH, LENGTH, g, strays=0.1)
        with torch.no_grad():
            answer = model(batch).logits.argmax(-1)
        logits = model.lm_head(drafter(embedding[batch[:, 1:]], seen.pop()[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), answer[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print("pairs", step, round(loss.item(), 3), flush=True)
    hook.remove()
    return drafter


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Write a folder in bfloat16."""
    config = {**SIZES, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, **config}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))


def write_mtp(folder: Path, target: LlamaForCausalLM, module: PairDrafter) -> None:
    """Write the target and the module as one folder of MiMo, a Qwen2 whose biases are zero here."""
    tensors = {name: tensor.detach() for name, tensor in target.state_dict().items()}
    for name, tensor in module.state_dict().items():
        if name == "fc.weight":  # MiMo has the columns of the state first
            tensors["model.mtp_layers.0.input_proj.weight"] = tensor.roll(SIZES["hidden_size"], dims=1)
        else:
            tensors[f"model.mtp_layers.0.{name.removeprefix('layers.0.')}"] = tensor
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = torch.zeros(tensors[name].shape[0])
    names = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    write(folder, tensors, **names, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)


def main(folder: Path) -> None:
    quick = int(os.environ.get("STEPS", "360"))
    target = train_target(quick)
    target.to(torch.bfloat16).save_pretrained(folder / "target")
    write_tokenizer(folder / "target")
    head = train_head(target.float(), quick // 3)
    head.save(folder / "eagle3")
    torch.manual_seed(5)
    write_mtp(folder / "mtp", target, train_pairs(target, PairDrafter(1, mtp=True), quick // 3, normed=False))
    eagle = train_pairs(target, PairDrafter(2, mtp=False), quick // 3, normed=True).state_dict()
    write(folder / "eagle", eagle, architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
