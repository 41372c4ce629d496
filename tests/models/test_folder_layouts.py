"""The same head in the other layouts of the field loads to the same model."""

import json

import pytest
import torch
from changed_folders import FIXTURES, change_config, change_tensors, refused
from safetensors.torch import load_file, save_file
from specgraph_models.checkpoints import TargetShape, drafter_format, load_drafter, load_target

from specgraph.draft import MaskedKind

AUX = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target():
    return load_target(FIXTURES / "target")


@pytest.fixture
def rewrite(tmp_path):
    """`rewrite(name, renames, **config)`: a fixture with tensors renamed by prefix, and the authors' flat config."""

    def write(name, renames, **config):
        folder = tmp_path / name
        folder.mkdir()
        given = json.loads((FIXTURES / name / "config.json").read_text())
        flags = {key: given[key] for key in FLAGS if key in given}
        (folder / "config.json").write_text(json.dumps({**given["transformer_layer_config"], **flags, **config}))
        tensors = {}
        for key, tensor in load_file(FIXTURES / name / "model.safetensors").items():
            old = next((old for old in renames if key.startswith(old)), "")
            tensors[renames.get(old, "") + key.removeprefix(old)] = tensor
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


def same_weights(a, b):
    mine, others = a.weights(), b.weights()
    return mine.keys() == others.keys() and all(torch.equal(mine[k], others[k]) for k in mine)


def test_eagle_of_the_authors_as_a_pickle(target, rewrite):
    """Several published heads are a pytorch_model.bin, with an embedding that is the target's own."""
    folder = rewrite("eagle", {"fusion_fc.": "fc.", "transformer.": "layers.0."}, architectures=["X"])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "embed_tokens.weight": target.embed_tokens}, folder / "pytorch_model.bin")
    assert str(drafter_format(folder)) == "eagle, authors layout (tensors fc and layers.0, no final norm)"
    head = load_drafter(folder, target)
    assert same_weights(head, load_drafter(FIXTURES / "eagle", target))
    assert head.weights()["embed_tokens"].data_ptr() == target.embed_tokens.data_ptr()


@pytest.mark.parametrize("name", ["eagle3-llama", "eagle3-qwen3"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle3_of_the_authors(name, prefix, target, rewrite):
    """`midlayer` first, `layers.1` after it; without the architecture's name the tensors tell."""
    renames = {"layers.0.": f"{prefix}midlayer."}
    renames |= {each: prefix + each for each in ("layers.", "norm.", "fc.", "fc_norm.", "input_norm.", "embed")}
    folder = rewrite(name, renames, eagle_config={AUX: [1, 2, 4]})
    assert "midlayer" in drafter_format(folder).evidence
    change_config(folder, architectures=["LlamaForCausalLMEagle3"])
    assert str(drafter_format(folder)) == "eagle3, authors layout (architecture LlamaForCausalLMEagle3)"
    head, other = load_drafter(folder, target), load_drafter(FIXTURES / name, target)
    assert same_weights(head, other)
    assert (head.norm_before_residual, head.norm_output) == (other.norm_before_residual, other.norm_output)
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
def test_the_aux_layers_of_both_ways_of_counting(listed, aux_layers, layout, target, rewrite, copied):
    """Every list is taken as it is in the format of speculators."""
    deep = TargetShape(num_layers=36, max_model_len=64, embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    if layout == "authors":
        folder = rewrite("eagle3-llama", {}, architectures=["LlamaForCausalLMEagle3"], eagle_config={AUX: listed})
    else:
        folder = copied("eagle3-llama")
        change_config(folder, **{AUX: listed})
    wanted = aux_layers if layout == "authors" or listed is None else tuple(listed)
    assert tuple(load_drafter(folder, deep).aux_layers) == wanted


@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96)])
def test_peagle_of_the_authors(shape, target, rewrite):
    """The names of amazon/*-P-EAGLE: `ptd_token_id`. Such a head is never drafted as a chain."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "ptd_token_id": 63}
    folder = rewrite("peagle", {"layers.0.": "midlayer."}, **config, eagle_config={AUX: [1, 2, 4]})
    change_tensors(folder, lambda tensors: tensors.update(mask_hidden=tensors["mask_hidden"].view(shape)))
    head = load_drafter(folder, target)
    assert str(drafter_format(folder)).startswith("peagle, authors layout")
    assert (head.kind, head.mask_token_id) == (MaskedKind(), 63)
    assert same_weights(head, load_drafter(FIXTURES / "peagle", target))
    change_config(folder, parallel_drafting=None, ptd_token_id=None)
    with refused("'ptd_token_id' is missing"):
        load_drafter(folder, target)


class TestDFlashOfTheAuthors:
    """Their layer ids name a layer's output; ours and speculators' name what enters a layer: one more."""

    @pytest.fixture
    def folder(self, rewrite):
        authors = {"mask_token_id": 63, "target_layer_ids": [0, 2]}
        return rewrite("dflash", {}, architectures=["DFlashDraftModel"], block_size=5, dflash_config=authors)

    def test_loads_to_the_same_head(self, folder, target):
        found = drafter_format(folder)
        assert str(found) == "dflash, authors layout (config.json has dflash_config)"
        assert found.num_speculative_tokens == 4
        head, other = load_drafter(folder, target), load_drafter(FIXTURES / "dflash", target)
        assert same_weights(head, other)
        assert list(head.aux_layers) == list(other.aux_layers) == [1, 3]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"target_layer_ids": [0, 4]}, ["target_layer_ids", "[0, 4]", "0 to 3"]),
            ({"target_layer_ids": None}, ["target_layer_ids", "should list layers"]),
            ({"mask_token_id": 64}, ["mask_token_id", "64", "64"]),
            ({"block_size": 1}, ["'block_size' is 1, and 5 in"]),
            ({"shift_label": True}, ["'shift_label' is True", "not known"]),  # Domino's
        ],
    )
    def test_that_does_not_fit(self, changes, words, folder, target):
        change_config(folder, "dflash_config", **changes)
        with refused(*words):
            load_drafter(folder, target)

    @torch.no_grad()
    def test_they_are_the_hidden_states_of_transformers(self, folder, tmp_path, random_model, dense_attend):
        """The heads were trained on these, the last of which is normalised."""
        model, listed = random_model("Llama", tmp_path / "target", vocab_size=64), [0, 2, 4]
        tokens = torch.tensor([5, 58, 23, 1])
        states = model(tokens[None], output_hidden_states=True).hidden_states
        change_config(folder, "dflash_config", target_layer_ids=listed)
        change_tensors(folder, lambda tensors: tensors.update({"fc.weight": torch.randn(32, 32 * 3)}))
        target = load_target(tmp_path / "target")
        head = load_drafter(folder, target)
        attend = dense_attend(target.attention_layers, torch.arange(4))
        got = target.forward(tokens, attend, head.aux_layers).aux_hidden
        want = torch.cat([states[i + 1][0] for i in listed], dim=-1)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

    def test_those_of_speculators_count_otherwise(self, copied, target):
        folder = copied("dflash")
        change_config(folder, aux_hidden_state_layer_ids=[1, 4])
        assert list(load_drafter(folder, target).aux_layers) == [1, 4]  # 4: before the final norm, as vLLM stores it


@pytest.mark.parametrize(
    "keys",
    [
        ["markov_rank", "markov_head_type"],
        ["block_size", "mask_token_id", "target_layer_ids", "markov_rank"],
        ["block_size"],
    ],
)
def test_dspark_of_the_authors(keys, target, rewrite):
    """Their keys are at the top level, or in a section beside the decoder's, with two that SpecForge checks."""
    said = {"markov_rank": 6, "markov_head_type": "vanilla", "block_size": 4, "mask_token_id": 63}
    said |= {"target_layer_ids": [0, 2], "enable_confidence_head": True, "confidence_head_with_markov": True}
    section = {key: said.pop(key) for key in keys} | {"attention_mode": "gqa", "confidence_head_alpha": 1.0}
    folder = rewrite(
        "dspark", {}, architectures=["Qwen3DSparkModel"], draft_vocab_size=24, **said, dflash_config=section
    )
    found = drafter_format(folder)
    assert (str(found), found.num_speculative_tokens) == ("dspark, authors layout (config.json has markov_rank)", 4)
    head, other = load_drafter(folder, target), load_drafter(FIXTURES / "dspark", target)
    assert same_weights(head, other)
    assert list(head.aux_layers) == [1, 3]
