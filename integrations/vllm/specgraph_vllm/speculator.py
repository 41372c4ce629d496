"""Turns vLLM's speculators into ones that draft through specgraph, or else by vLLM's own code."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from specgraph_models import cut_vocabulary
from specgraph_models.checkpoints import read_draft_vocab
from specgraph_models.parallel import Ranks, split_over
from specgraph_plugin import FastPath, PromptChunk, PromptPass, ProposeCounts, VerifyOutput
from specgraph_plugin.host_engine_names import parameters
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import VllmHead, draft_cache, draft_head
from specgraph_plugin.vllm.refusals import LOG, refusals

from specgraph import open_platform
from specgraph_vllm.draft_logits import write_draft_logits
from specgraph_vllm.names import PROPOSE, table_block_sizes

_Stock: Any = ABC
"""The base class of vLLM's BaseSpeculator. `Speculator` has the same base, so that an object can change its class."""

_TENSORS = PROPOSE[: PROPOSE.index("last_sampled") + 1]
"""The parameters of vLLM's `propose` that `Speculator.propose` names."""


def adopt(
    made: Any,
    settings: Settings,
    logits_are_divided: Callable[[], bool],
    forward_context: Callable[..., AbstractContextManager[None]],
    ranks: Ranks | None = None,
) -> None:
    """Change the class of vLLM's speculator to a subclass that is also a `Speculator`.

    Args:
        made: vLLM's speculator.
        logits_are_divided: see `divided_by_temperature`. Called if drafts are sampled.
        forward_context: vLLM's `set_forward_context`.
        ranks: the ranks that split the model. None for one rank.
    """
    stock = type(made)
    if made.draft_logits is not None:
        made.logits_are_divided = logits_are_divided()
        made.stock_logits = made.draft_logits
        made.draft_logits = made.draft_logits.float()  # the sampler must read the drafts' exact distribution
    made.__class__ = type(f"Specgraph{stock.__name__}", (Speculator, stock), {})
    made.start_specgraph(settings, parameters(stock.propose)[len(_TENSORS) :], forward_context, ranks)


def reason_for_vllm(
    batch: Any, num_speculative_tokens: int, max_num_requests: int, hidden_states: Any, options: dict[str, Any]
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


class Speculator(_Stock):
    """Drafts through captured graphs, or by vLLM's own code if `reason_for_vllm` says so, in the same KV cache."""

    use_vllm = False
    """True leaves every propose to vLLM, for comparisons in one process."""

    def start_specgraph(
        self,
        settings: Settings,
        more_parameters: tuple[str, ...],
        forward_context: Callable[..., AbstractContextManager[None]],
        ranks: Ranks | None,
    ) -> None:
        """Set the attributes. `adopt` calls it, since an object that changes its class runs no constructor.

        Args:
            more_parameters: the parameters of vLLM's `propose` after `_TENSORS`.
        """
        self.settings, self._more_parameters, self._ranks = settings, more_parameters, ranks
        self._forward_context = forward_context
        self.fast_path: FastPath | None = None
        """None before the capture, or if something is not supported and vLLM drafts."""
        self.counts = ProposeCounts(LOG, settings.log_every)
        self._kv_group = 0
        self._head: VllmHead | None = None
        self._left_to_vllm = "no captured graphs"

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        with self._refusals():
            self._head = self._read_head()

    def _read_head(self) -> VllmHead:
        split, model = split_over(self._ranks), self.vllm_config.model_config
        head = draft_head(self.model, lambda: model.get_hidden_size(), split, self._run_mlp)
        if self.settings.draft_vocab is not None:
            tokenizer = getattr(model, "tokenizer", None)
            cut_vocabulary(head, read_draft_vocab(self.settings.draft_vocab, tokenizer))
        return head

    def _run_mlp(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Run one of vLLM's mixtures of experts over rows [T, hidden_size]."""
        with self._forward_context(None, self.vllm_config, num_tokens=x.shape[0]):
            return module(x)

    def set_attn(self, *args: Any, **options: Any) -> None:
        # To measure the memory of graphs, vLLM 0.33 first captures over a KV cache that it then frees.
        self._drop_graphs()
        super().set_attn(*args, **options)

    def _drop_graphs(self) -> None:
        if self.fast_path is not None:
            self.fast_path.drafter.close()  # a dropped drafter keeps its graphs until a garbage collection
            self.fast_path = None

    def capture(self) -> None:
        with self._stock_logits(None):
            super().capture()
        self._capture()

    @contextmanager
    def _stock_logits(self, slots: torch.Tensor | None) -> Generator[None]:
        """Restore vLLM's own `draft_logits` within the block, and copy its distributions into ours at the end.

        Args:
            slots: integer [n]: the rows to copy, of the requests that vLLM drafts for. None copies nothing.
        """
        if (kept := self.draft_logits) is None:
            yield
            return
        self.draft_logits = self.stock_logits
        try:
            yield
        finally:
            self.draft_logits = kept
        if slots is not None:
            kept[slots] = self.stock_logits[slots].float()

    def _follow_weights(self) -> None:
        """Capture again over the new weights if vLLM has replaced their tensors."""
        if self.fast_path is not None and self.fast_path.weights_moved():
            LOG.warning("the drafter's weights lie elsewhere now: specgraph captures its graphs again")
            self._capture()

    def _capture(self) -> None:
        self._drop_graphs()
        if self._head is None:
            return
        with self._refusals():
            # Sleep mode frees memory that was allocated while vLLM loaded weights. Tensors that the head copies must
            # outlive it, so the head is made again here.
            self._head = self._read_head()
            groups, context = self.kv_cache_config.kv_cache_groups, self.vllm_config.compilation_config
            sizes = table_block_sizes(self.block_tables)
            cache = draft_cache(self._head, self.model, groups, sizes, context.static_forward_context)
            table = self.block_tables.input_block_tables[cache.group]
            fast = FastPath(
                self._head,
                cache.caches,
                open_platform(str(table.device)),
                num_speculative_tokens=self.num_speculative_steps,
                # A batch of K + 1 rows per request has no more requests, and vLLM's workspaces hold no more rows.
                max_num_requests=min(self.max_num_reqs, self.max_num_tokens // (self.num_speculative_steps + 1)),
                max_model_len=self.max_model_len,
                block_size=cache.block_size,
                max_num_rows=self.max_num_tokens,
                sampled=self.draft_logits is not None,
                capture_sizes=self.settings.capture_sizes,
                ranks=self._ranks,
                rank_parts=self._head.rank_parts(),
                compare_every=self.settings.compare_every,
                module=self.model,
            )
            self._warm_up(fast, self._head, table)
            self.fast_path, self._kv_group = fast, cache.group
            sizes = fast.config.sizes
            graphs = len(sizes) + len(fast.prompts.sizes)
            LOG.info("specgraph drafts for up to %d requests (%d graphs)", sizes[-1], graphs)

    def _warm_up(self, fast: FastPath, head: VllmHead, table: torch.Tensor) -> None:
        """Compile the kernels of both forms of `_verify_output`, so that none compiles while vLLM serves."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        num_states = max(len(head.aux_layers), 1)
        output = VerifyOutput(
            token_ids=zeros(fast.config.query_len, dtype=torch.int32),
            num_sampled=zeros(1, dtype=torch.int32),
            starts=zeros(1),
            table=torch.zeros_like(table[:1]),
            hidden_states=[zeros(1, head.aux_size // num_states, dtype=head.dtype)] * num_states,
            last_tokens=zeros(1, 1),
            last_rows=zeros(1, dtype=self.idx_mapping.dtype),  # int32 in 0.26, int64 in 0.33
            temperature=zeros(1, dtype=torch.float32),
            seeds=zeros(1),
        )
        fast.warm_up(output, replace(output, first_rows=zeros(1)))

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
        self._follow_weights()
        fast = self.fast_path
        # EAGLE-1 and MTP drafters take the target's last hidden state, after or before its final norm.
        states = aux_hidden_states if self._head is not None and self._head.aux_layers else [last_hidden_states]
        if fast is None or self.use_vllm:
            reason = self._left_to_vllm if fast is None else "switched off"
        else:
            most = fast.config.max_num_requests
            reason = reason_for_vllm(input_batch, self.num_speculative_steps, most, states, named)
        self.counts.add(reason)
        if fast is None or reason is not None:
            tensors = last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled
            with self._stock_logits(None if reason == "dummy run" else input_batch.idx_mapping.long()):
                return super().propose(input_batch, attn_metadata, slot_mappings, *tensors, *more, **options)
        with torch.inference_mode():
            prefilling = input_batch.is_prefilling_np[: input_batch.num_reqs].nonzero()[0].tolist()
            if prefilling:
                self._write_prompts(fast, input_batch, states, prefilling, named["next_prefill_tokens"])
            output = self._verify_output(input_batch, states, num_sampled, last_sampled, bool(prefilling))
            if self.draft_logits is None:
                fast.fill(output)
                return fast.propose(input_batch.num_reqs).token_ids
            slots = input_batch.idx_mapping.long()
            temperature = named["temperature"][slots]
            fast.fill(replace(output, temperature=temperature, seeds=named["seeds"][slots]))
            drafts, head = fast.propose(input_batch.num_reqs), self._head
            assert drafts.probs is not None
            assert head is not None
            factor = None if self.logits_are_divided else temperature
            write_draft_logits(self.draft_logits, slots, drafts.probs, head.draft_to_target, factor)
            return drafts.token_ids

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

    def _refusals(self) -> AbstractContextManager[None]:
        return refusals(self.settings, self._ranks, self._leave_to_vllm)

    def _leave_to_vllm(self) -> None:
        self._head, self._left_to_vllm = None, "not supported"
