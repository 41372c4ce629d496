"""MTP modules inside a target's checkpoint, against transformers' own MTP model, in the names of each family."""

import pytest
import torch
from changed_folders import change_config, change_tensors, keep_sizes, refused
from command import specgraph
from safetensors.torch import load_file, save_file
from small_targets import TARGETS
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target
from specgraph_models.checkpoints.mtp import OFFSET_NORMS

from specgraph.errors import ConfigError

ROWS, HIDDEN, LAYERS = 9, 32, 5

# What stands for a module's parts, as transformers' MtpLayer names them.
PARTS = ("enorm", "hnorm", "eh_proj", "post_norm")
NAMES = {
    "deepseek": ("model.layers.{n}", "model.layers.{n}", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "mimo": (
        "model.mtp_layers.{i}",
        "model.mtp_layers.{i}",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
    "qwen": ("mtp.layers.{i}", "mtp", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}
"""Family -> prefixes of a module's layer and of its other parts, and the names of these."""


def name_in(family, module, part):
    """The name of a part of a module in a checkpoint."""
    layer, parts, names = NAMES[family]
    name = layer if part == "mtp_block" else f"{parts}.{names[PARTS.index(part)]}"
    return name.format(i=module, n=LAYERS + module)


def modules_of(model, count):
    """MTP modules that transformers makes for a model, with random weights."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    mtp = modeling.MtpModel(model, count).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in mtp.layers.state_dict().values():
            noise = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.copy_(noise if tensor.dim() > 1 else 1 + noise)
    return mtp


def drafted_by(model, mtp, tokens, hidden):
    """Return the tokens and logits of transformers' own modules, one module per step."""
    from transformers.cache_utils import MtpCache

    drafted, logits, _ = mtp(
        input_ids=tokens[None],
        last_hidden_states=hidden[None],
        attention_mask=None,
        position_ids=torch.arange(1, ROWS + 1)[None],
        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )
    return drafted, logits


@pytest.fixture
def reference(tmp_path, random_model):
    """A target, and two MTP modules that transformers makes for it; the target is saved to tmp_path / 'target'."""
    model = random_model("Llama", tmp_path / "target", num_mtp_layers=2)
    return model, modules_of(model, 2)


def add_modules(folder, mtp, family, count):
    """Put the modules' tensors into the target's own checkpoint; experts as a matrix each."""
    tensors = load_file(folder / "model.safetensors")
    for i in range(count):
        for name, tensor in mtp.layers[i].state_dict().items():
            part, rest = name.split(".", 1)
            name = f"{name_in(family, i, part)}.{rest}"
            if family == "mimo" and part == "eh_proj":
                tensor = torch.cat((tensor[:, HIDDEN:], tensor[:, :HIDDEN]), dim=1)
            if not rest.startswith("mlp.experts."):
                tensors[name] = tensor.clone()
                continue
            block, packed = name.rsplit(".", 1)
            for expert, matrix in enumerate(tensor):
                halves = matrix.chunk(2) if packed == "gate_up_proj" else (matrix,)
                for kind, half in zip(packed.removesuffix("_proj").split("_"), halves, strict=True):
                    tensors[f"{block}.{expert}.{kind}_proj.weight"] = half.clone()
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def test_one_module_a_step(reference, tmp_path, dense_attend):
    """Every step runs its module over all rows: tokens move up by one, the new draft token comes last.

    Each module has a KV cache of its own.
    """
    model, mtp = reference
    add_modules(tmp_path / "target", mtp, "deepseek", 2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 120, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    drafted, logits = drafted_by(model, mtp, tokens, hidden)

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
    want, got = (load_drafter(tmp_path / name, target, num_modules=count).weights() for name in ("target", "other"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_modules_beside_a_target(reference, tmp_path):
    """Extra layers in the checkpoint are not the target's; embedding and head are."""
    add_modules(tmp_path / "target", reference[1], "deepseek", 2)
    target = load_target(tmp_path / "target")
    assert target.num_layers == LAYERS
    head = load_drafter(tmp_path / "target", target, num_modules=1)
    assert head.num_modules == 1
    assert head.weights()["embed_tokens"].data_ptr() == target.embed_tokens.data_ptr()
    assert head.weights()["lm_head"].data_ptr() == target.lm_head.data_ptr()
    with refused("2 MTP module(s)", "asked for 3"):
        load_drafter(tmp_path / "target", target, num_modules=3)
    with refused("num_modules must be at least 1", error=ConfigError):
        load_drafter(tmp_path / "target", target, num_modules=0)


def test_audit_has_the_option_that_its_error_advises(reference, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")
    add_modules(tmp_path / "target", reference[1], "deepseek", 2)
    folder = tmp_path / "target"
    settings = ("-k", 3, "--rounds", 2, "--requests", 1, "--max-model-len", 32)
    too_many = specgraph("audit", folder, "--target", folder, *settings)
    assert too_many.returncode == 2
    assert "(--num-modules 1)" in too_many.stderr
    audited = specgraph("audit", folder, "--target", folder, "--num-modules", 1, *settings)
    assert audited.returncode == 0, audited.stderr
    assert "equal to eager" in audited.stdout


def test_modules_that_are_refused(reference, tmp_path, random_model):
    """Modules of another target, at other layer numbers; misnamed ones; another family's norms."""
    folder = tmp_path / "target"
    add_modules(folder, reference[1], "deepseek", 1)
    change_config(folder, num_mtp_layers=1)
    target = load_target(folder)
    random_model("Llama", tmp_path / "deep", num_hidden_layers=7)
    with refused("0 MTP module(s) after the target's 7 layers"):
        load_drafter(folder, load_target(tmp_path / "deep"))
    for model_type in OFFSET_NORMS:  # named as DeepSeek's: they would load, and draft other tokens
        change_config(folder, model_type=model_type)
        with refused("model_type", f"is {model_type}", "1 + weight"):
            load_drafter(folder, target)
    change_config(folder, model_type="llama")
    norm = "model.layers.5.shared_head.norm.weight"
    change_tensors(folder, lambda tensors: tensors.update(other=tensors.pop(norm)))
    with refused(f"no tensor '{norm}'"):
        load_drafter(folder, target)
    gate = "model.layers.5.mlp.gate_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({gate.replace("mlp", "mlp.experts.0"): tensors.pop(gate)}))
    with refused(f"no tensor '{gate}'"):
        load_drafter(folder, target)


WITH_EXPERTS = [(*TARGETS[name], False) for name in ("glm4_moe", "deepseek_v3")]
SPARSE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_routed_experts": 32}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 14}
SIZES = [
    ("Glm4Moe", SPARSE | {"head_dim": 16}, True),
    ("DeepseekV3", SPARSE | LATENT | {"num_key_value_heads": 4}, True),
]
"""Keys that are given besides the sizes of `random_model`: the class's own value is too large for a test."""


@pytest.mark.parametrize(("architecture", "config", "bare"), WITH_EXPERTS + SIZES)
@torch.no_grad()
def test_a_module_with_experts(architecture, config, bare, tmp_path, random_model, dense_attend, decoded):
    """GLM-4.5, DeepSeek-V3: the module in the target's folder has a mixture of experts (and latents), as its layers.

    `bare`: config.json has nothing but sizes, and absent keys have the values of transformers' class.
    """
    model = random_model(architecture, tmp_path, **config | {"num_mtp_layers": 1})
    mtp = modules_of(model, 1)
    add_modules(tmp_path, mtp, "deepseek", 1)
    if bare:
        keep_sizes(tmp_path, config)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 120, (ROWS,), generator=generator)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator) * 0.01  # small, so that rms_norm_eps tells
    _, logits = drafted_by(model, mtp, tokens, hidden)
    head = load_drafter(tmp_path, load_target(tmp_path))
    assert head.num_modules == 1
    attend = dense_attend(head.attention_layers, torch.arange(ROWS), {})
    out = head.forward(tokens, head.combine(hidden), attend)
    torch.testing.assert_close(head.logits(out.hidden[-1]), logits[0, 0], rtol=0, atol=1e-4)
    if bare:
        return
    prompt = tokens[:5]
    wanted = model.generate(prompt[None], max_new_tokens=10, do_sample=False, eos_token_id=None)[0, 5:].tolist()
    target = load_target(tmp_path, max_model_len=32)
    got, decoder = decoded(target, head, [prompt.tolist()], 10, num_speculative_tokens=2)
    assert got == [wanted]
    assert decoder.drafter.launches["propose"] > 0
