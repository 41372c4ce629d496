"""vLLM's speculators with specgraph's fast path in front of its own code."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from specgraph import DraftHead, ProposeCounts, open_platform
from specgraph.errors import SpecgraphError
from specgraph_vllm.config import Settings
from specgraph_vllm.draft_model import draft_cache, draft_head
from specgraph_vllm.fast_path import FastPath, reason_for_vllm
from specgraph_vllm.round_end import RoundEnd
from specgraph_vllm.shims import Shim

_LOG = logging.getLogger("vllm.specgraph")  # below vLLM's own logger, so that its handlers show it


def speculator_class(stock: Any, shim: Shim) -> Any:
    """A subclass of one of vLLM's speculators.

    Args:
        stock: vLLM's class.
        shim: of its release.
    """

    class SpecgraphSpeculator(stock):
        """Drafts decode rounds through one graph, everything else as vLLM does, in the same KV cache."""

        def __init__(self, settings: Settings, vllm_config: Any, device: torch.device) -> None:
            super().__init__(vllm_config, device)
            self.settings = settings
            self.fast_path: FastPath | None = None
            """None before the capture, and where vLLM drafts because something is not supported."""
            self.counts = ProposeCounts(_LOG, settings.log_every)
            self.use_vllm = False
            """Set it to leave every propose to vLLM, for comparisons in one process."""
            self._head: DraftHead | None = None
            self._left_to_vllm = "no captured graphs"

        def load_model(self, target_model: Any) -> None:
            super().load_model(target_model)
            with self._refusals():
                self._head = draft_head(self.model, self.vllm_config.model_config.get_hidden_size())

        def set_attn(self, *args: Any, **options: Any) -> None:
            # vLLM 0.33 captures once over a KV cache that it then frees, to learn how much memory graphs take.
            if self.fast_path is not None:
                self.fast_path.drafter.close()  # a dropped drafter keeps its graphs until a garbage collection
                self.fast_path = None
            super().set_attn(*args, **options)

        def capture(self) -> None:
            super().capture()
            if self._head is None:
                return
            with self._refusals():
                tables, context = self.block_tables, self.vllm_config.compilation_config.static_forward_context
                cache = draft_cache(
                    self._head,
                    self.model,
                    self.kv_cache_config.kv_cache_groups,
                    getattr(tables, shim.block_sizes),
                    context,
                )
                index = self.device.index
                platform = open_platform(
                    f"{self.device.type}:{torch.cuda.current_device() if index is None else index}"
                )
                self.fast_path = FastPath(
                    self._head,
                    cache,
                    platform,
                    self.settings,
                    num_speculative_tokens=self.num_speculative_steps,
                    max_num_seqs=self.max_num_reqs,
                    max_model_len=self.max_model_len,
                )
                sizes = self.fast_path.config.sizes
                _LOG.info("specgraph drafts decode rounds of up to %d requests (%d graphs)", sizes[-1], len(sizes))

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
            next_prefill_tokens: Any,
            temperature: Any,
            seeds: Any,
            *extra: Any,
            **options: Any,
        ) -> Any:
            named = dict(zip(shim.extra_parameters, extra, strict=False)) | options if extra else options
            fast = self.fast_path
            # EAGLE-1 and MTP drafters take the state that the target's lm_head, or its final norm, takes.
            states = aux_hidden_states if self._head is not None and self._head.aux_layers else [last_hidden_states]
            if fast is None or self.use_vllm:
                reason = self._left_to_vllm if fast is None else "switched off"
            else:
                most = fast.config.sizes[-1]
                reason = reason_for_vllm(input_batch, self.num_speculative_steps, most, states, named)
            self.counts.add(reason)
            if reason is None:
                assert fast is not None
                end = RoundEnd(
                    input_ids=input_batch.input_ids,
                    positions=input_batch.positions,
                    num_sampled=num_sampled,
                    last_sampled=last_sampled,
                    idx_mapping=input_batch.idx_mapping,
                    block_table=self.block_tables.input_block_tables[fast.group],
                    hidden_states=states,
                )
                with torch.inference_mode():
                    return fast.propose(end)
            return super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                *extra,
                **options,
            )

        @contextmanager
        def _refusals(self) -> Generator[None]:
            """What is not supported ends the start-up, or leaves drafting to vLLM, as the settings say."""
            try:
                yield
            except SpecgraphError as error:
                if self.settings.when_unsupported == "refuse":
                    raise
                self._head, self._left_to_vllm = None, "not supported"
                _LOG.warning("vLLM drafts by itself: %s", error)

    return SpecgraphSpeculator
