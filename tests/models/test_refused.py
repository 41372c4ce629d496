"""Bad folders, and drafters of another target: one clear error each, which names the file, the tensor or key, and both
sides' numbers. Every tensor and key of a folder is used, known to be harmless, or refused: nothing is dropped in
silence."""

import json
import logging
import os

import pytest
import tiny_checkpoints
import torch
from changed_folders import FIXTURES, change_config, change_tensors, refused
from safetensors.torch import load_file
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target

from specgraph.errors import CapacityError, ConfigError

HEADS = ["eagle", "eagle3-llama", "eagle3-qwen3", "peagle", "mtp", "dflash", "dspark"]
ROPE = "rope_parameters"
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
MISTRAL, GEMMA = {"model_type": "mistral", "sliding_window": None}, {"model_type": "gemma3_text"}
SCALED = {"factor": 8.0, "original_max_position_embeddings": 16}
YARN = {**SCALED, "rope_type": "yarn"}
BOUNDS = {**SCALED, "rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}

TARGET_KEYS = [
    ({"model_type": "gpt2"}, ["model_type", "gpt2", "llama"]),
    ({"hidden_size": None}, ["hidden_size", "missing"]),
    ({"hidden_size": "32"}, ["hidden_size", "integer", "'32'"]),
    ({"hidden_size": 64}, ["model.embed_tokens.weight", "[64, 32]", "[64, 64]"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
    ({"num_hidden_layers": 6}, ["no tensor", "model.layers.4."]),
    ({"num_hidden_layers": 3}, ["'model.layers.3.input_layernorm.weight' and 8 more"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
    ({"head_dim": 7}, ["head_dim", "7", "even"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"rms_norm_eps": -1}, ["rms_norm_eps", "at least 1e-12", "-1"]),
    ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
    ({"dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq", "unquantised"]),
    ({"compression_config": {"format": "pack-quantized"}}, ["compression_config", "pack-quantized"]),
    ({"max_position_embeddings": 100_000_000}, ["max_position_embeddings", "100000000", "give max_model_len"]),
    ({"is_causal": False}, ["is_causal", "False"]),
    # windows
    ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "linear_attention"]),
    ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, ["layer_types", "unread in a llama model"]),
    ({**MISTRAL, "layer_types": ["sliding_attention"] * 4}, ["layer_types", "sliding_attention", "sliding_window"]),
    ({**MISTRAL, "layer_types": ["sliding_attention"], "sliding_window": 8}, ["layer_types", "1 entries"]),
    ({"model_type": "gpt_oss", "attention_bias": None}, ["attention_bias", "null"]),
    # rotation
    ({ROPE: 3}, [ROPE, "mapping"]),
    ({ROPE: {"rope_type": "dynamic", "factor": 2}}, ["rope_type", "dynamic", "llama3"]),
    ({ROPE: {"rope_type": "yarn", "factor": 2, "mscale": -1.0}}, ["mscale", "at least 0"]),
    ({ROPE: {"rope_theta": 0}}, ["rope_theta", "at least 1"]),
    ({ROPE: LONGROPE}, ["long_factor", "1 entries", "pairs"]),
    ({ROPE: {**LONGROPE, "long_factor": "x"}}, ["long_factor"]),
    ({ROPE: {**LONGROPE, "long_factor": [1.0, 0.0]}}, ["long_factor", "at least 0.001"]),
    ({ROPE: {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "not supported"]),
    ({ROPE: None, "rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor", "missing"]),
    ({**GEMMA, ROPE: None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "'type'", "rope_type"]),
    ({**GEMMA, ROPE: {"full_attention": {}}, "rope_scaling": {"rope_type": "linear"}}, [ROPE, "rope_scaling", "both"]),
    ({ROPE: BOUNDS}, ["low_freq_factor", "below"]),
    ({ROPE: {**YARN, "rope_theta": 1.0}}, ["rope_theta", "larger"]),
    ({ROPE: {**YARN, "beta_fast": float("inf")}}, ["beta_fast", "inf"]),
    ({ROPE: {**YARN, "beta_fast": 0.5}}, ["beta_slow", "at most 'beta_fast', 0.5"]),
    ({ROPE: {**SCALED, "rope_theta": float("nan")}}, ["rope_theta", "nan"]),
    ({ROPE: {"rope_theta": 1e4, "mrope_section": [1, 1, 2]}}, [ROPE, "'mrope_section'", "not known"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, [ROPE, "rope_scaling", "differ"]),
    # keys that change the computation
    ({"num_local_experts": 8}, ["'num_local_experts' is ", "not supported"]),
    ({"n_routed_experts": 64}, ["'n_routed_experts' is ", "not supported"]),
    ({"final_logit_softcapping": 30.0}, ["'final_logit_softcapping' is ", "not supported"]),
    ({"logit_scale": 0.5}, ["'logit_scale' is ", "not supported"]),
    ({"partial_rotary_factor": 0.5}, ["'partial_rotary_factor' is ", "not supported"]),
    ({"parallel_drafting": True}, ["'parallel_drafting' is ", "not supported"]),
    ({"pard_token": 5}, ["'pard_token' is ", "not supported"]),
    ({"is_encoder_decoder": True}, ["'is_encoder_decoder' is ", "not supported"]),
    ({"vision_config": {"depth": 2}}, ["'vision_config' is ", "not supported"]),
]
"""Changes of a target's config.json, and words of the message in their order."""

LAYERS, AUTHORS = "transformer_layer_config", "authors' eagle3"
AUX = "eagle_aux_hidden_state_layer_ids"
DRAFTER_KEYS = [
    (AUTHORS, [], {"target_hidden_size": 64}, ["hidden size 64", "32"]),
    (AUTHORS, [], {"vocab_size": 97}, ["vocabulary 97", "96"]),
    (AUTHORS, [], {"draft_vocab_size": 50}, ["lm_head.weight", "[40, 32]", "[50, 32]"]),
    (AUTHORS, [], {"hidden_size": 16}, ["self_attn.q_proj.weight", "[32, 64]", "[32, 32]"]),
    (AUTHORS, [], {"quantization_config": {"quant_method": "gptq"}}, ["gptq"]),
    (AUTHORS, [], {"parallel_drafting": True, "ptd_token_id": 95}, ["no tensor 'mask_hidden'"]),
    (AUTHORS, [], {"parallel_drafting": True, "ptd_token_id": 96}, ["'ptd_token_id' is 96", "has 96"]),
    (AUTHORS, ["eagle_config"], {AUX: [1, 2, 6]}, ["[1, 2, 6]", "0 to 4"]),
    (AUTHORS, ["eagle_config"], {AUX: [1, 2]}, ["fc.weight", "[32, 96]", "[32, 64]"]),
    (AUTHORS, ["eagle_config"], {"use_aux_hidden_state": False}, ["'fc.weight'", "does not use"]),
    (AUTHORS, [], {AUX: [1, 2, 4]}, ["'eagle_aux_hidden_state_layer_ids' is [1, 2, 3], and [1, 2, 4] in"]),
    ("eagle3-llama", [], {"eagle_config": {AUX: [1, 2, 3]}}, ["'eagle_config' is a key of the authors' layout"]),
    (AUTHORS, ["eagle_config"], {"use_input_layernorm_in_first_layer": False}, ["eagle_config", "only True"]),
    (AUTHORS, ["eagle_config"], {"use_last_layernorm": False}, ["eagle_config", "'use_last_layernorm'", "only True"]),
    *[
        (AUTHORS, ["eagle_config"], {key: True}, [f"'{key}'", "only False"])
        for key in ("norm_before_residual", "norm_output", "fc_norm")
    ],
    (AUTHORS, ["eagle_config"], {"norm_before_fc": True}, ["no tensor 'input_norm.weight'"]),
    (AUTHORS, ["eagle_config"], {"use_mtp_layernorm": True}, ["'use_mtp_layernorm'", "only False"]),
    (AUTHORS, ["eagle_config"], {"parallel_draft_step": 2}, ["'parallel_draft_step'", "only 1"]),
    (AUTHORS, ["eagle_config"], {"residual_scale": 2.0}, ["'residual_scale'", "not known"]),
    ("dspark", [], {"markov_head_type": "fir"}, ["'markov_head_type' is 'fir'", "vanilla, gated, rnn"]),
    ("dspark", [], {"markov_rank": 0}, ["'markov_rank' should be at least 1"]),
    ("dflash", [], {"dflash_config": {"block_size": 4}}, ["'dflash_config' is a key of the authors' layout"]),
    ("dspark", [], {"dspark_config": {"block_size": 4}}, ["'dspark_config' is a key of the authors' layout"]),
    ("dflash", [], {"projector_type": "domino"}, ["'projector_type' is "]),
    ("dflash", [], {"input_embedding_scale": 2.0}, ["'input_embedding_scale' is "]),
    ("dflash", [], {"use_gemma_norm": True}, ["'use_gemma_norm' is "]),
    ("dflash", [LAYERS], {"is_causal": True}, ["'is_causal' is "]),
    ("dflash", [LAYERS], {"is_neox_style": False}, ["'is_neox_style' is "]),
    ("mtp", [], {"num_nextn_predict_layers": 3}, ["'num_nextn_predict_layers' is 3", "num_modules=1"]),
    ("mtp", [LAYERS], {"mtp_num_hidden_layers": 3}, ["'mtp_num_hidden_layers' is 3", "num_modules=1"]),
    ("mtp", [], {"mtp_hidden_states_first": True}, ["'mtp_hidden_states_first' is True"]),
    ("eagle", [], {"bias": False}, ["'bias' is False", "a tensor 'fusion_fc.bias'"]),
    ("eagle", [], {"speculators_model_type": "lilicorr"}, ["'lilicorr'", "dflash, dflash2, dspark, eagle, "]),
    ("eagle", [], {"speculators_model_type": "xpress"}, ["'xpress'", "no program here does", "refiner"]),
]  # fmt: skip
"""Drafter, section of its config.json, changes there, words."""


def put(**changes):
    """A change of tensors, by name with `__` for each dot: a tensor, or None to drop it."""

    def change(tensors):
        for name, tensor in changes.items():
            tensors.pop(name.replace("__", "."), None)
            tensors |= {} if tensor is None else {name.replace("__", "."): tensor}

    return change


def with_more_layers(tensors):
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors |= {name.replace("midlayer", f"layers.{i}"): tensors[name].clone() for i in (1, 2, 3)}


def of_d2t(change):
    return lambda tensors: tensors.update(d2t=change(tensors["d2t"]))


TENSORS = [
    ("target", put(model__layers__3__mlp__down_proj__weight=None), ["no tensor 'model.layers.3.mlp.down_", "similar"]),
    ("target", put(model__norm__weight=torch.ones(31)), ["'model.norm.weight'", "[31]", "[32]"]),
    ("target", put(lm_head__weight=torch.zeros(64, 32, dtype=torch.int8)), ["lm_head.weight", "I8", "not say how"]),
    ("target", put(model__layers__0__self_attn__q_norm__weight=torch.ones(8)), ["q_norm.weight'", "does not use"]),
    ("target", put(rope_freqs__weight=torch.ones(4)), ["'rope_freqs.weight'", "does not use"]),
    *[(name, put(gate__weight=torch.ones(2)), ["'gate.weight'", "does not use"]) for name in HEADS],
    ("eagle", put(fusion_fc__bias=None), ["'fusion_bias' is True", "no tensor 'fusion_fc.bias'"]),
    (AUTHORS, put(d2t=None), ["40 tokens", "96", "d2t"]),
    (AUTHORS, put(midlayer__hidden_norm__weight=None), ["no tensor", "hidden_norm.weight"]),
    (AUTHORS, put(embed_tokens__weight=torch.ones(96, 16)), ["'embed_tokens.weight'", "[96, 16]", "[96, 32]"]),
    (AUTHORS, put(mask_hidden=torch.ones(1, 1, 96)), ["'ptd_token_id' is missing"]),
    (AUTHORS, with_more_layers, ["'layers.1.hidden_norm.weight' and 29 more"]),
    (AUTHORS, of_d2t(lambda d2t: torch.arange(40) + d2t), ["d2t", "offsets", "96"]),
    (AUTHORS, of_d2t(lambda d2t: d2t + 0.5), ["d2t"]),
    (AUTHORS, of_d2t(lambda d2t: d2t.fill_(-1)), ["d2t"]),
    (AUTHORS, of_d2t(lambda d2t: d2t.fill_(2**62)), ["d2t"]),
    (AUTHORS, of_d2t(lambda d2t: -torch.arange(40)), ["d2t"]),
]  # fmt: skip
"""Folder, change of its tensors, words."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """The target that a drafter is loaded for."""
    tiny = load_target(tiny_checkpoints.write_target(tmp_path_factory.mktemp("target")))
    return {AUTHORS: tiny} | dict.fromkeys(HEADS, load_target(FIXTURES / "target"))


@pytest.fixture
def load(targets):
    """`load(name, folder)`"""
    return lambda name, folder: load_target(folder) if name == "target" else load_drafter(folder, targets[name])


@pytest.fixture
def folder_of(copied, tmp_path):
    """`folder_of(name)`: a good folder, to be changed."""
    return lambda name: tiny_checkpoints.write_eagle3(tmp_path / "head") if name == AUTHORS else copied(name)


@pytest.mark.parametrize(("changes", "words"), TARGET_KEYS, ids=str)
def test_keys_of_a_target(changes, words, copied):
    folder = copied("target")
    change_config(folder, **changes)
    with refused(*words):
        load_target(folder)


@pytest.mark.parametrize(("name", "section", "changes", "words"), DRAFTER_KEYS, ids=str)
def test_keys_of_a_drafter(name, section, changes, words, folder_of, load):
    folder = folder_of(name)
    change_config(folder, *section, **changes)
    with refused(*words):
        load(name, folder)


@pytest.mark.parametrize(("name", "change", "words"), TENSORS)
def test_tensors(name, change, words, folder_of, load):
    folder = folder_of(name)
    change_tensors(folder, change)
    with refused(*words):
        load(name, folder)


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", ["target", *HEADS])
def test_weights_are_finite(name, value, copied, load):
    folder = copied(name)
    spoilt = sorted(n for n in load_file(folder / "model.safetensors") if n.endswith("down_proj.weight"))[0]
    change_tensors(folder, lambda tensors: tensors[spoilt].view(-1)[7].fill_(value))
    with refused(spoilt, "must be finite"):
        load(name, folder)


def test_a_weight_that_the_dtype_cannot_hold(copied):
    folder = copied("target")
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"][3].fill_(7e4))
    with refused("model.norm.weight", "finite"):
        load_target(folder, dtype=torch.float16)


def test_harmless_keys_and_tensors(copied, targets, caplog):
    """A value that changes nothing, a key that nobody knows, a buffer."""
    folder = copied("target")
    change_config(folder, num_local_experts=0, logit_scale=1.0, use_mrope=False, unsloth_fixed=True)
    with caplog.at_level(logging.WARNING, "specgraph"):
        load_target(folder)
    assert "['unsloth_fixed']" in caplog.text
    for name in HEADS:
        folder = copied(name)
        change_tensors(folder, put(layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4)))
        load_drafter(folder, targets[name])


@pytest.mark.parametrize("said", [False, True])
def test_sliding_layers_of_a_dflash_head_are_causal_unless_it_says_otherwise(said, copied, targets):
    """A window that hides nothing does not make such a layer one with full attention."""
    folder = copied("dflash")
    sliding = {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    change_config(folder, LAYERS, **sliding)
    if said:
        change_config(folder, sliding_window_non_causal=True)
        load_drafter(folder, targets["dflash"])
    else:
        with refused("layer_types", "causal"):
            load_drafter(folder, targets["dflash"])


def test_a_drafter_of_another_width(tmp_path, targets, monkeypatch):
    """It is for a target of its own width; one that is for ours cannot share the embedding."""
    monkeypatch.setattr(tiny_checkpoints, "HIDDEN", 16)
    folder = tiny_checkpoints.write_eagle3(tmp_path)
    with refused("made for a target with hidden size 16", "has 32"):
        load_drafter(folder, targets[AUTHORS])
    change_tensors(folder, put(fc__weight=torch.ones(16, 96)))
    change_config(folder, target_hidden_size=32)
    with refused("no 'embed_tokens.weight'", "[96, 32]", "[96, 16]"):
        load_drafter(folder, targets[AUTHORS])


def test_not_a_drafter(copied, targets):
    folder = copied("target")
    change_config(folder, architectures=["Mystery"], model_type="mystery")
    with refused("no known drafter", "Mystery", "eagle3"):
        load_drafter(folder, targets["eagle"])
    with refused("no known drafter"):
        drafter_format(folder)


LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 7092288\n".encode()
INDEX = "model.safetensors.index.json"
FILES = [
    ("config.json", None, ["no config.json", "model.safetensors"]),
    ("config.json", b"{", ["config.json", "JSON"]),
    ("model.safetensors", None, ["no weights", "config.json"]),
    *[("model.safetensors", keep, ["model.safetensors", "truncated"]) for keep in (4, 1000, -10)],
    ("adapter_config.json", b"{}", ["adapter_config.json", "merge"]),
    (INDEX, b'{"weight_map": [1]}', ["index.json", "weight_map"]),
    *[(name, LFS, [f"{name} is a pointer of Git LFS", "git lfs pull"])
      for name in ("config.json", "model.safetensors", INDEX)],
]  # fmt: skip
"""File of a target's folder, its content (None: the file is missing; a number: so many bytes of it), words."""


class TestFiles:
    @pytest.fixture
    def folder(self, copied):
        return copied("target")

    @pytest.fixture
    def index(self, folder):
        """`index(weight_map)` names the tensors' files, the one file for each by default."""
        names = sorted(load_file(folder / "model.safetensors"))

        def write(file="model.safetensors", change=dict):
            content = {"weight_map": change(dict.fromkeys(names, file))}
            (folder / "model.safetensors.index.json").write_text(json.dumps(content))
            return names

        return write

    def test_no_such_folder(self, tmp_path, monkeypatch):
        with refused("nowhere", "is not a folder"):
            load_target(tmp_path / "nowhere")
        monkeypatch.chdir(tmp_path)
        with refused(
            "meta-llama/Llama-3.1-8B is not a folder", "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3"
        ):
            load_target("meta-llama/Llama-3.1-8B")

    @pytest.mark.parametrize(("name", "content", "words"), FILES)
    def test_a_file(self, name, content, words, folder):
        path = folder / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
        with refused(*words):
            load_target(folder)

    def test_truncated_pickle(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        torch.save({"fc.weight": torch.ones(3)}, tmp_path / "pytorch_model.bin")
        content = (tmp_path / "pytorch_model.bin").read_bytes()
        (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
        with refused("pytorch_model.bin", "truncated"):
            drafter_format(tmp_path)

    def test_several_safetensors_without_an_index(self, folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
        with refused("2 safetensors files", "index.json"):
            load_target(folder)

    @pytest.mark.parametrize("shard", ["../other/evil.safetensors", "{tmp}/other/evil.safetensors", "..", ""])
    def test_an_index_that_leads_outside(self, shard, folder, index, tmp_path):
        index(shard.format(tmp=tmp_path))
        (tmp_path / "other").mkdir()
        (folder / "model.safetensors").rename(tmp_path / "other" / "evil.safetensors")
        with refused("index.json", "not a file of this folder"):
            load_target(folder)

    def test_missing_shard(self, folder, index):
        index("model-1.safetensors")
        (folder / "model.safetensors").unlink()
        with refused("index.json", "model-1.safetensors", "not in the folder"):
            load_target(folder)

    def test_an_index_that_names_a_tensor_which_is_not_there(self, folder, index):
        index(change=lambda weights: weights | {"extra.weight": "model.safetensors"})
        with refused("extra.weight", "does not"):
            load_target(folder)

    def test_shards_and_another_single_file(self, folder, index):
        """transformers reads model.safetensors where both are there: the shards are other weights than that."""
        index("model-1.safetensors")
        (folder / "model-1.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        with refused("weights twice", "model.safetensors", "index.json", "remove"):
            load_target(folder)

    def test_the_links_of_a_hub_cache(self, folder, tmp_path):
        blobs = tmp_path / "blobs"
        blobs.mkdir()
        for path in list(folder.iterdir()):
            path.rename(blobs / path.name)
            path.symlink_to(os.path.relpath(blobs / path.name, folder))
        load_target(folder)

    @pytest.mark.parametrize(("length", "says"), [(0, "at least 1, got 0"), (65, "65 is not in 1 to 64")])
    def test_max_model_len_out_of_range(self, folder, length, says):
        with refused("max_model_len", says, error=ConfigError):
            load_target(folder, max_model_len=length)

    def test_fewer_positions_than_no_table_is_made_of(self, folder):
        change_config(folder, max_position_embeddings=100_000_000)
        assert load_target(folder, max_model_len=48).attention_layers[0].rotary.shape[0] == 48


def test_a_device_without_memory_for_the_weights(monkeypatch):
    """torch's error becomes one line that names the tensor and what to do."""
    real = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if args and isinstance(args[0], torch.device) and tensor.dim() == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines")
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    words = ("could not be put on cpu, at tensor ", "embed_tokens", "narrower dtype")
    with refused(*words, error=CapacityError) as caught:
        load_target(FIXTURES / "target")
    assert "\n" not in str(caught.value)
