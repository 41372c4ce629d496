"""The same head in the other layouts of the field loads to the same model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgraph.checkpoints import TargetShape, drafter_format, load_drafter, load_target
from specgraph.errors import CheckpointError

FIXTURES = Path(__file__).parent / "speculators_fixtures"


@pytest.fixture(scope="module")
def target():
    return load_target(FIXTURES / "target")


def rewrite(name, folder, renames, config, drop=()):
    """Copy a fixture with tensors renamed by prefix and a flat config.json in the authors' manner."""
    folder.mkdir()
    given = json.loads((FIXTURES / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given["transformer_layer_config"], **config}))
    tensors = {}
    for key, tensor in load_file(FIXTURES / name / "model.safetensors").items():
        for old, new in renames.items():
            if key.startswith(old):
                key = new + key.removeprefix(old)
                break
        if key not in drop:
            tensors[key] = tensor
    return tensors


def same_weights(a, b):
    mine, others = a.weights(), b.weights()
    return mine.keys() == others.keys() and all(torch.equal(mine[k], others[k]) for k in mine)


def test_eagle_of_the_authors_as_a_pickle(target, tmp_path):
    """Several published heads are a pytorch_model.bin, with an embedding that is the target's own."""
    folder = tmp_path / "eagle"
    tensors = rewrite("eagle", folder, {"fusion_fc.": "fc.", "transformer.": "layers.0."}, {"architectures": ["X"]})
    torch.save({**tensors, "embed_tokens.weight": target.embed_tokens}, folder / "pytorch_model.bin")
    assert str(drafter_format(folder)) == "eagle, authors layout (tensors fc and layers.0, no final norm)"
    head = load_drafter(folder, target)
    assert same_weights(head, load_drafter(FIXTURES / "eagle", target))
    assert head.weights()["embed_tokens"].data_ptr() == target.embed_tokens.data_ptr()


def test_truncated_pickle(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"fc.weight": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*truncated"):
        drafter_format(tmp_path)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle3_of_the_authors(prefix, target, tmp_path):
    folder = tmp_path / "eagle3"
    tensors = rewrite(
        "eagle3-llama",
        folder,
        {
            "layers.0.": f"{prefix}midlayer.",
            "norm.": f"{prefix}norm.",
            "fc.": f"{prefix}fc.",
            "embed": f"{prefix}embed",
        },
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 24,
            "norm_before_residual": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        },
    )
    save_file(tensors, folder / "model.safetensors")
    head = load_drafter(folder, target)
    assert drafter_format(folder).algorithm == "eagle3"
    assert same_weights(head, load_drafter(FIXTURES / "eagle3-llama", target))
    assert list(head.aux_layers) == [1, 2, 4]


@pytest.mark.parametrize(
    ("listed", "aux_layers"),
    [
        ([1, 17, 32], (2, 18, 33)),  # SpecForge's default for 36 layers: outputs
        ([2, 18, 33], (2, 18, 33)),
        ([24, 30, 36], (24, 30, 36)),  # nvidia/gpt-oss-120b-Eagle3-v3
        ([1, 9, 32], (1, 9, 32)),
        (None, (2, 18, 33)),
    ],
)
@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_the_aux_layers_of_both_ways_of_counting(listed, aux_layers, layout, target, tmp_path):
    """In the format of speculators every list is taken as it is."""
    deep = TargetShape(num_layers=36, max_model_len=64, embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    ids = {} if listed is None else {"eagle_aux_hidden_state_layer_ids": listed}
    if layout == "authors":
        config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 24, "eagle_config": ids}
        save_file(rewrite("eagle3-llama", tmp_path / "head", {}, config), tmp_path / "head" / "model.safetensors")
    else:
        (tmp_path / "head").mkdir()
        config = json.loads((FIXTURES / "eagle3-llama" / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = listed
        (tmp_path / "head" / "config.json").write_text(json.dumps(config))
        weights = (FIXTURES / "eagle3-llama" / "model.safetensors").read_bytes()
        (tmp_path / "head" / "model.safetensors").write_bytes(weights)
    wanted = aux_layers if layout == "authors" or listed is None else tuple(listed)
    assert tuple(load_drafter(tmp_path / "head", deep).aux_layers) == wanted


@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96)])
def test_peagle_of_the_authors(shape, target, tmp_path):
    """The names of amazon/*-P-EAGLE: `midlayer` first, `layers.1` after it, `ptd_token_id`."""
    folder = tmp_path / "peagle"
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 24,
        "parallel_drafting": True,
        "ptd_token_id": 63,
        "norm_before_fc": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    tensors = rewrite("peagle", folder, {"layers.0.": "midlayer."}, config)
    tensors["mask_hidden"] = tensors["mask_hidden"].view(shape)
    save_file(tensors, folder / "model.safetensors")
    head = load_drafter(folder, target)
    assert str(drafter_format(folder)).startswith("peagle, authors layout")
    assert head.mask_token_id == 63
    assert same_weights(head, load_drafter(FIXTURES / "peagle", target))


def test_eagle3_without_a_telling_name_is_known_by_its_tensors(target, tmp_path):
    folder = tmp_path / "eagle3"
    tensors = rewrite("eagle3-llama", folder, {"layers.0.": "midlayer."}, {"draft_vocab_size": 24})
    save_file(tensors, folder / "model.safetensors")
    assert "midlayer" in drafter_format(folder).evidence


def test_unsupported_algorithm_of_speculators(tmp_path):
    config = json.loads((FIXTURES / "eagle" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "speculators_model_type": "dspark"}))
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'dspark'.*supported are dflash, eagle, eagle3, mtp, peagle"):
        drafter_format(tmp_path)


def test_speculators_folder_without_the_residual_key_means_true(target, tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    config = json.loads((FIXTURES / "eagle3-llama" / "config.json").read_text())
    assert config.pop("norm_before_residual") is True
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((FIXTURES / "eagle3-llama" / "model.safetensors").read_bytes())
    assert load_drafter(folder, target).config.norm_before_residual is True


class TestDFlashOfTheAuthors:
    """Their layer ids name a layer's output; ours and speculators' name what enters a layer: one more."""

    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "dflash"
        config = {
            "architectures": ["DFlashDraftModel"],
            "block_size": 5,
            "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2]},
        }
        save_file(rewrite("dflash", folder, {}, config), folder / "model.safetensors")
        return folder

    def change(self, folder, **changes):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["dflash_config"].update(changes)
        path.write_text(json.dumps(config))

    def test_loads_to_the_same_head(self, folder, target):
        found = drafter_format(folder)
        assert str(found) == "dflash, authors layout (config.json has dflash_config)"
        assert found.num_speculative_tokens == 4
        head, other = load_drafter(folder, target), load_drafter(FIXTURES / "dflash", target)
        assert same_weights(head, other)
        assert list(head.aux_layers) == list(other.aux_layers) == [1, 3]

    def test_layers_beyond_the_target(self, folder, target):
        self.change(folder, target_layer_ids=[0, 4])
        with pytest.raises(CheckpointError, match=r"target_layer_ids.*\[0, 4\].*0 to 3"):
            load_drafter(folder, target)

    def test_no_layers(self, folder, target):
        self.change(folder, target_layer_ids=None)
        with pytest.raises(CheckpointError, match=r"target_layer_ids.*should list layers"):
            load_drafter(folder, target)

    def test_mask_token_outside_the_vocabulary(self, folder, target):
        self.change(folder, mask_token_id=64)
        with pytest.raises(CheckpointError, match=r"mask_token_id.*64.*64"):
            load_drafter(folder, target)

    def test_block_without_masks(self, folder, target):
        self.change(folder, block_size=1)
        with pytest.raises(CheckpointError, match=r"block_size.*at least 2"):
            load_drafter(folder, target)
