"""MTP modules for an engine's own target, at random sizes, against transformers' own layers, in vLLM's names.

Qwen3-Next and Qwen3.5: gates on the attention's output, heads that are partly rotated, norms of 1 + weight, mixtures
whose shared expert has a gate. GLM-4.5 and 4.6. DeepSeek-V3.2, whose indexer chooses every key of a short text.
transformers drops these modules: what is around their layer is put together here as vLLM's `qwen3_next_mtp.py`,
`qwen3_5_mtp.py`, `glm4_moe_mtp.py` and `deepseek_mtp.py` have it; a carry is after the last norm.
"""

import importlib
import json
import random
from types import SimpleNamespace

import pytest
import torch
from changed_folders import change_config, change_tensors, refused
from safetensors.torch import save_file
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target, target_shape
from torch import nn

transformers = pytest.importorskip("transformers")
ROWS, VOCAB, LAYERS = 9, 64, 4
QWEN = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
KINDS = QWEN | {"glm4_moe": "Glm4Moe", "deepseek_v32": "DeepseekV32"}
QWEN_NAMES = ("mtp", "mtp.layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
NAMES = (f"model.layers.{LAYERS}", f"model.layers.{LAYERS}", "enorm", "hnorm", "eh_proj", "shared_head.norm")


def random_sizes(kind, seed):
    """Keys of a configuration."""
    choose = random.Random(f"{kind}{seed}").choice
    head_dim = choose([8, 16, 32])
    if kind == "deepseek_v32":
        return latent_sizes(choose)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": choose([32, 48]),
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": choose([1, 2, 4]),
        "head_dim": head_dim,
        "max_position_embeddings": choose([64, 256]),
        "rms_norm_eps": choose([1e-6, 1e-3]),
        "attention_bias": choose([False, False, True]),
        "tie_word_embeddings": choose([False, True]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": choose([1e4, 1e7]),
            "partial_rotary_factor": choose([f for f in (0.25, 0.5, 1.0) if head_dim * f >= 4]),
        },
    }
    if kind == "glm4_moe":
        sizes["use_qk_norm"] = choose([False, True])
        return sizes | grouped_sizes(choose)
    if kind != "qwen3_5_moe":
        sizes["intermediate_size"] = choose([40, 56])
    if kind != "qwen3_5":
        sizes |= {
            "num_experts": choose([4, 7]),
            "num_experts_per_tok": choose([1, 2, 4]),
            "moe_intermediate_size": choose([16, 24]),
            "shared_expert_intermediate_size": choose([16, 40]),
        }
    if kind == "qwen3_next":
        sizes |= {
            "norm_topk_prob": choose([False, True]),
            "mlp_only_layers": choose([[], [1], [0]]),
            "decoder_sparse_step": choose([1, 1, 2]),
        }
    else:
        sizes["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    return sizes


def grouped_sizes(choose):
    """Keys of a mixture as DeepSeek-V3 and GLM-4.5 have it."""
    groups = choose([1, 2, 4])
    return {
        "intermediate_size": 40,
        "moe_intermediate_size": choose([16, 24]),
        "n_routed_experts": 8,
        "num_experts_per_tok": choose([1, 2]),
        "n_shared_experts": choose([1, 2]),
        "n_group": groups,
        "topk_group": choose([1, groups]),
        "norm_topk_prob": choose([False, True]),
        "routed_scaling_factor": choose([1.0, 2.5]),
        "first_k_dense_replace": choose([0, 1, 3]),
    }


def latent_sizes(choose):
    """Keys of a DeepSeek-V3.2 whose indexer sees no text that is too long."""
    rotated = choose([4, 8])
    return grouped_sizes(choose) | {
        "vocab_size": VOCAB,
        "hidden_size": choose([32, 48]),
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": choose([12, 20]),
        "kv_lora_rank": choose([8, 10]),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": choose([6, 12]),
        "v_head_dim": choose([6, 14]),
        "index_topk": 32,
        "index_head_dim": rotated + choose([0, 4]),
        "index_n_heads": choose([1, 3]),
        "rms_norm_eps": choose([1e-6, 1e-3]),
        "tie_word_embeddings": choose([False, True]),
        "rope_parameters": {"rope_type": "default", "rope_theta": choose([1e4, 1e6])},
    }


def made_of(kind, sizes):
    """The configuration of transformers that has these sizes, and its classes."""
    named, text = KINDS[kind], "Text" if kind in QWEN and kind != "qwen3_next" else ""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = getattr(transformers, f"{named}{text}Config")(**sizes)
    classes = SimpleNamespace(
        layer=getattr(modeling, f"{named}DecoderLayer"),
        norm=getattr(modeling, f"{named}RMSNorm"),
        rotary=getattr(modeling, f"{named}{text}RotaryEmbedding"),
    )
    return config, classes


class Module(nn.Module):
    """A module as vLLM has it, around transformers' layer."""

    def __init__(self, config, classes):
        super().__init__()
        size = config.hidden_size
        one = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
        if hasattr(config, "layer_types"):
            one["layer_types"] = [config.layer_types[-1]]
        alone = type(config)(**{**config.to_dict(), **one, "mlp_layer_types": None})
        alone._attn_implementation = "eager"
        self.embed_norm, self.hidden_norm, self.norm = (classes.norm(size, eps=config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = classes.layer(alone, 0)
        self.rotary = classes.rotary(alone)

    def forward(self, embedded, hidden):
        rows = embedded.shape[0]
        x = self.fc(torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1))[None]
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        out = self.layer(x, position_embeddings=self.rotary(x, positions), attention_mask=mask, position_ids=positions)
        return self.norm(out[0])


def write(folder, kind, seed):
    """Write a folder of a target with an MTP module, of its own layers one tensor; return the module."""
    sizes = random_sizes(kind, seed)
    config, classes = made_of(kind, sizes)
    torch.manual_seed(seed)
    module = Module(config, classes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.2)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(-1.0, 0.2)
    prefix, layer, *names = QWEN_NAMES if kind in QWEN else NAMES
    parts = dict(zip(("embed_norm", "hidden_norm", "fc", "norm"), names, strict=True))
    tensors = {}
    for name, tensor in module.state_dict().items():
        part, rest = name.split(".", 1)
        if part != "rotary":
            tensors[f"{layer}.{rest}" if part == "layer" else f"{prefix}.{parts[part]}.{rest}"] = tensor
    if kind not in ("qwen3_5", "qwen3_5_moe"):  # Qwen3.5 has all experts in one tensor, the others do not
        for name in [name for name in tensors if ".mlp.experts." in name]:
            for expert, matrix in enumerate(tensors.pop(name)):
                block, kinds = name.rsplit(".", 1)[0], name.rsplit(".", 1)[1].removesuffix("_proj").split("_")
                for each, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                    tensors[f"{block}.{expert}.{each}_proj.weight"] = part
    pictures = kind in ("qwen3_5", "qwen3_5_moe")
    own = "model.language_model." if pictures else "model."
    hidden = config.hidden_size
    tensors |= {
        f"{own}embed_tokens.weight": torch.randn(VOCAB, hidden),
        f"{own}layers.0.linear_attn.A_log": torch.zeros(4),
        f"{own}layers.3.self_attn.q_norm.weight": torch.zeros(4),
    }
    if pictures:
        tensors["model.visual.merger.norm.weight"] = torch.zeros(4)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = torch.randn(VOCAB, hidden) / 8
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    text = config.to_dict()
    text["dtype"] = "float32"
    if pictures:
        tied = {"tie_word_embeddings": config.tie_word_embeddings}
        text = {"model_type": kind, "text_config": text, "vision_config": {"depth": 2}, "image_token_id": 5, **tied}
    (folder / "config.json").write_text(json.dumps(text))
    return module


@torch.no_grad()
def drafted(folder, module, dense_attend, seed, num_steps=3):
    """Compare the logits of some steps, each of which takes the carry of the one before."""
    target = target_shape(folder, max_model_len=32)
    head = load_drafter(folder, target)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, target.hidden_size, generator=generator) * 0.02  # small, so that rms_norm_eps tells
    caches: dict = {}
    new_tokens, new_hidden, worst = tokens, head.combine(hidden), 0.0
    for _ in range(num_steps):
        rows = torch.arange(len(tokens) - len(new_tokens), len(tokens))
        out = head.forward(new_tokens, new_hidden, dense_attend(head.attention_layers, rows, caches))
        states = module(target.embed_tokens[tokens], hidden)
        want, got = states[-1] @ target.lm_head.t(), head.logits(out.hidden[-1:])[0]
        worst = max(worst, float((want - got).abs().max()))
        new_tokens, new_hidden = want.argmax()[None], out.carry[-1:]
        tokens, hidden = torch.cat((tokens, new_tokens)), torch.cat((hidden, states[-1:]))
    return worst


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_three_steps(kind, seed, tmp_path, dense_attend):
    module = write(tmp_path, kind, seed)
    assert str(drafter_format(tmp_path)).startswith(f"mtp, {'qwen' if kind in QWEN else 'deepseek'} layout")
    assert drafted(tmp_path, module, dense_attend, seed) < 1e-4


def test_what_is_refused(tmp_path):
    """The target itself; keys and tensors that would change the result."""
    write(tmp_path, "qwen3_5_moe", 0)
    with refused("has no tensor 'model.language_model.layers.0.linear_attn.in_proj_qkv.weight'"):
        load_target(tmp_path)
    target = target_shape(tmp_path, max_model_len=32)
    for key, value in (("mtp_use_dedicated_embeddings", True), ("layer_scale", True), ("hidden_act", "gelu")):
        change_config(tmp_path, "text_config", **{key: value})
        with refused(f"'{key}' is {value!r}"):
            load_drafter(tmp_path, target)
        change_config(tmp_path, "text_config", **{key: None})
    change_config(tmp_path, "text_config", attn_output_gate=False)
    with refused("self_attn.q_proj.weight"):
        load_drafter(tmp_path, target)
    change_config(tmp_path, "text_config", attn_output_gate=True, norm_topk_prob=False)
    with refused("'norm_topk_prob' is False"):
        load_drafter(tmp_path, target)
    change_config(tmp_path, "text_config", norm_topk_prob=True)
    change_tensors(tmp_path, lambda tensors: tensors.update({"mtp.layers.1.input_layernorm.weight": torch.zeros(4)}))
    with refused("mtp.layers.1.input_layernorm.weight"):
        load_drafter(tmp_path, target)


def test_an_indexer_that_would_choose(tmp_path):
    """DeepSeek-V3.2: beyond `index_topk` keys its attention is to chosen ones."""
    write(tmp_path, "deepseek_v32", 0)
    for written in ("indexed_attention", "deepseek_sparse_attention"):  # by transformers 5.24 and 5.17
        change_config(tmp_path, layer_types=[written] * LAYERS)
        load_drafter(tmp_path, target_shape(tmp_path, max_model_len=32))
    with refused("'index_topk' is 32", "max_model_len 33", "max_model_len=32 or less"):
        load_drafter(tmp_path, target_shape(tmp_path, max_model_len=33))
