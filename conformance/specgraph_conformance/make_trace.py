"""Makes the golden trace of a small Llama as a draft model, in float64, without caches and without device code.

python -m specgraph_conformance.make_trace conformance/specgraph_conformance/traces/draft-model

Every draft comes from a whole pass over the request's tokens. What the target accepts and samples is random, chosen so
that no draft is a near tie.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from specgraph.checkpoints import load_target
from specgraph.models.llama import LlamaTarget

from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.traces import as_data

SEED, K, ROUNDS, MARGIN = 20261122, 4, 14, 0.25
JOINS = {0: (5, 19), 2: (33,), 5: (1,), 8: (16, 47)}
"""By round: prompt lengths of the requests that join."""
LEAVES = {4: (0,), 9: (2, 3)}
"""By round: the requests that are in it no more."""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}


def write_checkpoint(folder: Path) -> None:
    """A random Llama whose logits depend on the whole context."""
    generator = torch.Generator().manual_seed(SEED)

    def random_matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale / columns**0.5).to(torch.bfloat16)

    h, inner, heads, kv, dim = (
        CONFIG[n]
        for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    tensors = {
        "model.embed_tokens.weight": random_matrix(CONFIG["vocab_size"], h, h**0.5),
        "model.norm.weight": torch.ones(h, dtype=torch.bfloat16),
        "lm_head.weight": random_matrix(CONFIG["vocab_size"], h, 2.5),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns, scale in (
            ("self_attn.q_proj", heads * dim, h, 2.0),
            ("self_attn.k_proj", kv * dim, h, 2.0),
            ("self_attn.v_proj", kv * dim, h, 2.0),
            ("self_attn.o_proj", h, heads * dim, 2.0),
            ("mlp.gate_proj", inner, h, 1.0),
            ("mlp.up_proj", inner, h, 1.0),
            ("mlp.down_proj", h, inner, 1.0),
        ):
            tensors[f"{at}{name}.weight"] = random_matrix(rows, columns, scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(h, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def draft(model: LlamaTarget, tokens: list[int], k: int) -> tuple[list[int], float]:
    """K greedy tokens after `tokens`, each from a pass over all before it, and their smallest lead."""
    drafts, lead = list[int](), float("inf")
    for _ in range(k):
        dense = DenseKeys.empty(model.attention_layers)
        ids = [*tokens, *drafts]
        dense.at(range(len(ids)))
        logits = model.logits(model.forward(torch.tensor(ids), dense.attend).hidden[-1:])[0]
        best, second = logits.topk(2).values.tolist()
        lead = min(lead, best - second)
        drafts.append(int(logits.argmax()))
    return drafts, lead


def make(folder: Path) -> None:
    """Write checkpoint and trace."""
    write_checkpoint(folder)
    model, chance = load_target(folder, dtype=torch.float64), random.Random(SEED)
    vocab = CONFIG["vocab_size"]
    tokens: dict[int, list[int]] = {}
    drafts: dict[int, list[int]] = {}
    rounds: list[list[dict[str, Any]]] = []
    margin, next_id = float("inf"), 0
    for number in range(ROUNDS):
        for id in LEAVES.get(number, ()):
            del tokens[id], drafts[id]
        joining = dict(enumerate(JOINS.get(number, ()), next_id))
        next_id += len(joining)
        requests: list[dict[str, Any]] = []
        for id in [*tokens, *joining]:
            about, lead = _one(model, id, tokens.get(id), drafts.get(id), joining.get(id), chance, vocab)
            tokens[id] = about.pop("token_ids")
            drafts[id] = about["draft_token_ids"]
            margin = min(margin, lead)
            requests.append(about)
        rounds.append(requests)
    (folder / "trace.json").write_text(as_data("draft-model", K, margin, rounds), encoding="utf-8")
    print(f"{sum(map(len, rounds))} proposes of {next_id} requests, margin {margin:.3f}")


def _one(
    model: LlamaTarget,
    id: int,
    before: list[int] | None,
    drafted: list[int] | None,
    prompt_length: int | None,
    chance: random.Random,
    vocab: int,
) -> tuple[dict[str, Any], float]:
    """A round of one request, drawn until its drafts are no near ties."""
    while True:
        if before is None or drafted is None:
            prompt = [chance.randrange(vocab) for _ in range(prompt_length or 0)]
            sampled = [chance.randrange(vocab)]
            about: dict[str, Any] = {"id": id, "prompt": prompt, "sampled_token_ids": sampled}
        else:
            prompt, accepted = before, chance.randrange(K + 1)
            own = chance.choice([t for t in range(vocab) if accepted == K or t != drafted[accepted]])
            sampled = [*drafted[:accepted], own]
            about = {"id": id, "sampled_token_ids": sampled}
        drafts, lead = draft(model, [*prompt, *sampled], K)
        if lead >= MARGIN:
            return {**about, "draft_token_ids": drafts, "token_ids": [*prompt, *sampled]}, lead


if __name__ == "__main__":
    with torch.no_grad():
        make(Path(sys.argv[1]))
