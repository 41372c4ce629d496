"""SGLang's EAGLE draft worker with specgraph's fast path in front of its own code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph import open_platform
from specgraph.engine import ProposeCounts
from specgraph.plugin import FastPath, RoundEnd
from specgraph_sglang.draft_model import draft_cache, draft_head

_LOG = logging.getLogger("sglang.specgraph")


def draft_worker_class(stock: Any, sglang: Any) -> Any:
    """A subclass of SGLang's `EagleDraftWorker` that asks `DraftRounds` first.

    Its instances are made by SGLang and change their class (`worker_class`), so SGLang's class must be its only base.

    Args:
        stock: SGLang's class.
        sglang: what it takes of SGLang: `build_eagle_verify_input` and `get_batch_sizes_to_capture`.
    """

    class SpecgraphDraftWorker(stock):
        specgraph: DraftRounds

        def start_specgraph(self) -> None:
            """Once, before anything is loaded onto the device by the plugin."""
            self.specgraph = DraftRounds(self, sglang)

        def init_cuda_graphs(self) -> None:
            super().init_cuda_graphs()
            self.specgraph.capture()

        def draft(self, batch: Any) -> Any:
            return self.specgraph.draft(batch, super().draft)

        def _draft_extend_for_prefill(self, batch: Any, *args: Any, **options: Any) -> Any:
            self.specgraph.begin(batch)
            return super()._draft_extend_for_prefill(batch, *args, **options)

        def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
            if not self.specgraph.end(batch, batch_result):
                super()._draft_extend_for_decode(batch, batch_result)

    return SpecgraphDraftWorker


def worker_class(stock: Any, draft_worker: Any) -> Any:
    """A subclass of SGLang's `EAGLEWorkerV2`; `draft_worker` is the class that its draft worker gets."""

    class SpecgraphWorker(stock):
        """SGLang's worker; only its draft worker differs."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._draft_worker.__class__ = draft_worker
            self._draft_worker.start_specgraph()

    return SpecgraphWorker


class KeptTokens:
    """The draft tokens of the last round by request slot, and on the host which slots have them.

    SGLang drafts at the head of a round; specgraph at the tail of the round before, and keeps the tokens until then.
    """

    def __init__(self, num_slots: int, num_speculative_tokens: int, device: torch.device) -> None:
        """
        Args:
            num_slots: rows of SGLang's `req_to_token`.
        """
        self.tokens = torch.zeros(num_slots, num_speculative_tokens, dtype=torch.int64, device=device)
        self._held: set[int] = set()

    def keep(self, slots: Sequence[int], indices: Tensor, token_ids: Tensor) -> None:
        """Keep int64 [n, K] for the slots, which `indices` holds on the device."""
        self.tokens.index_copy_(0, indices, token_ids)
        self._held.update(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """These slots have no tokens any more: their requests begin, or SGLang drafted for them."""
        self._held.difference_update(slots)

    def holds(self, slots: Sequence[int]) -> list[bool]:
        """Which of the slots have tokens."""
        return [slot in self._held for slot in slots]

    def take(self, indices: Tensor) -> Tensor:
        """int64 [n, K]."""
        return self.tokens.index_select(0, indices)


class DraftRounds:
    """Drafts at the tail of a decode round through one graph, and hands the tokens out at the head of the next.

    A request whose last round was a prompt, or larger than every captured size, has no tokens: SGLang's own code then
    drafts for the batch, in the same KV cache, and rows that have tokens keep them.
    """

    def __init__(self, worker: Any, sglang: Any) -> None:
        """
        Args:
            worker: SGLang's draft worker.
            sglang: see `draft_worker_class`.
        """
        self.worker, self.sglang = worker, sglang
        self.counts = ProposeCounts(_LOG)
        self.fast_path: FastPath | None = None
        """None before the capture."""
        self.kept: KeptTokens | None = None
        self.use_sglang = False
        """Set it to leave every propose to SGLang, for comparisons in one process."""

    def capture(self) -> None:
        """Make the fast path, when SGLang has captured its own graphs."""
        worker, runner = self.worker, self.worker.draft_runner
        head, page_size = draft_head(runner.model), worker.server_args.page_size
        sizes, _ = self.sglang.get_batch_sizes_to_capture(runner)
        rows, table = worker.req_to_token_pool.req_to_token, head.attention_layers[0].rotary
        assert table is not None
        self.fast_path = FastPath(
            head,
            draft_cache(head, runner.token_to_kv_pool, page_size),
            open_platform(f"cuda:{worker.gpu_id}" if rows.is_cuda else "cpu"),
            num_speculative_tokens=worker.speculative_num_steps,
            max_num_requests=max(sizes),
            max_model_len=min(runner.model_config.context_len, table.shape[0]),
            block_size=page_size,
            capture_sizes=sizes,
        )
        self.kept = KeptTokens(rows.shape[0], worker.speculative_num_steps, rows.device)
        config = runner.model_config
        self._stand_ins = (
            torch.zeros(max(sizes), 1, dtype=torch.float32, device=rows.device),
            torch.zeros(max(sizes), 1, dtype=torch.int64, device=rows.device),
            torch.zeros(max(sizes), config.spec_hidden_size, dtype=config.dtype, device=rows.device),
        )
        """Zeros of the shapes of `topk_p`, `topk_index` and `hidden_states`."""
        _LOG.info("specgraph drafts decode rounds of up to %d requests (%d graphs)", max(sizes), len(sizes))

    def draft(self, batch: Any, stock: Callable[[Any], Any]) -> Any:
        """The verify input of a round, of kept tokens; by SGLang's own code (`stock`) where some are missing."""
        kept, worker = self.kept, self.worker
        if kept is None or batch.forward_mode.is_idle():
            return stock(batch)
        slots = batch.req_pool_indices_cpu.tolist()
        held = kept.holds(slots)
        if all(held):
            n = len(slots)
            return self.sglang.build_eagle_verify_input(
                batch,
                batch.spec_info,
                worker._topk1_parents_prealloc[:n],
                worker._topk1_score_indices_prealloc[:n],
                kept.take(batch.req_pool_indices),
                None,
                target_worker=worker.target_worker,
                topk=worker.topk,
                num_steps=worker.speculative_num_steps,
                num_draft_tokens=worker.speculative_num_draft_tokens,
                tree_mask_mode=worker.tree_mask_mode,
                device=worker.device,
            )
        verify = stock(batch)
        if any(held):
            drafts = verify.draft_token.view(len(slots), -1)[:, 1:]
            mine = torch.tensor(held).to(drafts.device, non_blocking=True)[:, None]
            drafts.copy_(torch.where(mine, kept.take(batch.req_pool_indices), drafts))
        return verify

    def begin(self, batch: Any) -> None:
        """Prompts run: nothing is kept for their slots any more."""
        if self.kept is not None and not batch.forward_mode.is_idle():
            self.kept.forget(batch.req_pool_indices_cpu.tolist())
            self.counts.add("prompts")

    def end(self, batch: Any, batch_result: Any) -> bool:
        """Draft after a decode round and keep the tokens; False where SGLang's own code must."""
        reason = self._reason_for_sglang(batch)
        self.counts.add(reason)
        fast, kept, n = self.fast_path, self.kept, len(batch.seq_lens)
        if reason is not None or fast is None or kept is None:
            if kept is not None and not batch.forward_mode.is_idle():
                kept.forget(batch.req_pool_indices_cpu.tolist())
            return False
        fast.fill(
            RoundEnd(
                token_ids=batch_result.next_token_ids,
                num_sampled=batch_result.accept_lens,
                starts=batch.seq_lens,
                table=self.worker.req_to_token_pool.req_to_token,
                hidden_states=[batch_result.logits_output.hidden_states],
                table_of_slots=True,
                table_rows=batch.req_pool_indices,
            )
        )
        if batch.seq_lens.is_cuda:
            # The last read of what the scheduler writes next: its barrier waits for this event.
            event = torch.cuda.Event()
            event.record()
            self.worker.draft_runner.war_fastpath_read_done_event = event
        kept.keep(batch.req_pool_indices_cpu.tolist(), batch.req_pool_indices, fast.propose(n))
        # SGLang stores these three per request slot, and reads them only where it drafts itself.
        draft = batch_result.next_draft_input
        draft.topk_p, draft.topk_index, draft.hidden_states = (zeros[:n] for zeros in self._stand_ins)
        return True

    def _reason_for_sglang(self, batch: Any) -> str | None:
        """Why SGLang's own code must draft after this round; None where specgraph drafts."""
        if batch.forward_mode.is_idle():
            return "idle"
        if self.fast_path is None:
            return "no captured graphs"
        if self.use_sglang:
            return "switched off"
        if len(batch.seq_lens) > self.fast_path.config.sizes[-1]:
            return "more requests than the largest captured size"
        return None
