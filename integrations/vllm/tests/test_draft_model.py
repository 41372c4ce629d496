"""vLLM's module as a head: the weights and logits of the head that the core reads from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mixtures import TP_GROUP, DeepSeekMTP, forward_context, mixture_folder
from safetensors.torch import load_file, save_file
from specgraph_models import load_drafter, load_target
from specgraph_models.checkpoints import target_shape
from specgraph_models.parallel import TensorParallel
from specgraph_plugin.vllm.draft_model import draft_cache, draft_head, draft_layers
from specgraph_run import shipped_pair
from specgraph_vllm.mixtures import summed_in_graph
from tiny_checkpoints import HEAD_DIM, HIDDEN, write_target
from vllm_objects import (
    LAYER_NAME,
    DFlashQwen3ForCausalLM,
    Eagle3LlamaForCausalLM,
    EagleLlamaForCausalLM,
    Fp8LinearMethod,
    GPTQMarlinLinearMethod,
    LlamaForCausalLM,
    MiMoMTP,
    MRotaryEmbedding,
    Qwen3DSparkForCausalLM,
    Qwen3ForCausalLM,
    dspark_folder,
    kv_cache,
    mimo_folder,
    quantise,
    separate_kv_cache,
)

from specgraph import DraftHead
from specgraph.draft import DraftModelKind
from specgraph.errors import UnsupportedError


@pytest.fixture
def target():
    return load_target(shipped_pair()[0], dtype=torch.float32)


@pytest.fixture
def module(target):
    folder = shipped_pair()[1]
    config = json.loads((folder / "config.json").read_text())
    return Eagle3LlamaForCausalLM(folder, config, target, torch.float32)


def test_the_head_is_the_one_that_the_core_reads_from_the_folder(module, target) -> None:
    head, want = draft_head(module, lambda: HIDDEN), load_drafter(shipped_pair()[1], target)
    got, expected = dict(head.weights()), dict(want.weights())
    torch.testing.assert_close(got.pop("rotary"), expected.pop("rotary")[:1024], atol=1e-4, rtol=0)
    embedding, wanted = got.pop("embed_tokens"), expected.pop("embed_tokens")
    assert torch.equal(embedding[: len(wanted)], wanted)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name
    aux, hidden = torch.randn(7, head.aux_size), torch.randn(7, head.hidden_size)
    assert torch.equal(head.combine(aux), want.combine(aux))
    assert torch.equal(head.logits(hidden), want.logits(hidden))
    for one, other in zip(head.attention_layers, want.attention_layers, strict=True):
        assert (one.num_heads, one.num_kv_heads, one.head_dim) == (other.num_heads, other.num_kv_heads, other.head_dim)
        assert one.scale == other.scale


def test_eagle_1_too(target) -> None:
    folder = Path(__file__).parents[3] / "examples/tiny-python/drafters/eagle1"
    config = json.loads((folder / "config.json").read_text())
    head = draft_head(EagleLlamaForCausalLM(folder, config, target, torch.float32), lambda: HIDDEN)
    want = load_drafter(folder, target)
    got, expected = dict(head.weights()), dict(want.weights())
    torch.testing.assert_close(got.pop("rotary"), expected.pop("rotary")[:1024], atol=1e-4, rtol=0)
    assert torch.equal(got.pop("embed_tokens")[: target.vocab_size], expected.pop("embed_tokens"))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name
    assert (head.aux_layers, head.aux_size, head.draft_vocab_size) == ((), want.aux_size, want.draft_vocab_size)


def test_mtp_too(tmp_path) -> None:
    folder = mimo_folder(tmp_path)
    target = load_target(folder, dtype=torch.float32)
    module = MiMoMTP(folder, json.loads((folder / "config.json").read_text()), target, torch.float32)
    module.model.layers = ["not of the drafter"]
    head, want = draft_head(module, lambda: HIDDEN), load_drafter(folder, target)
    got, expected = dict(head.weights()), dict(want.weights())
    torch.testing.assert_close(got.pop("rotary"), expected.pop("rotary")[:1024], atol=1e-4, rtol=0)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor[: len(expected[name])], expected[name]), name
    theirs = {p.untyped_storage().data_ptr() for p in module.parameters()}
    copied = {name for name, tensor in got.items() if tensor.untyped_storage().data_ptr() not in theirs}
    assert copied == {"modules.0.projection"}
    assert (head.aux_layers, head.aux_size, head.draft_vocab_size) == ((), want.aux_size, want.draft_vocab_size)
    assert [layer.self_attn.attn.layer_name for layer in draft_layers(module)] == [LAYER_NAME]


def test_dflash_too(target) -> None:
    folder = Path(__file__).parents[3] / "examples/tiny-python/drafters/dflash"
    config = json.loads((folder / "config.json").read_text())
    module = DFlashQwen3ForCausalLM(folder, config, target, torch.float32)
    head, want = draft_head(module, lambda: HIDDEN), load_drafter(folder, target)
    got, expected = dict(head.weights()), dict(want.weights())
    torch.testing.assert_close(got.pop("rotary"), expected.pop("rotary")[:1024], atol=1e-4, rtol=0)
    assert got.keys() == expected.keys()
    theirs = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for name, tensor in got.items():
        assert torch.equal(tensor[: len(expected[name])], expected[name]), name
        assert tensor.untyped_storage().data_ptr() in theirs, name
    for name in ("max_speculative_tokens", "mask_token_id", "sample_from_anchor", "aux_size", "draft_vocab_size"):
        assert getattr(head, name) == getattr(want, name), name
    assert len(head.aux_layers) == 3
    attention = module.model.layers[1].self_attn
    for owner, name, value, words in (
        (module.model, "has_separate_mask_embedding", True, "mask_embedding.pt"),
        (module.model, "use_aux_hidden_state", False, "use_aux_hidden_state"),
        (attention, "causal", True, "causal layers"), (attention, "v_scale", 2.0, "attention_value_scale"),
        (attention, "attention_sink_bias", torch.zeros(6), "attention_sink_bias"),
    ):  # fmt: skip
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(UnsupportedError, match=words):
            draft_head(module, lambda: HIDDEN)
        setattr(owner, name, before)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_a_language_model_too(kind, tmp_path) -> None:
    folder = write_target(tmp_path)
    if kind is Qwen3ForCausalLM:
        tensors, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(2)
        for i in range(4):
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{i}.self_attn.{name}.weight"] = 1 + torch.rand(HEAD_DIM, generator=g)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3", "attention_bias": False}))
    config = json.loads((folder / "config.json").read_text())
    module = kind(folder, config, None, torch.float32)
    head, want = draft_head(module, lambda: 48), load_target(folder, dtype=torch.float32)
    assert (head.aux_size, head.kind, head.draft_vocab_size) == (48, DraftModelKind(), want.vocab_size)
    got, expected = dict(head.weights()), dict(want.weights())
    table = expected.pop("rotary")
    torch.testing.assert_close(got.pop("rotary")[: len(table)], table, atol=1e-4, rtol=0)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor[: len(expected[name])], expected[name]), name
    theirs = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert {tensor.untyped_storage().data_ptr() for tensor in got.values()} <= theirs
    assert [shape.rotary is head.attention_layers[0].rotary for shape in head.attention_layers] == [True] * 4
    for one, other in zip(head.attention_layers, want.attention_layers, strict=True):
        assert (one.num_heads, one.num_kv_heads, one.head_dim) == (other.num_heads, other.num_kv_heads, other.head_dim)
        assert one.scale == other.scale


def test_no_weight_is_copied(module) -> None:
    theirs = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for name, tensor in draft_head(module, lambda: HIDDEN).weights().items():
        assert name == "rotary" or tensor.untyped_storage().data_ptr() in theirs, name


def test_a_drafter_of_the_whole_vocabulary_has_no_map_of_ids(module) -> None:
    module.config.draft_vocab_size = module.config.vocab_size
    module.lm_head.weight = module.model.embed_tokens.weight
    module.draft_id_to_target_id = None  # as in vLLM 0.33; 0.26 has zeros
    assert draft_head(module, lambda: HIDDEN).draft_to_target is None


def _quantised(module):
    module.model.layers[0].mlp.down_proj.quant_method = GPTQMarlinLinearMethod()


def _int8(module):
    down = module.model.layers[0].mlp.down_proj
    down.quant_method, down.weight = Fp8LinearMethod(), torch.nn.Parameter(down.weight.to(torch.int8), False)


def _scales(module):
    quantise(module.model.layers[0].self_attn.qkv_proj, "row").weight_scale = torch.nn.Parameter(torch.ones(3, 1))


def _padded(module):
    """A CUTLASS kernel pads sizes to multiples of 16: gate and up of 44 columns each would be cut at 48."""
    down = quantise(module.model.layers[0].mlp.down_proj, "row")
    down.input_size_per_partition = down.weight.shape[0]
    down.weight = torch.nn.Parameter(
        torch.nn.functional.pad(down.weight.t().float(), (0, 8)).to(torch.float8_e4m3fn).t(), False
    )


def _elsewhere(module):
    """Some kernels keep their weight in a layout of their own, and leave nothing under its name."""
    down = quantise(module.model.layers[0].mlp.down_proj, "row")
    down.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.float8_e4m3fn), False)


def _fp8_head(module):
    quantise(module.lm_head, "row")


def _mrope(module):
    module.model.layers[0].self_attn.rotary_emb = MRotaryEmbedding(32, 8, 1e4, torch.float32)


def _gptj(module):
    module.model.layers[0].self_attn.rotary_emb.is_neox_style = False


def _window(module):
    module.model.layers[0].self_attn.attn.sliding_window = 128


def _gelu(module):
    module.config.hidden_act = "gelu"


def _no_aux(module):
    module.model.use_aux_hidden_state = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_quantised, "quantised Linear of the drafter .GPTQMarlinLinearMethod"),
        (_int8, r"with weights torch.int8 \[\d+, \d+\] and scales None; served are float8_e4m3fn"),
        (_scales, r"scales \[3, 1\] and blocks None"),
        (_padded, r"weights \[\d+, \d+\] that are padded, from \[\d+, \d+\]"),
        (_elsewhere, r"weights torch.float8_e4m3fn \[0\] and scales"),
        (_fp8_head, "quantised Linear of the drafter .CompressedTensorsLinearMethod"),
        (_mrope, "rotary embedding MRotaryEmbedding"),
        (_gptj, "neox style False"),
        (_window, "sliding window of 128"),
        (_gelu, "hidden_act 'gelu'"),
        (_no_aux, "use_aux_hidden_state is false"),
    ],
)
def test_what_the_head_does_not_have_is_refused_by_name(module, change, words) -> None:
    change(module)
    with pytest.raises(UnsupportedError, match=words):
        draft_head(module, lambda: HIDDEN)


def test_another_model_class_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a SimpleNamespace; served are Eagle3LlamaForCausalLM"):
        draft_head(SimpleNamespace(), lambda: HIDDEN)


def test_dspark_is_read_where_vllm_computes_what_the_head_does(tmp_path, target) -> None:
    folder = dspark_folder(tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    module = Qwen3DSparkForCausalLM(folder, config, target, torch.float32)
    head, want = draft_head(module, lambda: HIDDEN), load_drafter(folder, target)
    got, expected = dict(head.weights()), dict(want.weights())
    assert {*got} == {*expected}
    theirs = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for name in got.keys() - {"rotary"}:
        assert torch.equal(got[name][: len(expected[name])], expected[name]), name
        assert got[name].untyped_storage().data_ptr() in theirs, name
    assert (head.sample_from_anchor, head.max_speculative_tokens, head.has_confidence) == (True, 8, False)
    for name, value in (("dspark_draft_topk", 4), ("markov_head_type", "rnn"), ("logit_scale", 0.5)):
        setattr(module.config, name, value)
        with pytest.raises(UnsupportedError, match=f"{name} {value} in the DSpark drafter"):
            draft_head(module, lambda: HIDDEN)
        delattr(module.config, name)
    module.config.dspark_bonus_anchor, module.model.mask_token_id, module.config.dspark_noise_token_id = True, None, 9
    assert not draft_head(module, lambda: HIDDEN).sample_from_anchor
    module.config.dspark_bonus_anchor, module.config.sample_from_anchor = False, False
    head = draft_head(module, lambda: HIDDEN)
    assert (head.sample_from_anchor, head.max_speculative_tokens, head.mask_token_id) == (False, 7, 9)
    output = module.model.markov_head.markov_w2
    output.weight = torch.nn.Parameter(output.weight[: len(output.weight) // 2])
    with pytest.raises(UnsupportedError, match="Markov head split over ranks"):
        draft_head(module, lambda: HIDDEN)


def test_a_mixture_over_ranks_that_sums_up_in_another_way_is_refused() -> None:
    context = summed_in_graph(forward_context, TP_GROUP, TensorParallel(0, 2, "two"))
    with pytest.raises(UnsupportedError, match="over 2 ranks that does not add up"), context(None, "config", 1):
        pass
    with pytest.raises(ZeroDivisionError), context(None, "config", 1):
        1 / 0  # noqa: B018
    assert TP_GROUP.all_reduce(torch.ones(1)).isnan()  # its own again


def test_latents_lie_in_vllms_cache_and_what_changes_them_is_refused(tmp_path) -> None:
    folder = mixture_folder(tmp_path / "t", "deepseek")
    config, target = json.loads((folder / "config.json").read_text()), target_shape(folder, max_model_len=64)
    module = DeepSeekMTP(folder, config, target, torch.float32)
    attention = module.model.layers["2"].mtp_block.self_attn

    def head(**options) -> DraftHead:
        return draft_head(module, lambda: HIDDEN, call=lambda mlp, x: mlp(x), **options)

    theirs, groups = torch.zeros(6, 8, 32), [SimpleNamespace(layer_names=[LAYER_NAME])]
    cache = draft_cache(head(), module, groups, [8], {LAYER_NAME: SimpleNamespace(kv_cache=theirs)}).caches[0]
    assert cache.key.shape == (6, 8, 1, 32)
    assert cache.key.data_ptr() == cache.value.data_ptr() == theirs.data_ptr()
    for other in (torch.zeros(6, 8, 1, 32), torch.zeros(6, 8, 656), torch.zeros(6, 8, 32).half()):
        with pytest.raises(UnsupportedError, match=f"the KV cache of {LAYER_NAME} is"):
            draft_cache(head(), module, groups, [8], {LAYER_NAME: SimpleNamespace(kv_cache=other)})
    inner = attention.mla_attn.mla_attn
    for owner, name, value, words in (
        (module.config, "index_topk", 2048, "index_topk 2048 in a drafter with latent attention; served is None"),
        (module.config, "hidden_act", "gelu", "hidden_act gelu"), (attention, "q_lora_rank", None, "q_lora_rank None"),
        (attention.rotary_emb, "is_neox_style", True, "neox style True"), (inner, "W_UV", None, "up-projections"),
    ):  # fmt: skip
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        with pytest.raises(UnsupportedError, match=words):
            head()
        setattr(owner, name, before)
    module.half()
    with pytest.raises(UnsupportedError, match=r"routed_scaling_factor 1\.5 in float16"):
        head()


def test_the_cache_is_a_view_of_vllms_memory(module) -> None:
    head = draft_head(module, lambda: HIDDEN)
    theirs = kv_cache(6, 2, 16, 32, torch.float32)
    groups = [SimpleNamespace(layer_names=["other"]), SimpleNamespace(layer_names=["x", LAYER_NAME])]
    found = draft_cache(head, module, groups, [8, 16], {LAYER_NAME: SimpleNamespace(kv_cache=theirs)})
    assert (found.group, found.block_size) == (1, 16)
    key, value = found.caches[0]
    assert key.shape == value.shape == (6, 16, 2, 32)
    key[3, 5, 1, 7], value[3, 5, 1, 7] = -1.0, -2.0
    assert theirs[3, 1, 5, 7] == -1.0
    assert theirs[3, 1, 5, 32 + 7] == -2.0


def test_so_are_keys_and_values_that_lie_apart(module) -> None:
    """vLLM on Moore Threads GPUs stores them so."""
    theirs = separate_kv_cache(6, 2, 16, 32, torch.float32)
    groups, layers = [SimpleNamespace(layer_names=[LAYER_NAME])], {LAYER_NAME: SimpleNamespace(kv_cache=theirs)}
    cache = draft_cache(draft_head(module, lambda: HIDDEN), module, groups, [16], layers).caches[0]
    cache.key[3, 5, 1, 7], cache.value[3, 5, 1, 7] = -1.0, -2.0
    assert theirs[:, 3, 5, 1, 7].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("shape", [(6, 16, 2, 64), (2, 6, 2, 16, 32), (6, 2, 16, 2, 32), (6, 2, 16, 32)])
def test_another_layout_of_the_cache_is_refused(module, shape) -> None:
    groups = [SimpleNamespace(layer_names=[LAYER_NAME])]
    with pytest.raises(
        UnsupportedError,
        match=r"served is \[num_blocks, .* = \[\*, 2, 16, 64\], \[2, .* = \[2, \*, 16, 2, 32\], or two",
    ):
        draft_cache(
            draft_head(module, lambda: HIDDEN),
            module,
            groups,
            [16],
            {LAYER_NAME: SimpleNamespace(kv_cache=torch.zeros(shape))},
        )


def test_layers_in_no_group_are_refused(module) -> None:
    with pytest.raises(UnsupportedError, match="in 0 KV cache groups"):
        draft_cache(draft_head(module, lambda: HIDDEN), module, [SimpleNamespace(layer_names=["other"])], [16], {})
