# vLLM is not there where types are checked.
# pyright: reportMissingImports=false
"""What `vllm_served.py` calls in the workers of a server that runs, through vLLM's `/collective_rpc`."""

from __future__ import annotations

from typing import Any


class Drafting:
    """`vllm serve --worker-extension-cls vllm_worker.Drafting` adds these methods to vLLM's worker."""

    vllm_config: Any
    model_runner: Any

    def init_worker_extension(self) -> None:
        """vLLM calls it before it loads weights."""
        if self.vllm_config.load_config.load_format == "dummy":
            from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

            # Dummy weights skip the loader, which would say so: the drafter has its own lm_head, not the embedding.
            Eagle3LlamaForCausalLM.has_own_lm_head = True
            Eagle3LlamaForCausalLM.has_own_embed_tokens = False

    def draft_by(self, way: str) -> None:
        """Draft in that way from now on: "stock" or "specgraph"."""
        self.model_runner.speculator.use_vllm = way == "stock"

    def proposes(self) -> dict[str, int]:
        """Proposes by who drafted, and why."""
        return dict(self.model_runner.speculator.counts.by_reason)
