"""SGLang's MTP modules, by the names that they have there: vLLM's stand-ins with their parts in other places."""

from __future__ import annotations

from typing import Any

import mixtures
import vllm_objects
from torch import Tensor, nn


class Glm4MoeSparseMoeBlock(mixtures.Mixture):
    """Its forward needs no context. The layer adds up what the ranks give (0.5.23)."""

    adds_up = False

    def forward(self, hidden_states: Tensor, forward_batch: Any = None) -> Tensor:
        assert forward_batch is None
        self.ranks = self.ranks if self.adds_up else 1
        return self.mixed(hidden_states)


class DeepseekV2MoE(Glm4MoeSparseMoeBlock):
    """It adds up itself, as all of 0.5.17 do."""

    adds_up = True


class Glm4MoeForCausalLMNextN(mixtures.MtpModule):
    def mlp(self, prefix: str) -> nn.Module:
        return Glm4MoeSparseMoeBlock(self.read, prefix, self.config)

    def name_parts(self, block: Any, norms: list[Any], projection: Any, lm_head: Any) -> None:
        inner, self.lm_head = self.model, lm_head
        inner.enorm, inner.hnorm, norm = norms
        inner.eh_proj, inner.decoder, inner.shared_head = projection, block, nn.Module()
        inner.shared_head.norm = norm
        del inner.layers


class DeepseekV3ForCausalLMNextN(Glm4MoeForCausalLMNextN):
    """SGLang has split `kv_b_proj` into tensors that are no parameters."""

    kind = "deepseek"

    def mlp(self, prefix: str) -> nn.Module:
        return DeepseekV2MoE(self.read, prefix, self.config)

    def layer(self, prefix: str, layer_name: str) -> nn.Module:
        layer = mixtures.DeepSeekMTP.layer(self, prefix, layer_name)
        attention = layer.self_attn
        inner, attention.fused_qkv_a_proj_with_mqa = attention.mla_attn.mla_attn, attention.fused_qkv_a_proj
        attention.w_kc, attention.w_vc = inner.W_UK_T.data, inner.W_UV.data
        del attention.mla_attn, attention.fused_qkv_a_proj
        return layer


class Qwen3NextForCausalLMMTP(mixtures.Qwen3NextMTP):
    """Norms and projection are the module's own, and the layer is its attention."""

    mlp = Glm4MoeForCausalLMNextN.mlp

    def name_parts(self, block: Any, norms: list[Any], projection: Any, lm_head: Any) -> None:
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.model.norm = norms
        self.fc, self.lm_head, layer = projection, lm_head, block.self_attn
        layer.mlp = block.mlp
        layer.input_layernorm, layer.post_attention_layernorm = block.input_layernorm, block.post_attention_layernorm
        self.model.layers = nn.ModuleList([layer])


class MiMoMTP(vllm_objects.MiMoMTP):
    def __init__(self, folder: Any, config: dict[str, Any], target: Any, dtype: Any) -> None:
        super().__init__(folder, config, target, dtype)
        (first,) = self.model.mtp_layers.values()
        for name, part in first.named_children():
            setattr(self.model, name, part)
        del self.model.mtp_layers
