"""An attention backend around FlashAttention, whose launch takes host integers, in captured graphs on an NVIDIA GPU.

    python examples/host_lengths/flash.py

torch's variable-length FlashAttention takes the longest key length as a Python integer, which a captured graph bakes
into the kernel's parameters. The backend below captures each call in a task group, and gives the group and a function
that prepares the call for new lengths to the update plan. `Drafter` then rewrites the captured parameters before each
replay. An engine whose attention has host metadata of its own (a plan, a split count) does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specgraph import (
    AttentionLayer,
    DraftConfig,
    Drafter,
    KVCache,
    Platform,
    ProposeBatch,
    allocate_caches,
    load_drafter,
    load_target,
    open_platform,
    ops,
    shipped_pair,
)
from specgraph.attention import HostLengths, StepContext, TaskKey
from specgraph.device import Support, no, yes
from specgraph.errors import PlatformError


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Keys and values are gathered from their blocks, then attended by FlashAttention with host lengths."""

    platform: Platform
    name: str = "flash-host"
    host_parameters: tuple[str, ...] = ("seq_lens",)
    preferred_block_size: int = 16
    cache_dtypes: tuple[torch.dtype, ...] = ()  # beside the model's
    after_advance = None  # it has no state of its own to move on between draft steps

    def forward(
        self, layer: AttentionLayer, index: int, query: Tensor, key: Tensor, value: Tensor, cache: KVCache,
        context: StepContext,
    ) -> Tensor:  # fmt: skip
        """See `specgraph.AttentionBackend.forward`."""
        from specgraph_cuda.host_values import store

        metadata = context.metadata
        query = ops.rotate_and_store(
            query, ops.NewRows(key, value, layer.rotary, metadata.positions, metadata.slot_mapping), cache
        )
        # torch 2.11 attends to contiguous keys only: each request's whole table, whatever its length. An op that takes
        # a block table needs no copy.
        keys, values = (cache[i][metadata.block_table].flatten(0, 2) for i in (0, 1))
        requests, blocks = metadata.block_table.shape
        width = blocks * cache.block_size
        starts = torch.arange(0, (requests + 1) * width, width, dtype=torch.int32, device=query.device)
        used = torch.empty(requests, dtype=torch.int32, device=query.device)
        out = torch.empty_like(query)

        def attend(lengths: HostLengths) -> None:
            """Issue the attention, again in each task update: it must launch the same kernels, whatever the lengths."""
            store(used, lengths.seq_lens)  # as parameters of a kernel: a copy from host memory would be read too late
            longest = max(1, *lengths.seq_lens)  # 0 would launch a fill instead of the attention kernel
            rows = max(2, metadata.query_len)  # 1 would choose a kernel by `longest`
            result = torch.ops.aten._flash_attention_forward(
                query, keys, values, metadata.query_start_loc, starts, rows, longest, 0.0, layer.causal, False,
                scale=layer.scale, seqused_k=used,
            )  # fmt: skip
            out.copy_(result[0])

        assert context.lengths is not None  # always given to attention with host parameters
        if context.updates is None:
            attend(context.lengths)
        else:
            with self.platform.task_group() as group:
                attend(context.lengths)
            context.updates.add(TaskKey(context.step, index), group, lambda lengths: partial(attend, lengths))
        return out

    def supports(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `specgraph.AttentionBackend.supports`."""
        if not layer.is_plain:
            return no("this backend has no sliding windows and no attention sinks")
        if dtype not in (torch.float16, torch.bfloat16):
            return no(f"FlashAttention takes float16 and bfloat16, the layers have {dtype}")
        if layer.head_dim % 8 or layer.head_dim > 256:
            return no(f"FlashAttention takes head_dim up to 256 in steps of 8, the layers have {layer.head_dim}")
        return yes()

    def supports_trees(self, layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> Support:
        """See `specgraph.AttentionBackend.supports_trees`."""
        return no("this backend has no ancestor mask")

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Empty: it keeps no tensors of its own."""
        return {}


def main() -> None:
    """Draft with the shipped head, merged into one graph, for batches whose lengths change."""
    try:
        platform = open_platform("cuda")
    except PlatformError as error:
        raise SystemExit(str(error)) from error
    target_folder, draft_folder = shipped_pair()
    head = load_drafter(draft_folder, load_target(target_folder, platform.device, torch.bfloat16))
    config = DraftConfig(num_speculative_tokens=4, max_num_requests=2, max_model_len=256, decode="merged")
    caches = allocate_caches(head.attention_layers, 33, 16, torch.bfloat16, platform.device)
    with torch.inference_mode():
        drafter = Drafter(head, caches, platform, config, attention=FlashAttention(platform))
        drafter.capture()
        before = platform.counts()["task_updates"]
        for start in (10, 40, 100):
            batch = ProposeBatch(
                sampled_token_ids=torch.tensor([[17, 4, 0, 0, 0], [9, 0, 0, 0, 0]], device=platform.device),
                num_sampled=torch.tensor([2, 1], dtype=torch.int32, device=platform.device),
                start_positions=torch.tensor([start, start + 5], device=platform.device),
                aux_hidden=torch.randn(10, head.aux_size, dtype=torch.bfloat16, device=platform.device),
                block_table=torch.arange(1, 33, dtype=torch.int32, device=platform.device).view(2, 16),
            )
            drafts = drafter.propose(batch, host_start_positions=[start, start + 5], host_num_sampled=[2, 1])
            print(f"from position {start}: {drafts.token_ids.tolist()}")
    updates = platform.counts()["task_updates"] - before
    print(f"{updates} task updates, {drafter.launches['propose']} launches")
    drafter.close()


if __name__ == "__main__":
    main()
