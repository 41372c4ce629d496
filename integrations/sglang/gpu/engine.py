"""What the GPU scripts share: one SGLang engine with its scheduler process.

Nothing is downloaded. `way` is "specgraph"; "stock" for SGLang's own drafting, without the plugin; or "off" for the
same with the plugin loaded.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

K = 5

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

ALGORITHMS = {"eagle3": ("EAGLE3", "SPECGRAPH"), "eagle": ("EAGLE", "SPECGRAPH_EAGLE")}


def options(target: str, draft: str, way: str, method: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: SGLang's attention in Triton, pages of 64 tokens, chains of K draft tokens."""
    if way == "stock":
        os.environ["SGLANG_PLUGINS"] = "none"  # a list of names; an empty one would load all
    return {
        "model_path": target,
        "speculative_draft_model_path": draft,
        "speculative_algorithm": ALGORITHMS[method][way == "specgraph"],
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
    """A copy of a drafter's folder as SGLang loads it.

    EAGLE-3: layer numbers as SGLang counts them, a layer's output, not its input. EAGLE: SGLang's own class, whose `fc`
    has a bias (zeros here).
    """
    from safetensors.torch import load_file, save_file

    copy = Path(tempfile.mkdtemp()) / "draft"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    if "eagle_config" in config:
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
    else:
        config["architectures"] = ["LlamaForCausalLMEagle"]
        tensors = load_file(copy / "model.safetensors")
        fc = tensors["fc.weight"]
        save_file({**tensors, "fc.bias": fc.new_zeros(fc.shape[0])}, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


def make_engine(arguments: dict[str, Any], out: Path) -> Any:
    """An `sglang.Engine` whose scheduler process writes once a second who drafted, for `proposes(out)`."""
    from sglang.srt.entrypoints.engine import Engine

    class CountedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler_process)

    os.environ["SPECGRAPH_COUNTS"] = str(out.with_suffix(".counts"))
    return CountedEngine(**arguments)


def proposes(out: Path) -> dict[str, int]:
    """Proposes by who drafted, and why, as of a second ago; empty for stock SGLang."""
    path = out.with_suffix(".counts")
    return json.loads(path.read_text()) if path.exists() else {}


def run_scheduler_process(*args: Any, **options: Any) -> Any:
    """SGLang's, with a thread that writes the plugin's counts to the file that SPECGRAPH_COUNTS names."""
    from sglang.srt.managers import scheduler

    init = scheduler.Scheduler.maybe_init_draft_worker

    def maybe_init_draft_worker(self: Any) -> None:
        init(self)
        drafting = getattr(self.draft_worker._draft_worker, "specgraph", None)
        if drafting is not None:
            threading.Thread(target=write, args=(drafting.counts,), daemon=True).start()

    def write(counts: Any) -> None:
        path = Path(os.environ["SPECGRAPH_COUNTS"])
        while True:
            time.sleep(1)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(dict(counts.by_reason)))
            part.rename(path)

    scheduler.Scheduler.maybe_init_draft_worker = maybe_init_draft_worker
    return scheduler.run_scheduler_process(*args, **options)


def generate(
    engine: Any, prompts: list[list[int]], at_once: int, max_tokens: int, temperature: float = 0.0
) -> tuple[list[list[int]], list[int]]:
    """(tokens by prompt, rounds by number of accepted draft tokens)."""
    tokens: list[list[int]] = []
    histogram = [0] * (K + 1)
    params = {"temperature": temperature, "max_new_tokens": max_tokens, "ignore_eos": True}
    for begin in range(0, len(prompts), at_once):
        for output in engine.generate(input_ids=prompts[begin : begin + at_once], sampling_params=params):
            tokens.append(list(output["output_ids"]))
            for accepted, rounds in enumerate(output["meta_info"].get("spec_accept_histogram") or []):
                histogram[accepted] += rounds
    return tokens, histogram
