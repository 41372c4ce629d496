"""Reads mixtures of experts: their sizes from config.json, and the tensors of one layer."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.latent import DEEPSEEK
from specgraph_models.experts import Experts, ExpertsConfig
from specgraph_models.layers import Weight
from specgraph_models.parallel import WHOLE, TensorParallel

_QWEN = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text")


def experts_config(source: ConfigSource, architecture: str, num_layers: int) -> ExpertsConfig | None:
    """Return the sizes and the routing of a mixture. None if the architecture has none."""
    if architecture not in (*_QWEN, "mixtral", "minimax_m2", "gpt_oss", "glm4_moe", *DEEPSEEK):
        return None
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    if architecture in ("glm4_moe", *DEEPSEEK):
        keys = ("n_routed_experts", "num_local_experts", "num_experts")
    key = next((k for k in keys if source.has(k)), "num_local_experts")
    source.taken.update(k for k in keys if source.values.get(k) == source.values.get(key))  # copies of the number
    num_experts, top_k = source.integer(key), source.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise source.fail("num_experts_per_tok", f"is {top_k}, and there are {num_experts} experts")
    source.taken.update(("router_aux_loss_coef", "output_router_logits", "router_jitter_noise"))  # used in training
    whole = architecture in ("mixtral", "minimax_m2", "gpt_oss")
    inner = source.integer("intermediate_size" if whole else "moe_intermediate_size")
    sparse = [True] * num_layers
    routing: dict[str, Any] = {}
    if architecture == "gpt_oss":
        source.taken.add("experts_per_token")  # the same number under another name
        routing["scoring"] = "softmax of the chosen"
        routing["alpha"] = source.number("swiglu_alpha", 1.702)
        routing["limit"] = source.number("swiglu_limit", 7.0)
    elif architecture == "minimax_m2":
        source.require({"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0})
        routing["scoring"] = "sigmoid"
    elif architecture in _QWEN:
        dense, every = source.integers("mlp_only_layers") or (), source.integer("decoder_sparse_step", 1)
        sparse = [i not in dense and (i + 1) % every == 0 for i in range(num_layers)]
        routing["normalised"] = source.boolean("norm_topk_prob", architecture != "qwen3_moe")
        if architecture == "qwen3_5_moe_text":
            source.require({"norm_topk_prob": True})  # the only value in transformers, but not in host engines
        if architecture != "qwen3_moe":
            routing |= {"shared_inner": source.integer("shared_expert_intermediate_size"), "shared_gated": True}
    elif architecture in ("glm4_moe", *DEEPSEEK):
        if architecture in DEEPSEEK:  # keys of the authors' own file; transformers supports these values only
            source.require({"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1})
            source.taken.update(("ep_size", "seq_aux", "aux_loss_alpha"))  # used in training
        if architecture == "glm4_moe_lite":
            sparse = _listed(source, num_layers)
        else:
            first = source.integer("first_k_dense_replace", 0)
            sparse = [i >= first for i in range(num_layers)]
        routing = _grouped(source, num_experts, top_k) | {"shared_inner": inner * source.integer("n_shared_experts", 1)}
    return ExpertsConfig(num_experts=num_experts, top_k=top_k, inner=inner, layers=tuple(sparse), **routing)


def _listed(source: ConfigSource, num_layers: int) -> list[bool]:
    """Return for each layer of GLM-4.7-Flash whether it has the mixture. transformers reads `mlp_layer_types` only.

    Raises CheckpointError if `first_k_dense_replace` is there and differs.
    """
    types = source.strings("mlp_layer_types") or ("dense", *["sparse"] * (num_layers - 1))
    sparse = [kind == "sparse" for kind in types]
    first = source.integer("first_k_dense_replace") if source.has("first_k_dense_replace") else None
    if len(types) != num_layers or not {*types} <= {"dense", "sparse"}:
        raise source.fail("mlp_layer_types", f"is {shown(list(types))}; it should be dense or sparse for each of "
                          f"{num_layers} layers")  # fmt: skip
    if first is not None and sparse != [i >= first for i in range(num_layers)]:
        raise source.fail(
            "mlp_layer_types", f"is {shown(list(types))}, and 'first_k_dense_replace' has {first} dense layers first; "
            "keep the right one"
        )  # fmt: skip
    return sparse


def _grouped(source: ConfigSource, num_experts: int, top_k: int) -> dict[str, Any]:
    """Return the routing fields of DeepSeek-V3's router, which GLM-4.5 has too: sigmoid scores, experts in groups."""
    groups, top_groups = source.integer("n_group", 1), source.integer("topk_group", 1)
    if num_experts % groups or top_groups > groups or top_k > num_experts // groups * top_groups:
        raise source.fail("n_group", f"is {groups}: {top_k} of {num_experts} experts from {top_groups} groups of them")
    return {
        "scoring": "sigmoid",
        "normalised": source.boolean("norm_topk_prob", True),
        "scale": source.number("routed_scaling_factor", 1.0),
        "num_groups": groups,
        "top_groups": top_groups,
    }


def load_experts(
    folder: CheckpointFolder, prefix: str, config: ExpertsConfig, hidden: int, ranks: TensorParallel = WHOLE
) -> dict[str, Any]:
    """Read the mixture of the layer `prefix`, named as in gpt-oss, Mixtral, Qwen3 (also DeepSeek and GLM) or Qwen3.5.

    Qwen3.5 stores all experts in one tensor.

    Args:
        ranks: the ranks that hold the mixture together. Each rank reads its part: some whole experts, or some columns
            of every expert.

    Returns:
        The fields `experts`, `gate_up` and `down` of `DecoderLayer`.
    """
    if config.limit:
        return _stacked_experts(folder, f"{prefix}.mlp", config, hidden, ranks)
    mixtral = f"{prefix}.block_sparse_moe.gate.weight" in folder
    block = f"{prefix}.{'block_sparse_moe' if mixtral else 'mlp'}"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    inner, own = [(config.inner, hidden)] * 2, _own_experts(config, ranks)
    rows, columns = (ranks.share(dim, config.inner) if ranks.experts is None else None for dim in (0, 1))
    if f"{block}.experts.gate_up_proj" in folder:
        gate_up, downs = _joined_experts(folder, block, config, hidden, ranks)
    else:
        gate_up = torch.stack(
            [
                folder.stacked([f"{block}.experts.{e}.{name}.weight" for name in (gate, up)], inner, [rows] * 2)
                for e in own
            ]
        )
        names = [f"{block}.experts.{e}.{down}.weight" for e in own]
        downs = torch.stack([folder.weight(name, (hidden, config.inner), share=columns) for name in names])
        others = "|".join(str(e) for e in range(config.num_experts) if e not in own)
        folder.ignore({rf"{re.escape(block)}\.experts\.({others})\..*": "an expert of another rank"})
    correction = shared_gate_up = shared_down = shared_gate = None
    if config.scoring == "sigmoid":
        holder = block if mixtral else f"{block}.gate"
        correction = folder.weight(f"{holder}.e_score_correction_bias", (config.num_experts,), torch.float32)
    if size := config.shared_inner:
        shared = f"{block}.shared_expert{'' if config.shared_gated else 's'}"
        shared_gate_up = folder.stacked([f"{shared}.{name}.weight" for name in (gate, up)], [(size, hidden)] * 2)
        shared_down = folder.weight(f"{shared}.{down}.weight", (hidden, size))
        shared_gate = folder.weight(f"{shared}_gate.weight", (1, hidden)) if config.shared_gated else None
    router = folder.weight(f"{block}.gate.weight", (config.num_experts, hidden))
    experts = Experts(config, router, None, correction, shared_gate_up, shared_down, shared_gate)
    return {"experts": experts, "gate_up": Weight(gate_up), "down": Weight(downs)}


def _own_experts(config: ExpertsConfig, ranks: TensorParallel) -> range:
    """Return the experts that this rank holds, whole or in part."""
    return range(config.num_experts) if ranks.experts is None else range(*ranks.experts.part(config.num_experts))


def _joined_experts(
    folder: CheckpointFolder, block: str, config: ExpertsConfig, hidden: int, ranks: TensorParallel
) -> tuple[Tensor, Tensor]:
    """Read the matrices of all experts from two tensors, each expert [out, in], gate above up.

    The tensors are read whole, then cut to this rank's part.
    """
    count, inner, own = config.num_experts, config.inner, _own_experts(config, ranks)
    experts = slice(own.start, own.stop)
    part = slice(None) if ranks.experts is not None else slice(*ranks.part(inner))
    gate_up = folder.weight(f"{block}.experts.gate_up_proj", (count, 2 * inner, hidden))[experts]
    down = folder.weight(f"{block}.experts.down_proj", (count, hidden, inner))[experts, :, part]
    return torch.cat([half[:, part] for half in gate_up.chunk(2, dim=1)], dim=1), down.contiguous()


def _stacked_experts(
    folder: CheckpointFolder, block: str, config: ExpertsConfig, hidden: int, ranks: TensorParallel
) -> dict[str, Any]:
    """Read gpt-oss's mixture: matrices [in, out], or [out, in] in MXFP4, in which gate and up rows alternate.

    The tensors are read whole, then cut to this rank's part.
    """
    count, inner, own = config.num_experts, config.inner, _own_experts(config, ranks)
    experts = slice(own.start, own.stop)
    part = slice(None) if ranks.experts is not None else slice(*ranks.part(inner))

    def matrices(name: str, out: int, columns: int) -> Tensor:
        if f"{block}.experts.{name}_blocks" in folder:
            return folder.mxfp4(f"{block}.experts.{name}", (count, out, columns))
        return folder.weight(f"{block}.experts.{name}", (count, columns, out)).transpose(1, 2)

    gate_up = matrices("gate_up_proj", 2 * inner, hidden)
    bias = folder.weight(f"{block}.experts.gate_up_proj_bias", (count, 2 * inner))
    down = matrices("down_proj", hidden, inner)
    router = folder.weight(f"{block}.router.weight", (count, hidden))
    down_bias = folder.weight(f"{block}.experts.down_proj_bias", (count, hidden))[experts].contiguous()

    def gate_then_up(packed: Tensor) -> Tensor:
        return torch.cat((packed[experts, ::2][:, part], packed[experts, 1::2][:, part]), dim=1)

    return {
        "experts": Experts(config, router, folder.weight(f"{block}.router.bias", (count,))),
        "gate_up": Weight(gate_then_up(gate_up), gate_then_up(bias)),
        "down": Weight(down[experts, :, part].contiguous(), down_bias),
    }
