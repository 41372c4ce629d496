"""Reads the drafter of vllm-ascend on an NPU, and captures its graphs."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from specgraph_models import cut_vocabulary
from specgraph_models.checkpoints import read_draft_vocab
from specgraph_models.from_modules import other_names
from specgraph_plugin import FastPath
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import DraftCache, VllmHead, draft_head

from specgraph import open_platform
from specgraph.attention import AttentionBackend, choose_attention
from specgraph.device import Platform
from specgraph.errors import UnsupportedError

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


def read_head(module: Any, vllm_config: Any, device: torch.device, settings: Settings) -> VllmHead:
    """Return a head over the weights of a drafter that vllm-ascend loaded.

    Raises:
        UnsupportedError: the drafter is not served.
        CheckpointError: the file of the draft vocabulary can't be read, or is for another target.
    """
    model = vllm_config.model_config
    with other_names():
        head = draft_head(module, lambda: model.get_hidden_size())
    require_plain_weights(head, device)
    if settings.draft_vocab is not None:
        cut_vocabulary(head, read_draft_vocab(settings.draft_vocab, getattr(model, "tokenizer", None)))
    return head


def capture_head(
    head: VllmHead,
    cache: DraftCache,
    device: torch.device,
    settings: Settings,
    *,
    num_speculative_tokens: int,
    max_num_requests: int,
    max_model_len: int,
    max_num_rows: int,
    module: Any,
) -> FastPath:
    """Return captured graphs of a head. The numbers are those of `FastPath`.

    Raises UnsupportedError if a propose is not one graph on the device.
    """
    platform = open_platform(f"{device.type}:{device.index or 0}")
    # In inference mode as vLLM's own captures, which leave torch_npu's random state as tensors of that mode.
    with torch.inference_mode():
        fast = FastPath(
            head,
            cache.caches,
            platform,
            num_speculative_tokens=num_speculative_tokens,
            max_num_requests=max_num_requests,
            max_model_len=max_model_len,
            block_size=cache.block_size,
            max_num_rows=max_num_rows,
            capture_sizes=settings.capture_sizes,
            module=module,
            attention=attention_for(platform, head, cache.block_size),
        )
    if (chosen := fast.drafter.resolution).lowering != "merged":
        fast.drafter.close()
        raise UnsupportedError(f"a propose is not one graph here: {chosen.explain()}")
    return fast
