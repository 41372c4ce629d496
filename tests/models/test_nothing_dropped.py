"""Every tensor and key of a folder is used, known to be harmless, or refused by name: nothing is dropped in silence."""

import json
import logging
import shutil
from contextlib import nullcontext

import pytest
import tiny_checkpoints
import torch
from changed_folders import FIXTURES, change_config, change_tensors, refused
from safetensors.torch import load_file

from specgraph.checkpoints import load_drafter, load_target
from specgraph.errors import CheckpointError

HEADS = ["eagle", "eagle3-llama", "eagle3-qwen3", "peagle", "mtp", "dflash"]


@pytest.fixture(scope="module")
def target():
    return load_target(FIXTURES / "target")


class TestTensors:
    @pytest.mark.parametrize("name", HEADS)
    def test_of_a_drafter(self, name, copied, target):
        folder = copied(name)
        change_tensors(folder, lambda tensors: tensors.update({"gate.weight": torch.ones(2)}))
        with refused("'gate.weight'", "does not use"):
            load_drafter(folder, target)

    def test_of_a_target(self, copied):
        folder = copied("target")
        change_tensors(
            folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
        )
        with refused("'model.layers.0.self_attn.q_norm.weight'", "does not use"):
            load_target(folder)

    def test_of_a_target_with_more_layers_than_it_says(self, copied):
        folder = copied("target")
        change_config(folder, num_hidden_layers=3)
        with refused("'model.layers.3.input_layernorm.weight' and 8 more"):
            load_target(folder)

    @pytest.mark.parametrize("name", HEADS)
    def test_buffers_are_ignored(self, name, copied, target):
        folder = copied(name)
        buffer = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        change_tensors(folder, lambda tensors: tensors.update(buffer))
        load_drafter(folder, target)

    def test_p_eagle_is_never_drafted_as_a_chain(self, tmp_path):
        target = load_target(tiny_checkpoints.write_target(tmp_path / "target"))
        folder = tiny_checkpoints.write_eagle3(tmp_path / "head")
        change_config(folder, parallel_drafting=True, ptd_token_id=95)
        with refused("no tensor 'mask_hidden'"):
            load_drafter(folder, target)
        change_tensors(folder, lambda tensors: tensors.update({"mask_hidden": torch.ones(1, 1, 96)}))
        assert load_drafter(folder, target).kind == "masked"
        change_config(folder, ptd_token_id=96)
        with refused("'ptd_token_id' is 96", "has 96"):
            load_drafter(folder, target)
        change_config(folder, parallel_drafting=None, ptd_token_id=None)
        with refused("'ptd_token_id' is missing"):
            load_drafter(folder, target)

    def test_an_eagle3_head_of_several_layers_in_the_authors_names(self, copied, target, dense_attend):
        """The same tensors under both names; tests/models/test_speculators_parity.py holds the other's results."""
        folder = copied("eagle3-qwen3")

        def rename(tensors):
            for name in [name for name in tensors if name.startswith("layers.0.")]:
                tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)

        change_tensors(folder, rename)
        heads = [load_drafter(path, target) for path in (folder, FIXTURES / "eagle3-qwen3")]
        tokens, hidden = torch.arange(5), torch.randn(5, heads[0].hidden_size)
        results = [
            head.forward(tokens, hidden, dense_attend(head.attention_layers, torch.arange(5))).hidden for head in heads
        ]
        assert len(heads[0].attention_layers) == 2
        assert torch.equal(*results)

    def test_layers_beyond_those_that_an_eagle3_head_names(self, tmp_path):
        target = load_target(tiny_checkpoints.write_target(tmp_path / "target"))
        folder = tiny_checkpoints.write_eagle3(tmp_path / "head")

        def add(tensors):
            for name in [name for name in tensors if name.startswith("midlayer.")]:
                tensors |= {name.replace("midlayer", f"layers.{i}"): tensors[name].clone() for i in (1, 2, 3)}

        change_tensors(folder, add)
        with refused("'layers.1.hidden_norm.weight' and 29 more"):
            load_drafter(folder, target)

    def test_a_tied_head_that_differs_is_used_as_transformers_does(self, tmp_path, random_model, dense_attend):
        transformers = pytest.importorskip("transformers")
        random_model("Llama", tmp_path)  # saved untied, with both tensors
        change_config(tmp_path, tie_word_embeddings=True)
        tokens = torch.tensor([3, 99, 7])
        with torch.no_grad():
            want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens[None]).logits[0]
        model = load_target(tmp_path)
        hidden = model.forward(tokens, dense_attend(model.attention_layers, torch.arange(3))).hidden
        torch.testing.assert_close(model.logits(hidden), want, rtol=0, atol=1e-5)


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("num_local_experts", 8), ("n_routed_experts", 64), ("final_logit_softcapping", 30.0),
            ("logit_scale", 0.5), ("partial_rotary_factor", 0.5), ("parallel_drafting", True), ("pard_token", 5),
            ("is_encoder_decoder", True), ("vision_config", {"depth": 2}),
        ],
    )  # fmt: skip
    def test_that_change_the_computation(self, key, value, copied):
        folder = copied("target")
        change_config(folder, **{key: value})
        with refused(f"'{key}' is ", "not supported"):
            load_target(folder)

    @pytest.mark.parametrize(("key", "value"), [("num_local_experts", 0), ("logit_scale", 1.0), ("use_mrope", False)])
    def test_that_change_nothing_with_this_value(self, key, value, copied):
        folder = copied("target")
        change_config(folder, **{key: value})
        load_target(folder)

    def test_that_nobody_knows_are_named_in_a_warning(self, copied, caplog):
        folder = copied("target")
        change_config(folder, unsloth_fixed=True)
        with caplog.at_level(logging.WARNING, "specgraph"):
            load_target(folder)
        assert "unsloth_fixed" in caplog.text

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("use_input_layernorm_in_first_layer", False, ["only True is supported"]),
            ("use_last_layernorm", False, ["only True"]), ("use_mtp_layernorm", True, ["only False"]),
            ("parallel_draft_step", 2, ["only 1"]), ("residual_scale", 2.0, ["not known"]),
        ],
    )  # fmt: skip
    def test_of_eagle_config(self, key, value, words, tmp_path):
        target = load_target(tiny_checkpoints.write_target(tmp_path / "target"))
        folder = tiny_checkpoints.write_eagle3(tmp_path / "head")
        change_config(folder, "eagle_config", **{key: value})
        with refused("eagle_config", f"'{key}'", *words):
            load_drafter(folder, target)

    @pytest.mark.parametrize(
        ("section", "key", "value"),
        [
            (None, "shift_label", True), (None, "projector_type", "domino"), (None, "input_embedding_scale", 2.0),
            ("transformer_layer_config", "is_causal", True), ("transformer_layer_config", "is_neox_style", False),
        ],
    )  # fmt: skip
    def test_of_a_dflash_head(self, section, key, value, copied, target):
        folder = copied("dflash")
        change_config(folder, *([section] if section else []), **{key: value})
        with refused(f"'{key}' is "):
            load_drafter(folder, target)

    @pytest.mark.parametrize("said", [{}, {"sliding_window_non_causal": True}])
    def test_sliding_layers_of_a_dflash_head_are_causal_unless_it_says_otherwise(self, said, copied, target):
        """A window that hides nothing does not make such a layer one with full attention."""
        folder = copied("dflash")
        sliding = {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
        change_config(folder, **said)
        change_config(folder, "transformer_layer_config", **sliding)
        with nullcontext() if said else refused("layer_types", "causal"):
            load_drafter(folder, target)

    def test_of_a_rotary_section(self, copied):
        folder = copied("target")
        change_config(folder, "rope_parameters", mrope_section=[1, 1, 2])
        with refused("rope_parameters", "'mrope_section'", "not known"):
            load_target(folder)

    def test_two_rotary_sections_that_differ(self, copied):
        folder = copied("target")
        change_config(folder, rope_scaling={"rope_type": "linear", "factor": 2.0})
        with refused("rope_parameters", "rope_scaling", "differ"):
            load_target(folder)

    @pytest.mark.parametrize(
        ("section", "words"),
        [
            ({"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}, ["low_freq_factor", "below"]),
            ({"rope_type": "yarn", "rope_theta": 1.0}, ["rope_theta", "larger"]),
            ({"rope_type": "yarn", "beta_fast": float("inf")}, ["beta_fast", "inf"]),
            ({"rope_type": "yarn", "beta_fast": 1.0}, ["beta_slow", "below"]),
            ({"rope_theta": float("nan")}, ["rope_theta", "nan"]),
        ],
    )
    def test_rotary_numbers(self, section, words, copied):
        folder = copied("target")
        change_config(folder, rope_parameters={"factor": 8.0, "original_max_position_embeddings": 16, **section})
        with refused(*words):
            load_target(folder)

    def test_an_adapter_beside_the_model(self, copied):
        folder = copied("target")
        (folder / "adapter_config.json").write_text("{}")
        with refused("adapter_config.json", "merge"):
            load_target(folder)


class TestValues:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
    @pytest.mark.parametrize("name", ["target", *HEADS])
    def test_weights_are_finite(self, name, value, copied, target):
        folder = copied(name)
        spoilt = sorted(n for n in load_file(folder / "model.safetensors") if n.endswith("down_proj.weight"))[0]
        change_tensors(folder, lambda tensors: tensors[spoilt].view(-1)[7].fill_(value))
        with refused(spoilt, "must be finite"):
            load_target(folder) if name == "target" else load_drafter(folder, target)

    def test_a_weight_that_the_dtype_cannot_hold(self, copied):
        folder = copied("target")
        change_tensors(folder, lambda tensors: tensors["model.norm.weight"][3].fill_(7e4))
        with refused("model.norm.weight", "finite"):
            load_target(folder, dtype=torch.float16)

    @pytest.mark.parametrize(
        "change",
        [
            lambda d2t: d2t + 0.5,
            lambda d2t: d2t.double(),
            lambda d2t: d2t.fill_(-1),
            lambda d2t: d2t.fill_(2**62),
            lambda d2t: -torch.arange(24),
        ],
        ids=["fractional", "floating", "below", "above", "all the same token"],
    )
    def test_d2t(self, change, copied, target):
        folder = copied("eagle3-llama")
        change_tensors(folder, lambda tensors: tensors.update({"d2t": change(tensors["d2t"])}))
        with refused("d2t"):
            load_drafter(folder, target)


class TestDFlashAuxLayers:
    """The authors' heads were trained on transformers' hidden states, the last of which is normalised."""

    def test_they_are_the_hidden_states_of_transformers(self, tmp_path, random_model, dense_attend):
        model = random_model("Llama", tmp_path)
        tokens = torch.tensor([5, 88, 23, 1])
        with torch.no_grad():
            states = model(tokens[None], output_hidden_states=True).hidden_states
        target = load_target(tmp_path)
        head = self.write_head(tmp_path / "head", target, [0, 2, 4])
        attend = dense_attend(target.attention_layers, torch.arange(4))
        got = target.forward(tokens, attend, head.aux_layers).aux_hidden
        want = torch.cat([states[i + 1][0] for i in (0, 2, 4)], dim=-1)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

    def write_head(self, folder, target, layers):
        shutil.copytree(FIXTURES / "dflash", folder)
        config = json.loads((folder / "config.json").read_text())
        decoder = config["transformer_layer_config"] | {"vocab_size": target.vocab_size}
        (folder / "config.json").write_text(
            json.dumps({**decoder, "block_size": 5, "dflash_config": {"target_layer_ids": layers, "mask_token_id": 1}})
        )
        change_tensors(folder, lambda tensors: tensors.update({"fc.weight": torch.randn(32, 32 * len(layers))}))
        return load_drafter(folder, target)

    def test_those_of_speculators_count_otherwise(self, copied, target, dense_attend):
        folder = copied("dflash")
        change_config(folder, aux_hidden_state_layer_ids=[1, 4])
        assert list(load_drafter(folder, target).aux_layers) == [1, 4]  # 4: before the final norm, as vLLM stores it

    def test_of_another_target(self, tmp_path, target):
        with pytest.raises(CheckpointError, match=r"target_layer_ids.*0 to 3"):
            self.write_head(tmp_path / "head", target, [1, 4])
