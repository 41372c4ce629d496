"""Targets with gated delta nets: whole rounds with scripted drafts, sampled text, folders and GGUF files.

`SPECGRAPH_HYBRID_CONFIGS=60` runs 200 random decodings, 3,000 requests and 4,000 sampled texts of each kind of drafter.
"""

import dataclasses
import os
import random

import pytest
import torch
from changed_folders import change_config, refused
from goodness_of_fit import p_value
from recurrent_targets import FAMILIES, MIXTURE, SIZES, with_cancels, write_hybrid
from scripted_rounds import closed, decoder_of, oracle_drafts, some_prompts, texts, theirs
from specgraph_conformance.decode_rig import logits_of
from specgraph_conformance.tiny_models import HIDDEN, make_head, make_target
from specgraph_models.checkpoints import load_drafter, load_target
from specgraph_models.checkpoints.architectures import ARCHITECTURES
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.parallel import TensorParallel
from specgraph_run.decoder import Request
from specgraph_run.decoder.blocks import size_cache
from specgraph_run.decoder.states import bytes_per_request, free_slot

from specgraph.cpu import CpuPlatform
from specgraph.draft import DraftTree
from specgraph.draft.ngram import NgramHead
from specgraph.errors import CapacityError, ConfigError, UnsupportedError

IS_LONG = int(os.environ.get("SPECGRAPH_HYBRID_CONFIGS", "1")) > 1
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def tiny():
    """A target with a vocabulary of 64, a recurrent layer and one with attention."""
    return make_target(3, CPU, recurrent=True)


def alone(target, prompts, max_tokens, query_len):
    """The greedy text of each prompt, decoded without a drafter, at the shape of the verify."""
    decoder = decoder_of(target, None, num_speculative_tokens=query_len - 1, max_num_requests=1, capture_sizes=[1])
    found = [texts(decoder, [prompt], max_tokens)[0] for prompt in prompts]
    closed(decoder)
    return found


@pytest.mark.parametrize("seed", range(200 if IS_LONG else 1))
def test_rejections_at_every_place_against_no_drafting(seed, tiny):
    """K changes from round to round, also to 0; requests join and leave; prompts of one to three chunks."""
    rng = random.Random(seed)
    k = rng.randint(1, 5)
    lengths = [rng.choice([1, 2, 3, 4, k, k + 1, k + 2, 7, 8, 9, 17]) for _ in range(4)]
    g = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 64, (n,), generator=g).tolist() for n in lengths]
    expected = alone(tiny, prompts, 20, k + 1)
    decoder = decoder_of(
        tiny, NgramHead(64, 2, 1), rng.choice(["device", "host"]), num_speculative_tokens=k,
        decode=rng.choice(["eager", "step", "merged"]), capture_sizes=[1, 2], rounds_ahead=rng.randint(0, 1),
        draft_schedule={1: k, 2: rng.randint(0, k)}, prefill=rng.choice(["auto", "eager"]),
    )  # fmt: skip
    oracle_drafts(decoder, {tuple(p): p + t for p, t in zip(prompts, expected, strict=True)}, rng)
    states = decoder.target.states
    for layer in states.layers:  # what a last owner may have left
        for tensor in layer:
            tensor.fill_(rng.choice([float("nan"), 3.0]))
    assert texts(decoder, prompts, 20) == expected
    assert all(bool(tensor[0].isnan().all()) or bool((tensor[0] == 3).all()) for tensor in states.layers[0]), (
        "null slot"
    )
    closed(decoder)


def test_cancelled_requests_leave_their_slots(tiny):
    """The slots of running requests are the lowest ones, each taken once, whatever came and went before."""
    assert [free_slot(taken) for taken in ((), (1,), (2, 3), (1, 2), (3, 1))] == [1, 2, 1, 3, 2]
    rng, prompts = random.Random(1), [[1 + i, 9, 40 - i][: 1 + i % 3] for i in range(9)]
    expected = alone(tiny, prompts, 6, 4)
    decoder = decoder_of(tiny, NgramHead(64, 2, 1), decode="merged", rounds_ahead=1)
    live, done, asked = {}, 0, 0
    while done < (3000 if IS_LONG else 15):
        while len(live) < 4:
            prompt = prompts[asked % 9]
            live[decoder.add(Request(prompt_token_ids=prompt, max_tokens=6))] = (expected[asked % 9], [])
            asked += 1
        if rng.random() < 0.3:
            decoder.cancel(rng.choice(list(live)))
        slots = [state.slot for state in decoder.rounds.running]
        assert len({*slots}) == len(slots)
        assert {*slots} <= {1, 2}
        for chunk in decoder.step():
            text, seen = live[chunk.request]
            seen += chunk.token_ids
            assert seen == text[: len(seen)]
            if chunk.finish_reason is not None:
                assert chunk.finish_reason == "cancelled" or seen == text
                del live[chunk.request]
                done += 1
    closed(decoder)


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash", "ngram"] if IS_LONG else ["mtp"])
def test_sampled_text_has_the_targets_distribution(kind, tiny):
    """Chi-square of each token's rank among float64 logits after the tokens before it. Rounds reject some drafts."""
    draws, rows, places = (4000, 64, 12) if IS_LONG else (96, 24, 12)
    decoder = decoder_of(
        tiny, make_head(kind, 3, CPU), sampled=True, max_num_requests=rows, capture_sizes=[rows], max_model_len=32
    )
    asked = [
        Request(prompt_token_ids=[5, 9, 5, 2, 9, 5], max_tokens=places, temperature=0.15, seed=seed)
        for seed in range(draws)
    ]
    found = [each.token_ids for each in decoder.generate(asked)]
    assert 0 < sum(decoder.metrics.accepted) < 3 * decoder.metrics.num_drafts
    counts, wanted = torch.zeros(2, places, 64, dtype=torch.float64)
    for request, tokens in zip(asked, found, strict=True):
        likely = logits_of(decoder, request, tokens).sort(descending=True)
        wanted += (likely.values / request.temperature).softmax(-1)
        counts += likely.indices == torch.tensor(tokens)[:, None]
    closed(decoder)
    values = [p_value(*pair) for pair in zip([counts.sum(0), *counts], [wanted.sum(0), *wanted], strict=True)]
    print(f"{kind}, {draws} texts: p = {values[0]:.3f}, by place {[round(value, 3) for value in values[1:]]}")
    assert min(values) > 1e-3


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash", "ngram"] if IS_LONG else ["mtp", "dflash"])
def test_every_lowering_has_the_bits_of_eager(kind):
    """Requests join, end and are cancelled; tokens are those of the target alone."""
    platform = CpuPlatform()
    eager = with_cancels(platform, kind, "eager")
    for lowering in ("step", "merged") if IS_LONG else ("merged",):
        assert with_cancels(platform, kind, lowering) == eager
    for (tokens, _), (own, _) in zip(eager, with_cancels(platform, None, "eager"), strict=True):
        assert tokens[: len(own)] == own[: len(tokens)]
    platform.close()


def test_every_k_by_measured_times(tiny):
    """Timed rounds leave no state behind."""
    head = make_head("eagle", 3, CPU)
    prompts = [[5, 9, 2], [40, 1, 17, 8, 8, 30, 2]]
    decoder = decoder_of(tiny, head, num_speculative_tokens=3, k_candidates=(1, 3), capture_sizes=[1, 2])
    assert texts(decoder, prompts, 12) == alone(tiny, prompts, 12, 4)
    closed(decoder)


def test_a_folders_mtp_module_drafts_for_it(tmp_path):
    """A whole folder of Qwen3-Next decodes through graphs, with its sizes in `explain` and in the description."""
    from safetensors.torch import load_file, save_file

    model = write_hybrid("qwen3_next", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {n.replace("model.layers.3.", "mtp.layers.0."): t.clone() for n, t in tensors.items() if ".layers.3." in n}
    parts = {f"mtp.{n}.weight": torch.zeros(32) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    fc = {"mtp.fc.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * 0.2}
    save_file({**tensors, **layer, **parts, **fc}, tmp_path / "model.safetensors")
    target = load_target(tmp_path, max_model_len=64)
    prompts = some_prompts(4, [5, 13])
    decoder = decoder_of(target, load_drafter(tmp_path, target), decode="merged", prefill="auto")
    assert texts(decoder, prompts, 10) == theirs(model, prompts, 10)
    closed(decoder)


def test_sizes():
    """Qwen3-Next-80B-A3B and Qwen3.5-27B, K = 3: the arithmetic of ADR 12."""
    from specgraph_models.delta import DeltaConfig

    def mib(layers, heads, k):
        each = DeltaConfig(key_heads=16, value_heads=heads, key_size=128, value_size=128, kernel=4)
        return bytes_per_request([each] * layers, k + 1, torch.bfloat16) / 2**20

    assert [round(mib(36, 32, k), 1) for k in (3, 5)] == [82.7, 87.2]
    assert [round(mib(48, 48, k), 1) for k in (3, 5)] == [162.6, 170.5]
    given = {"block_size": 16, "max_model_len": 4096, "max_num_requests": 64, "state_bytes": 83 << 20}
    size = size_cache(24576, memory=40 << 30, **given)
    assert size.num_bytes + size.state_bytes <= 40 << 30
    assert "recurrent states of 64 requests: 5.27 GiB" in str(size)
    with pytest.raises(CapacityError, match=r"states of 64 requests take 5.27 GiB.*lower max_num_requests"):
        size_cache(24576, memory=5 << 30, **given)


def test_absent_keys_are_those_of_the_class():
    transformers = pytest.importorskip("transformers")
    for family, (_, name) in FAMILIES.items():
        chosen = getattr(transformers, name)
        defaults = {field.name: field.default for field in dataclasses.fields(chosen)}
        defaults["partial_rotary_factor"] = chosen().rope_parameters["partial_rotary_factor"]
        absent = ARCHITECTURES[family].absent_keys
        assert absent == {key: defaults[key] for key in absent}
        made = chosen(**SIZES | MIXTURE)
        sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        assert [defaults[key] for key in (*sizes, "linear_conv_kernel_dim")] == [16, 32, 128, 128, 4]
        assert made.layer_types == ["linear_attention", "full_attention"] * 2


def test_what_is_refused(tmp_path, tiny):
    tree = DraftTree(num_steps=2, top_k=2, num_draft_tokens=4)
    head = make_head("eagle", 3, CPU)
    with pytest.raises(UnsupportedError, match="draft trees: the target has recurrent layers"):
        decoder_of(tiny, head, num_speculative_tokens=2, tree=tree)
    with pytest.raises(UnsupportedError, match="verified_drafts: the target has recurrent layers"):
        decoder_of(tiny, make_head("dspark", 3, CPU), verified_drafts=1.0)
    with pytest.raises(ConfigError, match="recurrent layers, whose states are kept for targets alone"):
        DraftModelHead(tiny, HIDDEN)
    write_hybrid("qwen3_next", tmp_path)
    target = load_target(tmp_path)
    with refused("a qwen3_next model has recurrent layers", "draft with its MTP module"):
        load_drafter(tmp_path, target)
    with pytest.raises(ConfigError, match="tensor parallel over 2 ranks: the qwen3_next model has recurrent layers"):
        load_target(tmp_path, tensor_parallel=TensorParallel(0, 2, "x"))
    for key, value in (
        ("mamba_ssm_dtype", "bfloat16"), ("output_gate_type", "sigmoid"), ("attn_output_gate", False),
        ("layer_types", ["linear_attention"] * 4), ("layer_types", ["full_attention"]),
        ("linear_num_value_heads", 5), ("linear_conv_kernel_dim", 1),
    ):  # fmt: skip
        change_config(tmp_path, **{key: value})
        with refused(f"'{key}'"):
            load_target(tmp_path)
        change_config(tmp_path, **{key: None} if key != "linear_conv_kernel_dim" else {key: 4})
        if key.startswith("linear_num"):
            change_config(tmp_path, linear_num_value_heads=4)


def gguf_of(path, model, family, architecture, kind="F32"):
    """Write a model as llama.cpp's converter does."""
    gguf = pytest.importorskip("gguf")
    import numpy as np
    from gguf_files import add, byte_level

    config = model.config
    keys, values, size = (
        getattr(config, f"linear_{n}") for n in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim // 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": keys, "ssm.time_step_rank": values, "ssm.inner_size": values * size,
        "full_attention_interval": 2,
    }  # fmt: skip
    if "moe" in family or family == "qwen3_next":
        numbers |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }  # fmt: skip
    else:
        numbers["feed_forward_length"] = config.intermediate_size
    for key, number in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_array(f"{architecture}.rope.dimension_sections", [2, 2, 2, 0])
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    for key, value in byte_level("qwen35").items():
        getattr(writer, f"add_{key}")(value)
    tiled = np.arange(values).reshape(keys, -1).T.flatten() if family != "qwen3_next" else np.arange(values)
    rows = (tiled[:, None] * size + np.arange(size)).flatten()
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    qk = 2 * keys * config.linear_key_head_dim
    tensors = {n: t.float().numpy() for n, t in model.state_dict().items()}
    for name in [n for n in tensors if n.endswith("in_proj_qkvz.weight")]:
        whole = tensors.pop(name).reshape(keys, -1, config.hidden_size)
        cuts = np.cumsum([config.linear_key_head_dim] * 2 + [values // keys * size])
        q, k, v, z = (part.reshape(-1, config.hidden_size) for part in np.split(whole, cuts, axis=1))
        tensors[name.replace("qkvz", "qkv")], tensors[name.replace("qkvz", "z")] = np.concatenate([q, k, v]), z
    for name, weight in tensors.items():
        base, _, suffix = name.rpartition(".")
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(weight, 2, axis=1), strict=True):
                add(writer, f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", half, kind)
            continue
        if name.endswith("experts.down_proj"):
            add(writer, f"blk.{name.split('.')[2]}.ffn_down_exps.weight", weight, kind)
            continue
        if name.endswith(("A_log", "dt_bias")):
            block = f"blk.{name.split('.')[2]}"
            stored = -np.exp(weight) if suffix == "A_log" else weight
            add(writer, f"{block}.ssm_a" if suffix == "A_log" else f"{block}.ssm_dt.bias", stored[tiled], "F32")
            continue
        if base.endswith("norm") and "linear_attn" not in base:
            weight = weight + 1
        if base.endswith(("in_proj_qkv", "conv1d")):
            weight = np.concatenate([weight[:qk], weight[qk:][rows]]).reshape(weight.shape[0], -1)
        elif base.endswith("in_proj_z"):
            weight = weight[rows]
        elif base.endswith(("in_proj_a", "in_proj_b")):
            weight = weight[tiled]
        elif base.endswith("linear_attn.out_proj"):
            weight = weight[:, rows]
        weight = weight[0] if base.endswith("shared_expert_gate") else weight
        add(
            writer,
            f"{names.get_name(base)}.{suffix}",
            np.ascontiguousarray(weight),
            "F32" if weight.ndim == 1 else kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


@pytest.mark.parametrize("family", FAMILIES if IS_LONG else ["qwen3_5_moe_text"])
def test_gguf_files(family, tmp_path):
    """Three value heads per key head, in llama.cpp's order; transformers reads two of the families itself."""
    transformers = pytest.importorskip("transformers")
    model = write_hybrid(family, tmp_path, vocab_size=400, linear_num_value_heads=6, head_dim=48)
    path = gguf_of(tmp_path / "model.gguf", model, family, GGUF[family])
    prompt = list(range(3, 25))
    expected = model(torch.tensor([prompt])).logits[0, -1]
    if family != "qwen3_next" and IS_LONG:
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
        torch.testing.assert_close(read(torch.tensor([prompt])).logits[0, -1], expected, rtol=0, atol=1e-4)
    target = load_target(path, max_model_len=64, dtype=torch.float32)
    decoder = decoder_of(target, None)
    texts(decoder, [prompt], 1)
    torch.testing.assert_close(decoder.target.prompt_logits[0], expected, rtol=0, atol=1e-4)
    closed(decoder)
