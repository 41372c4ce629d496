"""vLLM with vllm-ascend in this process, on the simulated runtime. One engine per process: vllm-ascend has globals.

Not from the wheels are the simulated libraries, and `acl` and `stand_ins` of backends/npu/engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "backends/npu" / folder) for folder in ("simulator", "engine")]
import ascendsim

RUNTIME = ascendsim.load(os.environ["ASCENDSIM_BUILD"], flavour="values", devices=1)
"""The runtime, with every limit on."""

import stand_ins
from vllm import LLM, SamplingParams

K = 3
SIZES = 4
"""The most requests at once."""
SEPARATE: dict[str, Any] = {"enable_npugraph_ex": False, "fuse_norm_quant": False, "fuse_qknorm_rope": False}
"""vllm-ascend's fusions, which need operators of CANN's compiler."""


class Engine:
    """An engine and its parts."""

    def __init__(
        self, models: Path, drafts: str | None, settings: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """
        Args:
            drafts: the speculative method and the folder of its drafter, which have the same name. None: no drafts.
            settings: of specgraph. None leaves drafting to vllm-ascend.
        """
        stand_ins.install()
        additional: dict[str, Any] = {"ascend_compilation_config": SEPARATE}
        if settings is not None:
            additional["specgraph"] = settings
        if drafts is not None:
            speculative = {"method": drafts, "model": str(models / drafts), "num_speculative_tokens": K}
            options["speculative_config"] = speculative | options.get("speculative_config", {})
        sizes = [(K + 1) * n for n in range(1, SIZES + 1)]
        self.llm = LLM(
            str(models / options.pop("target", "target")),
            skip_tokenizer_init=True, dtype="bfloat16", max_model_len=384, max_num_seqs=SIZES,
            max_num_batched_tokens=64, block_size=128, num_gpu_blocks_override=24, gpu_memory_utilization=0.5,
            enable_prefix_caching=False, async_scheduling=options.pop("async_scheduling", False),
            additional_config=additional,
            compilation_config={
                "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes, "mode": 3
            },
            **options,
        )  # fmt: skip
        self.core = self.llm.llm_engine
        self.runner: Any = self.core.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.drafter: Any = self.runner.drafter
        self.number = 0

    def serve(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], arrivals: Sequence[int], **sampling: Any
    ) -> list[list[int]]:
        """Serve requests, each of which arrives at an engine step. Return their new tokens."""
        waiting = sorted(range(len(prompts)), key=lambda i: arrivals[i])
        results: dict[str, list[int]] = {}
        names, step, self.number = {}, 0, self.number + 1
        while waiting or self.core.has_unfinished_requests():
            while waiting and (arrivals[waiting[0]] <= step or not self.core.has_unfinished_requests()):
                i = waiting.pop(0)
                names[i] = f"{self.number}-{i}"
                given = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **sampling}
                if "seed" in given:
                    given["seed"] += i
                self.core.add_request(
                    names[i], {"prompt_token_ids": list(prompts[i])}, SamplingParams(max_tokens=tokens[i], **given)
                )
            for output in self.core.step():
                if output.finished:
                    results[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
        return [results[names[i]] for i in range(len(prompts))]
