"""The names of vLLM that the plugin uses, against the sources in vLLM's wheels.

The wheels are large and not downloaded here: SPECGRAPH_VLLM_WHEELS names a folder with one unpacked wheel per release
(FOLDER/0.26/vllm and so on; `pip download --no-deps vllm==0.26.0`, then unzip). What is not there is skipped.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open
from specgraph_models.from_modules import ROTARY_CLASSES
from specgraph_plugin.vllm.dflash import DFLASH_CLASS, DSPARK_CLASS
from specgraph_plugin.vllm.draft_model import EAGLE3_CLASS, EAGLE_CLASS
from specgraph_plugin.vllm.language_model import LANGUAGE_MODEL_CLASSES
from specgraph_plugin.vllm.mtp import DEEPSEEK, GLM, LATENT_ATTENTION, MIMO, QWEN
from specgraph_plugin.vllm.v2_names import INPUT_BATCH, PROPOSE, SPECULATOR
from specgraph_run import shipped_pair
from specgraph_vllm.names import FORWARD_CONTEXT, RUNNER_MODULE, TENSOR_PARALLEL

GPU = "vllm/v1/worker/gpu"
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
CLASSES = {"eagle": "EagleSpeculator", "mtp": "MTPSpeculator", "standalone_ar": "StandaloneARSpeculator"}
BASES = {
    "0.26": ("autoregressive", "AutoRegressiveSpeculator"),
    "0.28": ("autoregressive", "AutoRegressiveSpeculator"),
    "0.30": ("autoregressive", "AutoRegressiveSpeculator"),
    "0.33": ("target_dependent_ar", "TargetDependentARSpeculator"),
}
"""The module and class that the speculators of EAGLE and MTP inherit `propose` from."""


@pytest.fixture(params=sorted(BASES))
def wheel(request) -> tuple[str, Path]:
    folder = Path(os.environ.get("SPECGRAPH_VLLM_WHEELS", "/nonexistent")) / request.param
    if not (folder / "vllm").is_dir():
        pytest.skip(f"no unpacked wheel of vLLM {request.param} (SPECGRAPH_VLLM_WHEELS)")
    return request.param, folder


def tree(folder: Path, path: str) -> ast.Module:
    return ast.parse((folder / path).read_text())


def found(root: ast.AST, kind: type, name: str) -> ast.AST:
    for node in ast.walk(root):
        if isinstance(node, kind) and node.name == name:
            return node
    raise AssertionError(f"no {kind.__name__} {name}")


def parameters(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in function.args.args if a.arg != "self"]


def assigned(root: ast.AST) -> set[str]:
    """Attributes of self that are assigned, and annotated names of a class body."""
    names = set()
    for node in ast.walk(root):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return names


def test_the_runner_imports_init_speculator_by_name(wheel) -> None:
    _, folder = wheel
    runner = tree(folder, RUNNER_MODULE.replace(".", "/") + ".py")
    imports = [a.name for n in ast.walk(runner) if isinstance(n, ast.ImportFrom) for a in n.names]
    assert "init_speculator" in imports
    init = found(tree(folder, f"{GPU}/spec_decode/__init__.py"), ast.FunctionDef, "init_speculator")
    assert parameters(init)[0] == "vllm_config"


def test_propose_has_the_parameters(wheel) -> None:
    release, folder = wheel
    path, base = BASES[release]
    for module in ("eagle", "mtp"):
        stock = found(tree(folder, f"{GPU}/spec_decode/{module}/speculator.py"), ast.ClassDef, CLASSES[module])
        assert isinstance(stock, ast.ClassDef)
        assert [b.id for b in stock.bases if isinstance(b, ast.Name)] == [base]
        assert not {n.name for n in stock.body if isinstance(n, ast.FunctionDef)} & {"propose", "capture", "set_attn"}
    places = [path, "standalone_ar"] if release == "0.33" else [path]
    for place in places:
        module = tree(folder, f"{GPU}/spec_decode/{place}/speculator.py")
        propose, capture = (found(module, ast.FunctionDef, name) for name in ("propose", "capture"))
        assert tuple(parameters(propose))[: len(PROPOSE)] == PROPOSE
        assert {"dummy_run", "mm_inputs", "is_profile"} <= set(parameters(propose))
        assert parameters(capture) == []
    for name in ("load_model", "set_attn"):
        found(tree(folder, f"{GPU}/spec_decode/speculator.py"), ast.FunctionDef, name)


def test_the_speculator_has_what_the_class_reads(wheel) -> None:
    release, folder = wheel
    source = found(tree(folder, f"{GPU}/spec_decode/speculator.py"), ast.ClassDef, "DraftModelSpeculator")
    own = assigned(source) | {n.name for n in ast.walk(source) if isinstance(n, ast.FunctionDef)}
    assert {*SPECULATOR, "model", "block_tables", "kv_cache_config"} <= own
    batch = assigned(found(tree(folder, f"{GPU}/input_batch.py"), ast.ClassDef, "InputBatch"))
    assert set(INPUT_BATCH) <= batch
    tables = assigned(found(tree(folder, f"{GPU}/block_table.py"), ast.ClassDef, "BlockTables"))
    assert {"input_block_tables", "block_sizes"} <= tables
    assert ("kernel_block_sizes" in tables) == (release != "0.33")
    groups = (folder / "vllm/v1/kv_cache_interface.py").read_text()
    assert "kv_cache_groups" in groups
    assert "layer_names" in groups


def test_the_draft_model_has_what_the_head_reads(wheel) -> None:
    _, folder = wheel
    models = tree(folder, "vllm/model_executor/models/llama_eagle3.py")
    whole = assigned(found(models, ast.ClassDef, EAGLE3_CLASS))
    assert {"config", "model", "lm_head", "draft_id_to_target_id"} <= whole
    inner = assigned(found(models, ast.ClassDef, "LlamaModel"))
    names = ("embed_tokens", "layers", "fc", "norm", "input_norm", "fc_norm", "norm_output", "use_aux_hidden_state")
    assert {*names, "num_aux_hidden_states"} <= inner
    layer = assigned(found(models, ast.ClassDef, "LlamaDecoderLayer"))
    llama = tree(folder, "vllm/model_executor/models/llama.py")
    layer |= assigned(found(llama, ast.ClassDef, "LlamaDecoderLayer"))
    assert {"self_attn", "mlp", "input_layernorm", "hidden_norm", "post_attention_layernorm"} <= layer
    attention = assigned(found(llama, ast.ClassDef, "LlamaAttention"))
    names = ("qkv_proj", "o_proj", "rotary_emb", "attn", "num_heads", "num_kv_heads", "head_dim", "scaling")
    assert set(names) <= attention
    assert {"gate_up_proj", "down_proj"} <= assigned(found(llama, ast.ClassDef, "LlamaMLP"))
    rotary = "".join(p.read_text() for p in (folder / "vllm/model_executor/layers/rotary_embedding").glob("*.py"))
    for name in ROTARY_CLASSES:
        assert f"class {name}(" in rotary
    assert {"cos_sin_cache", "is_neox_style"} <= assigned(
        ast.parse((folder / "vllm/model_executor/layers/rotary_embedding/base.py").read_text())
    )
    norm = (folder / "vllm/model_executor/layers/layernorm.py").read_text()
    assert "self.variance_epsilon" in norm
    attention_layer = (folder / "vllm/model_executor/layers/attention/attention.py").read_text()
    assert "self.layer_name" in attention_layer
    assert "self.kv_cache = " in attention_layer
    assert "self.sliding_window" in attention_layer
    for path, name in (
        ("linear", "UnquantizedLinearMethod"),
        ("vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ):
        assert f"class {name}(" in (folder / f"vllm/model_executor/layers/{path}.py").read_text()


def test_so_has_the_one_of_eagle_1(wheel) -> None:
    _, folder = wheel
    models = tree(folder, "vllm/model_executor/models/llama_eagle.py")
    assert {"config", "model"} <= assigned(found(models, ast.ClassDef, EAGLE_CLASS))
    assert {"embed_tokens", "layers", "fc"} <= assigned(found(models, ast.ClassDef, "LlamaModel"))
    assert "self.input_layernorm = nn.Identity()" in (folder / "vllm/model_executor/models/llama_eagle.py").read_text()
    sharing = (folder / f"{GPU}/spec_decode/eagle/utils.py").read_text()
    assert "eagle_model.lm_head = " in sharing
    assert "target_embed = target_embed.base_layer" in sharing  # the drafter does not see the target's LoRA


def test_so_has_the_one_of_mtp(wheel) -> None:
    release, folder = wheel
    path = "vllm/model_executor/models/mimo_mtp.py"
    models = tree(folder, path)
    assert {"config", "model", "lm_head"} <= assigned(found(models, ast.ClassDef, MIMO))
    assert {"embed_tokens", "mtp_layers"} <= assigned(found(models, ast.ClassDef, "MiMoMultiTokenPredictor"))
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "mtp_block", "final_layernorm")
    layer = found(models, ast.ClassDef, "MiMoMultiTokenPredictorLayer")
    assert set(names) <= assigned(layer)
    assert "torch.cat([previous_hidden_states, inputs_embeds], dim=-1)" in ast.unparse(layer)
    attention = assigned(found(tree(folder, "vllm/model_executor/models/qwen2.py"), ast.ClassDef, "Qwen2Attention"))
    names = ("qkv_proj", "o_proj", "rotary_emb", "attn", "num_heads", "num_kv_heads", "head_dim", "scaling")
    assert set(names) <= attention
    speculator = (folder / f"{GPU}/spec_decode/{BASES[release][0]}/speculator.py").read_text()
    assert "spec_step_idx" not in speculator  # so it is 0 at every step: the first module drafts every token
    registry = (folder / "vllm/model_executor/models/registry.py").read_text()
    assert f'"MiMoMTPModel": ("mimo_mtp", "{MIMO}")' in registry


def test_so_have_those_with_mixtures(wheel) -> None:
    _, folder = wheel
    models = folder / "vllm/model_executor/models"
    glm = tree(models, "glm4_moe_mtp.py")
    layer = found(glm, ast.ClassDef, "Glm4MoeMultiTokenPredictorLayer")
    assert {"enorm", "hnorm", "eh_proj", "mtp_block", "shared_head"} <= assigned(layer)
    assert {"norm", "head"} <= assigned(found(glm, ast.ClassDef, "SharedHead"))
    assert {"embed_tokens", "layers"} <= assigned(found(glm, ast.ClassDef, "Glm4MoeMultiTokenPredictor"))
    for text in ("torch.cat([inputs_embeds, previous_hidden_states], dim=-1)", "return hidden_states"):  # without norm
        assert text in ast.unparse(layer)
    assert "config" in assigned(found(glm, ast.ClassDef, GLM))
    attention = {"qkv_proj", "o_proj", "rotary_emb", "attn", "num_heads", "num_kv_heads", "head_dim", "scaling"}
    normed = {"q_norm", "k_norm"}
    assert attention | normed <= assigned(found(tree(models, "glm4_moe.py"), ast.ClassDef, "Glm4MoeAttention"))
    qwen = tree(models, "qwen3_next.py")
    assert attention | normed <= assigned(found(qwen, ast.ClassDef, "Qwen3NextAttention"))
    assert "layer_scale" in assigned(found(qwen, ast.ClassDef, "Qwen3NextDecoderLayer"))
    assert "GemmaRMSNorm as Qwen3NextRMSNorm" in (models / "qwen3_next.py").read_text()
    for file, names, inner in (
        ("qwen3_next_mtp.py", QWEN[:1], "Qwen3NextMultiTokenPredictor"),
        ("qwen3_5_mtp.py", QWEN[1:2], "Qwen3_5MultiTokenPredictor"),
    ):
        predictor = found(tree(models, file), ast.ClassDef, inner)
        parts = {"pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers", "norm", "embed_tokens"}
        assert parts <= assigned(predictor)
        assert "torch.cat([inputs_embeds, hidden_states], dim=-1)" in ast.unparse(predictor)
        for name in names:
            assert {"config", "model", "lm_head"} <= assigned(found(tree(models, file), ast.ClassDef, name))
    more = found(tree(models, "qwen3_5_mtp.py"), ast.ClassDef, QWEN[2])
    assert ast.unparse(more.bases[0]) == QWEN[1]
    module, name = FORWARD_CONTEXT
    context = found(tree(folder, f"{module.replace('.', '/')}.py"), ast.FunctionDef, name)
    assert parameters(context)[:3] == ["attn_metadata", "vllm_config", "num_tokens"]
    base = (folder / f"{GPU}/spec_decode/{BASES[wheel[0]][0]}/speculator.py").read_text()
    assert "positions=input_buffers.positions[:num_tokens]" in base.replace("self.input_buffers", "input_buffers")


def test_so_has_the_one_with_latents(wheel) -> None:
    _, folder = wheel
    models, layers = folder / "vllm/model_executor/models", folder / "vllm/model_executor/layers"
    mtp, deepseek = tree(models, "deepseek_mtp.py"), tree(models, "deepseek_v2.py")
    layer = found(mtp, ast.ClassDef, "DeepSeekMultiTokenPredictorLayer")
    assert {"enorm", "hnorm", "eh_proj", "mtp_block", "shared_head"} <= assigned(layer)
    for text in ("torch.cat([inputs_embeds, previous_hidden_states], dim=-1)", "self.shared_head(hidden_states)"):
        assert text in ast.unparse(layer)  # the next step takes the state after the norm
    assert {"embed_tokens", "layers"} <= assigned(found(mtp, ast.ClassDef, "DeepSeekMultiTokenPredictor"))
    assert "config" in assigned(found(mtp, ast.ClassDef, DEEPSEEK))
    names = {"fused_qkv_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "o_proj", "rotary_emb", "mla_attn"}
    names |= {"num_heads", "scaling", "q_lora_rank", "kv_lora_rank"}
    names |= {"qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
    attention = found(deepseek, ast.ClassDef, LATENT_ATTENTION)
    assert names <= assigned(attention)
    assert "is_neox_style=False" in ast.unparse(attention)
    block = found(deepseek, ast.ClassDef, "DeepseekV2DecoderLayer")
    names = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "routed_scaling_factor"}
    assert names <= assigned(block)
    assert "hidden_states.dtype == torch.float16" in ast.unparse(block)
    assert "mla_attn" in assigned(found(tree(layers, "mla.py"), ast.ClassDef, "MultiHeadLatentAttentionWrapper"))
    text = (layers / "attention/mla_attention.py").read_text()
    for words in ('"W_UV", W_UV.transpose(0, 1)', '"W_UK_T", W_UK.permute(1, 2, 0)', "self.layer_name = prefix"):
        assert words in text


def test_so_has_the_one_of_dflash(wheel) -> None:
    release, folder = wheel
    models = tree(folder, "vllm/model_executor/models/qwen3_dflash.py")
    whole = {"config", "model", "lm_head", "draft_id_to_target_id"}
    assert whole <= assigned(found(models, ast.ClassDef, DFLASH_CLASS))
    inner = {"embed_tokens", "layers", "fc", "hidden_norm", "norm", "mask_token_id", "has_separate_mask_embedding"}
    assert inner | {"use_aux_hidden_state"} <= assigned(found(models, ast.ClassDef, "DFlashQwen3Model"))
    names = {"qkv_proj", "o_proj", "rotary_emb", "attn", "num_heads", "num_kv_heads", "head_dim", "scaling", "q_norm"}
    names |= {"k_norm", "total_num_kv_heads", "causal", "attention_sink_bias"}
    attention = assigned(found(models, ast.ClassDef, "DFlashQwen3Attention"))
    assert names | ({"v_scale"} if release == "0.33" else set()) <= attention
    speculator = tree(folder, f"{GPU}/spec_decode/dflash/speculator.py")
    assert tuple(parameters(found(speculator, ast.FunctionDef, "propose")))[: len(PROPOSE)] == PROPOSE
    file, slots = ("v1/core/sched/scheduler.py", "self.num_spec_tokens + 1")
    if release != "0.26":
        file, slots = ("config/vllm.py", "self.num_speculative_tokens + 1")
    assert slots in (folder / "vllm" / file).read_text()  # reserved for the block


def test_so_has_the_one_of_dspark(wheel) -> None:
    release, folder = wheel
    models = tree(folder, "vllm/model_executor/models/qwen3_dspark.py")
    assert {"config", "model", "lm_head", "draft_id_to_target_id"} <= assigned(
        found(models, ast.ClassDef, DSPARK_CLASS)
    )
    inner = found(models, ast.ClassDef, "Qwen3DSparkModel")
    assert ast.unparse(inner.bases[0]) == "DFlashQwen3Model"
    assert {"markov_head"} <= assigned(inner)
    assert {"markov_w1", "markov_w2"} <= assigned(found(models, ast.ClassDef, "DSparkMarkovHead"))
    speculator = tree(folder, f"{GPU}/spec_decode/dspark/speculator.py")
    assert ast.unparse(found(speculator, ast.ClassDef, "DSparkSpeculator").bases[0]) == "DFlashSpeculator"
    text, config = (folder / f"{GPU}/spec_decode/dspark/speculator.py").read_text(), "self.draft_model_config.hf_config"
    assert f'{config}, "dspark_bonus_anchor", False' in text or f'{config}, "sample_from_anchor", True' in text
    assert release == "0.26" or "dspark_draft_topk" in text
    reserved = (folder / "vllm/config/vllm.py").read_text()
    assert ("def num_lookahead_tokens" in reserved) == (release != "0.26")
    assert ("or dspark_fill_in" in reserved) == (release == "0.33")  # the slot of the last row


def test_so_have_the_ones_of_draft_models(wheel) -> None:
    _, folder = wheel
    models = folder / "vllm/model_executor/models"
    registry = (models / "registry.py").read_text()
    for name, attention in zip(LANGUAGE_MODEL_CLASSES, ("Llama", "Qwen2", "Qwen3"), strict=True):
        file = attention.lower()
        assert f'"{name}": ("{file}", "{name}")' in registry
        assert {"config", "model", "lm_head"} <= assigned(found(tree(models, f"{file}.py"), ast.ClassDef, name))
        names = {"qkv_proj", "o_proj", "rotary_emb", "attn", "num_heads", "num_kv_heads", "head_dim", "scaling"}
        norms = {"q_norm", "k_norm"} if name == "Qwen3ForCausalLM" else set()
        assert names | norms <= assigned(found(tree(models, f"{file}.py"), ast.ClassDef, f"{attention}Attention"))
    for file in ("llama", "qwen2"):  # Qwen3's inner model is Qwen2's
        kind = "LlamaModel" if file == "llama" else "Qwen2Model"
        inner = found(tree(models, f"{file}.py"), ast.ClassDef, kind)
        assert {"embed_tokens", "norm"} <= assigned(inner)
        assert "self.layers = make_layers(" in ast.unparse(inner)


def test_the_methods_are_those_that_the_v2_runner_serves(wheel) -> None:
    release, folder = wheel
    init = ast.unparse(found(tree(folder, f"{GPU}/spec_decode/__init__.py"), ast.FunctionDef, "init_speculator"))
    for module, name in CLASSES.items():
        there = f"from {SPECULATORS}.{module}.speculator import {name}" in init
        assert there == (module != "standalone_ar" or release == "0.33")
    config = tree(folder, "vllm/config/vllm.py")
    chosen = found(config, ast.FunctionDef, "use_v2_model_runner")
    assert [ast.unparse(decorator) for decorator in chosen.decorator_list] == ["property"]
    refused = ast.unparse(found(config, ast.FunctionDef, "_get_v2_model_runner_unsupported_features"))
    if release != "0.33":
        served = "method not in ('eagle', 'eagle3', 'mtp', 'dflash', 'dspark')"  # draft_model is not there
        left_out = "method in ('ngram', 'ngram_gpu', 'draft_model', 'suffix', 'medusa', 'mlp_speculator', "
        assert (left_out if release == "0.30" else served) in refused
    checks = {n.name for n in ast.walk(tree(folder, "vllm/config/speculative.py")) if isinstance(n, ast.FunctionDef)}
    assert "use_gemma4_mtp" in checks
    assert ("use_multi_module_mtp" in checks) == (release != "0.26")


def test_the_configuration_has_what_is_checked(wheel) -> None:
    _, folder = wheel
    for path, names in {
        "speculative": (
            "method",
            "draft_sample_method",
            "parallel_drafting",
            "use_heterogeneous_vocab",
            "draft_tensor_parallel_size",
        ),
        "parallel": (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "enable_eplb",
        ),
        "model": ("dtype", "enforce_eager"),
        "cache": ("cache_dtype",),
        "compilation": ("cudagraph_mode", "static_forward_context"),
        "vllm": ("additional_config",),
    }.items():
        assert set(names) <= assigned(tree(folder, f"vllm/config/{path}.py")), path


def test_the_group_of_ranks_has_its_process_groups_and_sums_up_what_mixtures_give(wheel) -> None:
    _, folder = wheel
    module, name = TENSOR_PARALLEL
    source = tree(folder, f"{module.replace('.', '/')}.py")
    returned = found(source, ast.FunctionDef, name).returns
    assert isinstance(returned, ast.Name)
    group = found(source, ast.ClassDef, returned.id)
    assert {"device_group", "cpu_group"} <= {
        node.target.id for node in group.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    op = tree(folder, "vllm/distributed/communication_op.py")
    summed = found(op, ast.FunctionDef, "tensor_model_parallel_all_reduce")
    assert ast.unparse(summed.body[-1]) == "return get_tp_group().all_reduce(input_)"
    runner = tree(folder, "vllm/model_executor/layers/fused_moe/runner/moe_runner.py")
    final = ast.unparse(found(runner, ast.FunctionDef, "_maybe_reduce_final_output"))
    assert "states = tensor_model_parallel_all_reduce(states)" in final


def test_greedy_drafts_are_one_hot_to_the_rejection_sampler(wheel) -> None:
    """vLLM's default: drafts are greedy whatever a request samples, and no draft logits are handed over."""
    _, folder = wheel
    config = (folder / "vllm/config/speculative.py").read_text()
    assert 'draft_sample_method: DraftSampleMethod = "greedy"' in config
    base = ast.unparse(found(tree(folder, f"{GPU}/spec_decode/speculator.py"), ast.ClassDef, "DraftModelSpeculator"))
    assert "self.draft_logits: torch.Tensor | None = None" in base
    assert "if self.speculative_config.draft_sample_method == 'probabilistic':" in base


def test_the_cache_of_draft_logits_has_the_parameter_of_its_release(wheel) -> None:
    release, folder = wheel
    gumbel = found(tree(folder, f"{GPU}/sample/gumbel.py"), ast.FunctionDef, "gumbel_sample")
    assert isinstance(gumbel, ast.FunctionDef)
    assert ("output_processed_logits" in parameters(gumbel), "logits_cache" in parameters(gumbel)) == (
        release == "0.26", release != "0.26",
    )  # fmt: skip
    runner = (folder / f"{GPU}/model_runner.py").read_text()
    assert "self.speculator.draft_logits" in runner


def test_flash_attention_keeps_keys_and_values_side_by_side(wheel) -> None:
    _, folder = wheel
    source = (folder / "vllm/v1/attention/backends/flash_attn.py").read_text()
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in source


def test_vllm_loads_the_shipped_drafter_as_it_is(wheel) -> None:
    """Every tensor of the folder ends, through the mapper in vLLM's source, at a parameter that the head reads."""
    _, folder = wheel
    source = (folder / "vllm/model_executor/models/llama_eagle3.py").read_text()
    assert 'orig_to_new_substr={"midlayer.": "layers.0."}' in source
    assert 'name.replace("d2t", "draft_id_to_target_id")' in source
    assert 'if "t2d" in name' in source
    drafter = shipped_pair()[1]
    with safe_open(drafter / "model.safetensors", "pt") as file:
        tensors = set(file.keys())
    assert {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"} <= tensors
    assert all(
        n.startswith("midlayer.") for n in tensors - {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"}
    )
    config = json.loads((drafter / "config.json").read_text())
    models = (folder / "vllm/model_executor/models/registry.py").read_text()
    assert f'"{config["architectures"][0]}": ("llama_eagle3", "{EAGLE3_CLASS}")' in models
