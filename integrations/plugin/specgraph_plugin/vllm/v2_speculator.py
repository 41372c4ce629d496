"""A speculator of vLLM's V2 model runner that drafts through specgraph, or else by vLLM's own code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from specgraph_models.parallel import Ranks
from torch import Tensor

from specgraph_plugin.fast_path import FastPath
from specgraph_plugin.host_engine_names import parameters
from specgraph_plugin.prompts import PromptChunk, PromptPass
from specgraph_plugin.verify_output import VerifyOutput
from specgraph_plugin.vllm.captured import CapturedDrafter
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import DraftCache, VllmHead, draft_cache
from specgraph_plugin.vllm.v2_names import PROPOSE, table_block_sizes

_Stock: Any = ABC
"""The base class of vLLM's BaseSpeculator. `V2Speculator` has the same base, so that an object can change its class."""

_TENSORS = PROPOSE[: PROPOSE.index("last_sampled") + 1]
"""The parameters of vLLM's `propose` that `V2Speculator.propose` names."""


def reason_for_vllm(
    batch: Any, num_speculative_tokens: int, max_num_requests: int, hidden_states: Any, options: Mapping[str, Any]
) -> str | None:
    """Return why vLLM's own code must draft after this pass. None if specgraph drafts. It reads no device memory.

    Args:
        batch: vLLM's `InputBatch`.
        max_num_requests: the largest captured size.
        hidden_states: the target's hidden states that the drafter takes. Empty or None if vLLM passed none.
        options: the arguments of `propose` after the tensors, by name.
    """
    if options.get("dummy_run") or options.get("is_profile"):
        return "dummy run"
    if options.get("num_speculative_tokens") not in (None, num_speculative_tokens):
        return "fewer draft tokens asked for"
    if batch.num_reqs > max_num_requests:
        return "more requests than the largest captured size"
    if batch.has_structured_output_reqs:
        return "structured output"
    if not hidden_states:
        return "no hidden states of the target"
    embeddings = options.get("mm_inputs")
    if embeddings is not None and embeddings[0]:
        return "multimodal inputs"
    return None


def chunk_of(batch: Any, request: int) -> PromptChunk:
    """Return a request's rows in its prompt. After a prompt's last row vLLM may have put rows of draft tokens."""
    first, end = batch.query_start_loc_np[request : request + 2].tolist()
    position = int(batch.num_computed_tokens_np[request])
    left = int(batch.prefill_len_np[request]) - position
    goes_on = end - first < left
    next_row = int(batch.idx_mapping_np[request]) if goes_on else None
    return PromptChunk(first, min(end - first, left), position, table_row=request, next_row=next_row)


class V2Speculator(_Stock):
    """Drafts through captured graphs, or by vLLM's own code if `reason_for_vllm` says so, in the same KV cache.

    A plugin has a subclass for its devices, and changes the class of vLLM's speculator to one that inherits from this
    subclass and from vLLM's own class.
    """

    use_vllm = False
    """True leaves every propose to vLLM, for comparisons in one process."""

    @abstractmethod
    def read_head(self) -> VllmHead:
        """Return a head over the weights of vLLM's loaded module.

        Raises UnsupportedError if the drafter is not served.
        """

    @abstractmethod
    def capture_head(self, head: VllmHead, cache: DraftCache, table: Tensor) -> FastPath:
        """Return captured graphs of the head over its part of vLLM's KV cache.

        Args:
            table: vLLM's block table of the head's KV cache group.

        Raises:
            UnsupportedError: the device does not capture the head.
        """

    def draft(self, fast: FastPath, batch: Any, output: VerifyOutput, named: Mapping[str, Any]) -> Tensor:
        """Return draft token ids [n, K] for the requests of a pass.

        Args:
            batch: vLLM's `InputBatch`.
            named: the arguments of vLLM's `propose` after the tensors, by name.
        """
        fast.fill(output)
        return fast.propose(batch.num_reqs).token_ids

    def stock_drafting(self, slots: Tensor | None) -> AbstractContextManager[None]:
        """Return the context in which vLLM's own code captures or drafts.

        Args:
            slots: integer [n]: the rows of the requests that vLLM drafts for. None for a capture or a dummy run.
        """
        return nullcontext()

    def start_specgraph(self, settings: Settings, more_parameters: tuple[str, ...], ranks: Ranks | None = None) -> None:
        """Set the attributes. An object that changes its class runs no constructor.

        Args:
            more_parameters: see `more_parameters`.
        """
        self.specgraph = CapturedDrafter(settings, self.read_head, self._capture_graphs, ranks)
        self.counts = self.specgraph.counts
        self._more_parameters, self._kv_group = more_parameters, 0

    @property
    def fast_path(self) -> FastPath | None:
        return self.specgraph.fast_path

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.specgraph.load()

    def set_attn(self, *args: Any, **options: Any) -> None:
        # To measure the memory of graphs, vLLM 0.33 first captures over a KV cache that it then frees.
        self.specgraph.drop_graphs()
        super().set_attn(*args, **options)

    def capture(self) -> None:
        with self.stock_drafting(None):
            super().capture()
        self.specgraph.capture()

    def _capture_graphs(self, head: VllmHead) -> FastPath:
        groups, context = self.kv_cache_config.kv_cache_groups, self.vllm_config.compilation_config
        sizes = table_block_sizes(self.block_tables)
        cache = draft_cache(head, self.model, groups, sizes, context.static_forward_context)
        fast = self.capture_head(head, cache, self.block_tables.input_block_tables[cache.group])
        self._kv_group = cache.group
        return fast

    @property
    def max_num_requests(self) -> int:
        """The most requests to draft for: a batch of K + 1 rows per request has no more rows than one of vLLM's."""
        return min(self.max_num_reqs, self.max_num_tokens // (self.num_speculative_steps + 1))

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: Any,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Return draft token ids, as the `propose` of vLLM's speculators does.

        `more` are next_prefill_tokens, temperature, seeds, and any further parameters of the release.
        """
        named = dict(zip(self._more_parameters, more, strict=False)) | options
        self.specgraph.follow_weights()
        # EAGLE-1 and MTP drafters take the target's last hidden state, after or before its final norm.
        head, fast = self.specgraph.head, self.specgraph.fast_path
        states = aux_hidden_states if head is not None and head.aux_layers else [last_hidden_states]

        def of_pass(fast: FastPath) -> str | None:
            most = fast.config.max_num_requests
            return reason_for_vllm(input_batch, self.num_speculative_steps, most, states, named)

        reason = self.specgraph.reason(self.use_vllm, of_pass)
        if fast is None or reason is not None:
            tensors = last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled
            with self.stock_drafting(None if reason == "dummy run" else input_batch.idx_mapping.long()):
                return super().propose(input_batch, attn_metadata, slot_mappings, *tensors, *more, **options)
        with torch.inference_mode():
            prefilling = input_batch.is_prefilling_np[: input_batch.num_reqs].nonzero()[0].tolist()
            if prefilling:
                self._write_prompts(fast, input_batch, states, prefilling, named["next_prefill_tokens"])
            output = self._verify_output(input_batch, states, num_sampled, last_sampled, bool(prefilling))
            return self.draft(fast, input_batch, output, named)

    def _write_prompts(
        self, fast: FastPath, batch: Any, states: list[Any], prefilling: list[int], next_prefill_tokens: Any
    ) -> None:
        """Write the keys of the pass's prompt rows. prefilling: the requests with such rows. See `propose`."""
        fast.write_prompts(
            PromptPass(
                chunks=[chunk_of(batch, request) for request in prefilling],
                token_ids=batch.input_ids,
                next_tokens=next_prefill_tokens,
                hidden_states=states,
                table=self.block_tables.input_block_tables[self._kv_group],
            )
        )

    def _verify_output(
        self, batch: Any, states: list[Any], num_sampled: Any, last_sampled: Any, has_prompts: bool
    ) -> VerifyOutput:
        """Return the `VerifyOutput` of a pass. has_prompts: True if it has prompt rows. See `propose`."""
        n, query_len = batch.num_reqs, self.num_speculative_steps + 1
        starts, first_rows = batch.positions[: n * query_len : query_len], None
        # A request has at most K + 1 rows, so an equal sum means K + 1 rows each.
        if has_prompts or batch.num_tokens != n * query_len:
            # Rows with logits: a prompt's last row, and the draft rows after it. A request inside its prompt is inert.
            first_rows = batch.logits_indices.index_select(0, batch.cu_num_logits[:n])
            starts = batch.positions.index_select(0, first_rows)
        return VerifyOutput(
            token_ids=batch.input_ids,
            num_sampled=num_sampled,
            starts=starts,
            table=self.block_tables.input_block_tables[self._kv_group],
            hidden_states=states,
            first_rows=first_rows,
            last_tokens=last_sampled,
            last_rows=batch.idx_mapping,
        )


def more_parameters(stock: Any) -> tuple[str, ...]:
    """Return the parameters of the `propose` of vLLM's class that follow those which `V2Speculator.propose` names."""
    return parameters(stock.propose)[len(_TENSORS) :]
