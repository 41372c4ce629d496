"""Turns vllm-ascend's proposers into ones that draft through specgraph, or else by vllm-ascend's own code."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from specgraph_models.from_modules import other_names
from specgraph_plugin import FastPath, PromptPass, ProposeCounts, VerifyOutput
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import VllmHead, draft_cache, draft_head
from specgraph_plugin.vllm.refusals import LOG, refusals
from torch import Tensor

from specgraph import open_platform
from specgraph.attention import AttentionBackend, choose_attention
from specgraph.device import Platform
from specgraph.errors import UnsupportedError
from specgraph_vllm_ascend.host_batch import HostBatch, host_batch, next_prompt_tokens, num_sampled
from specgraph_vllm_ascend.names import missing


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
        made.capture_specgraph()
        return size

    made.runner.capture_model = capture_model


PLAIN_FORMATS = (-1, 0, 2)
"""torch_npu's numbers of formats whose memory is in the order of the tensor: undefined, NCHW, ND."""


def require_plain_weights(head: VllmHead, device: torch.device) -> None:
    """Raise UnsupportedError if a weight is in one of the device's own formats, such as FRACTAL_NZ."""
    if device.type == "cpu":
        return
    format_of = importlib.import_module("torch_npu").get_npu_format
    for name, tensor in head.weights().items():
        if (found := format_of(tensor)) not in PLAIN_FORMATS:
            raise UnsupportedError(
                f"the drafter's {name} is in the device's format {found}; served are plain ones: set weight_nz_mode "
                "to 0 in --additional-config"
            )


def attention_for(platform: Platform, head: VllmHead, block_size: int) -> AttentionBackend:
    """Return the device's attention for the head. Raises UnsupportedError if it has some, and none takes the head."""
    choice = choose_attention("auto", platform, head.attention_layers, head.dtype, block_size)
    if choice.reason and not choice.backend.host_parameters:
        raise UnsupportedError(choice.reason)
    return choice.backend


_Stock: Any = object
"""The base class that `Proposer` stands for: vllm-ascend's proposers."""


class Proposer(_Stock):
    """Drafts through captured graphs, or by vllm-ascend's own code in the same KV cache; `counts` says why."""

    use_vllm = False
    """True leaves every propose to vllm-ascend, for comparisons in one process."""

    def start_specgraph(self, settings: Settings) -> None:
        """Set the attributes. `adopt` calls it, since an object that changes its class runs no constructor."""
        self.settings = settings
        self.fast_path: FastPath | None = None
        """None before the capture, or if something is not supported and vllm-ascend drafts."""
        self.counts = ProposeCounts(LOG, settings.log_every)
        self._head: VllmHead | None = None
        self._left_to_vllm = "no captured graphs"
        self._num_sampled: Any = None

    def _refusals(self) -> AbstractContextManager[None]:
        return refusals(self.settings, leave=self._leave_to_vllm)

    def _leave_to_vllm(self) -> None:
        self._head, self._left_to_vllm = None, "not supported"

    def load_model(self: Any, model: Any) -> None:
        super().load_model(model)
        with self._refusals():
            if found := missing(self):
                raise UnsupportedError(f"this release of vllm-ascend is not served: {'; '.join(found)}")
            if getattr(self, "uses_mrope", False):
                raise UnsupportedError("positions of several axes (M-RoPE); a row has one position")
            self._head = self._read_head()

    def _read_head(self: Any) -> VllmHead:
        with other_names():
            head = draft_head(self.get_model(), self.vllm_config.model_config.get_hidden_size)
        require_plain_weights(head, self.device)
        return head

    def capture_specgraph(self: Any) -> None:
        """Capture a graph per batch size over vllm-ascend's weights and KV cache."""
        if self.fast_path is not None:
            self.fast_path.drafter.close()
            self.fast_path = None
        if self._head is None:
            return
        # In inference mode as vLLM's own captures, which leave torch_npu's random state as tensors of that mode.
        with self._refusals(), torch.inference_mode():
            # Sleep mode frees memory that was allocated while vLLM loaded weights. Tensors that the head copies must
            # outlive it, so the head is made again here.
            self._head = head = self._read_head()
            runner, config = self.runner, self.vllm_config
            groups = runner.kv_cache_config.kv_cache_groups
            sizes = [runner.input_batch.block_table[group].block_size for group in range(len(groups))]
            layers = config.compilation_config.static_forward_context
            cache = draft_cache(head, self.get_model(), groups, sizes, layers)
            platform = open_platform(f"{self.device.type}:{self.device.index or 0}")
            fast = FastPath(
                head,
                cache.caches,
                platform,
                num_speculative_tokens=self.num_speculative_tokens,
                max_num_requests=min(runner.max_num_reqs, runner.max_num_tokens // (self.num_speculative_tokens + 1)),
                max_model_len=self.max_model_len,
                block_size=cache.block_size,
                max_num_rows=runner.max_num_tokens,
                capture_sizes=self.settings.capture_sizes,
                module=self.get_model(),
                attention=attention_for(platform, head, cache.block_size),
            )
            if (chosen := fast.drafter.resolution).lowering != "merged":
                fast.drafter.close()
                raise UnsupportedError(f"a propose is not one graph here: {chosen.explain()}")
            self.fast_path = fast
            graphs = len(fast.config.sizes) + len(fast.prompts.sizes)
            LOG.info("specgraph drafts for up to %d requests (%d graphs)", fast.config.sizes[-1], graphs)

    def prepare_next_token_ids_padded(self: Any, *args: Any, **options: Any) -> Any:
        """Keep the number of tokens that the target sampled for each request. vllm-ascend calls it before `_propose`,
        which gets the numbers of rejected tokens only."""
        next_token_ids, self._num_sampled = super().prepare_next_token_ids_padded(*args, **options)
        return next_token_ids, self._num_sampled

    def _reason_for_vllm(self: Any, given: dict[str, Any]) -> str | None:
        """Return why vllm-ascend's own code must draft after this pass. None if specgraph drafts."""
        if self.fast_path is None:
            return self._left_to_vllm
        if self.use_vllm:
            return "switched off"
        if self.runner.input_batch.num_reqs > self.fast_path.config.max_num_requests:
            return "more requests than the largest captured size"
        embeddings = given.get("mm_embed_inputs")
        if embeddings is not None and embeddings[0]:
            return "multimodal inputs"
        return None

    def _propose(self: Any, **given: Any) -> Any:
        """Return draft token ids, as the `_propose` of vllm-ascend's proposers does. The runner names all arguments."""
        if self.fast_path is not None and self.fast_path.weights_moved():
            LOG.warning("the drafter's weights lie elsewhere now: specgraph captures its graphs again")
            self.capture_specgraph()
        reason = self._reason_for_vllm(given)
        self.counts.add(reason)
        fast: FastPath | None = self.fast_path
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
