"""Objects shaped as those of SGLang 0.5.17 that the plugin reads, from its sources. The class names matter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from vllm_objects import Linear, RMSNorm, RotaryEmbedding, padded_to_64  # SGLang's have the same names and members


class DraftModule(torch.nn.Module):
    """SGLang's modules over a folder: its names, projections packed, rows of vocabularies padded to 64."""

    layer_name = "layers.0"

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__()
        read = load_file(folder / "model.safetensors")
        self.read = t = {n: x.to(dtype) if x.is_floating_point() else x for n, x in read.items()}
        self.config = SimpleNamespace(**config)
        self.eps, dim = config["rms_norm_eps"], config["head_dim"]

        def packed(*names: str) -> Linear:
            return Linear(torch.cat([t[f"{self.layer_name}.{name}.weight"] for name in names]))

        attention = torch.nn.Module()
        attention.qkv_proj = packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        attention.o_proj = packed("self_attn.o_proj")
        attention.rotary_emb = RotaryEmbedding(
            dim, config["max_position_embeddings"], config["rope_theta"], torch.float32
        )
        attention.num_heads, attention.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        attention.total_num_kv_heads = config["num_key_value_heads"]
        attention.head_dim, attention.scaling = dim, dim**-0.5
        attention.attn = SimpleNamespace(sliding_window_size=-1, logit_cap=0.0, k_scale_float=None, v_scale_float=None)
        layer = torch.nn.Module()
        layer.self_attn, layer.mlp = attention, torch.nn.Module()
        layer.mlp.gate_up_proj, layer.mlp.down_proj = packed("mlp.gate_proj", "mlp.up_proj"), packed("mlp.down_proj")
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            if f"{self.layer_name}.{name}.weight" in t:
                setattr(layer, name, self.norm(f"{self.layer_name}.{name}"))
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])
        self.model.embed_tokens = Linear(padded_to_64(target.embed_tokens.to(dtype)))
        self.model.fc = torch.nn.Linear(t["fc.weight"].shape[1], t["fc.weight"].shape[0], bias="fc.bias" in t)
        self.model.fc.load_state_dict({n.removeprefix("fc."): x for n, x in t.items() if n.startswith("fc.")})
        self.requires_grad_(False)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.read[f"{name}.weight"], self.eps)


class LlamaForCausalLMEagle3(DraftModule):
    layer_name = "midlayer"

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__(folder, config, target, dtype)
        self.model.norm = self.norm("norm")
        self.model.input_norm = self.model.fc_norm = None
        self.model.norm_output, self.model.num_aux_hidden_states = False, 3
        self.lm_head = Linear(padded_to_64(self.read["lm_head.weight"]))
        self.hot_token_id = self.read["d2t"] + torch.arange(len(self.read["d2t"]))


class LlamaForCausalLMEagle(DraftModule):
    """Its first layer has a function in place of the input norm, and its lm_head is the target's."""

    def __init__(self, folder: Path, config: dict[str, Any], target: Any, dtype: torch.dtype) -> None:
        super().__init__(folder, config, target, dtype)
        self.model.layers[0].input_layernorm = lambda x: x
        self.lm_head = Linear(padded_to_64(target.lm_head.to(dtype)))


class MHATokenToKVPool:
    """[slots, heads, dim] per layer, full of garbage; page 0 is the one that pads."""

    def __init__(self, pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.page_size, shape = page_size, ((1 + pages) * page_size, heads, dim)
        stored, self.dtype = torch.uint8 if dtype.itemsize == 1 else dtype, dtype
        self.k_buffer, self.v_buffer = ([torch.full(shape, 9.0).to(dtype).view(stored)] for _ in range(2))


class MLATokenToKVPool:
    """[slots, 1, kv_lora_rank + qk_rope_head_dim] per layer."""

    def __init__(self, *sizes: Any) -> None:
        pool = MHATokenToKVPool(*sizes)
        self.page_size, self.dtype, self.kv_buffer = pool.page_size, pool.dtype, pool.k_buffer


class HybridLinearKVPool(SimpleNamespace):
    """The pool of a target with linear attention, and of its drafter."""


def server_args(**changes: Any) -> Any:
    """`ServerArgs` that are served."""
    return SimpleNamespace(
        **{
            "speculative_algorithm": "SPECGRAPH", "speculative_draft_model_path": "d", "speculative_num_steps": 4,
            "speculative_eagle_topk": 1, "page_size": 16, "tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_cp_size": 1,
            "kv_cache_dtype": "auto", "disaggregation_mode": "null", "speculative_adaptive": False,
        } | changes
    )  # fmt: skip


class Mode:
    """`ForwardMode` of a decode round."""

    def is_idle(self) -> bool:
        return False


def round_batch(slots: list[int], starts: list[int], **prompts: Any) -> Any:
    """A `ScheduleBatch` in a decode round, or with what it has more where prompts run."""
    return SimpleNamespace(
        forward_mode=Mode(), req_pool_indices=torch.tensor(slots), req_pool_indices_cpu=torch.tensor(slots),
        seq_lens=torch.tensor(starts), spec_info="draft input", **prompts,
    )  # fmt: skip


def prompt_tails(batch: Any, next_token_ids: torch.Tensor) -> torch.Tensor:
    """The token after each chunk: the prompt's next one where it goes on (-1 in `following` where it does not)."""
    following = torch.tensor(batch.following)
    return torch.where(following >= 0, following, next_token_ids)


class StockDraftWorker:
    """The attributes of SGLang's `EagleDraftWorker` after its start-up, and a record of what reached its own code."""

    topk, tree_mask_mode, device, target_worker = 1, "mode", "cpu", "target"

    def _capture_cuda_graphs(self) -> None:
        self.captured = True

    def draft(self, batch: Any) -> Any:
        n = len(batch.seq_lens)
        self.drafted = torch.arange(n * (self.speculative_num_steps + 1)) + 10_000
        return SimpleNamespace(draft_token=self.drafted.clone())

    def _draft_extend_for_prefill(
        self, batch: Any, target_hidden_states: Any, next_token_ids: Any, mm_input_embeds: Any = None
    ) -> str:
        return "SGLang's"

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
        batch_result.next_draft_input.topk_p = "SGLang's"
