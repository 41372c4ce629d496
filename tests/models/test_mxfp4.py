"""MXFP4 folders: numbers against arithmetic in float64, logits against transformers' own dequantisation."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from specgraph_models.checkpoints import load_target
from specgraph_models.checkpoints.quantised import from_mxfp4
from specgraph_models.errors import CheckpointError

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def parts(*shape):
    """Random blocks and scales, and what they mean, number by number in float64."""
    g = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(118, 123, (*shape[:-1], shape[-1] // 32), generator=g, dtype=torch.uint8)
    values = []
    for row, exponent in zip(blocks.view(-1, 16).tolist(), scales.flatten().tolist(), strict=True):
        for byte in row:
            for code in (byte % 16, byte // 16):
                sign = -1.0 if code >= 8 else 1.0
                values.append(sign * CODES[code % 8] * 2.0 ** (exponent - 127))
    return blocks, scales, torch.tensor(values, dtype=torch.float64).view(shape)


def test_numbers():
    blocks, scales, want = parts(3, 8, 64)
    assert torch.equal(from_mxfp4(blocks, scales).double(), want)


@torch.no_grad()
def test_logits_of_gpt_oss_are_those_of_transformers(tmp_path, random_model, dense_attend, caplog):
    """The same numbers stored in MXFP4 for us, and in float32 for transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain, packed = tmp_path / "plain", tmp_path / "packed"
    model = random_model("GptOss", plain, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
                         sliding_window=6, intermediate_size=64)  # fmt: skip
    hidden, tensors = model.config.hidden_size, load_file(plain / "model.safetensors")
    theirs = dict(tensors)
    for i in range(model.config.num_hidden_layers):
        for name, out, columns in (("gate_up_proj", 128, hidden), ("down_proj", hidden, 64)):
            full = f"model.layers.{i}.mlp.experts.{name}"
            blocks, scales, _ = parts(4, out, columns)
            del tensors[full]
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
            theirs[full] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(theirs, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    save_file(tensors, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    tokens = torch.randint(0, 120, (40,), generator=torch.Generator().manual_seed(1))
    want = transformers.AutoModelForCausalLM.from_pretrained(plain)(tokens[None]).logits[0]
    with caplog.at_level(logging.WARNING, "specgraph"):
        ours = load_target(packed, dtype=torch.float32)
    assert "MXFP4 weights are turned into float32" in caplog.text
    states = ours.forward(tokens, dense_attend(ours.attention_layers, torch.arange(40))).hidden
    torch.testing.assert_close(ours.logits(states), want, rtol=0, atol=1e-4)
    config_path = packed / "config.json"
    config_path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks.*mxfp4"):
        load_target(packed)
