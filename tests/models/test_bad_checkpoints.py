"""Bad folders: one clear error each, which names the file, the tensor or key, and both sides' numbers."""

import json

import pytest
import torch
from changed_folders import refused
from safetensors.torch import load_file, save_file

from specgraph.checkpoints import drafter_format, load_drafter, load_target
from specgraph.errors import CapacityError, ConfigError


@pytest.fixture
def folder(tmp_path, random_model):
    """A good target folder, to be broken."""
    random_model("Llama", tmp_path / "target")
    return tmp_path / "target"


def change_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def change_tensors(folder, **changes):
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def test_no_such_folder(tmp_path):
    with refused("nowhere", "is not a folder"):
        load_target(tmp_path / "nowhere")


def test_a_name_of_the_hub_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("meta-llama/Llama-3.1-8B is not a folder", "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3"):
        load_target("meta-llama/Llama-3.1-8B")


def test_no_config(folder):
    (folder / "config.json").unlink()
    with refused("no config.json", "model.safetensors"):
        load_target(folder)


def test_config_is_not_json(folder):
    (folder / "config.json").write_text("{")
    with refused("config.json", "JSON"):
        load_target(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "gpt2", "llama"]),
        ({"hidden_size": "absent"}, ["hidden_size", "missing"]),
        ({"hidden_size": "32"}, ["hidden_size", "integer", "'32'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"head_dim": 7}, ["head_dim", "7", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "at least 1e-12", "-1"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, ["rope_type", "dynamic", "llama3"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale": -1.0}}, ["mscale", "at least 0"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta", "at least 1"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ["long_factor", "1 entries", "pairs"],
        ),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": "x"}}, ["long_factor"]),
        ({"rope_parameters": 3}, ["rope_parameters", "mapping"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "not supported"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "sliding_attention", "sliding_window"],
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "linear_attention"]),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, ["layer_types", "1 entries"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor", "missing"]),
        ({"dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq", "unquantised"]),
        ({"compression_config": {"format": "pack-quantized"}}, ["compression_config", "pack-quantized"]),
        ({"hidden_size": 64}, ["model.embed_tokens.weight", "[120, 32]", "[120, 64]"]),
        ({"num_hidden_layers": 6}, ["no tensor", "model.layers.5."]),
    ],
)
def test_config_that_cannot_be_used(folder, changes, words):
    change_config(folder, **changes)
    with refused(*words):
        load_target(folder)


@pytest.mark.parametrize("keep", [4, 1000, -10])
def test_truncated_safetensors(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with refused("model.safetensors", "truncated"):
        load_target(folder)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with refused("no weights", "config.json"):
        load_target(folder)


def test_missing_tensor(folder):
    change_tensors(folder, model__layers__3__mlp__down_proj__weight=None)
    with refused("no tensor 'model.layers.3.mlp.down_proj.weight'", "similar names"):
        load_target(folder)


def test_wrong_shape(folder):
    change_tensors(folder, model__norm__weight=torch.ones(31))
    with refused("'model.norm.weight'", "[31]", "[32]"):
        load_target(folder)


def test_weights_that_are_not_floating_point(folder):
    change_tensors(folder, lm_head__weight=torch.zeros(120, 32, dtype=torch.int8))
    with refused("lm_head.weight", "I8", "does not say how"):
        load_target(folder)


def test_missing_shard(tmp_path, random_model):
    random_model("Llama", tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with refused("index.json", shard.name, "not in the folder"):
        load_target(tmp_path)


def test_index_that_names_a_tensor_its_shard_lacks(tmp_path, random_model):
    random_model("Llama", tmp_path, max_shard_size="30KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["extra.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with refused("extra.weight", "does not"):
        load_target(tmp_path)


def test_malformed_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with refused("index.json", "weight_map"):
        load_target(folder)


def test_shards_and_another_single_file(tmp_path, random_model):
    """transformers reads model.safetensors where both are there: the shards are other weights than that."""
    random_model("Llama", tmp_path, max_shard_size="30KB")
    shard = min(tmp_path.glob("*.safetensors"))
    (tmp_path / "model.safetensors").write_bytes(shard.read_bytes())
    with refused("weights twice", "model.safetensors", "index.json", "remove"):
        load_target(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs(folder, name):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 7092288\n"
    (folder / name).write_text(pointer)
    with refused(f"{name} is a pointer of Git LFS", "git lfs pull"):
        load_target(folder)


def test_several_safetensors_without_an_index(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with refused("2 safetensors files", "index.json"):
        load_target(folder)


@pytest.mark.parametrize("length", [0, 129])
def test_max_model_len_out_of_range(folder, length):
    with refused("max_model_len", str(length), "128", error=ConfigError):
        load_target(folder, max_model_len=length)


class TestDrafterThatDoesNotFit:
    """Each names both sides' numbers."""

    @pytest.fixture
    def target(self, folder):
        return load_target(folder)

    @pytest.fixture
    def head(self, tmp_path, write_eagle3):
        write_eagle3(tmp_path / "head")
        return tmp_path / "head"

    def test_hidden_size(self, head, target):
        change_config(head, target_hidden_size=64)
        with refused("hidden size 64", "32"):
            load_drafter(head, target)

    def test_vocabulary(self, head, target):
        change_config(head, vocab_size=121)
        with refused("vocabulary 121", "120"):
            load_drafter(head, target)

    def test_aux_layers(self, head, target):
        change_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 6]})
        with refused("[1, 2, 6]", "0 to 5"):
            load_drafter(head, target)

    def test_number_of_aux_layers(self, head, target):
        change_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]})
        with refused("fc.weight", "[32, 96]", "[32, 64]"):
            load_drafter(head, target)

    def test_draft_vocabulary(self, head, target):
        change_config(head, draft_vocab_size=50)
        with refused("lm_head.weight", "[48, 32]", "[50, 32]"):
            load_drafter(head, target)

    def test_no_vocabulary_map(self, head, target):
        change_tensors(head, d2t=None)
        with refused("48 tokens", "120", "d2t"):
            load_drafter(head, target)

    def test_vocabulary_map_with_ids_instead_of_offsets(self, head, target):
        offsets = load_file(head / "model.safetensors")["d2t"]
        change_tensors(head, d2t=torch.arange(48) + offsets)
        with refused("d2t", "offsets", "120"):
            load_drafter(head, target)

    def test_missing_tensor(self, head, target):
        change_tensors(head, midlayer__hidden_norm__weight=None)
        with refused("no tensor", "hidden_norm.weight"):
            load_drafter(head, target)

    def test_quantised(self, head, target):
        change_config(head, quantization_config={"quant_method": "gptq"})
        with refused("gptq"):
            load_drafter(head, target)

    def test_embedding_of_another_width_cannot_be_shared(self, target, tmp_path, write_eagle3):
        write_eagle3(tmp_path / "narrow", hidden_size=16)
        with refused("no 'embed_tokens.weight'", "[120, 32]", "[120, 16]"):
            load_drafter(tmp_path / "narrow", target)

    def test_no_target_states_for_an_fc_that_takes_them(self, head, target):
        change_config(head, eagle_config={"use_aux_hidden_state": False})
        with refused("fc.weight", "[32, 96]", "[32, 32]"):
            load_drafter(head, target)

    def test_not_a_drafter(self, folder, target, tmp_path):
        change_config(folder, architectures=["Mystery"], model_type="mystery")
        with refused("no known drafter", "Mystery", "eagle3"):
            load_drafter(folder, target)
        with refused("no known drafter"):
            drafter_format(folder)


def test_a_device_without_memory_for_the_weights(folder, monkeypatch):
    """torch's error becomes one line that names the tensor and what to do."""
    real = torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if args and isinstance(args[0], torch.device) and tensor.dim() == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines")
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    with pytest.raises(
        CapacityError, match=r"could not be put on cpu, at tensor .*embed_tokens.*narrower dtype"
    ) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)
