"""A propose of vLLM through specgraph's graphs, and the choice between that and vLLM's own code."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specgraph import DraftConfig, Drafter, DraftHead, Platform
from specgraph_vllm.config import Settings
from specgraph_vllm.draft_model import DraftCache
from specgraph_vllm.round_end import RoundEnd, fill_round


def reason_for_vllm(
    batch: Any, num_speculative_tokens: int, max_num_requests: int, hidden_states: Any, options: dict[str, Any]
) -> str | None:
    """Why vLLM's own code must draft after this pass; None where specgraph drafts. Reads nothing from the device.

    Args:
        batch: vLLM's `InputBatch`.
        max_num_requests: the largest captured size.
        hidden_states: those that the drafter takes of the target; empty or None where vLLM gave none.
        options: the arguments of `propose` after the tensors, by name.
    """
    n, k = batch.num_reqs, num_speculative_tokens
    if options.get("dummy_run") or options.get("is_profile"):
        return "dummy run"
    if options.get("num_speculative_tokens") not in (None, k):
        return "fewer draft tokens asked for"
    if batch.num_draft_tokens != n * k or batch.num_tokens != n * (k + 1):
        return "prompts, or rounds of another length"  # each request has at most K drafts, so equal sums mean K each
    if batch.is_prefilling_np.any():
        return "prompts, or rounds of another length"
    if n > max_num_requests:
        return "more requests than the largest captured size"
    if batch.has_structured_output_reqs:
        return "structured output"
    if not hidden_states:
        return "no hidden states of the target"
    embeddings = options.get("mm_inputs")
    if embeddings is not None and embeddings[0]:
        return "multimodal inputs"
    return None


class FastPath:
    """The drafter over vLLM's weights and KV cache, with every captured size. Made once, when vLLM captures its graphs.

    Not thread-safe. Owns its graphs and buffers; weights and KV cache are vLLM's.
    """

    def __init__(
        self,
        head: DraftHead,
        cache: DraftCache,
        platform: Platform,
        settings: Settings,
        *,
        num_speculative_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Captures.

        Raises:
            ConfigError, UnsupportedError, CaptureError: as of `Drafter` and its `capture`.
        """
        sizes = settings.capture_sizes
        config = DraftConfig(
            num_speculative_tokens=num_speculative_tokens,
            max_num_requests=max_num_seqs if sizes is None else min(max(sizes), max_num_seqs),
            max_model_len=max_model_len,
            block_size=cache.block_size,
            capture_sizes=None if sizes is None else sorted({min(size, max_num_seqs) for size in sizes}),
            prefill_sizes=(1,),  # vLLM writes the prompts' keys and values itself
            prefill="eager",
        )
        self.config, self.group = config, cache.group
        self.drafter = Drafter(head, cache.caches, platform, config)
        self.drafter.capture()

    def propose(self, end: RoundEnd) -> Tensor:
        """Draft after a round that `reason_for_vllm` lets through.

        Returns:
            int64 [n, K]: a view of the drafter's memory, which the next propose overwrites.
        """
        inputs = self.drafter.inputs(end.num_requests)
        fill_round(end, inputs, self.config.max_model_len, self.config.block_size)
        return self.drafter.propose(inputs, copy=False).token_ids
