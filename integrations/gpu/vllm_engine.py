# Types are checked without vLLM.
# pyright: reportMissingImports=false
"""A vLLM engine in this process, for the scripts of this folder. Nothing is downloaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

K, MAX_LEN = 5, 1024
KV_BYTES_PER_TOKEN = 2304
"""Bytes per token of the shipped target and its EAGLE-3 drafter in float16."""

_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process: we can read its speculator
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)  # vLLM reads them when the functions below import it


def call(function: Callable[[], Any]) -> Any:
    """Call the function in this process."""
    return function()


class Engine:
    """vLLM with the plugin (`way` "specgraph"), without it ("stock"), or with it but without its key ("off")."""

    seeded = True
    """Sampled requests have seeds, so that their tokens can be compared."""

    def __init__(
        self,
        target: str,
        draft: str | None,
        way: str,
        method: str = "eagle3",
        speculative: dict[str, Any] | None = None,
        lora: str | None = None,
        **arguments: Any,
    ) -> None:
        """Start the engine.

        Args:
            draft: the drafter's folder. None if the target's folder has the drafter (MTP).
            speculative: further keys of `speculative_config`.
            lora: the folder of an adapter. Prompts of odd lengths run with it.
        """
        os.environ["VLLM_PLUGINS"] = "" if way == "stock" else "specgraph"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.model_executor.models import registry
        from vllm.plugins import load_general_plugins
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        registry._run_in_subprocess = call  # inspects model classes without another process
        load_general_plugins()
        import vllm.v1.worker.gpu.model_runner as runner

        made: list[Any] = []
        init = runner.init_speculator

        @functools.wraps(init)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            made.append(init(*args, **kwargs))
            return made[-1]

        runner.init_speculator = recorded
        settings = {"capture_sizes": [1, 4, 16, 32, 64], "log_every": 20000}
        speculation = {"method": method, "num_speculative_tokens": K} | ({"model": draft} if draft else {})
        options: dict[str, Any] = {
            "model": target,
            "max_model_len": MAX_LEN,
            "max_num_seqs": 64,
            "disable_log_stats": True,
            "seed": 0,
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "speculative_config": speculation | (speculative or {}),
            "additional_config": {"specgraph": settings} if way == "specgraph" else {},
        }
        self.lora = None if lora is None else LoRARequest("adapter", 1, lora)
        if lora is not None:
            options |= {"enable_lora": True, "max_lora_rank": 8}
        self.llm = LLMEngine.from_engine_args(EngineArgs(**options | arguments), usage_context=UsageContext.LLM_CLASS)
        self.speculator = made[0]

    @staticmethod
    def shipped(target: Path, draft: Path | None, way: str, method: str, kv_tokens: int, **options: Any) -> Engine:
        """Return an engine for a pair with the sizes of the shipped one, in float16.

        Args:
            draft: the drafter's folder. None if the target's folder has the drafter.
            kv_tokens: the tokens that the KV cache holds.
        """
        memory: dict[str, Any] = {
            "dtype": "float16",
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": kv_tokens * KV_BYTES_PER_TOKEN,
        }
        folders = str(target), None if draft is None else str(draft)
        return Engine(*folders, way, method, **memory | options)

    @staticmethod
    def agreed(answer: bool) -> bool:
        """Return rank 0's answer: every rank has to add the same requests before the same engine step."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().broadcast_object(answer)

    @staticmethod
    def room(prompt: list[int]) -> int:
        """Return the most new tokens of a request."""
        return MAX_LEN - len(prompt)

    def start(self, name: str, prompt: list[int], limit: int, seed: int | None = None) -> None:
        """Add a request. It is greedy without a seed, and at temperature 1 with one."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=limit, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        lora = self.lora if len(prompt) % 2 else None
        self.llm.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=lora)

    def abort(self, name: str) -> None:
        self.llm.abort_request([name])

    def step(self) -> list[tuple[str, list[int], bool, int]]:
        """Run one engine step, and return the new outputs of requests.

        Each is (name, new tokens, True if the request ended, cached tokens of its prompt).
        """
        return [
            (output.request_id, list(output.outputs[0].token_ids), output.finished, output.num_cached_tokens or 0)
            for output in self.llm.step()
        ]

    def generate(
        self, prompts: list[list[int]], at_once: int, max_tokens: int, sampled: bool = False
    ) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of each prompt, and the number of rounds by accepted draft tokens (0 .. K).

        A request's first output is not counted, since it comes from the prompt. Its last output is not counted either:
        it may be cut. If `sampled` is True, prompt i has the seed i.
        """
        tokens: list[list[int]] = [[] for _ in prompts]
        histogram = [0] * (K + 1)
        for begin in range(0, len(prompts), at_once):
            part = range(begin, min(begin + at_once, len(prompts)))
            counts: dict[int, list[int]] = {index: [] for index in part}
            for index in part:
                limit = min(max_tokens, self.room(prompts[index]))
                self.start(str(index), prompts[index], limit, index if sampled else None)
            while self.llm.has_unfinished_requests():
                for name, new, _, _ in self.step():
                    tokens[int(name)] += new
                    counts[int(name)] += [len(new)] * bool(new)
            for each in counts.values():
                for count in each[1:-1]:
                    histogram[count - 1] += 1
        return tokens, histogram

    def proposes(self) -> dict[str, int]:
        """Return `ProposeCounts.by_reason`. It is empty for stock vLLM."""
        return dict(self.speculator.counts.by_reason) if hasattr(self.speculator, "counts") else {}

    def close(self) -> None:
        """Do nothing: the engine ends with the process."""
