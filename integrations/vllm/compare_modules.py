"""The head over vLLM's own loaded module, against the head that the core reads from the same folder, on a CPU.

    python compare_modules.py TARGET '{"method": "draft_model", "model": "DRAFTER", "num_speculative_tokens": 5}'

vLLM's loader, its speculator's `load_model` and its model classes run as they are, in any release that the plugin
serves; nothing drafts. Every tensor must be equal, but for the rotary tables, which vLLM rounds to the model's dtype:
their largest difference is printed. vLLM's wheel has no platform for a CPU, so the few questions that it asks one while
it loads are answered here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch

from specgraph import load_drafter, load_target

for _name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
    os.environ.setdefault(_name, "1")  # read when vllm is imported
os.environ.setdefault("VLLM_PLUGINS", "")


def answer_for_a_cpu() -> None:
    """What vLLM asks its platform, and torch's accelerator, while it loads a model."""
    import vllm.config.vllm
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    kind: Any = type(current_platform)
    kind.device_type = "cpu"
    kind.get_attn_backend_cls = classmethod(
        lambda *_args, **_options: "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    )
    vllm.config.vllm.HAS_TRITON = True  # the V2 model runner asks for it
    registry._run_in_subprocess = lambda fn: fn()
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_args: None
    torch.accelerator.get_memory_info = lambda *_args: (1 << 40, 1 << 40)


def loaded_speculator(target: str, speculative: dict[str, Any]) -> Any:
    """specgraph's speculator after vLLM's `load_model`."""
    answer_for_a_cpu()
    import vllm
    from specgraph_vllm.config import Settings
    from specgraph_vllm.shims import SPECULATORS, shim_for
    from specgraph_vllm.speculator import speculator_class
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = EngineArgs(
        model=target, dtype="float16", skip_tokenizer_init=True, speculative_config=speculative, enforce_eager=True
    )
    config = arguments.create_engine_config()
    shim = shim_for(vllm.__version__)
    module, name = shim.speculators[speculative["method"]]
    stock = getattr(importlib.import_module(f"{SPECULATORS}.{module}"), name)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29977", 0, "gloo")
        initialize_model_parallel(1, 1)
        speculator = speculator_class(stock, shim)(Settings(), config, torch.device("cpu"))
        speculator.load_model(get_model(vllm_config=config))
    return speculator


def main() -> None:
    """Print what was compared; exit status 1 where a tensor differs."""
    folder, speculative = sys.argv[1], json.loads(sys.argv[2])
    speculator = loaded_speculator(folder, dict(speculative))
    head = speculator._head
    core: Any = load_drafter(speculative.get("model", folder), load_target(folder, dtype=torch.float16))
    got, want = dict(head.weights()), dict(core.weights())
    wrong = sorted(got.keys() ^ want.keys())
    equal = 0
    for name in got.keys() & want.keys():
        one, other = got[name], want[name]
        if name.startswith("rotary"):
            rows = min(len(one), len(other))
            print(f"{name}: largest difference {float((one[:rows] - other[:rows]).abs().max()):.1e}")
        elif torch.equal(one[: len(other)], other):
            equal += 1
        else:
            wrong.append(name)
    model = type(speculator.model).__name__
    print(f"{model} as {type(head).__name__}: {equal} tensors equal, differing: {wrong or 'none'}")
    print(f"attention layers of the drafter: {sorted(speculator.draft_attn_layer_names)}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
