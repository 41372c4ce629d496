# Types are checked without vLLM.
# pyright: reportMissingImports=false
"""Methods that `vllm_served.py` calls in the workers of a running server, through vLLM's `/collective_rpc`."""

from __future__ import annotations

from typing import Any


class Drafting:
    """Extends vLLM's worker: `vllm serve --worker-extension-cls vllm_worker.Drafting`."""

    vllm_config: Any
    model_runner: Any

    def init_worker_extension(self) -> None:
        """Prepare for dummy weights. vLLM calls this before it loads weights."""
        if self.vllm_config.load_config.load_format == "dummy":
            from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

            # The loader would set these, but dummy weights skip it: the drafter has its own lm_head, but no embedding.
            Eagle3LlamaForCausalLM.has_own_lm_head = True
            Eagle3LlamaForCausalLM.has_own_embed_tokens = False

    def draft_by(self, way: str) -> None:
        """Draft by "stock" or "specgraph" from now on."""
        self.model_runner.speculator.use_vllm = way == "stock"

    def proposes(self) -> dict[str, int]:
        """Return `ProposeCounts.by_reason`."""
        return dict(self.model_runner.speculator.counts.by_reason)
