"""What the GPU scripts share: one SGLang engine with its scheduler process, and prompts of token ids.

Nothing is downloaded. `way` is "specgraph", or "stock" for SGLang's own EAGLE-3.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

K = 5

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

ALGORITHM = {"stock": "EAGLE3", "specgraph": "SPECGRAPH"}


def options(target: str, draft: str, way: str, **changes: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: SGLang's attention in Triton, pages of 64 tokens, chains of K draft tokens."""
    return {
        "model_path": target,
        "speculative_draft_model_path": draft,
        "speculative_algorithm": ALGORITHM[way],
        "speculative_num_steps": K,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": K + 1,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "page_size": 64,
        "max_running_requests": 64,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
        "disable_prefill_cuda_graph": True,
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "info",
    } | changes


def environment() -> dict[str, str]:
    """Versions and the GPU, for a result file."""
    import sglang
    import triton

    return {
        "sglang": sglang.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
    }


def sglang_draft(folder: Path) -> str:
    """A copy of an EAGLE-3 folder with its layer numbers as SGLang counts them: a layer's output, not its input."""
    copy = Path(tempfile.mkdtemp()) / "draft"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


def python_prompts(tokenizer_file: Path, count: int, seed: int) -> list[list[int]]:
    """Beginnings of files of Python's own library, 20 to 300 tokens each."""
    from tokenizers import Tokenizer

    tokenizer, draw = Tokenizer.from_file(str(tokenizer_file)), random.Random(seed)
    files = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size > 6000]
    prompts: list[list[int]] = []
    for index in range(count):
        text = files[index % len(files)].read_text(errors="replace")
        at = draw.randrange(0, 1500)
        ids = tokenizer.encode(text[at : at + 3000]).ids
        prompts.append(ids[: draw.randrange(20, 300)])
    return prompts


def generate(engine: Any, prompts: list[list[int]], at_once: int, max_tokens: int) -> tuple[list[list[int]], list[int]]:
    """(tokens by prompt, rounds by number of accepted draft tokens), greedy."""
    tokens: list[list[int]] = []
    histogram = [0] * (K + 1)
    for begin in range(0, len(prompts), at_once):
        params = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        for output in engine.generate(input_ids=prompts[begin : begin + at_once], sampling_params=params):
            tokens.append(list(output["output_ids"]))
            for accepted, rounds in enumerate(output["meta_info"].get("spec_accept_histogram") or []):
                histogram[accepted] += rounds
    return tokens, histogram


def acceptance(histogram: list[int]) -> list[float]:
    """Share of rounds in which more than j draft tokens were accepted, for j = 0 .. K - 1."""
    total = max(sum(histogram), 1)
    return [round(sum(histogram[j + 1 :]) / total, 4) for j in range(K)]
