"""A drafter on the platform under test, and random batches of a target's results for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from specgraph.attention import NULL_BLOCK, KVCache, allocate_caches
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, DraftTokens, ProposeBatch
from specgraph.errors import UnsupportedError
from specgraph.ops.past_rows import PastRows
from torch import Tensor

from specgraph_conformance.case import Absent
from specgraph_conformance.draft_oracles import Context
from specgraph_conformance.oracles import gather_request
from specgraph_conformance.rig import AttentionShape, attention_backend, on_host, supported_shape
from specgraph_conformance.tiny_models import CONFIG, VOCAB, Head


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The target's results for one batch, in host memory."""

    sampled_token_ids: Tensor
    num_sampled: list[int]
    start_positions: list[int]
    aux_hidden: Tensor
    blocks: list[list[int]]
    temperature: Tensor
    seeds: Tensor

    @property
    def num_requests(self) -> int:
        """The number of requests in the batch."""
        return len(self.num_sampled)

    def on(self, device: torch.device, dtype: torch.dtype, sampled: bool = False) -> ProposeBatch:
        """Return the batch as a host engine hands it over: tokens behind `num_sampled` are -1. Only if `sampled` is
        True it has temperatures and seeds."""
        width = max(len(row) for row in self.blocks)
        table = [row + [NULL_BLOCK] * (width - len(row)) for row in self.blocks]
        sampled_token_ids = self.sampled_token_ids.clone()
        for tokens, count in zip(sampled_token_ids, self.num_sampled, strict=False):  # a case may give too few or many
            tokens[count:] = -1
        return ProposeBatch(
            sampled_token_ids=sampled_token_ids.to(device),
            num_sampled=torch.tensor(self.num_sampled, dtype=torch.int32, device=device),
            start_positions=torch.tensor(self.start_positions, device=device),
            aux_hidden=self.aux_hidden.to(device, dtype),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            temperature=self.temperature.to(device) if sampled else None,
            seeds=self.seeds.to(device) if sampled else None,
        )


GRAPH_MODES: Mapping[str, dict[str, Any]] = {
    "NONE": {"decode": "eager"},
    "PIECEWISE": {"decode": "piecewise"},
    "FULL": {"decode": "auto", "prefill": "full"},
    "FULL_DECODE_ONLY": {"decode": "auto", "prefill": "eager"},
    "FULL_AND_PIECEWISE": {"decode": "auto", "prefill": "piecewise"},
}
"""The drafter options of each graph mode, by the name that case ids give the mode."""


def small_limits(
    *, decode: Any = "eager", k: int = 3, max_num_requests: int = 4, max_model_len: int = 96, **options: Any
) -> dict[str, Any]:
    """Return a small drafter's limits. It captures 1 and `max_num_requests` requests, and prefill passes of 16 rows."""
    return {
        "num_speculative_tokens": k,
        "max_num_requests": max_num_requests,
        "max_model_len": max_model_len,
        "decode": decode,
        "capture_sizes": tuple(sorted({1, max_num_requests})),
        "prefill_sizes": (16,),
        "block_size": 16,
        **options,
    }


def make_config(**options: Any) -> DraftConfig:
    """Return the config of a small drafter. The options are those of `small_limits`."""
    return DraftConfig(**small_limits(**options))


def fit_attention(
    platform: Platform, attention: str, block_size: int, dtype: torch.dtype = torch.float32
) -> AttentionShape:
    """Return the tiny models' dtype, head size and block size, or replacements for defaults that the attention refuses.

    Raises:
        Absent: the attention is not available, or supports no such shape. The message is its reason.
    """
    try:
        backend = attention_backend(platform, attention)
    except UnsupportedError as error:
        raise Absent(str(error)) from error
    wanted = AttentionShape(dtype, CONFIG.head_dim, block_size)
    return supported_shape(backend, (CONFIG.num_heads, CONFIG.num_kv_heads), wanted)


def with_blocks(config: DraftConfig, block_size: int) -> DraftConfig:
    """Return the config with KV blocks of another size. max_model_len changes in proportion, so that requests keep
    their number of blocks."""
    max_model_len = config.max_model_len * block_size // config.block_size
    return replace(config, block_size=block_size, max_model_len=max_model_len)


def make_batches(config: DraftConfig, aux_size: int, seed: int, sizes: Sequence[int]) -> list[HostBatch]:
    """Return random batches with the given numbers of requests. Lengths, accepted counts and block orders are random.

    In each batch the rows of the first request cross a block border. The rows of the second request, if there is one,
    end at max_model_len. The first request accepted all draft tokens, the last one none.
    """
    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    batches: list[HostBatch] = []
    q, k, block = config.query_len, config.num_speculative_tokens, config.block_size
    for n in sizes:
        starts = [randint(0, config.max_model_len - 2 * q) for _ in range(n)]
        starts[0] = block * randint(1, config.max_model_len // block) - randint(1, min(q, block) + 1)
        if n > 1:
            starts[1] = config.max_model_len - q
        counts = [randint(1, q + 1) for _ in range(n)]
        counts[0] = q
        if n > 1:
            counts[-1] = 1
        free = (torch.randperm(num_blocks(config) - 1, generator=generator) + 1).tolist()
        blocks: list[list[int]] = []
        for start in starts:
            needed = -(-(min(start + 2 * k + 2, config.max_model_len) + config.scratch_tokens) // block)
            blocks.append([free.pop() for _ in range(needed)])
        batches.append(
            HostBatch(
                torch.randint(0, VOCAB, (n, q), generator=generator),
                counts,
                starts,
                torch.randn(n * q, aux_size, generator=generator),
                blocks,
                torch.tensor([(0.0, 0.7, 1.0)[i % 3] for i in range(n)]),
                torch.randint(0, 1 << 40, (n,), generator=generator),
            )
        )
    return batches


def num_blocks(config: DraftConfig) -> int:
    """Return the number of KV blocks: enough for every request at its longest, plus the null block."""
    return 1 + config.max_num_requests * config.max_blocks


def random_caches(head: Head, config: DraftConfig, device: torch.device, seed: int) -> list[KVCache]:
    """Return caches with different values everywhere, so that a read of a wrong slot shows. The null block is zero."""
    caches = allocate_caches(head.attention_layers, num_blocks(config), config.block_size, head.dtype, device)
    generator = torch.Generator().manual_seed(seed)
    for cache in caches:
        for tensor in cache:
            values = torch.randn(tensor.shape, generator=generator)
            values[NULL_BLOCK] = 0
            tensor.copy_(values.to(tensor.dtype))
    return caches


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """The results of one propose, in host memory."""

    token_ids: Tensor
    probs: Tensor | None
    hidden: Tensor
    """[n * carried rows, hidden_size]: the states after the last draft step. Empty for a drafter that carries none."""
    from_graph: bool


def _copied(batch: ProposeBatch) -> ProposeBatch:
    """Return tensors of an engine's own, with the shapes of the batch's."""
    given: dict[str, Tensor | None] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    own: dict[str, Any] = {name: value.clone() for name, value in given.items() if value is not None}
    return replace(batch, **own)


_OPEN: list[DraftRig] = []


def close_rigs() -> None:
    """Close every rig that is still open."""
    while _OPEN:
        _OPEN[-1].close()


class DraftRig:
    """A drafter on a platform, with its own caches. The suite closes all rigs after each case."""

    def __init__(
        self,
        platform: Platform,
        head: Head,
        config: DraftConfig,
        attention: str = "paged",
        seed: int = 0,
        *,
        bound: bool = False,
    ) -> None:
        """
        Args:
            bound: batches are handed over in tensors that were given to `Drafter.bind`.

        Raises:
            Absent: the platform can't run this lowering with this attention. The message is its reason.
        """
        self.platform, self.head, self.config = platform, head, config
        self.caches = random_caches(head, config, platform.device, seed)
        try:
            backend = attention_backend(platform, attention)
            self.drafter = Drafter(head, self.caches, platform, config, attention=backend)
            self._bound = self.drafter.bind(_copied(self.drafter.inputs(config.max_num_requests))) if bound else None
            self.drafter.capture()
        except UnsupportedError as error:
            raise Absent(str(error)) from error
        _OPEN.append(self)

    def propose(self, batch: HostBatch, *, host_numbers: bool = True, k: int | None = None) -> DraftTokens:
        """Draft for one batch.

        Args:
            host_numbers: also hand over the start positions and accepted counts as host integers.
            k: the draft tokens per request. None for the config's K.
        """
        handed = batch.on(self.platform.device, self.head.dtype, self.config.sampled)
        if self._bound is not None:
            inputs = self.drafter.inputs(batch.num_requests, bound=self._bound)
            inputs.block_table.fill_(NULL_BLOCK)
            for field in fields(handed):
                into, values = getattr(inputs, field.name), getattr(handed, field.name)
                if values is None or into is None:
                    continue
                (into[:, : values.shape[1]] if field.name == "block_table" else into).copy_(values)
            handed = inputs
        return self.drafter.propose(
            handed,
            host_start_positions=batch.start_positions if host_numbers else None,
            host_num_sampled=batch.num_sampled if host_numbers else None,
            num_speculative_tokens=k,
        )

    def prefill(self, tokens: Sequence[int], positions: range, blocks: Sequence[int], aux_hidden: Tensor) -> None:
        """Prefill the rows at some positions of a prompt. `tokens` are the rows' input tokens, from position 0 on."""
        prompt = tokens if self.drafter.position_offset else [0, *tokens]
        self.drafter.prefill(prompt, positions, blocks, aux_hidden)

    def propose_to_host(self, batch: HostBatch, **options: Any) -> HostDrafts:
        """Draft for one batch and copy the results to the host."""
        drafts = self.propose(batch, **options)
        probs = None if drafts.probs is None else on_host(drafts.probs)
        carried = self.drafter.read_set().get("buffers.hidden")
        hidden = torch.empty(0)  # for a kind that carries no states
        if carried is not None:
            rows = carried.shape[0] // self.config.max_num_requests
            hidden = on_host(carried[: batch.num_requests * rows])
        return HostDrafts(on_host(drafts.token_ids), probs, hidden, drafts.dispatch.captured)

    def contexts(self, batch: HostBatch) -> list[Context]:
        """Return each request as it is before a propose for this batch, for an oracle.

        For a head with several modules it begins with the rows that the drafter kept from earlier passes.
        """
        caches = [(on_host(cache.key), on_host(cache.value)) for cache in self.caches]
        aux_hidden = batch.aux_hidden.to(self.head.dtype).split(batch.sampled_token_ids.shape[1])
        found: list[Context] = []
        for r, (start, count, blocks) in enumerate(
            zip(batch.start_positions, batch.num_sampled, batch.blocks, strict=True)
        ):
            past_tokens, past_hidden = self.past_rows(blocks, start)
            first = start - len(past_tokens) + self.drafter.position_offset
            keys, values = ([gather_request(cache[i], blocks, first) for cache in caches] for i in (0, 1))
            tokens = torch.cat([past_tokens, batch.sampled_token_ids[r, :count]])
            found.append(Context(tokens, torch.cat([past_hidden, aux_hidden[r][:count]]), first, keys, values))
        return found

    def past_rows(self, blocks: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """Return the past rows before `start` that a drafter with several modules has kept: up to K - 1, without a gap.

        For each row they are the token after it, [n], and its hidden state, [n, aux_size]. Other drafters have none. An
        oracle that begins with these rows does not check that they belong to the text. `kernels.keep-rows` and
        `drafting.rounds-leave-the-keys-of-the-text` check that.
        """
        named = self.drafter.read_set()
        parts = [named.get(f"buffers.past.{name}") for name in PastRows._fields]
        kept = PastRows._make(part for part in parts if part is not None) if None not in parts else None
        tokens, states = list[Tensor](), list[Tensor]()
        for position in range(start - 1, max(start - self.config.num_speculative_tokens, -1), -1):
            if kept is None:
                break
            block, offset = blocks[position // self.config.block_size], position % self.config.block_size
            entry = block, offset % kept.positions.shape[1]
            if block == NULL_BLOCK or int(kept.positions[entry]) != position:
                break
            tokens.insert(0, on_host(kept.token_ids[entry]))
            states.insert(0, on_host(kept.hidden[entry]))
        empty = torch.zeros(0, self.head.aux_size, dtype=self.head.dtype)
        return (torch.stack(tokens), torch.stack(states)) if tokens else (empty[:, 0].long(), empty)

    def host_caches(self) -> list[tuple[Tensor, Tensor]]:
        """Return host copies of the caches, without the null block: its content is undefined."""
        return [(on_host(cache.key)[1:], on_host(cache.value)[1:]) for cache in self.caches]

    def close(self) -> None:
        """Release the drafter's graphs."""
        if self in _OPEN:
            _OPEN.remove(self)
        self.drafter.close()


def make_prompt(made: DraftRig, length: int, seed: int) -> list[tuple[int, list[int], Tensor]]:
    """Return the prefill passes of a prompt: the first position, tokens and hidden states of each. All have the largest
    size, except the last one."""
    generator, most = torch.Generator().manual_seed(seed), made.config.prefill_rows[-1]
    tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    aux = torch.randn(length, made.head.aux_size, generator=generator).to(made.platform.device, made.head.dtype)
    return [(first, tokens[first : first + most], aux[first : first + most]) for first in range(0, length, most)]
