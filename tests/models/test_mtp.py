"""MTP modules inside a target's checkpoint, against transformers' own MTP model, in the names of each family."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgraph.checkpoints import drafter_format, load_drafter, load_target
from specgraph.checkpoints.mtp import OFFSET_NORMS
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder
from specgraph.errors import CheckpointError, ConfigError

ROWS, HIDDEN, LAYERS = 9, 32, 5

# What stands for a module's parts, as transformers' MtpLayer names them.
NAMES = {
    "deepseek": {
        "enorm": "model.layers.{n}.enorm",
        "hnorm": "model.layers.{n}.hnorm",
        "eh_proj": "model.layers.{n}.eh_proj",
        "post_norm": "model.layers.{n}.shared_head.norm",
        "mtp_block": "model.layers.{n}",
    },
    "mimo": {
        "enorm": "model.mtp_layers.{i}.token_layernorm",
        "hnorm": "model.mtp_layers.{i}.hidden_layernorm",
        "eh_proj": "model.mtp_layers.{i}.input_proj",
        "post_norm": "model.mtp_layers.{i}.final_layernorm",
        "mtp_block": "model.mtp_layers.{i}",
    },
    "qwen": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "post_norm": "mtp.norm",
        "mtp_block": "mtp.layers.{i}",
    },
}


@pytest.fixture
def reference(tmp_path, random_model):
    """A target, and two MTP modules that transformers makes for it; the target is saved to tmp_path / 'target'."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    model = random_model("Llama", tmp_path / "target", num_mtp_layers=2)
    mtp = modeling.MtpModel(model, 2).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model, mtp


def add_modules(folder, mtp, family, count):
    """Put the modules' tensors into the target's own checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    for i in range(count):
        for name, tensor in mtp.layers[i].state_dict().items():
            part, rest = name.split(".", 1)
            if family == "mimo" and part == "eh_proj":
                tensor = torch.cat((tensor[:, HIDDEN:], tensor[:, :HIDDEN]), dim=1)
            tensors[f"{NAMES[family][part].format(i=i, n=LAYERS + i)}.{rest}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def test_one_module_a_step(reference, tmp_path, dense_attend):
    """Every step runs its module over all rows: tokens move up by one, the new draft token comes last.

    Each module has a KV cache of its own.
    """
    from transformers.cache_utils import MtpCache

    model, mtp = reference
    add_modules(tmp_path / "target", mtp, "deepseek", 2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 120, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    drafted, logits, _ = mtp(
        input_ids=tokens[None],
        last_hidden_states=hidden[None],
        attention_mask=None,
        position_ids=torch.arange(1, ROWS + 1)[None],
        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )

    target = load_target(tmp_path / "target")
    assert str(drafter_format(tmp_path / "target")).startswith("mtp, deepseek layout")
    head = load_drafter(tmp_path / "target", target)
    assert head.num_modules == 2
    assert len(head.attention_layers) == 2
    caches: dict = {}
    hidden = head.combine(hidden)
    early = hidden[:5]
    for step in range(2):  # the first rows by themselves, as a prompt's chunk: their next tokens are all known
        attend = dense_attend(head.attention_layers, torch.arange(5), caches)
        early = head.forward_step(step, tokens[step : step + 5], early, attend).carry
    late, hidden = tokens[5:], hidden[5:]
    for step in range(2):
        attend = dense_attend(head.attention_layers, torch.arange(5, ROWS), caches)
        out = head.forward_step(step, late, hidden, attend)
        got = head.logits(out.hidden[-1])
        torch.testing.assert_close(got, logits[0, step], rtol=0, atol=1e-4)
        assert got.argmax() == drafted[0, step]
        late, hidden = torch.cat((late[1:], got.argmax()[None])), out.carry


@pytest.mark.parametrize(("family", "count"), [("mimo", 2), ("qwen", 1)])
def test_other_families_load_to_the_same_modules(family, count, reference, tmp_path, random_model):
    _, mtp = reference
    random_model("Llama", tmp_path / "other")
    add_modules(tmp_path / "target", mtp, "deepseek", count)
    add_modules(tmp_path / "other", mtp, family, count)
    target = load_target(tmp_path / "target")
    assert drafter_format(tmp_path / "other").layout == family
    want, got = (load_drafter(tmp_path / name, target).weights() for name in ("target", "other"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_embedding_and_head_are_the_targets(reference, tmp_path):
    add_modules(tmp_path / "target", reference[1], "deepseek", 1)
    target = load_target(tmp_path / "target")
    weights = load_drafter(tmp_path / "target", target).weights()
    assert weights["embed_tokens"].data_ptr() == target.embed_tokens.data_ptr()
    assert weights["lm_head"].data_ptr() == target.lm_head.data_ptr()


def test_number_of_modules(reference, tmp_path):
    add_modules(tmp_path / "target", reference[1], "deepseek", 2)
    target = load_target(tmp_path / "target")
    assert load_drafter(tmp_path / "target", target, num_modules=1).num_modules == 1
    with pytest.raises(CheckpointError, match=r"2 MTP module\(s\).*asked for 3"):
        load_drafter(tmp_path / "target", target, num_modules=3)
    with pytest.raises(ConfigError, match="num_modules 0"):
        load_drafter(tmp_path / "target", target, num_modules=0)


def test_modules_of_another_target(reference, tmp_path, random_model):
    """A deeper target would look for its modules at other layer numbers."""
    add_modules(tmp_path / "target", reference[1], "deepseek", 1)
    random_model("Llama", tmp_path / "deep", num_hidden_layers=7)
    with pytest.raises(CheckpointError, match=r"0 MTP module\(s\) after the target's 7 layers"):
        load_drafter(tmp_path / "target", load_target(tmp_path / "deep"))


def test_truncated_module(reference, tmp_path):
    add_modules(tmp_path / "target", reference[1], "deepseek", 1)
    path = tmp_path / "target" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.5.shared_head.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.5\.shared_head\.norm\.weight'"):
        load_drafter(tmp_path / "target", load_target(tmp_path / "target"))


@pytest.mark.parametrize("model_type", OFFSET_NORMS)
def test_norms_that_add_one_are_refused(model_type, reference, tmp_path):
    """Named as DeepSeek's: they would load, and draft other tokens."""
    add_modules(tmp_path / "target", reference[1], "deepseek", 1)
    target = load_target(tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": model_type}))
    with pytest.raises(CheckpointError, match=rf"model_type.*is {model_type}.*1 \+ weight"):
        load_drafter(tmp_path / "target", target)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "llama", "deepseek_v3", "glm4_moe"])
def test_which_norms_add_one(model_type):
    """As transformers' own norm computes them with weights of 0.25."""
    modeling = pytest.importorskip(f"transformers.models.{model_type}.modeling_{model_type}")
    (kind,) = {each for name, each in vars(modeling).items() if name.endswith("RMSNorm") and "Gated" not in name}
    norm, x = kind(4), torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    with torch.no_grad():
        norm.weight.fill_(0.25)
        assert bool((norm(x).abs() > 1).all()) == (model_type in OFFSET_NORMS)


def test_layers_that_are_not_dense(reference, tmp_path):
    """Real DeepSeek and GLM modules hold experts, which are not supported: the missing dense tensor is named."""
    add_modules(tmp_path / "target", reference[1], "deepseek", 1)
    path = tmp_path / "target" / "model.safetensors"
    tensors = {name.replace("5.mlp.", "5.mlp.experts.0."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.5.mlp.gate_proj.weight'"):
        load_drafter(tmp_path / "target", load_target(tmp_path / "target"))


def test_config_keeps_the_target_loadable(reference, tmp_path):
    """Extra layers in the checkpoint are not the target's."""
    add_modules(tmp_path / "target", reference[1], "deepseek", 2)
    assert json.loads((tmp_path / "target" / "config.json").read_text())["num_hidden_layers"] == LAYERS
    assert load_target(tmp_path / "target").num_layers == LAYERS


WITH_EXPERTS = {
    "Glm4Moe": {"head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
        "v_head_dim": 14, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
@torch.no_grad()
def test_a_module_with_experts(architecture, tmp_path, random_model, dense_attend):
    """GLM-4.5, DeepSeek-V3: the module in the target's folder has a mixture of experts (and latents), as its layers."""
    from transformers.cache_utils import MtpCache

    modeling = pytest.importorskip("transformers.modeling_layers")
    folder, experts = tmp_path / "target", 6
    model = random_model(
        architecture, folder, num_mtp_layers=1, n_routed_experts=experts, num_experts_per_tok=2,
        moe_intermediate_size=24, **WITH_EXPERTS[architecture],
    )  # fmt: skip
    mtp = modeling.MtpModel(model, 1).float().eval()
    generator = torch.Generator().manual_seed(7)
    for tensor in mtp.layers.state_dict().values():
        noise = torch.randn(tensor.shape, generator=generator) * 0.2
        tensor.copy_(noise if tensor.dim() > 1 else 1 + noise)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in mtp.layers[0].state_dict().items():
        part, rest = name.split(".", 1)
        stored = f"{NAMES['deepseek'][part].format(i=0, n=LAYERS)}.{rest}"
        if rest.startswith("mlp.experts."):
            for expert in range(experts):
                prefix = f"model.layers.{LAYERS}.mlp.experts.{expert}"
                if rest.endswith("down_proj"):
                    tensors[f"{prefix}.down_proj.weight"] = tensor[expert].clone()
                else:
                    gate, up = tensor[expert].chunk(2)
                    tensors[f"{prefix}.gate_proj.weight"] = gate.clone()
                    tensors[f"{prefix}.up_proj.weight"] = up.clone()
        else:
            tensors[stored] = tensor.clone()
    save_file(tensors, folder / "model.safetensors")
    tokens = torch.randint(0, 120, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    _, logits, _ = mtp(
        input_ids=tokens[None],
        last_hidden_states=hidden[None],
        attention_mask=None,
        position_ids=torch.arange(1, ROWS + 1)[None],
        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )
    head = load_drafter(folder, load_target(folder))
    assert head.num_modules == 1
    attend = dense_attend(head.attention_layers, torch.arange(ROWS), {})
    out = head.forward(tokens, head.combine(hidden), attend)
    torch.testing.assert_close(head.logits(out.hidden[-1]), logits[0, 0], rtol=0, atol=1e-4)
    prompt = tokens[:5]
    wanted = model.generate(prompt[None], max_new_tokens=10, do_sample=False, eos_token_id=None)[0, 5:].tolist()
    config = EngineConfig(num_speculative_tokens=2, max_num_requests=1, max_model_len=32, block_size=4)
    decoder = SpeculativeDecoder(load_target(folder, max_model_len=32), head, CpuPlatform(), config)
    decoder.capture()
    assert decoder.generate([Request(prompt_token_ids=prompt.tolist(), max_tokens=10)])[0].token_ids == wanted
    assert decoder.drafter.launches["propose"] > 0
    decoder.close()
