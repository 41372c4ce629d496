"""vLLM with vllm-ascend in this process, on the simulated runtime. One engine per process: vllm-ascend has globals.

Three things are not from the wheels: `acl`, the simulated libraries, and `Slots` below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "backends/npu/simulator"))
import ascendsim

RUNTIME = ascendsim.load(os.environ["ASCENDSIM_BUILD"], flavour="values", devices=1)
"""The runtime, with every limit on."""

import torch
import vllm.v1.worker.block_table as block_table
from vllm import LLM, SamplingParams
from vllm_ascend.utils import enable_custom_op

K = 3
SIZES = 4
"""The most requests at once."""
SEPARATE: dict[str, Any] = {"enable_npugraph_ex": False, "fuse_norm_quant": False, "fuse_qknorm_rope": False}
"""vllm-ascend's fusions, which need operators of CANN's compiler."""


class Slots:
    """vLLM's kernel of slot mappings in torch ops. vllm-ascend calls it without a fallback, and there is no Triton."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(
            num_tokens: int, most: int, starts: Any, positions: Any, table: Any, stride: int, block: int, slots: Any,
            *, PAD_ID: int, **_: Any,
        ) -> None:  # fmt: skip
            lengths = (starts[1 : grid[0]] - starts[: grid[0] - 1]).long()
            index = torch.arange(grid[0] - 1, device=positions.device)
            request = torch.repeat_interleave(index, lengths, output_size=num_tokens)
            at = positions[:num_tokens].long()
            slots[:num_tokens] = (table[request, at // block] * block + at % block).to(slots.dtype)
            slots[num_tokens:most].fill_(PAD_ID)

        return run


def prepare() -> None:
    """Put the stand-ins in place; vllm-ascend's compiled operators can't load, which it must find before a compile."""
    block_table._compute_slot_mapping_kernel = Slots()
    enable_custom_op()


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
        prepare()
        additional: dict[str, Any] = {"ascend_compilation_config": SEPARATE}
        if settings is not None:
            additional["specgraph"] = settings
        if drafts is not None:
            model = str(models / ("target" if drafts == "mtp" else drafts))
            options["speculative_config"] = {"method": drafts, "model": model, "num_speculative_tokens": K}
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
