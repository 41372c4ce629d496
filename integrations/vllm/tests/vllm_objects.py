"""Objects shaped as those of vLLM 0.26 that the plugin reads: seen on a GPU with vLLM itself, and in its sources.

0.28 has the same, except for the cache of draft logits, which is that of 0.33. The class names matter: the plugin asks
for them.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mimo import write_mimo
from safetensors.torch import load_file, save_file
from specgraph_models import load_target
from specgraph_plugin.vllm.mtp import mtp_parts
from torch import Tensor

LAYER_NAME = "model.layers.4.self_attn.attn"


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    pass


class CompressedTensorsLinearMethod:
    pass


class GPTQMarlinLinearMethod:
    pass


class RMSNorm(torch.nn.Module):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(weight, requires_grad=False), eps


class GemmaRMSNorm(RMSNorm):
    pass


class Linear(torch.nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self.quant_method: Any = UnquantizedLinearMethod()


class RotaryEmbedding(torch.nn.Module):
    """Cosines and sines by RoFormer's formula, in float64, then rounded."""

    def __init__(self, dim: int, positions: int, theta: float, dtype: torch.dtype) -> None:
        super().__init__()
        pair = torch.arange(dim // 2, dtype=torch.float64)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] / theta ** (2 * pair / dim)
        self.cos_sin_cache, self.is_neox_style = torch.cat((angle.cos(), angle.sin()), 1).to(dtype), True


class MRotaryEmbedding(RotaryEmbedding):
    pass


class DraftModule(torch.nn.Module):
    """vLLM's modules over a folder: its names, projections packed, rows of vocabularies padded to 64."""

    layer_name = "layers.0"

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__()
        read = load_file(folder / "model.safetensors")
        self.read = t = {name: x.to(dtype) if x.is_floating_point() else x for name, x in read.items()}
        self.config = SimpleNamespace(**{k: v for k, v in config.items() if k != "eagle_config"})
        self.eps, dim = config["rms_norm_eps"], config["head_dim"]

        rope = config.get("rope_parameters", {})
        theta, dim = config.get("rope_theta") or rope["rope_theta"], int(dim * rope.get("partial_rotary_factor", 1))
        self.rotary = RotaryEmbedding(dim, config["max_position_embeddings"], theta, dtype)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([self.layer(self.layer_name, LAYER_NAME)])
        self.model.embed_tokens = Linear(padded_to_64(target.embed_tokens.to(dtype)))
        if "fc.weight" in t:
            self.model.fc = Linear(t["fc.weight"])

    def packed(self, prefix: str, *names: str) -> Linear:
        parts = [[self.read.get(f"{prefix}.{name}_proj.{kind}") for name in names] for kind in ("weight", "bias")]
        return Linear(torch.cat(parts[0]), None if parts[1][0] is None else torch.cat(parts[1]))

    def mlp(self, prefix: str) -> torch.nn.Module:
        mlp = torch.nn.Module()
        mlp.gate_up_proj, mlp.down_proj = self.packed(prefix, "gate", "up"), self.packed(prefix, "down")
        return mlp

    def layer(self, prefix: str, layer_name: str) -> torch.nn.Module:
        """One decoder layer with the tensors under `prefix`; `layer_name` is that of its KV cache."""
        t, config = self.read, self.config
        attention = torch.nn.Module()
        attention.qkv_proj = self.packed(f"{prefix}.self_attn", "q", "k", "v")
        attention.o_proj, attention.rotary_emb = self.packed(f"{prefix}.self_attn", "o"), self.rotary
        attention.num_heads, attention.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        attention.total_num_kv_heads = config.num_key_value_heads
        attention.head_dim, attention.scaling = config.head_dim, config.head_dim**-0.5
        attention.attn = SimpleNamespace(layer_name=layer_name, sliding_window=None)
        layer = torch.nn.Module()
        layer.self_attn, layer.mlp = attention, self.mlp(f"{prefix}.mlp")
        for at, name in (
            (layer, "input_layernorm"), (layer, "hidden_norm"), (layer, "post_attention_layernorm"),
            (attention, "self_attn.q_norm"), (attention, "self_attn.k_norm"),
        ):  # fmt: skip
            if f"{prefix}.{name}.weight" in t:
                setattr(at, name.removeprefix("self_attn."), self.norm(f"{prefix}.{name}"))
        return layer

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.read[f"{name}.weight"], self.eps)


class Eagle3LlamaForCausalLM(DraftModule):
    layer_name = "midlayer"

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__(folder, config, target, dtype)
        self.model.norm = self.norm("norm")
        self.model.input_norm = self.model.fc_norm = None
        self.model.norm_output, self.model.use_aux_hidden_state, self.model.num_aux_hidden_states = False, True, 3
        self.lm_head = Linear(padded_to_64(self.read["lm_head.weight"]))
        self.draft_id_to_target_id = torch.nn.Parameter(self.read["d2t"], requires_grad=False)


class EagleLlamaForCausalLM(DraftModule):
    """Its first layer has no input norm, and its lm_head is the target's."""

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__(folder, config, target, dtype)
        self.model.layers[0].input_layernorm = torch.nn.Identity()
        self.lm_head = Linear(padded_to_64(target.lm_head.to(dtype)))


class DFlashQwen3ForCausalLM(DraftModule):
    """A folder in the authors' layout; embedding and lm_head are the target's."""

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        vocab = {"draft_vocab_size": config["vocab_size"]}
        super().__init__(folder, config | vocab, target, dtype)
        self.model.layers = torch.nn.ModuleList(
            self.layer(f"layers.{i}", f"model.layers.{8 + i}.self_attn.attn")
            for i in range(config["num_hidden_layers"])
        )
        for layer in self.model.layers:
            of = layer.self_attn
            of.causal, of.attention_sink_bias, of.v_scale = False, None, None
        self.model.norm, self.model.hidden_norm = self.norm("norm"), self.norm("hidden_norm")
        self.model.use_aux_hidden_state, self.model.has_separate_mask_embedding = True, False
        self.model.mask_token_id = config["dflash_config"]["mask_token_id"]
        self.lm_head, self.draft_id_to_target_id = Linear(padded_to_64(target.lm_head.to(dtype))), None


def dspark_folder(folder: Path) -> Path:
    """The shipped target's DFlash drafter with a random Markov head, in the authors' layout of DSpark."""
    shutil.copytree(Path(__file__).parents[3] / "examples/tiny-python/drafters/dflash", folder)
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 16, "markov_head_type": "vanilla"}
    config |= {"enable_confidence_head": False}
    (folder / "config.json").write_text(json.dumps(config))
    g, tensors = torch.Generator().manual_seed(11), load_file(file)
    for name, scale in (("markov_w1", 1.0), ("markov_w2", 0.5)):
        table = torch.randn(config["vocab_size"], config["markov_rank"], generator=g) * scale
        tensors[f"markov_head.{name}.weight"] = table.half()
    save_file(tensors, file)
    return folder


class Qwen3DSparkForCausalLM(DFlashQwen3ForCausalLM):
    """A folder of `dspark_folder`."""

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__(folder, config, target, dtype)
        self.model.markov_head = torch.nn.Module()
        self.model.markov_head.markov_w1 = Linear(self.read["markov_head.markov_w1.weight"])
        self.model.markov_head.markov_w2 = Linear(padded_to_64(self.read["markov_head.markov_w2.weight"]))


def mimo_folder(folder: Path) -> Path:
    """The shipped target and its MTP drafter in MiMo's layout, with biases that are not zero."""
    write_mimo(folder, Path(__file__).parents[3] / "examples/tiny-python/drafters/mtp")
    g, tensors = torch.Generator().manual_seed(11), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensors[name] = (torch.randn(tensor.shape, generator=g) / 10).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


class MiMoMTP(DraftModule):
    """A folder in MiMo's layout; embedding and lm_head are the target's. `mtp_layers` has the layer's number as key."""

    layer_name = "model.mtp_layers.0"

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__(folder, config | {"head_dim": target.sizes.head_dim}, target, dtype)
        block, module = self.model.layers[0], torch.nn.Module()
        del self.model.layers
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(module, name, self.norm(f"{self.layer_name}.{name}"))
        module.input_proj = torch.nn.Linear(1, 1, bias=False)
        module.input_proj.weight = torch.nn.Parameter(self.read[f"{self.layer_name}.input_proj.weight"])
        module.mtp_block = block
        self.model.mtp_layers = torch.nn.ModuleDict({str(config["num_hidden_layers"]): module})
        self.lm_head = Linear(padded_to_64(target.lm_head.to(dtype)))


class LlamaForCausalLM(DraftModule):
    """A language model of any number of layers as vLLM 0.33 loads a `draft_model`: its own embedding and lm_head."""

    layer_name = "model.layers.0"

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        own = load_target(folder, dtype=dtype)
        super().__init__(folder, config, own, dtype)
        self.model.layers = torch.nn.ModuleList(
            self.layer(f"model.layers.{i}", f"draft_model.model.layers.{i}.self_attn.attn")
            for i in range(config["num_hidden_layers"])
        )
        self.model.norm, self.lm_head = self.norm("model.norm"), Linear(padded_to_64(own.lm_head.to(dtype)))


class Qwen3ForCausalLM(LlamaForCausalLM):
    pass


def quantise(linear: Any, how: str) -> Any:
    """Make a linear FP8 as vLLM has it after loading: by "tensor" and "row" with the matrix as a view [in, out]."""
    matrix, size = linear.weight.data, 16
    rows, columns = matrix.shape
    block = {"tensor": (rows, columns), "row": (1, columns), "block": (size, size)}[how]
    parts = matrix.view(rows // block[0], block[0], columns // block[1], block[1])
    scale = parts.abs().amax((1, 3)) / 448
    stored = (parts / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
    linear.dequantised = (stored.double().view(parts.shape) * scale.double()[:, None, :, None]).view(rows, columns)
    linear.weight = torch.nn.Parameter(stored if how == "block" else stored.t(), requires_grad=False)
    linear.quant_method = CompressedTensorsLinearMethod() if how == "row" else Fp8LinearMethod()
    linear.weight_block_size = [size, size] if how == "block" else None
    scale = torch.nn.Parameter(scale.squeeze() if how == "tensor" else scale, requires_grad=False)
    setattr(linear, "weight_scale_inv" if how == "block" else "weight_scale", scale)
    return linear


def split(module: Any, rank: int, size: int) -> None:
    """Leave a rank's part of a module, as vLLM's linears and embeddings load it; one KV head is on every rank."""

    def cut(at: Any, *parts: tuple[int, int], dim: int = 0, names: tuple[str, ...] = ("weight", "bias")) -> None:
        """`parts`, where several are packed: their sizes, and over how many ranks each is split."""
        for name in names:
            tensor = getattr(at, name, None)
            if tensor is not None and dim < tensor.dim():
                given = parts or [(tensor.shape[dim], size)]
                pieces = zip(tensor.split([rows for rows, _ in given], dim=dim), given, strict=True)
                mine = [piece.chunk(over, dim=dim)[rank % over] for piece, (_, over) in pieces]
                setattr(at, name, torch.nn.Parameter(torch.cat(mine, dim=dim), requires_grad=False))

    for layer in [m for m in module.modules() if hasattr(m, "self_attn")]:
        attention, mlp = layer.self_attn, layer.mlp
        cut(attention.o_proj, dim=1)
        if hasattr(attention, "q_b_proj"):
            cut(attention.q_b_proj)
            of_vllm = getattr(attention, "mla_attn", None)
            cut(attention if of_vllm is None else of_vllm.mla_attn, names=("W_UK_T", "W_UV", "w_kc", "w_vc"))
        else:
            over, kv = min(size, attention.num_kv_heads), attention.num_kv_heads * attention.head_dim
            query = attention.qkv_proj.weight.shape[0] - 2 * kv
            cut(attention.qkv_proj, (query, size), (kv, over), (kv, over))
            attention.num_heads, attention.num_kv_heads = attention.num_heads // size, attention.num_kv_heads // over
        if hasattr(mlp, "w13"):
            cut(mlp, *[(mlp.w13.shape[1] // 2, size)] * 2, dim=1, names=("w13", "shared13"))
            cut(mlp, dim=2, names=("w2", "shared2"))
            mlp.ranks = size
        else:
            cut(mlp.gate_up_proj, *[(mlp.gate_up_proj.weight.shape[0] // 2, size)] * 2)
            cut(mlp.down_proj, dim=1)
    cut(module.model.embed_tokens)
    cut(module.lm_head if hasattr(module, "lm_head") else mtp_parts(module).lm_head)
    if getattr(module, "kind", "") == "qwen":
        cut(module.model.fc)


def padded_to_64(weight: Tensor) -> Tensor:
    """Rows filled up with what must never be read."""
    rows = -weight.shape[0] % 64
    return torch.cat([weight, torch.full((rows, weight.shape[1]), 1e4, dtype=weight.dtype)])


def kv_cache(num_blocks: int, kv_heads: int, block: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[num_blocks, kv_heads, block, 2 * dim], in memory [num_blocks, block, kv_heads, 2 * dim], full of garbage."""
    return torch.full((num_blocks, block, kv_heads, 2 * dim), 9.0, dtype=dtype).transpose(1, 2)


def separate_kv_cache(num_blocks: int, kv_heads: int, block: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[2, num_blocks, block, kv_heads, dim], keys and values, as FLASH_ATTN of vllm-musa has them, full of garbage."""
    return torch.full((2, num_blocks, block, kv_heads, dim), 9.0, dtype=dtype)


def input_batch(
    rows: list[Tensor], starts: list[int], slots: list[int], prefilling: list[bool] | None = None,
    prompts: list[int] | None = None, drafts: list[int] | None = None,
) -> Any:  # fmt: skip
    """vLLM's `InputBatch` of requests with these input ids, first positions and request slots.

    Args:
        prefilling: requests that are in their prompts, of `prompts` tokens; none by default.
        drafts: rows of draft tokens per request; all rows but the first by default.
    """
    lengths, prefilling = [len(r) for r in rows], prefilling or [False] * len(rows)
    drafts = [length - 1 for length in lengths] if drafts is None else drafts
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    rows_with_logits = [torch.arange(end - d - 1, end) for end, d in zip(bounds[1:].tolist(), drafts, strict=True)]
    return SimpleNamespace(
        num_reqs=len(rows),
        num_tokens=sum(lengths),
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping_np=np.array(slots),
        logits_indices=torch.cat(rows_with_logits),
        cu_num_logits=torch.tensor([0, *drafts]).cumsum(0).int() + torch.arange(len(rows) + 1).int(),
        cu_num_logits_np=np.cumsum([0, *drafts]) + np.arange(len(rows) + 1),
        num_scheduled_tokens=np.array(lengths, dtype=np.int32),
        prefill_len_np=np.array(starts if prompts is None else prompts, dtype=np.int32),
        query_start_loc_np=bounds,
        num_computed_tokens_np=np.array(starts, dtype=np.int32),
        input_ids=torch.cat([*rows, torch.full((5,), 1 << 20)]).int(),  # rows of padding: no token ids
        positions=torch.cat(
            [*(torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)), torch.zeros(5).long()]
        ),
        is_prefilling_np=np.array(prefilling),
        has_structured_output_reqs=False,
    )


def vllm_config(**changes: Any) -> Any:
    """A `VllmConfig` that is served; `changes` are dotted names with `__` for the dot."""
    config = SimpleNamespace(
        additional_config={"specgraph": {}},
        speculative_config=SimpleNamespace(
            method="eagle3", draft_sample_method="greedy", parallel_drafting=False, use_heterogeneous_vocab=False,
            kv_cache_dtype=None, num_speculative_tokens=5,
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16, enforce_eager=False),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE")),
    )  # fmt: skip
    for name, value in changes.items():
        at: Any = config
        *path, last = name.split("__")
        for part in path:
            at = getattr(at, part)
        setattr(at, last, value)
    return config


def batch_class() -> type:
    """`InputBatch`, as far as the check of names looks at it."""
    batch = input_batch([torch.arange(1)], [0], [0])
    return type("InputBatch", (), {"__annotations__": dict.fromkeys(vars(batch))})


def propose_of_0_26(
    self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected,
    last_sampled, next_prefill_tokens, temperature, seeds, num_tokens_across_dp=None, dummy_run=False,
    skip_attn_for_dummy_run=False, mm_inputs=None, is_profile=False,
):  # fmt: skip
    """The parameters."""


@dataclass
class StockSpeculator(ABC):  # as BaseSpeculator is
    """The attributes of `EagleSpeculator` after vLLM's start-up, and a record of what reached its own code."""

    vllm_config: Any
    device: Any
    proposed: list[tuple[Any, ...]] = field(default_factory=list)
    captured: bool = False
    draft_logits: Any = None
    idx_mapping: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int32))
    num_speculative_steps, max_num_reqs, max_num_tokens, max_model_len = 4, 3, 48, 96

    def load_model(self, target_model: Any) -> None:
        self.model = target_model

    def set_attn(self, *args: Any) -> None:
        self.attn = args

    def capture(self) -> None:
        self.captured = True

    @wraps(propose_of_0_26)
    def propose(self, *args: Any, **options: Any) -> Any:
        self.proposed.append((args, options))
        return "vLLM's drafts"
