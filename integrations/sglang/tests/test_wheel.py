"""The names of SGLang that the plugin uses, against the sources in the wheel of 0.5.17 or of 0.5.23.

The wheel is not downloaded here: SPECGRAPH_SGLANG_WHEEL names a folder with it, unpacked (`pip download --no-deps
sglang==0.5.23`, then unzip).
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from specgraph_models.from_modules import ROTARY_CLASSES
from specgraph_sglang.config import ALGORITHMS
from specgraph_sglang.draft_model import EAGLE3_CLASS, EAGLE_CLASS, HYBRID_POOL_CLASS, LATENT_POOL_CLASS, POOL_CLASS
from specgraph_sglang.mtp import DEEPSEEK, GLM, MIMO, QWEN
from specgraph_sglang.names import (
    BATCH,
    DRAFT_INPUT,
    DRAFT_WORKER,
    READ_DONE,
    RESERVE,
    ROW_HEADROOM,
    SCHEDULER,
    SIZING_MODULE,
    TAKEN,
    TENSOR_PARALLEL,
    VERIFY_INPUT,
)

FOLDER = Path(os.environ.get("SPECGRAPH_SGLANG_WHEEL", "/nonexistent"))
pytestmark = pytest.mark.skipif(
    not (FOLDER / "sglang").is_dir(), reason="no unpacked wheel of SGLang (SPECGRAPH_SGLANG_WHEEL)"
)


def source(path: str) -> str:
    return (FOLDER / "sglang/srt" / path).read_text()


def found(path: str, kind: type, name: str) -> ast.AST:
    for node in ast.walk(ast.parse(source(path))):
        if isinstance(node, kind) and getattr(node, "name", "") == name:
            return node
    raise AssertionError(f"no {name} in {path}")


def parameters(function: ast.AST) -> list[str]:
    assert isinstance(function, ast.FunctionDef)
    return [a.arg for a in (*function.args.args, *function.args.kwonlyargs) if a.arg not in ("self", "cls")]


def members(root: ast.AST) -> set[str]:
    """Methods, fields, and attributes of self that are assigned."""
    names: set[str] = set()
    for node in ast.walk(root):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        for target in (*getattr(node, "targets", ()), getattr(node, "target", None)):
            for part in target.elts if isinstance(target, ast.Tuple) else (target,):
                names.add(part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", ""))
    return names


def test_the_registry_takes_what_the_plugin_registers() -> None:
    register = found("speculative/spec_registry.py", ast.FunctionDef, "register_algorithm")
    assert parameters(register) == ["name", "supports_overlap", "validate_server_args", "spec_class"]
    custom = members(found("speculative/spec_registry.py", ast.ClassDef, "CustomSpecAlgo"))
    assert {"create_worker", "is_eagle3", "factory", "name"} <= custom
    enumeration = members(found("speculative/spec_info.py", ast.ClassDef, "SpeculativeAlgorithm"))
    assert {*ALGORITHMS.values(), "register", "from_string", "create_worker", "create_future_map"} <= enumeration
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in source("plugins/__init__.py")
    assert {"AROUND", "AFTER"} <= members(found("plugins/hook_registry.py", ast.ClassDef, "HookType"))
    found("runtime_context.py", ast.FunctionDef, "get_spec")


@pytest.mark.parametrize(
    ("hooked", "used_by"),
    [(RESERVE, "speculative/eagle_utils.py"), (ROW_HEADROOM, "mem_cache/kv_cache_configurator.py")],
)
def test_slots_are_reserved_by_one_function(hooked, used_by) -> None:
    name, path = hooked, SIZING_MODULE.removeprefix("sglang.srt.").replace(".", "/") + ".py"
    assert parameters(found(path, ast.FunctionDef, name)) in (["server_args"], [])
    calls = [n for n in ast.walk(ast.parse(source(used_by))) if isinstance(n, ast.Call)]
    assert name in {getattr(call.func, "id", "") for call in calls}


def test_the_scheduler_binds_what_is_hooked_after_it_has_made_its_worker() -> None:
    scheduler = found("managers/scheduler.py", ast.ClassDef, SCHEDULER.rsplit(".", 1)[1])
    assert {"get_internal_state", "set_internal_state", "draft_worker"} <= members(scheduler)
    init = ast.unparse(next(n for n in scheduler.body if getattr(n, "name", "") == "__init__"))
    assert init.index("self.init_model_worker()") < init.index("self.init_request_dispatcher()")
    states = source("managers/io_struct.py")
    assert "internal_state: Dict[" in states
    assert "server_args: Dict[" in states


def test_the_workers_have_what_the_classes_use() -> None:
    path = "speculative/eagle_worker_v2.py"
    draft, worker = found(path, ast.ClassDef, "EagleDraftWorker"), found(path, ast.ClassDef, "EAGLEWorkerV2")
    own = members(draft) | members(found("speculative/base_spec_worker.py", ast.ClassDef, "EagleDraftWorkerBase"))
    assert {
        "_capture_cuda_graphs", "draft", "_draft_extend_for_prefill", "_draft_extend_for_decode", "draft_runner",
        "req_to_token_pool", "server_args", "device", "topk", "tree_mask_mode", "speculative_num_steps",
        "speculative_num_draft_tokens", "target_worker", "_topk1_parents_prealloc", "_topk1_score_indices_prealloc",
    } <= own  # fmt: skip
    assert {"_draft_worker", "forward_batch_generation"} <= members(worker)
    for name, wanted in DRAFT_WORKER.items():
        method = next(n for n in ast.walk(draft) if isinstance(n, ast.FunctionDef) and n.name == name)
        assert parameters(method)[: len(wanted)] == list(wanted)
    build = found("speculative/eagle_worker_common.py", ast.FunctionDef, "build_eagle_verify_input")
    assert parameters(build) == [
        *VERIFY_INPUT, "target_worker", "topk", "num_steps", "num_draft_tokens", "tree_mask_mode", "device",
    ]  # fmt: skip
    imported = {a.name for n in ast.walk(ast.parse(source(path))) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(TAKEN) <= imported
    assert any(name in source("managers/scheduler.py") for name in READ_DONE)
    module, name = TENSOR_PARALLEL
    path = module.removeprefix("sglang.srt.").replace(".", "/") + ".py"
    found(path, ast.FunctionDef, name)
    assert {"device_group", "cpu_group", "all_reduce"} <= members(found(path, ast.ClassDef, "GroupCoordinator"))


def test_batches_and_results_have_the_fields() -> None:
    batch = members(found("managers/schedule_batch.py", ast.ClassDef, "ScheduleBatch"))
    assert set(BATCH) <= batch
    result = members(found("managers/utils.py", ast.ClassDef, "GenerationBatchResult"))
    assert {"next_token_ids", "accept_lens", "logits_output", "next_draft_input"} <= result
    draft = members(found("speculative/eagle_info.py", ast.ClassDef, "EagleDraftInput"))
    assert set(DRAFT_INPUT) <= draft
    assert "spec_hidden_size" in members(found("configs/model_config.py", ast.ClassDef, "ModelConfig"))


def test_the_draft_model_and_its_cache_have_what_the_head_reads() -> None:
    path = "models/llama_eagle3.py"
    assert {"config", "model", "lm_head", "hot_token_id"} <= members(found(path, ast.ClassDef, EAGLE3_CLASS))
    names = {"embed_tokens", "layers", "fc", "norm", "input_norm", "fc_norm", "norm_output", "num_aux_hidden_states"}
    assert names <= members(found(path, ast.ClassDef, "LlamaModel"))
    layer = members(found(path, ast.ClassDef, "LlamaDecoderLayer"))
    layer |= members(found("models/llama.py", ast.ClassDef, "LlamaDecoderLayer"))
    assert {"self_attn", "mlp", "input_layernorm", "hidden_norm", "post_attention_layernorm"} <= layer
    attention = members(found("models/llama.py", ast.ClassDef, "LlamaAttention"))
    names = {"qkv_proj", "o_proj", "rotary_emb", "attn", "num_heads", "num_kv_heads", "head_dim", "scaling"}
    assert names <= attention
    path = "models/llama_eagle.py"
    found(path, ast.ClassDef, EAGLE_CLASS)
    assert {"embed_tokens", "layers", "fc"} <= members(found(path, ast.ClassDef, "LlamaModel"))
    rotary = "".join(p.read_text() for p in (FOLDER / "sglang/srt/layers/rotary_embedding").glob("*.py"))
    assert all(f"class {name}(" in rotary for name in ROTARY_CLASSES)
    radix = members(found("layers/radix_attention.py", ast.ClassDef, "RadixAttention"))
    assert {"sliding_window_size", "logit_cap"} <= radix
    pool = members(found("mem_cache/memory_pool.py", ast.ClassDef, POOL_CLASS))
    assert {"k_buffer", "v_buffer"} <= pool
    for name in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
        found("layers/quantization/unquant.py", ast.ClassDef, name)


def test_the_mtp_modules_have_the_parts() -> None:
    latent = "w_kc w_vc fused_qkv_a_proj_with_mqa q_a_layernorm q_b_proj kv_a_layernorm o_proj rotary_emb num_heads "
    latent += "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim scaling"
    nextn = "embed_tokens enorm hnorm eh_proj decoder shared_head"
    attention = "qkv_proj o_proj attn rotary_emb q_norm k_norm mlp input_layernorm post_attention_layernorm num_heads "
    attention += "num_kv_heads head_dim scaling"
    for path, name, parts in (
        ("models/glm4_moe_nextn.py", GLM, "config model lm_head"),
        ("models/glm4_moe_nextn.py", "Glm4MoeModelNextN", nextn),
        ("models/deepseek_nextn.py", DEEPSEEK, "config model lm_head"),
        ("models/deepseek_nextn.py", "DeepseekModelNextN", nextn),
        ("models/deepseek_v2.py", "DeepseekV2AttentionMLA", latent),
        ("models/mimo_mtp.py", MIMO, "config model lm_head"),
        ("models/mimo_mtp.py", "MiMoMultiTokenPredictorLayer",
         "embed_tokens token_layernorm hidden_layernorm input_proj mtp_block final_layernorm"),
        *((f"models/{file}_mtp.py", name, "fc pre_fc_norm_embedding pre_fc_norm_hidden config model lm_head")
          for file, name in zip(("qwen3_next", "qwen3_5"), QWEN, strict=True)),
        ("models/qwen3_next.py", "Qwen3HybridAttentionDecoderLayer", attention),
        ("models/qwen3_5.py", "Qwen3_5AttentionDecoderLayer", attention),
        ("mem_cache/memory_pool.py", LATENT_POOL_CLASS, "kv_buffer"),
        ("mem_cache/memory_pool.py", HYBRID_POOL_CLASS, "full_kv_pool"),
    ):  # fmt: skip
        assert set(parts.split()) <= members(found(path, ast.ClassDef, name)), name
    split = source("models/deepseek_common/deepseek_weight_loader.py")
    for words in ("w_kc.transpose(1, 2).contiguous().transpose(1, 2)", "w_vc.contiguous().transpose(1, 2)"):
        assert words in split
    hidden_first = source("models/mimo_mtp.py")
    assert hidden_first.index("self.hidden_layernorm(") < hidden_first.index("self.token_layernorm(")


def test_the_arguments_that_are_checked_exist() -> None:
    args = members(found("server_args.py", ast.ClassDef, "ServerArgs"))
    for file in (FOLDER / "sglang/srt/arg_groups/fields").glob("*.py"):  # since 0.5.23
        args |= members(ast.parse(file.read_text()))
    config = ast.parse((Path(__file__).parents[1] / "specgraph_sglang/config.py").read_text())
    listed = {
        node.value
        for node in ast.walk(config)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.isidentifier()
        and node.value.islower()
    }
    read = {n.attr for n in ast.walk(config) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "args"}
    assert (listed - {"auto", "null", "none", "annotations", "fp8_e4m3"}) | read <= args
