"""Turns vLLM's speculators into ones that draft through specgraph, or else by vLLM's own code."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from specgraph_models import cut_vocabulary
from specgraph_models.checkpoints import read_draft_vocab
from specgraph_models.parallel import Ranks, split_over
from specgraph_plugin import FastPath, VerifyOutput
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import DraftCache, VllmHead, draft_head
from specgraph_plugin.vllm.v2_speculator import V2Speculator, more_parameters

from specgraph import open_platform
from specgraph_vllm.draft_logits import write_draft_logits


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
    made._forward_context = forward_context
    made.start_specgraph(settings, more_parameters(stock), ranks)


class Speculator(V2Speculator):
    """A speculator on GPUs and on the CPU: drafts are greedy or sampled, and the model may be split over ranks."""

    _forward_context: Callable[..., AbstractContextManager[None]]
    """vLLM's `set_forward_context`."""

    def read_head(self) -> VllmHead:
        split, model = split_over(self.specgraph.ranks), self.vllm_config.model_config
        head = draft_head(self.model, lambda: model.get_hidden_size(), split, self._run_mlp)
        if (path := self.specgraph.settings.draft_vocab) is not None:
            cut_vocabulary(head, read_draft_vocab(path, getattr(model, "tokenizer", None)))
        return head

    def _run_mlp(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Run one of vLLM's mixtures of experts over rows [T, hidden_size]."""
        with self._forward_context(None, self.vllm_config, num_tokens=x.shape[0]):
            return module(x)

    def capture_head(self, head: VllmHead, cache: DraftCache, table: torch.Tensor) -> FastPath:
        fast = FastPath(
            head,
            cache.caches,
            open_platform(str(table.device)),
            num_speculative_tokens=self.num_speculative_steps,
            max_num_requests=self.max_num_requests,
            max_model_len=self.max_model_len,
            block_size=cache.block_size,
            max_num_rows=self.max_num_tokens,
            sampled=self.draft_logits is not None,
            capture_sizes=self.specgraph.settings.capture_sizes,
            ranks=self.specgraph.ranks,
            rank_parts=head.rank_parts(),
            compare_every=self.specgraph.settings.compare_every,
            module=self.model,
        )
        self._warm_up(fast, head, table)
        return fast

    def _warm_up(self, fast: FastPath, head: VllmHead, table: torch.Tensor) -> None:
        """Compile the kernels of both forms of `VerifyOutput`, so that none compiles while vLLM serves."""

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

    @contextmanager
    def stock_drafting(self, slots: torch.Tensor | None) -> Generator[None]:
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

    def draft(self, fast: FastPath, batch: Any, output: VerifyOutput, named: Mapping[str, Any]) -> torch.Tensor:
        if self.draft_logits is None:
            return super().draft(fast, batch, output, named)
        slots = batch.idx_mapping.long()
        temperature = named["temperature"][slots]
        fast.fill(replace(output, temperature=temperature, seeds=named["seeds"][slots]))
        drafts, head = fast.propose(batch.num_reqs), self.specgraph.head
        assert drafts.probs is not None
        assert head is not None
        factor = None if self.logits_are_divided else temperature
        write_draft_logits(self.draft_logits, slots, drafts.probs, head.draft_to_target, factor)
        return drafts.token_ids
