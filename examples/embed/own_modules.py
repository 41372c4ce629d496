"""A small host engine in plain torch that drafts through `Drafter`; each propose is one graph launch.

    python examples/embed/own_modules.py

The first part does not use specgraph: torch modules, and paged attention over the engine's own block tables. The second
part, `DraftModel` and `EngineAttention`, is all that `Drafter` needs. The third part is the engine, with continuous
batching: requests join and leave between rounds, and get KV blocks as their texts grow. Target and drafter share the
block tables, and each has its own KV cache. Weights are random. docs/embedding.md explains each part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from specgraph import (
    AttentionLayer,
    ChainKind,
    DraftConfig,
    Drafter,
    DraftOutput,
    KVCache,
    ProposeBatch,
    open_platform,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 32, 4, 2, 8, 3
K, BLOCK, MAX_LEN, MAX_REQUESTS = 4, 8, 96, 4
NUM_BLOCKS = 1 + MAX_REQUESTS * MAX_LEN // BLOCK  # the null block, and enough for the longest requests

# ---------------------------------------------------------------------------------------- the engine's own models


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [T, heads, HEAD_DIM] with the rotary embedding of its positions [T]."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = (positions[:, None] * frequencies)[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


def paged_attention(query, key, value, cache, positions, slots, block_table, seq_lens, query_len) -> Tensor:
    """Write keys and values of all rows, then attend; returns [T, HEADS, HEAD_DIM].

    A graph can capture it: its shapes are fixed, and it reads no value on the host.

    Args:
        query: [T, HEADS, HEAD_DIM], not rotated yet; key, value: [T, KV_HEADS, HEAD_DIM].
        cache: keys and values, each [NUM_BLOCKS, BLOCK, KV_HEADS, HEAD_DIM].
        slots: [T], block * BLOCK + offset. A row with -1 writes to block 0, which belongs to no request.
        seq_lens: [R], the keys of each request, including the keys of its query_len rows. 0 for padding.
    """
    query, key = rotate(query, positions), rotate(key, positions)
    for stored, new in zip(cache, (key, value), strict=True):
        stored.view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots.clamp(min=0), new)
    keys, values = (stored[block_table].flatten(1, 2).transpose(1, 2) for stored in cache)  # [R, KV_HEADS, S, HEAD_DIM]
    last = seq_lens[:, None] - query_len + torch.arange(query_len, device=query.device)  # [R, query_len]
    seen = torch.arange(keys.shape[2], device=query.device) <= last[..., None]
    heads = query.view(-1, query_len, HEADS, HEAD_DIM).transpose(1, 2)
    mask = seen[:, None] | (seq_lens == 0).view(-1, 1, 1, 1)  # padding sees all keys: with none it gives NaN
    out = nn.functional.scaled_dot_product_attention(heads, keys, values, mask, enable_gqa=True).transpose(1, 2)
    return out.masked_fill((seq_lens == 0).view(-1, 1, 1, 1), 0).reshape(-1, HEADS, HEAD_DIM)


class Layer(nn.Module):
    """A Llama layer. `attend` takes the query, key and value of all rows."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_up, self.down = nn.Linear(HIDDEN, 96, bias=False), nn.Linear(48, HIDDEN, bias=False)
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN, 1e-5), nn.RMSNorm(HIDDEN, 1e-5)

    def forward(self, x: Tensor, residual: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        residual = residual + self.out(attend(*heads).flatten(1))
        gate, up = self.gate_up(self.mlp_norm(residual)).chunk(2, -1)
        return residual + self.down(nn.functional.silu(gate) * up)


class TargetModel(nn.Module):
    """A Llama model. It returns logits, and for an EAGLE-3 head the concatenated outputs of its three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.RMSNorm(HIDDEN, 1e-5)

    def forward(self, token_ids: Tensor, attends: list[Callable[..., Tensor]]) -> tuple[Tensor, Tensor]:
        x, states = self.embed(token_ids), []
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(layer.norm(x), x, attend)
            states.append(x)
        return self.lm_head(self.norm(x)), torch.cat(states, -1)


class EagleModel(nn.Module):
    """An EAGLE-3 head: one layer over token and hidden state, with the target's embedding and lm_head."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.embed, self.lm_head = target.embed, target.lm_head
        self.fc, self.layer = nn.Linear(LAYERS * HIDDEN, HIDDEN, bias=False), Layer(2 * HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN, 1e-5)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        embedded = self.embed(token_ids)
        return self.layer(torch.cat((embedded, self.layer.norm(hidden)), -1), embedded + 0.1 * hidden, attend)


# ----------------------------------------------------------------------------------- the adapters for specgraph


class DraftModel:
    """`EagleModel` as a `specgraph.DraftHead`. Its layer has no rotary table, because `paged_attention` rotates."""

    kind, projection, pair_input, ranks = ChainKind(), None, None, None  # a chain of draft steps; its methods do it
    hidden_size, aux_size, draft_vocab_size, dtype = HIDDEN, LAYERS * HIDDEN, VOCAB, torch.float32
    aux_layers, draft_to_target = tuple(range(1, LAYERS + 1)), None
    attention_layers = (AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, scale=HEAD_DIM**-0.5, no_rotary=True),)

    def __init__(self, model: EagleModel) -> None:
        self.model = model

    def combine(self, aux_hidden: Tensor) -> Tensor:
        return self.model.fc(aux_hidden)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend, rows: Tensor | None = None) -> DraftOutput:
        state = self.model(token_ids, hidden, partial(attend, 0))  # attention layer 0
        state = state if rows is None else state[rows]
        return DraftOutput(hidden=self.model.norm(state), carry=state)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())


class EngineAttention:
    """`paged_attention` as a `specgraph.AttentionBackend`."""

    name, host_parameters, preferred_block_size = "engine", (), BLOCK
    after_advance = None  # no state of its own changes between draft steps

    def forward(self, layer, index, query, key, value, cache, context) -> Tensor:
        m = context.metadata  # the core advances it from draft step to draft step, on the device
        at = m.positions, m.slot_mapping, m.block_table, m.seq_lens, m.query_len
        return paged_attention(query, key, value, cache, *at)

    def named_tensors(self) -> dict[str, Tensor]:
        return {}  # a graph reads no tensors of its own


# ------------------------------------------------------------------------------------------------ the engine


@dataclass
class Running:
    """A request, with the results of its last verify."""

    number: int
    tokens: list[int]
    limit: int
    blocks: list[int]
    sampled: list[int]
    """K + 1 tokens: accepted drafts, the target's own token, then any tokens."""
    num_sampled: int
    start: int
    """The position of the verify's first row."""
    aux: Tensor
    """[K + 1, aux_size]: the target's hidden states of the verify's rows."""


class Engine:
    """Greedy generation with continuous batching."""

    def __init__(self, target: TargetModel, draft: EagleModel) -> None:
        self.target = target
        self.caches = [tuple(torch.zeros(2, NUM_BLOCKS, BLOCK, KV_HEADS, HEAD_DIM)) for _ in range(LAYERS)]
        config = DraftConfig(
            num_speculative_tokens=K,
            max_num_requests=MAX_REQUESTS,
            max_model_len=MAX_LEN,
            block_size=BLOCK,
            prefill_sizes=[16],
            decode="merged",
        )
        draft_cache = KVCache(*torch.zeros(2, NUM_BLOCKS, BLOCK, KV_HEADS, HEAD_DIM))
        attention = EngineAttention()
        self.drafter = Drafter(DraftModel(draft), [draft_cache], open_platform("cpu"), config, attention=attention)
        self.drafter.capture()
        self.chunk = config.prefill_rows[-1]
        self.free = list(range(1, NUM_BLOCKS))  # block 0 is the null block: no request owns it
        self.drafts: dict[tuple[int, int], list[int]] = {}
        """Drafts by request and number of tokens before them. A test compares them."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Return the new tokens of each prompt, and the mean acceptance length."""
        waiting, running, finished = list(enumerate(prompts)), list[Running](), dict[int, list[int]]()
        verifies = tokens = 0
        while waiting or running:
            while waiting and len(running) < MAX_REQUESTS:
                running.append(self._start(*waiting.pop(0), max_tokens))
            drafts = self.drafter.propose(self._round(running)).token_ids
            for request, row in zip(running, drafts.tolist(), strict=True):
                self.drafts[request.number, len(request.tokens)] = row
            verifies, tokens = verifies + len(running), tokens + self._verify(running, drafts)
            for request in [request for request in running if len(request.tokens) >= request.limit]:
                finished[request.number] = request.tokens[len(prompts[request.number]) : request.limit]
                self.free += request.blocks
                running.remove(request)
        return [finished[number] for number in range(len(prompts))], tokens / max(verifies, 1)

    def _start(self, number: int, prompt: list[int], max_tokens: int) -> Running:
        """Prefill target and drafter. The request joins the next round as one that sampled its first token."""
        end = len(prompt)
        request = Running(number, list(prompt), end + max_tokens, [], [0] * (K + 1), 1, end - 1, torch.empty(0))
        self._grow(request)
        logits, aux = self._target_pass(torch.tensor([prompt]), torch.tensor([0]), self._table([request]))
        hidden = None
        for start in range(0, end, self.chunk):
            positions = range(start, min(start + self.chunk, end))
            hidden = self.drafter.prefill(prompt, positions, request.blocks, aux[start : positions.stop])
        assert hidden is not None  # the last prefill chunk returns the prompt's last row
        request.aux = torch.cat((hidden[None], torch.zeros(K, len(hidden))))
        request.sampled[0] = int(logits[-1].argmax())
        request.tokens.append(request.sampled[0])
        return request

    def _grow(self, request: Running) -> None:
        """Add blocks for all rows of the next propose and verify: 2 (K + 1) tokens from `request.start` on."""
        needed = -(-min(request.start + 2 * (K + 1), MAX_LEN) // BLOCK)
        while len(request.blocks) < needed:
            request.blocks.append(self.free.pop())

    def _table(self, running: list[Running]) -> Tensor:
        """Return the block table, int32 [n, MAX_LEN / BLOCK], filled up with the null block."""
        width = MAX_LEN // BLOCK
        return torch.tensor([r.blocks + [0] * (width - len(r.blocks)) for r in running], dtype=torch.int32)

    def _round(self, running: list[Running]) -> ProposeBatch:
        """Return the results of the last verify as the batch of the next propose."""
        for request in running:
            self._grow(request)
        return ProposeBatch(
            sampled_token_ids=torch.tensor([request.sampled for request in running]),
            num_sampled=torch.tensor([request.num_sampled for request in running], dtype=torch.int32),
            start_positions=torch.tensor([request.start for request in running]),
            aux_hidden=torch.cat([request.aux for request in running]),
            block_table=self._table(running),
        )

    def _verify(self, running: list[Running], drafts: Tensor) -> int:
        """Run the target over last tokens and drafts, and keep accepted ones. Returns the number of new tokens."""
        rows = torch.cat((torch.tensor([[request.tokens[-1]] for request in running]), drafts), dim=1)
        starts = torch.tensor([len(request.tokens) - 1 for request in running])
        logits, aux = self._target_pass(rows, starts, self._table(running))
        best = logits.argmax(-1).view(-1, K + 1)
        agreed = (drafts == best[:, :K]).long().cumprod(1).sum(1)
        for row, request in enumerate(running):
            request.sampled, request.num_sampled = best[row].tolist(), int(agreed[row]) + 1
            request.start, request.aux = int(starts[row]), aux[row * (K + 1) : (row + 1) * (K + 1)]
            request.tokens += request.sampled[: request.num_sampled]
        return int(agreed.sum()) + len(running)

    def _target_pass(self, token_ids: Tensor, starts: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n * q, VOCAB] and hidden states [n * q, aux_size] of token_ids [n, q].

        The first tokens of the requests are at the positions `starts` [n].
        """
        query_len = token_ids.shape[1]
        positions = starts[:, None] + torch.arange(query_len)
        blocks = block_table.long().gather(1, positions // BLOCK)
        slots = blocks * BLOCK + positions % BLOCK
        at = positions.flatten(), slots.flatten(), block_table, starts + query_len, query_len
        attends = [lambda q, k, v, cache=cache: paged_attention(q, k, v, cache, *at) for cache in self.caches]
        return self.target(token_ids.flatten(), attends)


if __name__ == "__main__":
    torch.manual_seed(3)
    model = TargetModel()
    with torch.inference_mode():
        engine = Engine(model, EagleModel(model))
        prompts = [torch.randint(0, VOCAB, (length,)).tolist() for length in (5, 17, 1, 40, 9, 2)]
        generated, length = engine.generate(prompts, max_tokens=24)
    for prompt, new in zip(prompts, generated, strict=True):
        print(f"{len(prompt)} tokens, then {new}")
    print(f"mean acceptance length {length:.2f}, {engine.drafter.launches['propose']} launches")
