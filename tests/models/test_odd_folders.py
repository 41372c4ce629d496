"""Published folders whose config.json or files say more, less or something else than their tensors: each is read as
transformers, vLLM or the authors' code reads it, or refused with a way out."""

import json
import logging

import pytest
import tiny_checkpoints
import torch
from changed_folders import change_config, change_tensors, refused
from safetensors.torch import load_file, save_file
from small_targets import EXPERTS, TARGETS
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target, target_shape
from specgraph_models.errors import CheckpointError

from specgraph.errors import ConfigError

TOKENS = torch.randint(0, 120, (24,), generator=torch.Generator().manual_seed(1))


def logits(target, dense_attend, tokens=TOKENS):
    attend = dense_attend(target.attention_layers, torch.arange(len(tokens)))
    return target.logits(target.forward(tokens, attend).hidden)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


ALWAYS = {"use_qk_norm": True, "qkv_bias": False}
UNREAD = [{"attention_bias": True, "mlp_bias": True}, {"attention_bias": False}]
KEYS = [
    ("qwen3", ALWAYS), ("gemma3_text", {**ALWAYS, "use_gemma_norm": True}),
    ("qwen3_moe", {**ALWAYS, "shared_expert_intermediate_size": 0}),
    *((name, keys) for name in ("mistral", "mixtral", "phi3", "qwen2") for keys in UNREAD),
    ("deepseek_v3", {"num_experts": 6}), ("qwen3_moe", {"num_local_experts": 6}),
    ("qwen3", {"mlp_bias": True}), ("glm4_moe", {"mlp_bias": True}), ("gpt_oss", {"mlp_bias": True}),
]  # fmt: skip
"""Keys that say of an architecture what it always has (Qwen3-Coder), or that its class leaves unread."""


@pytest.mark.parametrize(("architecture", "keys"), KEYS, ids=str)
@torch.no_grad()
def test_a_key_that_is_neutral_for_its_architecture(architecture, keys, tmp_path, random_model, dense_attend, caplog):
    name, sizes = TARGETS[architecture]
    model = random_model(name, tmp_path, **sizes)
    change_config(tmp_path, **keys)
    with caplog.at_level(logging.WARNING, "specgraph"):
        close(logits(load_target(tmp_path), dense_attend), model(TOKENS[None]).logits[0])
    assert not [record for record in caplog.records if record.name == "specgraph"]


def test_a_key_that_is_neutral_elsewhere(tmp_path, random_model):
    """A Llama may have norms of heads without weights, which no tensor tells of."""
    random_model("Llama", tmp_path)
    change_config(tmp_path, use_qk_norm=True)
    with refused("'use_qk_norm' is True", "not supported"):
        load_target(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "rope_theta": 500.0}


@torch.no_grad()
def test_attn_factor_multiplies_the_factor_of_yarn(tmp_path, random_model, dense_attend, caplog):
    """vLLM computes so; transformers has that product under another name."""
    yarn = {**YARN, "attention_factor": 0.5 * (0.1 * torch.tensor(4.0).log().item() + 1)}
    model = random_model("Qwen3", tmp_path, head_dim=8, rope_parameters=yarn)
    change_config(tmp_path, rope_parameters={**YARN, "attn_factor": 0.5})
    close(logits(load_target(tmp_path), dense_attend), model(TOKENS[None]).logits[0])
    assert "attn_factor" in caplog.text
    change_config(tmp_path, rope_parameters={**yarn, "attn_factor": 0.5})
    with refused("'attn_factor'", "keep one of them"):
        load_target(tmp_path)


@torch.no_grad()
def test_yarn_without_a_range(tmp_path, random_model, dense_attend):
    """Kimi-K2 has one number of turns for both limits."""
    yarn = {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}
    model = random_model("Llama", tmp_path, rope_parameters=yarn)
    close(logits(load_target(tmp_path), dense_attend), model(TOKENS[None]).logits[0])


@torch.no_grad()
def test_yarn_allows_as_many_positions_as_it_scales_to(tmp_path, random_model, dense_attend):
    model = random_model("Qwen3", tmp_path, head_dim=8, max_position_embeddings=64, rope_parameters=YARN)
    tokens = TOKENS.repeat(8)
    assert load_target(tmp_path).max_model_len == 64
    close(logits(load_target(tmp_path, max_model_len=192), dense_attend, tokens), model(tokens[None]).logits[0])
    with refused("max_model_len 193 is not in 1 to 192", "yarn section", error=ConfigError):
        load_target(tmp_path, max_model_len=193)
    assert load_drafter(tmp_path, load_target(tmp_path, max_model_len=192)).model.max_model_len == 192


class TestFiles:
    @torch.no_grad()
    def test_a_tensor_that_the_index_does_not_name(self, tmp_path, random_model, dense_attend):
        model = random_model("Llama", tmp_path, max_shard_size="20KB")
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        files = list(index["weight_map"].values())
        first = next(name for name, file in index["weight_map"].items() if files.count(file) > 1)
        shard = index["weight_map"].pop(first)
        path.write_text(json.dumps(index))
        close(logits(load_target(tmp_path), dense_attend), model(TOKENS[None]).logits[0])
        other = next(name for name in index["weight_map"].values() if name != shard)
        save_file(load_file(tmp_path / other) | {first: load_file(tmp_path / shard)[first]}, tmp_path / other)
        with refused(first, "so does", shard):
            load_target(tmp_path)

    @torch.no_grad()
    def test_masks_of_older_files(self, tmp_path, random_model, dense_attend):
        model = random_model("Llama", tmp_path)
        mask = {"model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
        mask |= {"model.layers.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
        mask |= {"model.layers.0.attn.masked_bias": torch.tensor(-1e4)}
        change_tensors(tmp_path, lambda tensors: tensors.update(mask))
        close(logits(load_target(tmp_path), dense_attend), model(TOKENS[None]).logits[0])
        change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.bias": torch.ones(32)}))
        with refused("self_attn.bias", "does not use"):
            load_target(tmp_path)

    @pytest.mark.parametrize(("name", "sizes"), [TARGETS[each] for each in ("llama", "qwen3_moe", "gemma3_text")])
    @torch.no_grad()
    def test_a_model_without_the_prefix(self, name, sizes, tmp_path, random_model, dense_attend):
        """`AutoModel.save_pretrained` writes such a folder; transformers finds its names, and ties lm_head."""
        model = random_model(name, tmp_path / "whole", tie_word_embeddings=True, **sizes)
        model.model.save_pretrained(tmp_path / "base")
        assert "embed_tokens.weight" in load_file(tmp_path / "base/model.safetensors")
        target = load_target(tmp_path / "base")
        close(logits(target, dense_attend), model(TOKENS[None]).logits[0])
        assert drafter_format(tmp_path / "base").algorithm == "draft_model"
        close(logits(load_drafter(tmp_path / "base", target).model, dense_attend), model(TOKENS[None]).logits[0])
        change_config(tmp_path / "base", tie_word_embeddings=False)
        with refused("no tensor 'lm_head.weight'"):
            load_target(tmp_path / "base")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tiny_checkpoints.write_target(tmp_path_factory.mktemp("target")))


AUX = "eagle_aux_hidden_state_layer_ids"
HEADS = {
    "an empty list (ModelOpt)": ({"eagle_config": {AUX: [], "use_aux_hidden_state": True}}, ""),
    "layers of the target (Vicuna)": ({"num_hidden_layers": 40}, "num_layers"),
    "biases of Qwen2 (SpecForge's QwQ)": ({"model_type": "qwen2"}, "qkv_bias"),
    "norms of Qwen3": ({"model_type": "qwen3", "head_dim": 8}, "qk_norm"),
    "biases": ({"attention_bias": True, "mlp_bias": True}, "output_bias"),
    "experts and latents of the target": (
        {"model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512,
         "q_lora_rank": 1536, "use_qk_norm": True, "mlp_only_layers": [1]},
        "",
    ),
}  # fmt: skip
"""Changes of an EAGLE-3 head's config.json that its tensors contradict, and a word of the warning."""


@pytest.mark.parametrize(("changes", "word"), HEADS.values(), ids=HEADS)
def test_the_tensors_of_an_eagle3_head_say_what_it_is(changes, word, target, tmp_path, caplog):
    folder = tiny_checkpoints.write_eagle3(tmp_path / "head")
    change_config(folder, eagle_config=None)
    plain = load_drafter(folder, target)
    change_config(folder, **changes)
    with caplog.at_level(logging.WARNING, "specgraph"):
        head = load_drafter(folder, target)
    weights = plain.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in head.weights().items())
    assert len(weights) == len(head.weights())
    assert head.aux_layers == plain.aux_layers == (2, 2, 1)
    assert [word in record.getMessage() for record in caplog.records if "unknown keys" not in record.getMessage()] == (
        [True] if word else []
    )


def test_a_head_whose_tensors_have_more_than_its_config_says(target, tmp_path):
    """Biases are read, and added; a norm of queries alone is refused."""
    folder = tiny_checkpoints.write_eagle(tmp_path / "head")
    sizes = {"q": 32, "k": 16, "v": 16}
    biases = {f"layers.0.self_attn.{name}_proj.bias": torch.randn(size) for name, size in sizes.items()}
    change_tensors(folder, lambda tensors: tensors.update(biases))
    assert torch.equal(load_drafter(folder, target).layers[0].qkv.bias, torch.cat(list(biases.values())))
    change_tensors(folder, lambda tensors: tensors.update({"layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    with refused("no tensor 'layers.0.self_attn.k_norm.weight'"):
        load_drafter(folder, target)


class TestDetection:
    """Nothing is read as a whole draft model whose configuration promised another drafter."""

    @pytest.fixture
    def folder(self, tmp_path, random_model):
        sizes = {**EXPERTS, "head_dim": 8, "n_routed_experts": 6, "n_group": 2, "num_nextn_predict_layers": 1}
        random_model("Glm4Moe", tmp_path, **sizes)
        return tmp_path

    def test_modules_that_an_export_lost(self, folder):
        loaded = load_target(folder)
        for call in (drafter_format, lambda path: load_drafter(path, loaded)):
            with refused("'num_nextn_predict_layers' is 1", "no tensor of an MTP module", "set the key to 0"):
                call(folder)
        change_config(folder, num_nextn_predict_layers=0, text_config={"mtp_num_hidden_layers": 2})
        with refused("[text_config]: 'mtp_num_hidden_layers' is 2"):
            drafter_format(folder)
        change_config(folder, text_config=None)
        assert drafter_format(folder).evidence == "a whole glm4_moe model"

    @pytest.mark.parametrize(
        ("key", "value"),
        [("architectures", ["EagleLlamaForCausalLM"]), ("draft_vocab_size", 40), ("eagle_config", {AUX: [1]})],
    )
    def test_another_drafter(self, key, value, folder):
        change_config(folder, **{"num_nextn_predict_layers": 0, key: value})
        with refused(f"'{key}'", "no tensor of such a drafter", "take the key out"):
            drafter_format(folder)

    def test_what_was_recognised_is_logged(self, target, tmp_path, caplog):
        folder = tiny_checkpoints.write_eagle(tmp_path / "head")
        with caplog.at_level(logging.INFO, "specgraph"):
            load_drafter(folder, target)
        assert "is read as eagle, authors layout (tensors fc and layers.0, no final norm)" in caplog.text


@pytest.mark.parametrize("rows", [100, 140])
@torch.no_grad()
def test_a_draft_model_whose_vocabulary_is_padded_otherwise(rows, tmp_path, random_model, dense_attend, decoded):
    """Its logits over the tokens that both have are its own; tokens of padding alone are never drafted."""
    random_model("Llama", tmp_path / "target")
    small = random_model("Qwen3", tmp_path / "small", hidden_size=16, num_hidden_layers=2, head_dim=8, vocab_size=rows)
    loaded = load_target(tmp_path / "target")
    head = load_drafter(tmp_path / "small", loaded)
    common = min(rows, 120)
    assert head.draft_vocab_size == common
    tokens = TOKENS % common
    attend = dense_attend(head.attention_layers, torch.arange(len(tokens)))
    out = head.forward(tokens, torch.zeros(len(tokens), head.hidden_size), attend)
    close(head.logits(out.hidden), small(tokens[None]).logits[0, :, :common])
    prompts = [[119, 5, 7], [3, 118]]  # tokens that the smaller one has not
    alone, _ = decoded(loaded, None, prompts, 20)
    tokens, decoder = decoded(loaded, head, prompts, 20)
    assert tokens == alone
    assert decoder.metrics.num_drafts > 0


def test_a_draft_model_of_another_vocabulary(tmp_path, random_model):
    random_model("Llama", tmp_path / "target")
    random_model("Llama", tmp_path / "small", vocab_size=249)
    with refused("vocabulary 249, the target has 120", "128 rows"):
        load_drafter(tmp_path / "small", load_target(tmp_path / "target"))


class Table(torch.nn.Module):
    """A module with the methods of transformers' models, and a configuration of its own."""

    def __init__(self, **config):
        super().__init__()
        self.config = type("Config", (), config)()
        self.table = torch.nn.Embedding(8, 4)

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.table


@pytest.mark.parametrize("layers", [{}, {"num_hidden_layers": None}, {"num_hidden_layers": "4"}])
def test_a_module_without_a_number_of_layers(layers):
    assert target_shape(Table(num_hidden_layers=4, max_position_embeddings=8)).num_layers == 4
    with pytest.raises(CheckpointError, match=r"'config.num_hidden_layers' is .* give a TargetShape"):
        target_shape(Table(max_position_embeddings=8, **layers))
    with pytest.raises(CheckpointError, match=r"'config.max_position_embeddings' is None"):
        target_shape(Table(num_hidden_layers=4))
