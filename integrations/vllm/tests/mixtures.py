"""MTP modules with mixtures of experts: folders in the checkpoints' names with random tensors, and vLLM's objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm_objects import DraftModule, GemmaRMSNorm, Linear, padded_to_64

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, EXPERTS, INNER, POSITIONS = 128, 32, 2, 4, 2, 16, 6, 24, 128
SHARED = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": DIM, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32", "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER, "intermediate_size": INNER, "norm_topk_prob": True, "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
CONFIGS = {
    "qwen": SHARED | {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_experts": EXPERTS,
        "shared_expert_intermediate_size": INNER, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "glm": SHARED | {
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": EXPERTS, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 0,
        "use_qk_norm": True, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
QUERY_RANK, RANK, ROTATED, PLAIN, VALUE = 20, 24, 8, 12, 10
CONFIGS["deepseek"] = CONFIGS["glm"] | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": HEADS,
    "q_lora_rank": QUERY_RANK, "kv_lora_rank": RANK, "qk_rope_head_dim": ROTATED, "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUE, "head_dim": ROTATED, "use_qk_norm": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LAYER = {"qwen": "mtp.layers.0", "glm": f"model.layers.{LAYERS}", "deepseek": f"model.layers.{LAYERS}"}
OF_DEEPSEEK = tuple(f"{LAYER['deepseek']}.{name}" for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"))
NORMS = {
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "glm": OF_DEEPSEEK[:3],
    "deepseek": OF_DEEPSEEK[:3],
}
PROJECTION = {"qwen": "mtp.fc", "glm": OF_DEEPSEEK[3], "deepseek": OF_DEEPSEEK[3]}


def mixture_folder(folder: Path, kind: str) -> Path:
    """A target's folder, of whose layers nobody reads a tensor, with one MTP module of `kind`."""
    g, layer, query = torch.Generator().manual_seed(17), LAYER[kind], HEADS * DIM
    shared = "shared_expert" if kind == "qwen" else "shared_experts"

    def draw(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * gain * shape[-1] ** -0.5

    matrices = {
        PROJECTION[kind]: (HIDDEN, 2 * HIDDEN), f"{layer}.mlp.gate": (EXPERTS, HIDDEN),
    }  # fmt: skip
    attention = {
        "q_proj": ((2 if kind == "qwen" else 1) * query, HIDDEN), "k_proj": (KV_HEADS * DIM, HIDDEN),
        "v_proj": (KV_HEADS * DIM, HIDDEN), "o_proj": (HIDDEN, query),
    }  # fmt: skip
    heads = {"q_norm": DIM, "k_norm": DIM}
    if kind == "deepseek":
        attention = {
            "q_a_proj": (QUERY_RANK, HIDDEN), "q_b_proj": (HEADS * (PLAIN + ROTATED), QUERY_RANK),
            "kv_a_proj_with_mqa": (RANK + ROTATED, HIDDEN), "kv_b_proj": (HEADS * (PLAIN + VALUE), RANK),
            "o_proj": (HIDDEN, HEADS * VALUE),
        }  # fmt: skip
        heads = {"q_a_layernorm": QUERY_RANK, "kv_a_layernorm": RANK}
    matrices |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
    for name in [*(f"experts.{i}" for i in range(EXPERTS)), shared]:
        matrices |= {f"{layer}.mlp.{name}.{part}_proj": (INNER, HIDDEN) for part in ("gate", "up")}
        matrices[f"{layer}.mlp.{name}.down_proj"] = (HIDDEN, INNER)
    if kind == "qwen":
        matrices[f"{layer}.mlp.shared_expert_gate"] = (1, HIDDEN)
    tensors = {f"{name}.weight": draw(*shape, gain=2.0) for name, shape in matrices.items()}
    norms = dict.fromkeys((*NORMS[kind], f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"), HIDDEN)
    for name, size in (norms | {f"{layer}.self_attn.{name}": size for name, size in heads.items()}).items():
        tensors[f"{name}.weight"] = torch.rand(size, generator=g) + (0.0 if kind == "qwen" else 0.5)
    if kind != "qwen":
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = draw(EXPERTS)
    tensors |= {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "lm_head.weight": draw(VOCAB, HIDDEN, gain=4.0)}
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(HIDDEN)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    return folder


CONTEXT: list[int] = []
"""The rows of each forward context that is entered: a mixture of vLLM's finds its layer in it."""


@contextmanager
def forward_context(attn_metadata, vllm_config, num_tokens=None) -> Iterator[None]:
    """vLLM's `set_forward_context`."""
    assert attn_metadata is None
    assert vllm_config is not None
    CONTEXT.append(num_tokens)
    yield
    CONTEXT.pop()


class Group:
    """vLLM's group of ranks, whose own sums are no numbers in a warm-up and in another's capture."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.full_like(x, float("nan"))


TP_GROUP = Group()


class Mixture(nn.Module):
    """vLLM's block: all experts in two tensors, over all rows, of which each keeps its own."""

    ranks = 1
    """The number of ranks, each with some columns of each expert, that add up what they give."""

    def __init__(self, read: dict[str, Tensor], prefix: str, config: Any) -> None:
        super().__init__()

        def parameter(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor, requires_grad=False)

        def expert(name: str) -> tuple[Tensor, Tensor]:
            gate, up, down = (read[f"{prefix}.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            return torch.cat((gate, up)), down

        self.gate, self.scale = parameter(read[f"{prefix}.gate.weight"]), getattr(config, "routed_scaling_factor", 1.0)
        packed = zip(*(expert(f"experts.{i}") for i in range(EXPERTS)), strict=True)
        self.w13, self.w2 = (parameter(torch.stack(parts)) for parts in packed)
        self.sigmoid = f"{prefix}.gate.e_score_correction_bias" in read
        shared = expert("shared_experts" if self.sigmoid else "shared_expert")
        self.shared13, self.shared2 = (parameter(part[None]) for part in shared)
        name = "gate.e_score_correction_bias" if self.sigmoid else "shared_expert_gate.weight"
        self.rest = parameter(read[f"{prefix}.{name}"])

    def forward(self, x: Tensor) -> Tensor:
        assert CONTEXT[-1:] == [x.shape[0]]
        return self.mixed(x)

    def mixed(self, x: Tensor) -> Tensor:
        scores = x @ self.gate.t()
        scores = scores.sigmoid() if self.sigmoid else scores.softmax(-1)
        chosen = (scores + self.rest if self.sigmoid else scores).topk(2, -1).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        routed = torch.einsum("te,eth->th", weights, self.experts(x, self.w13, self.w2))
        shared = self.experts(x, self.shared13, self.shared2)[0]
        out = routed + (shared if self.sigmoid else shared * (x @ self.rest.t()).sigmoid())
        return out if self.ranks == 1 else TP_GROUP.all_reduce(out)

    @staticmethod
    def experts(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eih->eti", x, w13).chunk(2, -1)
        return torch.einsum("eti,ehi->eth", gate * gate.sigmoid() * up, w2)


class MtpModule(DraftModule):
    """The two classes below without their own names of parts; `kind` as in `mixture_folder`."""

    kind = "glm"

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        self.layer_name = LAYER[self.kind]
        super().__init__(folder, config, target, dtype)
        norms = [self.norm(name) for name in NORMS[self.kind]]
        projection = nn.Linear(1, 1, bias=False)
        projection.weight = nn.Parameter(self.read[f"{PROJECTION[self.kind]}.weight"], requires_grad=False)
        self.name_parts(self.model.layers[0], norms, projection, Linear(padded_to_64(target.lm_head.to(dtype))))

    def mlp(self, prefix: str) -> nn.Module:
        return Mixture(self.read, prefix, self.config)


class Glm4MoeMTP(MtpModule):
    def name_parts(self, block: Any, norms: list[Any], projection: Any, lm_head: Any) -> None:
        module = nn.Module()
        (module.enorm, module.hnorm, norm), module.eh_proj, module.mtp_block = norms, projection, block
        module.shared_head = nn.Module()
        module.shared_head.norm, module.shared_head.head = norm, lm_head
        self.model.layers = nn.ModuleDict({str(LAYERS): module})


class DeepseekV2MLAAttention(nn.Module):
    """vLLM's, whose `kv_b_proj` its inner module has split."""

    def __init__(self, module: DraftModule, prefix: str, layer_name: str) -> None:
        super().__init__()
        read, rotary = module.read, module.rotary
        self.num_heads, self.q_lora_rank, self.kv_lora_rank = HEADS, QUERY_RANK, RANK
        self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim = ROTATED, PLAIN, VALUE
        self.scaling, self.rotary_emb, rotary.is_neox_style = (PLAIN + ROTATED) ** -0.5, rotary, False
        self.q_a_layernorm, self.kv_a_layernorm = (module.norm(f"{prefix}.{x}_a_layernorm") for x in ("q", "kv"))
        first = [read[f"{prefix}.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        self.fused_qkv_a_proj = Linear(torch.cat(first))
        self.q_b_proj, self.o_proj = (Linear(read[f"{prefix}.{name}_proj.weight"]) for name in ("q_b", "o"))
        self.mla_attn, inner = nn.Module(), nn.Module()
        self.mla_attn.mla_attn, inner.layer_name = inner, layer_name
        both = read[f"{prefix}.kv_b_proj.weight"].t().view(RANK, HEADS, PLAIN + VALUE)
        key, value = both.split((PLAIN, VALUE), -1)
        inner.W_UK_T = nn.Parameter(key.permute(1, 2, 0), requires_grad=False)
        inner.W_UV = nn.Parameter(value.transpose(0, 1), requires_grad=False)


def as_vllm_stores(key: Tensor) -> Tensor:
    """A latent's row [1, ROTATED + RANK], its rotated part in halves, as vLLM stores it: the latent, then pairs."""
    rotated, latent = key.split((ROTATED, RANK), -1)
    return torch.cat((latent, rotated.view(1, 2, -1).transpose(1, 2).reshape(1, -1)), -1)


class DeepSeekMTP(Glm4MoeMTP):
    kind = "deepseek"

    def layer(self, prefix: str, layer_name: str) -> nn.Module:
        layer = nn.Module()
        layer.self_attn = DeepseekV2MLAAttention(self, f"{prefix}.self_attn", layer_name)
        layer.mlp, layer.routed_scaling_factor = self.mlp(f"{prefix}.mlp"), 1.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, self.norm(f"{prefix}.{name}"))
        return layer


class Qwen3NextMTP(MtpModule):
    kind = "qwen"

    def name_parts(self, _: Any, norms: list[Any], projection: Any, lm_head: Any) -> None:
        inner = self.model
        (inner.pre_fc_norm_embedding, inner.pre_fc_norm_hidden, inner.norm), inner.fc = norms, projection
        self.lm_head = lm_head

    def norm(self, name: str) -> GemmaRMSNorm:
        return GemmaRMSNorm(self.read[f"{name}.weight"], self.eps)
