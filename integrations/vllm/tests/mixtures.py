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
from vllm_objects import DraftModule, Linear, RMSNorm, padded_to_64

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, EXPERTS, INNER, POSITIONS = 96, 32, 2, 4, 2, 16, 6, 24, 128
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
LAYER = {"qwen": "mtp.layers.0", "glm": f"model.layers.{LAYERS}"}
NORMS = {
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "glm": (f"{LAYER['glm']}.enorm", f"{LAYER['glm']}.hnorm", f"{LAYER['glm']}.shared_head.norm"),
}
PROJECTION = {"qwen": "mtp.fc", "glm": f"{LAYER['glm']}.eh_proj"}


def mixture_folder(folder: Path, kind: str) -> Path:
    """A target's folder, of whose layers nobody reads a tensor, with one MTP module of `kind`."""
    g, layer, query = torch.Generator().manual_seed(17), LAYER[kind], HEADS * DIM
    shared = "shared_expert" if kind == "qwen" else "shared_experts"

    def draw(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g) * gain * shape[-1] ** -0.5

    matrices = {
        PROJECTION[kind]: (HIDDEN, 2 * HIDDEN), f"{layer}.mlp.gate": (EXPERTS, HIDDEN),
        f"{layer}.self_attn.q_proj": ((2 if kind == "qwen" else 1) * query, HIDDEN),
        f"{layer}.self_attn.k_proj": (KV_HEADS * DIM, HIDDEN), f"{layer}.self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        f"{layer}.self_attn.o_proj": (HIDDEN, query),
    }  # fmt: skip
    for name in [*(f"experts.{i}" for i in range(EXPERTS)), shared]:
        matrices |= {f"{layer}.mlp.{name}.{part}_proj": (INNER, HIDDEN) for part in ("gate", "up")}
        matrices[f"{layer}.mlp.{name}.down_proj"] = (HIDDEN, INNER)
    if kind == "qwen":
        matrices[f"{layer}.mlp.shared_expert_gate"] = (1, HIDDEN)
    tensors = {f"{name}.weight": draw(*shape, gain=2.0) for name, shape in matrices.items()}
    heads = [f"{layer}.self_attn.{name}" for name in ("q_norm", "k_norm")]
    for name in (*NORMS[kind], f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", *heads):
        size = DIM if name in heads else HIDDEN
        tensors[f"{name}.weight"] = torch.rand(size, generator=g) + (0.0 if kind == "qwen" else 0.5)
    if kind == "glm":
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = draw(EXPERTS)
    tensors |= {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "lm_head.weight": draw(VOCAB, HIDDEN, gain=4.0)}
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(HIDDEN)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    return folder


class GemmaRMSNorm(RMSNorm):
    pass


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


class Mixture(nn.Module):
    """vLLM's block: all experts in two tensors, over all rows, of which each keeps its own."""

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
        scores = x @ self.gate.t()
        scores = scores.sigmoid() if self.sigmoid else scores.softmax(-1)
        chosen = (scores + self.rest if self.sigmoid else scores).topk(2, -1).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        routed = torch.einsum("te,eth->th", weights, self.experts(x, self.w13, self.w2))
        shared = self.experts(x, self.shared13, self.shared2)[0]
        return routed + (shared if self.sigmoid else shared * (x @ self.rest.t()).sigmoid())

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


class Qwen3NextMTP(MtpModule):
    kind = "qwen"

    def name_parts(self, _: Any, norms: list[Any], projection: Any, lm_head: Any) -> None:
        inner = self.model
        (inner.pre_fc_norm_embedding, inner.pre_fc_norm_hidden, inner.norm), inner.fc = norms, projection
        self.lm_head = lm_head

    def norm(self, name: str) -> RMSNorm:
        return GemmaRMSNorm(self.read[f"{name}.weight"], self.eps)
