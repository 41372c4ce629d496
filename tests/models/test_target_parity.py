"""Target logits and hidden states against transformers, float32, random weights."""

import pytest
import torch
from changed_folders import change_config, refused
from recurrent_targets import FAMILIES
from small_targets import ALIKE, TARGETS
from specgraph_models.checkpoints import load_target
from specgraph_models.checkpoints.architectures import ARCHITECTURES
from specgraph_models.parallel import TensorParallel
from specgraph_run import shipped_pair

from specgraph.errors import ConfigError

TOLERANCE = {"rtol": 0, "atol": 1e-4}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 512}

MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

GLM = {
    "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
GPT_OSS = {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}
DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
    "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0,
}  # fmt: skip
GEMMA = {
    "head_dim": 8,
    "sliding_window": 18,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 1
    + ["sliding_attention", "full_attention"],
}

CASES = {
    "llama, grouped queries": ("Llama", {}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("Llama", {"num_key_value_heads": 4}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, own head size": ("Llama", {"head_dim": 16}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, other theta and eps": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 0.1},
    ),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "yarn, own factors": (
        "Llama",
        {"head_dim": 32, "rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3}},
    ),
    "mistral, window": ("Mistral", {"sliding_window": 30}),
    "qwen2, window in the last layers": (
        "Qwen2",
        {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3, windows by layer": (
        "Qwen3",
        {
            "sliding_window": 9,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "qwen3, window not in use": ("Qwen3", {"sliding_window": 9}),
    "qwen3 moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3 moe, one expert per row": (
        "Qwen3Moe",
        {**MOE, "num_experts_per_tok": 1, "head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen3 moe, some layers dense, weights not normalised": (
        "Qwen3Moe",
        {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral, window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 20}),
    "phi3": ("Phi3", {}),
    "phi3, window, part of each head rotated": (
        "Phi3",
        {
            "sliding_window": 21,
            "num_attention_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "glm-4 moe": ("Glm4Moe", {**GLM, "attention_bias": True}),
    "glm-4 moe, norms of heads, groups": (
        "Glm4Moe",
        {
            **GLM,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 3,
            "sliding_window": 9,
        },
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss, no windows, other limits": (
        "GptOss",
        {**GPT_OSS, "layer_types": ["full_attention"] * 5, "swiglu_limit": 0.3, "swiglu_alpha": 2.0},
    ),
    "gemma 3": ("Gemma3", GEMMA),
    "gemma 3, long rope": (
        "Gemma3",
        {
            **GEMMA,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "deepseek-v3, queries without a latent, rotation in halves": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 5},
    ),
    "deepseek-v3, yarn": (
        "DeepseekV3",
        {**DEEPSEEK, "sliding_window": 9, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2}},
    ),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
        },
    ),
    "ministral 3": (
        "Ministral3",
        {
            "head_dim": 8,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
        },
    ),
    "yarn, mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2}}),
    "window as long as the context": ("Mistral", {"sliding_window": 128}),
    "llama, sharded": ("Llama", {"max_shard_size": "30KB"}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


def test_every_architecture_is_among_the_cases():
    compared = {architecture for architecture, _ in CASES.values()}
    known = {name for name, (architecture, _) in TARGETS.items() if architecture in compared}
    known |= {name for name, architecture in ALIKE.items() if architecture in compared}
    assert known | FAMILIES.keys() == set(ARCHITECTURES), "test_recurrent_targets.py has the other ones"


@pytest.mark.parametrize(("architecture", "config"), CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_logits_and_hidden_states_agree_with_transformers(architecture, config, tmp_path, random_model, dense_attend):
    model = random_model(architecture, tmp_path, **config)
    tokens = torch.randint(0, 120, (100,), generator=torch.Generator().manual_seed(1))
    expected = model(tokens[None], output_hidden_states=True)

    target = load_target(tmp_path)
    attend = dense_attend(target.attention_layers, torch.arange(100))
    out = target.forward(tokens, attend, aux_layers=(0, 2, 4))

    torch.testing.assert_close(target.logits(out.hidden), expected.logits[0], **TOLERANCE)
    # transformers' hidden state k is the stream entering layer k, for k below the number of layers.
    states = torch.cat([expected.hidden_states[k][0] for k in (0, 2, 4)], dim=-1)
    torch.testing.assert_close(out.aux_hidden, states, **TOLERANCE)
    torch.testing.assert_close(out.hidden, expected.hidden_states[-1][0], **TOLERANCE)


@torch.no_grad()
def test_kimi_k2_is_a_deepseek_v3_with_equal_yarn_betas(tmp_path, random_model, dense_attend):
    rope = {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = random_model("DeepseekV3", tmp_path, **DEEPSEEK, rope_parameters=rope)
    change_config(tmp_path, model_type="kimi_k2")
    target = load_target(tmp_path)
    out = target.forward(torch.arange(40), dense_attend(target.attention_layers, torch.arange(40)))
    torch.testing.assert_close(target.logits(out.hidden), model(torch.arange(40)[None]).logits[0], **TOLERANCE)


def test_what_the_cheap_ones_refuse(tmp_path, random_model):
    random_model("Ministral3", tmp_path / "a", head_dim=8, max_position_embeddings=32768)
    with refused("scales queries from position 16384 on", "max_model_len 32768", "max_model_len=16384 or less"):
        load_target(tmp_path / "a")
    assert load_target(tmp_path / "a", max_model_len=16384).max_model_len == 16384
    random_model("Glm4MoeLite", tmp_path / "b", **{**DEEPSEEK, "n_group": 1, "topk_group": 1})
    change_config(tmp_path / "b", first_k_dense_replace=3)
    with refused("'mlp_layer_types' is", "3 dense layers first"):
        load_target(tmp_path / "b")
    random_model("MiniMaxM2", tmp_path / "c", head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    change_config(tmp_path / "c", rotary_dim=8, use_qk_norm=True, num_mtp_modules=3, attn_type_list=[1] * 5)
    assert load_target(tmp_path / "c").sizes.rotary_dim == 8
    with pytest.raises(ConfigError, match="minimax_m2 model normalises all heads at once"):
        load_target(tmp_path / "c", tensor_parallel=TensorParallel(0, 2, "x"))
    change_config(tmp_path / "c", attn_type_list=[1, 0, 1, 1, 1])
    with refused("'attn_type_list' has other values than 1"):
        load_target(tmp_path / "c")


@torch.no_grad()
def test_last_aux_layer_is_the_state_before_the_final_norm(tmp_path, random_model, dense_attend):
    model = random_model("Llama", tmp_path)
    seen = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    tokens = torch.arange(20)
    model(tokens[None])
    target = load_target(tmp_path)
    out = target.forward(tokens, dense_attend(target.attention_layers, torch.arange(20)), aux_layers=(5,))
    torch.testing.assert_close(out.aux_hidden, seen[0], **TOLERANCE)


@torch.no_grad()
def test_a_tied_head_that_differs_is_used_as_transformers_does(tmp_path, random_model, dense_attend):
    transformers = pytest.importorskip("transformers")
    random_model("Llama", tmp_path)  # saved untied, with both tensors
    change_config(tmp_path, tie_word_embeddings=True)
    tokens = torch.tensor([3, 99, 7])
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens[None]).logits[0]
    target = load_target(tmp_path)
    hidden = target.forward(tokens, dense_attend(target.attention_layers, torch.arange(3))).hidden
    torch.testing.assert_close(target.logits(hidden), want, **TOLERANCE)


@torch.no_grad()
def test_no_aux_layers_gives_the_final_hidden_state(tmp_path, random_model, dense_attend):
    random_model("Llama", tmp_path)
    target = load_target(tmp_path)
    out = target.forward(torch.arange(9), dense_attend(target.attention_layers, torch.arange(9)))
    assert torch.equal(out.aux_hidden, out.hidden)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 4.5, 9.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "positions", "max_model_len", "first"),
    [
        (LLAMA3_ROPE, 4096, None, 4000),
        (YARN, 4096, None, 4000),
        ({**YARN, "rope_theta": 1e4, "beta_fast": 200.0, "beta_slow": 0.001}, 4096, None, 4000),
        ({**YARN, "mscale": 0.8}, 4096, None, 4000),
        ({**YARN, "original_max_position_embeddings": 2}, 4096, None, 4000),
        (LONGROPE, 512, 64, 24),
        (LONGROPE, 512, 65, 25),
        (LONGROPE, 64, None, 24),
        ({**LONGROPE, "factor": 1.5, "attention_factor": 1.3}, 512, None, 470),
        (LONGROPE, 96, None, 50),
    ],
    ids=[
        "llama3", "yarn", "yarn, all pairs between the limits", "yarn, one mscale", "yarn, less than a turn",
        "longrope, just short", "longrope, just long", "longrope, never long", "longrope, own factor",
        "longrope, half as long again",
    ],
)  # fmt: skip
@torch.no_grad()
def test_scaled_positions_agree_with_transformers(
    rope, positions, max_model_len, first, tmp_path, random_model, dense_attend
):
    """Positions far beyond the original context, where a wrong frequency shows.

    transformers takes the long factors when a pass goes beyond the original length; we, when the model may.
    """
    config = {"rope_parameters": rope, "max_position_embeddings": positions}
    model = (  # transformers takes Phi-3's original length from the top level only, 4096 where it is absent
        random_model("Phi3", tmp_path, **config, original_max_position_embeddings=64)
        if rope["rope_type"] == "longrope"
        else random_model("Llama", tmp_path, **config, head_dim=32)
    )
    tokens, places = torch.arange(40), torch.arange(first, first + 40)
    expected = model(tokens[None], position_ids=places[None]).logits[0]
    target = load_target(tmp_path, max_model_len=max_model_len)
    out = target.forward(tokens, dense_attend(target.attention_layers, places))
    torch.testing.assert_close(target.logits(out.hidden), expected, **TOLERANCE)


def test_dtype_and_max_model_len_are_honoured(tmp_path, random_model):
    random_model("Llama", tmp_path)
    target = load_target(tmp_path, dtype=torch.bfloat16, max_model_len=64)
    assert target.dtype == torch.bfloat16
    assert target.max_model_len == 64
    rotary = target.attention_layers[0].rotary
    assert rotary is not None
    assert rotary.dtype == torch.float32
    assert rotary.shape == (64, 8)


@torch.no_grad()
def test_shipped_target_agrees_with_transformers(dense_attend):
    """Trained weights, stored in float16, computed in float32."""
    transformers = pytest.importorskip("transformers")
    folder = shipped_pair()[0]
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, 2048, (60,), generator=torch.Generator().manual_seed(4))
    target = load_target(folder, dtype=torch.float32)
    out = target.forward(tokens, dense_attend(target.attention_layers, torch.arange(60)))
    torch.testing.assert_close(target.logits(out.hidden), model(tokens[None]).logits[0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_shorter_runs_may_ignore_a_sliding_window(tmp_path, random_model, dense_attend):
    """Within the window it is full attention, which every attention backend has."""
    model = random_model("Mistral", tmp_path, sliding_window=40)
    assert {layer.window for layer in load_target(tmp_path).attention_layers} == {40}
    target = load_target(tmp_path, max_model_len=40)
    assert {layer.window for layer in target.attention_layers} == {None}
    out = target.forward(torch.arange(40), dense_attend(target.attention_layers, torch.arange(40)))
    torch.testing.assert_close(target.logits(out.hidden), model(torch.arange(40)[None]).logits[0], **TOLERANCE)
