"""Subclasses of SGLang's workers for EAGLE and MTP that draft through specgraph, or else by SGLang's own code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from specgraph_models import cut_vocabulary
from specgraph_models.checkpoints import read_draft_vocab
from specgraph_models.parallel import split_over
from specgraph_models.parallel.join import ranks_of_groups
from specgraph_models.start_up import agreed
from specgraph_plugin import FastPath, PromptChunk, PromptPass, ProposeCounts, VerifyOutput
from torch import Tensor

from specgraph import open_platform
from specgraph.capture.transfers import write
from specgraph.errors import UnsupportedError
from specgraph_sglang.config import DRAFT_VOCAB, unsupported_experts
from specgraph_sglang.draft_model import draft_cache, draft_head
from specgraph_sglang.mtp import MTP_CLASSES
from specgraph_sglang.names import READ_DONE

_LOG = logging.getLogger("sglang.specgraph")


def draft_worker_class(stock: Any, sglang: Any) -> Any:
    """Return a subclass of SGLang's `EagleDraftWorker` that drafts by `DraftsAhead`, or else by SGLang's own code.

    SGLang makes the instances, and `worker_class` then changes their class. So SGLang's class must be the only base.

    Args:
        stock: SGLang's class.
        sglang: the functions and classes of SGLang in `names.TAKEN`, and as `tp_group` the function of
            `names.TENSOR_PARALLEL`, or None for one rank.
    """

    class SpecgraphDraftWorker(stock):
        specgraph: DraftsAhead | None = None
        """None before the capture."""

        def _capture_cuda_graphs(self) -> None:
            super()._capture_cuda_graphs()
            self.specgraph = DraftsAhead(self, sglang)  # only now SGLang has set the values that mixtures read

        def draft(self, batch: Any, **options: Any) -> Any:
            if (ahead := drafts_of(self, batch)) is None or options:
                return super().draft(batch, **options)
            return ahead.draft(batch, super().draft)

        def _draft_extend_for_prefill(self, batch: Any, *args: Any, **options: Any) -> Any:
            ahead = drafts_of(self, batch)
            begun = None if ahead is None else ahead.begin(batch, *args)
            return super()._draft_extend_for_prefill(batch, *args, **options) if begun is None else begun

        def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **options: Any) -> None:
            if (ahead := drafts_of(self, batch)) is None or not ahead.end(batch, batch_result):
                super()._draft_extend_for_decode(batch, batch_result, **options)

    def drafts_of(worker: SpecgraphDraftWorker, batch: Any) -> DraftsAhead | None:
        """Return the worker's `DraftsAhead`. None before its capture, or if the batch has no requests."""
        return None if worker.specgraph is None or batch.forward_mode.is_idle() else worker.specgraph

    return SpecgraphDraftWorker


def worker_class(stock: Any, draft_worker: Any) -> Any:
    """Return a subclass of SGLang's `EAGLEWorkerV2`. Its draft worker has the class `draft_worker`."""

    class SpecgraphWorker(stock):
        """SGLang's worker with another draft worker."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._draft_worker.__class__ = draft_worker

    return SpecgraphWorker


class BySlot:
    """Device tensors with a row per request slot. The host knows the slots that have a valid row."""

    def __init__(self, *tensors: Tensor) -> None:
        """
        Args:
            tensors: each has the rows of SGLang's `req_to_token`, one per slot.
        """
        self.tensors = tensors
        self._held: set[int] = set()

    def keep(self, slots: Sequence[int], indices: Tensor, *rows: Tensor) -> None:
        """Store the slots' rows, one tensor of rows for each of `tensors`. `indices` are the slots on the device."""
        for tensor, values in zip(self.tensors, rows, strict=True):
            tensor.index_copy_(0, indices, values.to(tensor.dtype))
        self._held.update(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Mark the slots as having no row."""
        self._held.difference_update(slots)

    def holds(self, slots: Sequence[int]) -> list[bool]:
        """Return, for each slot, True if it has a row."""
        return [slot in self._held for slot in slots]

    def take(self, indices: Tensor) -> Tensor:
        """Return the slots' rows. There must be one tensor."""
        (tensor,) = self.tensors
        return tensor.index_select(0, indices)


class DraftsAhead:
    """Drafts at the end of a decode round through one graph, and returns the tokens at the start of the next round.

    After a prompt's pass it writes the prompt's keys, and keeps the inputs of the prompt's last row. SGLang reserves
    the slots of the first drafts only later, so they are drafted at the start of the request's first round.

    A request lacks both drafts and such inputs if SGLang's own code ran after its last pass. SGLang's code then drafts
    for the whole batch, in the same KV cache, and requests that have drafts keep theirs.
    """

    def __init__(self, worker: Any, sglang: Any) -> None:
        """Capture the drafter's graphs. SGLang must have captured its own graphs before.

        Args:
            worker: SGLang's draft worker.
            sglang: see `draft_worker_class`.
        """
        self._group = group = None if sglang.tp_group is None else sglang.tp_group()
        self._ranks = None if group is None else ranks_of_groups(group.device_group, group.cpu_group)
        self.worker, self.sglang = worker, sglang
        self.counts = ProposeCounts(_LOG)
        self.use_sglang = False
        """True leaves every propose to SGLang. `plugin.switched` sets it."""
        self.fast_path = fast = self._captured()
        rows, head, config = worker.req_to_token_pool.req_to_token, fast.drafter.head, worker.draft_runner.model_config

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows.shape[0], *shape, dtype=dtype, device=rows.device)

        self.kept = BySlot(zeros(worker.speculative_num_steps))
        """The drafts for a request's next verify, int64 [slots, K]."""
        self.begun = BySlot(zeros(), zeros(head.aux_size, dtype=head.dtype))
        """The token after a prompt's last row, int64 [slots], and the row's hidden states, [slots, aux_size]."""
        self._positions: dict[int, int] = {}
        """The position of a prompt's last row, by slot."""
        self._ones = zeros() + 1
        hidden = zeros(config.spec_hidden_size, dtype=config.dtype)
        self._stand_ins = {"topk_p": zeros(1, dtype=torch.float32), "topk_index": zeros(1), "hidden_states": hidden}
        """Zeros for tensors that SGLang stores per request slot, but reads only if its own code drafts."""
        graphs = len(fast.config.sizes) + len(fast.prompts.sizes)
        _LOG.info("specgraph drafts for up to %d requests (%d graphs)", fast.config.sizes[-1], graphs)

    def _follow_weights(self) -> None:
        """Capture again over the new weights if SGLang has replaced their tensors."""
        if self.fast_path.weights_moved():
            _LOG.warning("the drafter's weights lie elsewhere now: specgraph captures its graphs again")
            self.fast_path.drafter.close()
            self.fast_path = self._captured()

    def _captured(self) -> FastPath:
        """Return a captured fast path over SGLang's loaded drafter, with its kernels compiled."""
        worker, runner = self.worker, self.worker.draft_runner
        split = split_over(self._ranks)
        with agreed(self._ranks):
            is_mtp = type(runner.model).__name__ in MTP_CLASSES  # also if it has a folder of its own
            if is_mtp and (reason := unsupported_experts(worker.server_args)) is not None:
                raise UnsupportedError(f"specgraph does not draft for this configuration: {reason}")
            head, page_size = draft_head(runner.model, split, self._group), runner.token_to_kv_pool.page_size
            caches = draft_cache(head, runner.model, runner.token_to_kv_pool)
            if path := os.environ.get(DRAFT_VOCAB):
                tokenizer = getattr(getattr(worker, "server_args", None), "tokenizer_path", None)
                cut_vocabulary(head, read_draft_vocab(path, tokenizer))
        sizes, _ = self.sglang.get_batch_sizes_to_capture(runner)
        rows, table = worker.req_to_token_pool.req_to_token, head.attention_layers[0].rotary
        assert table is not None
        fast = FastPath(
            head,
            caches,
            open_platform(str(rows.device)),
            num_speculative_tokens=worker.speculative_num_steps,
            max_num_requests=max(sizes),
            max_model_len=min(runner.model_config.context_len, table.shape[0]),
            block_size=page_size,
            capture_sizes=sizes,
            ranks=self._ranks,
            rank_parts=head.rank_parts(),
            module=runner.model,
        )
        self._warm_up(fast, rows, head.dtype)
        return fast

    @staticmethod
    def _warm_up(fast: FastPath, rows: Tensor, dtype: torch.dtype) -> None:
        """Compile the kernels for the `VerifyOutput` of `end` and of `_draft_begun` at start-up, not while serving."""
        one = torch.zeros(1, dtype=torch.int64, device=rows.device)
        output = VerifyOutput(
            token_ids=torch.zeros(fast.config.query_len, dtype=torch.int32, device=rows.device),
            num_sampled=one.int(),
            starts=one,
            table=torch.zeros_like(rows[:1]),
            hidden_states=[torch.zeros(1, fast.drafter.head.aux_size, dtype=dtype, device=rows.device)],
            table_of_slots=True,
            table_rows=one,
        )
        fast.warm_up(output, replace(output, token_ids=one, num_sampled=one, first_rows=one))

    def draft(self, batch: Any, stock: Callable[[Any], Any]) -> Any:
        """Return the verify input of a round, with the kept drafts. If some are missing, `stock` drafts them."""
        kept, worker = self.kept, self.worker
        self._follow_weights()
        slots = batch.req_pool_indices_cpu.tolist()
        self._draft_begun(slots)
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

    def _draft_begun(self, slots: Sequence[int]) -> None:
        """Draft for the slots with a prompt that has just ended, and keep the tokens."""
        fast, kept, begun, most = self.fast_path, self.kept, self.begun, self.fast_path.config.max_num_requests
        new = [slot for slot, has in zip(slots, begun.holds(slots), strict=True) if has]
        for first in range(0, len(new), most):
            part = new[first : first + most]
            padding = [0] * (len(part) % 2)  # so that both rows begin at multiples of 16 bytes, as at start-up
            numbers = torch.empty(2, len(part + padding), dtype=torch.int64, device=self._ones.device)
            write(numbers, [part + padding, [self._positions[slot] for slot in part] + padding])
            indices, positions = numbers[:, : len(part)]
            tokens, states = begun.tensors
            fast.fill(
                VerifyOutput(
                    token_ids=tokens,
                    num_sampled=self._ones[: len(part)],
                    starts=positions,
                    table=self.worker.req_to_token_pool.req_to_token,
                    hidden_states=[states],
                    first_rows=indices,
                    table_of_slots=True,
                    table_rows=indices,
                )
            )
            kept.keep(part, indices, fast.propose(len(part)).token_ids)
        begun.forget(new)

    def begin(self, batch: Any, hidden_states: Tensor, next_token_ids: Tensor, embeddings: Any = None) -> Any:
        """Write the keys of prompt rows, and keep the inputs of each prompt's last row.

        Args:
            hidden_states: the target's hidden states of all rows.
            next_token_ids: integer [n]: the token that the target sampled after each request's last row.
            embeddings: the embeddings of multimodal inputs. None without such inputs.

        Returns:
            SGLang's `EagleDraftInput`. None if SGLang's own code must run instead.
        """
        self._follow_weights()
        reason = self._reason_for_sglang(embeddings)
        self.counts.add(reason)
        slots, indices, chunks, row = batch.req_pool_indices_cpu.tolist(), batch.req_pool_indices, [], 0
        self.kept.forget(slots)
        self.begun.forget(slots)
        if reason is not None:
            return None
        # Drafts begin in a later pass, so this pass also writes the keys of a prompt's last row.
        for i, (slot, length, start) in enumerate(zip(slots, batch.extend_lens, batch.prefix_lens, strict=True)):
            chunks.append(PromptChunk(row, length, start, table_row=slot, next_row=i))
            row += length
        self.fast_path.write_prompts(
            PromptPass(
                chunks=chunks,
                token_ids=batch.input_ids,
                next_tokens=self.sglang._eagle_prefill_tail_tokens(batch, next_token_ids),
                hidden_states=[hidden_states],
                table=self.worker.req_to_token_pool.req_to_token,
                table_of_slots=True,
            )
        )
        last = torch.empty(len(chunks), dtype=torch.int64, device=indices.device)
        write(last, [chunk.first_row + chunk.num_rows - 1 for chunk in chunks])
        self._positions |= {chunk.table_row: chunk.position + chunk.num_rows - 1 for chunk in chunks}
        self.begun.keep(slots, indices, next_token_ids, hidden_states.index_select(0, last))
        zeros = {name: tensor[: len(slots)] for name, tensor in self._stand_ins.items()}
        return self.sglang.EagleDraftInput(
            **zeros, bonus_tokens=next_token_ids, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )

    def end(self, batch: Any, batch_result: Any) -> bool:
        """Draft after a verify and keep the tokens. Returns False if SGLang's own code must draft instead."""
        fast, reason, slots = self.fast_path, self._reason_for_sglang(), batch.req_pool_indices_cpu.tolist()
        if (n := len(slots)) > fast.config.max_num_requests:
            reason = "more requests than the largest captured size"
        self.counts.add(reason)
        if reason is not None:
            self.kept.forget(slots)
            return False
        fast.fill(
            VerifyOutput(
                token_ids=batch_result.next_token_ids,
                num_sampled=batch_result.accept_lens,
                starts=batch.seq_lens,
                table=self.worker.req_to_token_pool.req_to_token,
                hidden_states=[batch_result.logits_output.hidden_states],
                table_of_slots=True,
                table_rows=batch.req_pool_indices,
            )
        )
        if batch.seq_lens.device.type != "cpu":
            # The scheduler's next writes wait for this event: `fill` was the last read of the tensors it overwrites.
            event = fast.drafter.platform.event()
            event.record()
            runner = self.worker.draft_runner
            for name in READ_DONE:
                if hasattr(runner, name):
                    setattr(runner, name, event)
        self.kept.keep(slots, batch.req_pool_indices, fast.propose(n).token_ids)
        for name, zeros in self._stand_ins.items():
            setattr(batch_result.next_draft_input, name, zeros[:n])
        return True

    def _reason_for_sglang(self, embeddings: Any = None) -> str | None:
        """Return why SGLang's own code must draft after this pass. None if specgraph drafts."""
        if self.use_sglang:
            return "switched off"
        return None if embeddings is None else "multimodal inputs"
