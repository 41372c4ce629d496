"""What the GPU scripts share: one vLLM engine in this process, and its speculator.

Nothing is downloaded. Set VLLM_PLUGINS to `specgraph`, or to an empty string for stock vLLM.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

K, MAX_LEN = 5, 1024

_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: its speculator is in reach
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # read when vllm is imported, in the functions below


def make_engine(
    target: str, draft: str | None, settings: dict[str, Any] | None, method: str = "eagle3", **arguments: Any
) -> tuple[Any, Any]:
    """(LLMEngine, its speculator). `draft` None takes the target's folder (MTP); `settings` None leaves the key out."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    registry._run_in_subprocess = lambda fn: fn()  # model classes are inspected here: no other interpreter starts
    load_general_plugins()
    import vllm.v1.worker.gpu.model_runner as runner

    made: list[Any] = []
    init = runner.init_speculator

    @functools.wraps(init)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(init(*args, **kwargs))
        return made[-1]

    runner.init_speculator = recorded
    options: dict[str, Any] = {
        "model": target,
        "max_model_len": MAX_LEN,
        "disable_log_stats": True,
        "seed": 0,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "speculative_config": {"method": method, "num_speculative_tokens": K} | ({"model": draft} if draft else {}),
        "additional_config": {} if settings is None else {"specgraph": settings},
    }
    arguments = EngineArgs(**options | arguments)  # type: ignore[arg-type]
    return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS), made[0]


def environment() -> dict[str, str]:
    """Versions and the GPU, for a result file."""
    import triton
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
    }


def params(max_tokens: int, seed: int | None = None) -> Any:
    """Greedy, or at temperature 1 with a seed; only the new tokens with each output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip


def generate(
    engine: Any, prompts: list[list[int]], at_once: int, max_tokens: int = 128, sampled: bool = False
) -> tuple[list[list[int]], list[int]]:
    """(tokens by prompt, accepted drafts by round). A request's first output is its prompt's, its last may be cut.

    `sampled`: the seed of prompt i is i.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    accepted: list[int] = []
    for begin in range(0, len(prompts), at_once):
        part = range(begin, min(begin + at_once, len(prompts)))
        steps: dict[int, list[int]] = {index: [] for index in part}
        for index in part:
            limit = min(max_tokens, MAX_LEN - len(prompts[index]))
            asked = params(limit, index if sampled else None)
            engine.add_request(str(index), {"prompt_token_ids": prompts[index]}, asked)
        while engine.has_unfinished_requests():
            for output in engine.step():
                new = list(output.outputs[0].token_ids)
                tokens[int(output.request_id)] += new
                if new:
                    steps[int(output.request_id)].append(len(new))
        for counts in steps.values():
            accepted += [count - 1 for count in counts[1:-1]]
    return tokens, accepted


def write(path: str, result: dict[str, Any]) -> None:
    """Write a result file; called after every part, so that a part that fails loses nothing."""
    Path(path).write_text(json.dumps(result) + "\n")
