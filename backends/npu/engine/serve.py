"""Serve a tiny model with vLLM and vllm-ascend on the simulated runtime, and print what happened as the last line.

    python serve.py BUILD '{"model": "llama", "drafts": true, "sampling": [{"temperature": 0}]}'

The model answers a token with its successor, by a wide margin, so the right answers are known.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "simulator")]
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
VOCABULARY, HIDDEN, HEAD_DIM = 512, 256, 128
PROMPTS = [[1, 5, 7, 9, 11], [1, 100, 200], [3, 40]]
LENGTH = 8


def write_target(folder: Path, kind: str) -> None:
    """A Llama or a Qwen3 of random layers, whose head reads a token's embedding as the next token."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    name = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
    model.to(torch.bfloat16).save_pretrained(folder)


def write_head(folder: Path) -> None:
    """An EAGLE-3 head of random weights."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(1)

    def matrix(*shape: int) -> Any:
        return (torch.randn(*shape, generator=draw) * 0.05).bfloat16()

    names = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    weights = {f"midlayer.{name}.weight": torch.ones(HIDDEN).bfloat16() for name in names}
    weights |= {
        f"midlayer.self_attn.{n}_proj.weight": matrix(r, 2 * HIDDEN) for n, r in (("q", 256), ("k", 128), ("v", 128))
    }
    weights |= {f"midlayer.mlp.{n}_proj.weight": matrix(512, HIDDEN) for n in ("gate", "up")}
    weights |= {
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, 256),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, 512),
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN).bfloat16(),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "bfloat16", "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def serve(runtime: Any, folder: Path, model: str, drafts: bool, sampling: list[dict[str, Any]]) -> dict[str, Any]:
    """Answer `PROMPTS` once for each of `sampling`. With drafts the decode passes and the draft loop are ACL graphs."""
    import stand_ins

    stand_ins.install()
    from vllm import LLM, SamplingParams

    write_target(folder / "target", model)
    settings: dict[str, Any] = {"enforce_eager": True}
    if drafts:
        write_head(folder / "head")
        off = dict.fromkeys(("enable_npugraph_ex", "fuse_norm_quant", "fuse_qknorm_rope"), False)
        settings = {
            "speculative_config": {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3},
            "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4, 16], "mode": 3},
            "additional_config": {"ascend_compilation_config": off},
        }
    llm = LLM(
        str(folder / "target"), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, max_num_seqs=4,
        max_num_batched_tokens=256, block_size=128, num_gpu_blocks_override=16, gpu_memory_utilization=0.5,
        enable_prefix_caching=False, async_scheduling=False, **settings,
    )  # fmt: skip
    runtime.reset_report()
    prompts, answers = [{"prompt_token_ids": prompt} for prompt in PROMPTS], []
    for each in sampling:
        chosen = SamplingParams(max_tokens=LENGTH, ignore_eos=True, detokenize=False, **each)
        answers.append([list(request.outputs[0].token_ids) for request in llm.generate(prompts, chosen)])
    report = runtime.report()
    return {
        "answers": answers,
        "violations": report["violations"],
        "calls": report["calls"],
        "limits": report["limits"],
    }


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    import ascendsim

    loaded = ascendsim.load(sys.argv[1], devices=1)
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(serve(loaded, Path(made), **json.loads(sys.argv[2]))))
