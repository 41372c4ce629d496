"""Turns the speculators of vllm-ascend's V2 model runner into ones that draft through specgraph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgraph_plugin import FastPath, VerifyOutput
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import DraftCache, VllmHead
from specgraph_plugin.vllm.v2_speculator import V2Speculator, more_parameters
from torch import Tensor

from specgraph.errors import UnsupportedError
from specgraph_vllm_ascend.npu_drafter import capture_head, read_head


def adopt_speculator(made: Any, settings: Settings) -> None:
    """Change the class of vllm-ascend's speculator to a subclass that is also a `Speculator`.

    Raises:
        UnsupportedError: drafts are sampled.
    """
    if made.draft_logits is not None:
        raise UnsupportedError("speculative option draft_sample_method 'probabilistic'; drafts are greedy here")
    stock = type(made)
    made.__class__ = type(f"Specgraph{stock.__name__}", (Speculator, stock), {})
    made.start_specgraph(settings, more_parameters(stock))


def start_positions(batch: Any) -> list[int]:
    """Return, for each request of vLLM's `InputBatch`, the position of the first row at which the target samples.

    The numbers are on the host. vllm-ascend has corrected them by the rejected tokens of earlier rounds.
    """
    ends = batch.num_computed_tokens_np[: batch.num_reqs] + batch.num_scheduled_tokens[: batch.num_reqs]
    sampled_rows = batch.cu_num_logits_np[1 : batch.num_reqs + 1] - batch.cu_num_logits_np[: batch.num_reqs]
    return (ends - sampled_rows).tolist()


class Speculator(V2Speculator):
    """A speculator on an NPU. Drafts are greedy, and their attention takes lengths from the host."""

    def read_head(self) -> VllmHead:
        return read_head(self.model, self.vllm_config, self.device, self.specgraph.settings)

    def capture_head(self, head: VllmHead, cache: DraftCache, table: Tensor) -> FastPath:
        return capture_head(
            head,
            cache,
            self.device,
            self.specgraph.settings,
            num_speculative_tokens=self.num_speculative_steps,
            max_num_requests=self.max_num_requests,
            max_model_len=self.max_model_len,
            max_num_rows=self.max_num_tokens,
            module=self.model,
        )

    def draft(self, fast: FastPath, batch: Any, output: VerifyOutput, named: Mapping[str, Any]) -> Tensor:
        fast.fill(output)
        return fast.propose(batch.num_reqs, start_positions(batch)).token_ids
