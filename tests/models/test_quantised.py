"""FP8 folders: weights against arithmetic in float64, logits against transformers' own dequantisation."""

import itertools
import json
import logging
import shutil

import pytest
import torch
from changed_folders import FIXTURES, change_config, change_tensors, refused
from quantised_folders import BLOCKS, compressed, quantise
from safetensors.torch import load_file, save_file
from specgraph_models.checkpoints import load_drafter, load_target
from specgraph_models.checkpoints.quantised import from_fp8, scale_shapes, scales_by_row
from specgraph_models.parallel import TensorParallel
from specgraph_run import load_generator, shipped_pair

from specgraph.errors import ConfigError


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
        scale = {"model.layers.0.mlp.down_proj.input_scale": torch.tensor(0.5)}
        change_tensors(tmp_path, lambda tensors: tensors.update(scale))
    with caplog.at_level(logging.WARNING, "specgraph"):
        model = load_target(tmp_path, dtype=dtype)
    assert "FP8" in caplog.text
    assert str(dtype).removeprefix("torch.") in caplog.text
    for i, layer in enumerate(model.layers):
        names = [f"model.layers.{i}.{part}.weight" for part in ("mlp.gate_proj", "mlp.up_proj")]
        gate_up = torch.cat([products[name] for name in names])
        # A product has 28 bits at most, so that float32 rounds it once.
        assert torch.equal(layer.gate_up.matrix, gate_up.float().to(dtype))
        assert torch.equal(layer.down.matrix, products[f"model.layers.{i}.mlp.down_proj.weight"].float().to(dtype))


@pytest.mark.parametrize("experts", [3, 4])
@pytest.mark.parametrize(
    "scale_shape", [(), (1,), ("E",), ("E", 1), ("E", 1, 1), ("E", 4), ("E", 4, 1), ("E", 2, 3)], ids=str
)
def test_weights_of_stacked_experts(experts, scale_shape):
    """Scales by tensor, expert, row, or blocks of [3, 3], where the number of experts is that of the rows or not."""
    shape, block = (experts, 4, 8), (3, 3) if scale_shape == ("E", 2, 3) else None
    scale = torch.rand([experts if size == "E" else size for size in scale_shape]) + 0.5
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    want = weight.double()
    for e, row, column in itertools.product(*map(range, shape)):
        place = (e, row // 3, column // 3) if block else (e, row, 0)
        index = [i if size > 1 else 0 for i, size in zip(place, scale.shape, strict=False)]
        want[e, row, column] *= scale[tuple(index)].double()
    assert tuple(scale.shape) in scale_shapes(shape, block)
    assert torch.equal(from_fp8(weight, scales_by_row(scale, shape, block), block), want.float())


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


def same_logits(model, plain, dense_attend):
    tokens = torch.randint(0, 120, (30,), generator=torch.Generator().manual_seed(1))
    attend = dense_attend(model.attention_layers, torch.arange(30))
    hidden, wanted = (m.forward(tokens, attend).hidden for m in (model, plain))
    torch.testing.assert_close(model.logits(hidden), plain.logits(wanted), rtol=0, atol=1e-5)


KINDS = {
    "blocks": {**BLOCKS, "weight_block_size": [12, 16]},
    "one scale": {"quant_method": "fp8", "activation_scheme": "static"},
    "rows": compressed("channel"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_matrices_that_stay_fp8(name, tmp_path, random_model, dense_attend, caplog):
    """The values and scales of the folder, by name in float64, and the logits of the dequantised model."""
    section = KINDS[name]
    random_model("Llama", tmp_path)
    products = quantise(tmp_path, section, "scale_inv" if name == "blocks" else "scale")
    with caplog.at_level(logging.WARNING, "specgraph"):
        model, plain = load_target(tmp_path, keep_fp8=True), load_target(tmp_path)
    assert f"{7 * len(model.layers)} matrices stay in FP8" in caplog.text
    for i, layer in enumerate(model.layers):
        for part, (weight, _, scale) in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv),
            (("self_attn.o_proj",), layer.output),
            (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up),
            (("mlp.down_proj",), layer.down),
        ):
            want = torch.cat([products[f"model.layers.{i}.{one}.weight"] for one in part])
            assert weight.dtype == torch.float8_e4m3fn
            assert scale.shape == (want.shape[1] // 16 if name == "blocks" else 1, len(want))
            got = weight.double() * scale.double().t().repeat_interleave(want.shape[1] // scale.shape[0], 1)
            assert torch.equal(got, want)
    same_logits(model, plain, dense_attend)
    assert sum(t.nbytes for t in model.weights().values()) < 0.6 * sum(t.nbytes for t in plain.weights().values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("block", [[12, 16], [16, 32]])
def test_ranks_have_their_part_of_fp8_matrices(block, size, tmp_path, random_model):
    """Each rank's values times scales are its part of the products; scales that ranks would cut are dequantised."""
    random_model("Llama", tmp_path)
    products = quantise(tmp_path, {**BLOCKS, "weight_block_size": block}, "scale_inv")
    for rank in range(size):
        try:
            layer = load_target(tmp_path, tensor_parallel=TensorParallel(rank, size), keep_fp8=True).layers[0]
        except ConfigError:
            pytest.skip("the model does not split over so many ranks")
        down = products["model.layers.0.mlp.down_proj.weight"]
        part = down.chunk(size, 1)[rank]
        if part.shape[1] % block[1]:
            assert layer.down.scale is None
            got = layer.down.matrix
        else:
            groups = layer.down.scale.double().t().repeat_interleave(block[1], 1)
            got = layer.down.matrix.double() * groups
        assert torch.equal(got.double(), part if part.shape[1] % block[1] == 0 else part.float().double())


def test_scales_of_the_kv_cache_are_refused_only_with_an_fp8_cache(tmp_path):
    target, drafter = shipped_pair()
    folder = shutil.copytree(target, tmp_path / "target")
    name = "model.layers.1.self_attn.k_scale"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.tensor(3.0)}))
    load_target(folder)
    with refused("--kv-cache-dtype fp8", name, "auto"):
        load_generator(folder, drafter, kv_cache_dtype="fp8")
    quarks = "model.layers.1.self_attn.v_proj.output_scale"
    change_tensors(folder, lambda tensors: tensors.update({quarks: tensors.pop(name)}))
    with refused("--kv-cache-dtype fp8", quarks, "auto"):
        load_generator(folder, drafter, kv_cache_dtype="fp8")
    head = shutil.copytree(drafter, tmp_path / "drafter")
    change_tensors(head, lambda tensors: tensors.update({"midlayer.self_attn.k_scale": torch.tensor(3.0)}))
    with refused("--kv-cache-dtype fp8", "drafter", "midlayer.self_attn.k_scale", "auto"):
        load_generator(target, head, kv_cache_dtype="fp8")


def restore(folder, products, chosen):
    """Store the linears whose names contain `chosen` as they were before `quantise`."""

    def change(tensors):
        for name in [name for name in products if chosen in name]:
            del tensors[f"{name}_scale"]
            tensors[name] = products[name].float()

    change_tensors(folder, change)


def test_matrices_of_which_one_is_not_fp8_are_turned(copied):
    """Query, key and value are one matrix here; a folder may leave one of them as it was."""
    folder = copied("target")
    products = quantise(folder, compressed("channel"), "scale")
    restore(folder, products, "layers.1.self_attn.k_proj")
    layers = load_target(folder, keep_fp8=True).layers
    assert layers[1].qkv.scale is None
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(layers[1].qkv.matrix, torch.cat([products[n] for n in names]).float())
    assert layers[0].qkv.scale is not None


@torch.no_grad()
def test_an_fp8_layer_after_one_that_is_not(tmp_path, random_model, dense_attend):
    """A plain layer's last linear may compute the next one's projection too, which in FP8 has scales."""
    random_model("Llama", tmp_path)
    restore(tmp_path, quantise(tmp_path, compressed("channel"), "scale"), "layers.0.")
    model = load_target(tmp_path, keep_fp8=True)
    assert [layer.qkv.scale is None for layer in model.layers[:2]] == [True, False]
    same_logits(model, load_target(tmp_path), dense_attend)


@pytest.mark.parametrize("what", ["weight", "scale"])
def test_fp8_that_is_not_finite_is_refused(what, copied):
    folder, name = copied("target"), "model.layers.1.mlp.up_proj.weight"
    quantise(folder, compressed("channel"), "scale")
    if what == "weight":
        change_tensors(folder, lambda tensors: tensors[name].view(torch.uint8)[3, 2].fill_(0xFF))
    else:
        change_tensors(folder, lambda tensors: tensors[f"{name}_scale"][2].fill_(float("inf")))
    with refused("up_proj", "not finite"):
        load_target(folder, keep_fp8=True)


def test_a_pair_in_fp8_generates_the_same_tokens(tmp_path, caplog):
    """Kept and dequantised, target and drafter, every lowering's ops."""
    folders = [tmp_path / "target", tmp_path / "drafter"]
    for folder, source in zip(folders, shipped_pair(), strict=True):
        shutil.copytree(source, folder)
        quantise(folder, compressed("channel"), "scale")
    texts = []
    for fp8_weights in ("keep", "dequantise"):
        caplog.clear()
        with load_generator(*folders, platform="cpu", fp8_weights=fp8_weights, max_model_len=128) as generator:
            texts.append(generator.text("def read(self, size):\n", max_tokens=24))
        assert caplog.text.count("stay in FP8") == (2 if fp8_weights == "keep" else 0)
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="fp8_weights must be one of 'dequantise', 'keep', got 'always'"):
        load_generator(*folders, platform="cpu", fp8_weights="always")


def test_a_drafter_in_fp8(copied):
    folder = copied("eagle3-llama")
    products = quantise(folder, compressed("channel"), "scale")
    head = load_drafter(folder, load_target(FIXTURES / "target"))
    assert torch.equal(head.layers[0].down.matrix, products["layers.0.mlp.down_proj.weight"].float())


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["'fmt'", "e4m3"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["'weight_block_size'"]),
        (compressed("group"), ["'weights'", "float of 8 bits"]),
        (compressed("channel", num_bits=4, type="int"), ["'weights'", "'int' of 4 bits"]),
        (compressed("channel", symmetric=False), ["'weights'"]),
        (
            compressed("channel") | {"transform_config": {"config_groups": {"R1": {}}}},
            ["'transform_config'"],
        ),
        (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["'sparsity_config'", "pruned"]),
        ({"quant_method": "awq"}, ["'awq'; read are"]),
    ],
)
def test_other_kinds_are_refused(section, words, copied):
    folder = copied("target")
    change_config(folder, quantization_config=section)
    with refused(*words) as error:
        load_target(folder)
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_scales_that_are_missing_or_misshapen(copied):
    folder, name = copied("target"), "model.layers.2.mlp.up_proj.weight_scale_inv"
    quantise(folder, BLOCKS, "scale_inv")
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:, 1:]}))
    with refused(name, "shape"):
        load_target(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with refused("no tensor", "up_proj.weight_scale"):
        load_target(folder)
    change_config(folder, quantization_config=None)
    with refused("F8_E4M3", "does not say how"):
        load_target(folder)
