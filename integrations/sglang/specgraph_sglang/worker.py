"""SGLang's EAGLE draft worker with specgraph's fast path in front of its own code."""

from __future__ import annotations

import logging
from typing import Any

import torch

from specgraph import ProposeCounts, open_platform
from specgraph_sglang.draft_model import draft_cache, draft_head
from specgraph_sglang.fast_path import FastPath, KeptTokens
from specgraph_sglang.round_end import RoundEnd

_LOG = logging.getLogger("sglang.specgraph")


def draft_worker_class(stock: Any, sglang: Any) -> Any:
    """A subclass of SGLang's `EagleDraftWorker`.

    Args:
        stock: SGLang's class.
        sglang: what it takes of SGLang: `build_eagle_verify_input` and `get_batch_sizes_to_capture`.
    """

    class SpecgraphDraftWorker(stock):
        """Drafts at the tail of a decode round through one graph, and hands the tokens out at the head of the next.

        A request whose last round was a prompt, or larger than every captured size, has no tokens: SGLang's own code
        then drafts for the batch, in the same KV cache, and rows that have tokens keep them.
        """

        fast_path: FastPath | None = None
        """None before the capture."""
        use_sglang = False
        """Set it to leave every propose to SGLang, for comparisons in one process."""

        def start_specgraph(self) -> None:
            """Once, before anything is loaded onto the device by the plugin."""
            self.counts = ProposeCounts(_LOG)
            self.kept: KeptTokens | None = None

        def init_cuda_graphs(self) -> None:
            super().init_cuda_graphs()
            runner = self.draft_runner
            head = draft_head(runner.model)
            page_size = self.server_args.page_size
            sizes, _ = sglang.get_batch_sizes_to_capture(runner)
            rows = self.req_to_token_pool.req_to_token
            table = head.attention_layers[0].rotary
            assert table is not None
            self.fast_path = FastPath(
                head,
                draft_cache(head, runner.token_to_kv_pool, page_size),
                open_platform(f"cuda:{self.gpu_id}" if rows.is_cuda else "cpu"),
                num_speculative_tokens=self.speculative_num_steps,
                capture_sizes=sizes,
                max_model_len=min(runner.model_config.context_len, table.shape[0]),
                page_size=page_size,
            )
            self.kept = KeptTokens(rows.shape[0], self.speculative_num_steps, rows.device)
            _LOG.info("specgraph drafts decode rounds of up to %d requests (%d graphs)", max(sizes), len(sizes))

        def draft(self, batch: Any) -> Any:
            kept = self.kept
            if kept is None or batch.forward_mode.is_idle():
                return super().draft(batch)
            slots = batch.req_pool_indices_cpu.tolist()
            held = kept.holds(slots)
            if all(held):
                n = len(slots)
                return sglang.build_eagle_verify_input(
                    batch,
                    batch.spec_info,
                    self._topk1_parents_prealloc[:n],
                    self._topk1_score_indices_prealloc[:n],
                    kept.take(batch.req_pool_indices),
                    None,
                    target_worker=self.target_worker,
                    topk=self.topk,
                    num_steps=self.speculative_num_steps,
                    num_draft_tokens=self.speculative_num_draft_tokens,
                    tree_mask_mode=self.tree_mask_mode,
                    device=self.device,
                )
            verify = super().draft(batch)
            if any(held):
                drafts = verify.draft_token.view(len(slots), -1)[:, 1:]
                mine = torch.tensor(held).to(drafts.device, non_blocking=True)[:, None]
                drafts.copy_(torch.where(mine, kept.take(batch.req_pool_indices), drafts))
            return verify

        def _draft_extend_for_prefill(self, batch: Any, *args: Any, **options: Any) -> Any:
            if self.kept is not None and not batch.forward_mode.is_idle():
                self.kept.forget(batch.req_pool_indices_cpu.tolist())
                self.counts.add("prompts")
            return super()._draft_extend_for_prefill(batch, *args, **options)

        def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
            reason = self._reason_for_sglang(batch)
            self.counts.add(reason)
            if reason is not None:
                if self.kept is not None and not batch.forward_mode.is_idle():
                    self.kept.forget(batch.req_pool_indices_cpu.tolist())
                super()._draft_extend_for_decode(batch, batch_result)
                return
            fast, kept, n = self.fast_path, self.kept, len(batch.seq_lens)
            assert fast is not None
            assert kept is not None
            fast.fill(
                RoundEnd(
                    next_token_ids=batch_result.next_token_ids,
                    accept_lens=batch_result.accept_lens,
                    seq_lens=batch.seq_lens,
                    req_pool_indices=batch.req_pool_indices,
                    req_to_token=self.req_to_token_pool.req_to_token,
                    hidden_states=batch_result.logits_output.hidden_states,
                )
            )
            if batch.seq_lens.is_cuda:
                # The last read of what the scheduler writes next: its barrier waits for this event.
                event = torch.cuda.Event()
                event.record()
                self.draft_runner.war_fastpath_read_done_event = event
            kept.keep(batch.req_pool_indices_cpu.tolist(), batch.req_pool_indices, fast.propose(n))
            # SGLang stores these three per request slot, and reads them only where it drafts itself.
            draft = batch_result.next_draft_input
            draft.topk_p, draft.topk_index, draft.hidden_states = self._stand_ins(n)

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

        def _stand_ins(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Zeros of the shapes of `topk_p`, `topk_index` and `hidden_states`."""
            if not hasattr(self, "_zeros"):
                most = self.fast_path.config.max_num_requests if self.fast_path else n
                config, device = self.draft_runner.model_config, self.req_to_token_pool.req_to_token.device
                self._zeros = (
                    torch.zeros(most, 1, dtype=torch.float32, device=device),
                    torch.zeros(most, 1, dtype=torch.int64, device=device),
                    torch.zeros(most, config.spec_hidden_size, dtype=config.dtype, device=device),
                )
            p, index, hidden = self._zeros
            return p[:n], index[:n], hidden[:n]

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
