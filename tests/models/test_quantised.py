"""FP8 and MXFP4 folders: weights against arithmetic in float64, logits against transformers' own dequantisation."""

import json
import logging
from pathlib import Path

import pytest
import torch
from quantised_folders import BLOCKS, compressed, quantise
from safetensors.torch import load_file, save_file

from specgraph.checkpoints import load_drafter, load_target
from specgraph.checkpoints.quantised import from_mxfp4
from specgraph.errors import CheckpointError

FIXTURES = Path(__file__).parent / "speculators_fixtures"


@pytest.mark.parametrize(
    ("section", "suffix"),
    [
        (BLOCKS, "scale_inv"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "scale"),
        (compressed("channel"), "scale"),
        (compressed("tensor"), "scale"),
    ],
    ids=["blocks", "one scale", "compressed-tensors, rows", "compressed-tensors, one scale"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_products(section, suffix, dtype, tmp_path, random_model, caplog):
    random_model("Llama", tmp_path)
    products = quantise(tmp_path, section, suffix)
    if section.get("activation_scheme") == "static":
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["model.layers.0.mlp.down_proj.input_scale"] = torch.tensor(0.5)
        save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "specgraph"):
        model = load_target(tmp_path, dtype=dtype)
    assert "FP8" in caplog.text
    assert str(dtype).removeprefix("torch.") in caplog.text
    for i, layer in enumerate(model.layers):
        names = [f"model.layers.{i}.{part}.weight" for part in ("mlp.gate_proj", "mlp.up_proj")]
        gate_up = torch.cat([products[name] for name in names])
        # A product has 28 bits at most, so that float32 rounds it once.
        assert torch.equal(layer.gate_up, gate_up.float().to(dtype))
        assert torch.equal(layer.down, products[f"model.layers.{i}.mlp.down_proj.weight"].float().to(dtype))


@torch.no_grad()
def test_logits_of_an_fp8_mixture_are_those_of_transformers(tmp_path, random_model, dense_attend):
    """The same folder in FP8 for us, and turned into float32 by transformers' arithmetic for its own model."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random_model("Qwen3Moe", tmp_path / "fp8", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    quantise(tmp_path / "fp8", {**BLOCKS, "weight_block_size": [16, 16]}, "scale_inv")
    plain, tensors = tmp_path / "plain", load_file(tmp_path / "fp8" / "model.safetensors")
    plain.mkdir()
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = Fp8Dequantize(None)._dequantize_one(tensors[weight], tensors.pop(name), torch.float32)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(0, 120, (50,), generator=torch.Generator().manual_seed(1))
    want = transformers.AutoModelForCausalLM.from_pretrained(plain)(tokens[None]).logits[0]
    model = load_target(tmp_path / "fp8")
    hidden = model.forward(tokens, dense_attend(model.attention_layers, torch.arange(50))).hidden
    torch.testing.assert_close(model.logits(hidden), want, rtol=0, atol=1e-4)


def test_a_drafter_in_fp8(tmp_path):
    target = load_target(FIXTURES / "target")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FIXTURES / "eagle3-llama" / name).read_bytes())
    products = quantise(tmp_path, compressed("channel"), "scale")
    head = load_drafter(tmp_path, target)
    assert torch.equal(head.layers[0].down, products["layers.0.mlp.down_proj.weight"].float())


class TestMxfp4:
    CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def parts(self, *shape):
        """Random blocks and scales, and what they mean, number by number in float64."""
        g = torch.Generator().manual_seed(4)
        blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(118, 123, (*shape[:-1], shape[-1] // 32), generator=g, dtype=torch.uint8)
        values = []
        for row, exponent in zip(blocks.view(-1, 16).tolist(), scales.flatten().tolist(), strict=True):
            for byte in row:
                for code in (byte % 16, byte // 16):
                    sign = -1.0 if code >= 8 else 1.0
                    values.append(sign * self.CODES[code % 8] * 2.0 ** (exponent - 127))
        return blocks, scales, torch.tensor(values, dtype=torch.float64).view(shape)

    def test_numbers(self):
        blocks, scales, want = self.parts(3, 8, 64)
        assert torch.equal(from_mxfp4(blocks, scales).double(), want)

    @torch.no_grad()
    def test_logits_of_gpt_oss_are_those_of_transformers(self, tmp_path, random_model, dense_attend, caplog):
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
                blocks, scales, _ = self.parts(4, out, columns)
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


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'fmt'.*e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size'"),
        (compressed("group"), "'weights'.*float of 8 bits"),
        (compressed("channel", num_bits=4, type="int"), "'weights'.*'int' of 4 bits"),
        (compressed("channel", symmetric=False), "'weights'"),
        (compressed("channel") | {"transform_config": {"config_groups": {"R1": {}}}}, "'transform_config'.*rotated"),
        (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config'.*pruned"),
        ({"quant_method": "awq"}, "'awq'; read are"),
    ],
)
def test_other_kinds_are_refused(section, words, tmp_path, random_model):
    random_model("Llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": section}))
    with pytest.raises(CheckpointError, match=words) as error:
        load_target(tmp_path)
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_scales_that_are_missing_or_misshapen(tmp_path, random_model):
    random_model("Llama", tmp_path)
    quantise(tmp_path, BLOCKS, "scale_inv")
    name = "model.layers.2.mlp.up_proj.weight_scale_inv"
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.*shape"):
        load_target(tmp_path)
    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor.*up_proj.weight_scale"):
        load_target(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "quantization_config"}))
    with pytest.raises(CheckpointError, match=r"F8_E4M3.*does not say how"):
        load_target(tmp_path)
