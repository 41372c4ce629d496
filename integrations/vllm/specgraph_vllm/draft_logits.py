"""Writes the distributions of sampled drafts for vLLM's rejection sampler (draft_sample_method probabilistic)."""

from __future__ import annotations

from typing import Any

import torch
from specgraph_plugin.host_engine_names import parameters
from torch import Tensor

from specgraph.errors import UnsupportedError

GUMBEL = "vllm.v1.worker.gpu.sample.gumbel", "gumbel_sample"


def divided_by_temperature(gumbel_sample: Any) -> bool:
    """Return True if a speculator stores `draft_logits` divided by the temperature.

    vLLM 0.26 does; in 0.33 the sampler divides when it loads them.

    Args:
        gumbel_sample: vLLM's function `GUMBEL`, which fills `draft_logits`.

    Raises:
        UnsupportedError: the function has no parameter of these two releases.
    """
    for name, divided in (("output_processed_logits", True), ("logits_cache", False)):
        if name in parameters(gumbel_sample):
            return divided
    raise UnsupportedError(f"gumbel_sample takes ({', '.join(parameters(gumbel_sample))}), and none is logits_cache")


def write_draft_logits(
    into: Tensor, slots: Tensor, probs: Tensor, draft_to_target: Tensor | None, temperature: Tensor | None
) -> None:
    """Write the logits of the distribution that each draft was drawn from.

    Args:
        into: vLLM's float32 [max_reqs, K, vocabulary].
        slots: integer [n]: the row of each request in `into`.
        probs: float32 [n, K, draft vocabulary].
        draft_to_target: see `Head.draft_to_target`.
        temperature: float32 [n]. The logits are multiplied by it, since the sampler will divide by it. None if the
            sampler does not divide.
    """
    logits = probs.log()
    if temperature is not None:
        factor = temperature[:, None, None]
        logits = torch.where(factor > 0, logits * factor, logits)
    whole = logits.new_full((*logits.shape[:2], into.shape[2]), float("-inf"))
    ids = torch.arange(logits.shape[2], device=logits.device)
    whole[:, :, ids if draft_to_target is None else ids + draft_to_target] = logits
    into[slots.long()] = whole
