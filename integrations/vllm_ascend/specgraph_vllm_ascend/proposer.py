"""Turns vllm-ascend's proposers into ones that draft through specgraph, or else by vllm-ascend's own code."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from specgraph_plugin import FastPath, PromptPass, VerifyOutput
from specgraph_plugin.vllm.captured import CapturedDrafter
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import VllmHead, draft_cache
from torch import Tensor

from specgraph.errors import UnsupportedError
from specgraph_vllm_ascend.host_batch import HostBatch, host_batch, next_prompt_tokens, num_sampled
from specgraph_vllm_ascend.names import missing
from specgraph_vllm_ascend.npu_drafter import capture_head, read_head


def adopt(made: Any, settings: Settings) -> None:
    """Change the class of vllm-ascend's proposer to a subclass that is also a `Proposer`.

    Its runner's `capture_model` then captures specgraph's graphs too, after vllm-ascend's own.

    Args:
        made: vllm-ascend's proposer, with its `runner`.
    """
    stock = type(made)
    made.__class__ = type(f"Specgraph{stock.__name__}", (Proposer, stock), {})
    made.start_specgraph(settings)
    capture = made.runner.capture_model

    @wraps(capture)
    def capture_model() -> Any:
        size = capture()
        made.specgraph.capture()
        return size

    made.runner.capture_model = capture_model


_Stock: Any = object
"""The base class that `Proposer` stands for: vllm-ascend's proposers."""


class Proposer(_Stock):
    """Drafts through captured graphs, or by vllm-ascend's own code in the same KV cache; `counts` says why."""

    use_vllm = False
    """True leaves every propose to vllm-ascend, for comparisons in one process."""

    def start_specgraph(self, settings: Settings) -> None:
        """Set the attributes. `adopt` calls it, since an object that changes its class runs no constructor."""
        self.specgraph = CapturedDrafter(settings, self._read_head, self._capture_head)
        self.counts = self.specgraph.counts
        self._num_sampled: Any = None

    @property
    def fast_path(self) -> FastPath | None:
        return self.specgraph.fast_path

    def load_model(self: Any, model: Any) -> None:
        super().load_model(model)
        self.specgraph.load()

    def _read_head(self: Any) -> VllmHead:
        if found := missing(self):
            raise UnsupportedError(f"this release of vllm-ascend is not served: {'; '.join(found)}")
        if getattr(self, "uses_mrope", False):
            raise UnsupportedError("positions of several axes (M-RoPE); a row has one position")
        return read_head(self.get_model(), self.vllm_config, self.device, self.specgraph.settings)

    def _capture_head(self: Any, head: VllmHead) -> FastPath:
        """Capture a graph per batch size over vllm-ascend's weights and KV cache."""
        runner, layers = self.runner, self.vllm_config.compilation_config.static_forward_context
        groups = runner.kv_cache_config.kv_cache_groups
        sizes = [runner.input_batch.block_table[group].block_size for group in range(len(groups))]
        return capture_head(
            head,
            draft_cache(head, self.get_model(), groups, sizes, layers),
            self.device,
            self.specgraph.settings,
            num_speculative_tokens=self.num_speculative_tokens,
            max_num_requests=min(runner.max_num_reqs, runner.max_num_tokens // (self.num_speculative_tokens + 1)),
            max_model_len=self.max_model_len,
            max_num_rows=runner.max_num_tokens,
            module=self.get_model(),
        )

    def prepare_next_token_ids_padded(self: Any, *args: Any, **options: Any) -> Any:
        """Keep the number of tokens that the target sampled for each request. vllm-ascend calls it before `_propose`,
        which gets the numbers of rejected tokens only."""
        next_token_ids, self._num_sampled = super().prepare_next_token_ids_padded(*args, **options)
        return next_token_ids, self._num_sampled

    def _reason_for_vllm(self: Any, given: dict[str, Any], fast: FastPath) -> str | None:
        """Return why vllm-ascend's own code must draft after this pass. None if specgraph drafts."""
        if self.runner.input_batch.num_reqs > fast.config.max_num_requests:
            return "more requests than the largest captured size"
        embeddings = given.get("mm_embed_inputs")
        if embeddings is not None and embeddings[0]:
            return "multimodal inputs"
        return None

    def _propose(self: Any, **given: Any) -> Any:
        """Return draft token ids, as the `_propose` of vllm-ascend's proposers does. The runner names all arguments."""
        self.specgraph.follow_weights()
        specgraph: CapturedDrafter = self.specgraph
        fast, reason = specgraph.fast_path, specgraph.reason(self.use_vllm, partial(self._reason_for_vllm, given))
        if fast is None or reason is not None:
            return super()._propose(**given)
        batch = host_batch(self.runner, given["scheduler_output"])
        with torch.inference_mode():
            if chunks := batch.chunks():
                fast.write_prompts(
                    PromptPass(
                        chunks=chunks,
                        token_ids=given["target_token_ids"],
                        next_tokens=self._next_tokens(batch, given["next_token_ids"]),
                        hidden_states=[given["target_hidden_states"]],
                        table=given["common_attn_metadata"].block_table_tensor,
                    )
                )
            fast.fill(verify_output(batch, fast.config.query_len, self._num_sampled, given))
            starts, counts = batch.start_positions(), num_sampled(self.runner, batch)
            return fast.propose(len(starts), starts, counts).token_ids

    def _next_tokens(self: Any, batch: HostBatch, sampled: Tensor) -> Tensor:
        """Return the token after each request's rows, if its prompt goes on."""
        if not batch.goes_on:
            return sampled
        tokens = torch.tensor(next_prompt_tokens(self.runner, batch), pin_memory=self.device.type != "cpu")
        return tokens.to(self.device, non_blocking=True)


def verify_output(batch: HostBatch, query_len: int, num_sampled: Tensor, given: dict[str, Any]) -> VerifyOutput:
    """Return the results of the target's pass.

    Args:
        query_len: K + 1.
        num_sampled: integer [n]; 0 if a request's prompt goes on.
        given: the arguments of vllm-ascend's `_propose`.
    """
    n, positions = len(batch.num_rows), given["target_positions"]
    if batch.is_uniform(query_len):
        first_rows, starts = None, positions[: n * query_len : query_len]
    else:
        last_rows = given["token_indices_to_sample"]
        if last_rows is None:
            last_rows = given["common_attn_metadata"].query_start_loc[1:] - 1
        first_rows = (last_rows[:n] - (num_sampled - 1).clamp(min=0)).long()
        starts = positions.index_select(0, first_rows)
    return VerifyOutput(
        token_ids=given["target_token_ids"],
        num_sampled=num_sampled,
        starts=starts,
        table=given["common_attn_metadata"].block_table_tensor[:n],
        hidden_states=[given["target_hidden_states"]],
        first_rows=first_rows,
        last_tokens=given["next_token_ids"],
        last_rows=torch.arange(n, device=num_sampled.device),
    )
