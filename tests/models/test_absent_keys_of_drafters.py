"""Keys that a drafter's config.json leaves out have the values that its authors' code gives them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgraph.checkpoints import load_drafter, load_target

LAYERS, HIDDEN, ROWS = 5, 32, 9
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_routed_experts": 32}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 14}
GIVEN = {
    "Glm4Moe": {**EXPERTS, "head_dim": 16},
    "DeepseekV3": {**EXPERTS, **LATENT, "num_key_value_heads": 4},
}
"""Besides the sizes of `random_model`, because the class's own value is too large for a test."""
SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
PARTS = {"enorm": "enorm.", "hnorm": "hnorm.", "eh_proj": "eh_proj.", "post_norm": "shared_head.norm.", "mtp_block": ""}


@pytest.mark.parametrize("name", GIVEN)
@torch.no_grad()
def test_mtp_in_a_target_with_nothing_but_sizes(name, tmp_path, random_model, dense_attend):
    """Against transformers' own MTP module of the class's own configuration."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    from transformers.cache_utils import MtpCache

    config = GIVEN[name]
    model = random_model(name, tmp_path, **config, num_mtp_layers=1)
    mtp = modeling.MtpModel(model, 1).float().eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in mtp.layers.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    add_module(tmp_path, mtp)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: written[key] for key in SIZES} | config))
    tokens = torch.randint(0, 120, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator) * 0.01  # small, so that rms_norm_eps tells
    _, logits, _ = mtp(
        input_ids=tokens[None],
        last_hidden_states=hidden[None],
        attention_mask=None,
        position_ids=torch.arange(ROWS)[None],
        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )

    head = load_drafter(tmp_path, load_target(tmp_path))
    out = head.forward_step(0, tokens, hidden, dense_attend(head.attention_layers, torch.arange(ROWS)))
    torch.testing.assert_close(head.logits(out.hidden[-1]), logits[0, 0], rtol=0, atol=1e-4)


def add_module(folder, mtp):
    """Put the module's tensors into the target's own checkpoint, in DeepSeek's names: a matrix per expert."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in mtp.layers[0].state_dict().items():
        part, rest = name.split(".", 1)
        name = f"model.layers.{LAYERS}.{PARTS[part]}{rest}"
        if not rest.startswith("mlp.experts."):
            tensors[name] = tensor.clone()
            continue
        packed, block = rest.removeprefix("mlp.experts."), name.rsplit(".", 1)[0]
        for expert, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if packed == "gate_up_proj" else (matrix,)
            for kind, half in zip(packed.removesuffix("_proj").split("_"), halves, strict=True):
                tensors[f"{block}.{expert}.{kind}_proj.weight"] = half.clone()
    save_file(tensors, folder / "model.safetensors")
