"""An engine with a target, a KV cache and a verification of its own, which drafts through `specgraph.Drafter`.

    python examples/embed/engine.py

The target runs one request at a time over dense keys and values, so that it is short; the drafter runs the whole batch.
docs/embedding.md explains each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgraph import (
    DraftConfig,
    Drafter,
    Target,
    allocate_caches,
    load_drafter,
    load_target,
    open_platform,
    shipped_pair,
)

K, BLOCK, MAX_LEN, MAX_REQUESTS = 4, 16, 256, 4
BLOCKS_PER_REQUEST = -(-MAX_LEN // BLOCK)


@dataclass
class Running:
    """One request: its tokens, the target's keys and values by layer, and its blocks of the drafter's cache."""

    tokens: list[int]
    blocks: list[int]
    limit: int
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.limit


def target_pass(target: Target, aux_layers, tokens: list[int], start: int, past: dict) -> tuple[Tensor, Tensor]:
    """Logits and the drafter's hidden states of `tokens` at positions start, start + 1, ...; appends to `past`."""
    positions = torch.arange(start, start + len(tokens))

    def rotate(x: Tensor, table: Tensor) -> Tensor:
        cos, sin = table[positions][:, None].chunk(2, -1)
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = target.attention_layers[index]
        query, key = rotate(query, layer.rotary), rotate(key, layer.rotary)
        if index in past:
            key, value = torch.cat((past[index][0], key)), torch.cat((past[index][1], value))
        past[index] = key, value
        mask = torch.ones(len(tokens), key.shape[0], dtype=torch.bool).tril(start)
        heads = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, mask, scale=layer.scale, enable_gqa=True)
        return out.transpose(0, 1)

    out = target.forward(torch.tensor(tokens), attend, aux_layers)
    return target.logits(out.hidden), out.aux_hidden if aux_layers else out.hidden


class Engine:
    """Greedy generation for up to MAX_REQUESTS prompts at once."""

    def __init__(self) -> None:
        platform, (target_folder, draft_folder) = open_platform("cpu"), shipped_pair()
        self.target = load_target(target_folder, platform.device, torch.float32)
        self.head = load_drafter(draft_folder, self.target)
        config = DraftConfig(
            num_speculative_tokens=K, max_num_requests=MAX_REQUESTS, max_model_len=MAX_LEN, block_size=BLOCK
        )
        num_blocks = 1 + MAX_REQUESTS * BLOCKS_PER_REQUEST  # block 0 is the null block: no request may own it
        caches = allocate_caches(self.head.attention_layers, num_blocks, BLOCK, torch.float32, platform.device)
        self.drafter = Drafter(self.head, caches, platform, config)
        self.drafter.capture()
        self.chunk = config.prefill_rows[-1]

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """New tokens of each prompt, and the mean acceptance length."""
        batch = self.drafter.inputs(len(prompts))  # the drafter's own memory: everything below is written in place
        batch.block_table.zero_()
        running = [self._start(batch, row, prompt, max_tokens) for row, prompt in enumerate(prompts)]
        rounds = tokens = 0
        while not all(request.done for request in running):
            drafts = self.drafter.propose(batch).token_ids.tolist()
            for row, request in enumerate(running):
                if request.done:
                    batch.num_sampled[row] = 0  # inert from now on
                    continue
                tokens, rounds = tokens + self._verify(batch, row, request, drafts[row]), rounds + 1
        ids = [s.tokens[len(p) :][:max_tokens] for s, p in zip(running, prompts, strict=True)]
        return ids, tokens / max(rounds, 1)

    def _start(self, batch, row: int, prompt: list[int], max_tokens: int) -> Running:
        """Prefill target and drafter, and let the request join the first round with its first token."""
        first = 1 + row * BLOCKS_PER_REQUEST
        request = Running(list(prompt), list(range(first, first + BLOCKS_PER_REQUEST)), len(prompt) + max_tokens)
        logits, aux = target_pass(self.target, self.head.aux_layers, prompt, 0, request.past)
        hidden = None
        for start in range(0, len(prompt), self.chunk):
            positions = range(start, min(start + self.chunk, len(prompt)))
            hidden = self.drafter.prefill(prompt, positions, request.blocks, aux[start : positions.stop])
        token = logits[-1].argmax()
        batch.join(row, token, hidden)
        batch.start_positions[row] = len(prompt) - 1
        batch.block_table[row, :BLOCKS_PER_REQUEST] = torch.tensor(request.blocks)
        request.tokens.append(int(token))
        return request

    def _verify(self, batch, row: int, request: Running, drafts: list[int]) -> int:
        """Run the target over the last token and the drafts, keep what it agrees with, and write the round's end."""
        start, rows = len(request.tokens) - 1, [request.tokens[-1], *drafts]
        logits, aux = target_pass(self.target, self.head.aux_layers, rows, start, request.past)
        best = logits.argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != best[i]), K)
        keep = start + accepted + 1
        request.past = {layer: (key[:keep], value[:keep]) for layer, (key, value) in request.past.items()}
        request.tokens += best[: accepted + 1]
        batch.sampled_token_ids[row] = torch.tensor(best)  # accepted drafts, the target's own token, then anything
        batch.num_sampled[row] = accepted + 1
        batch.start_positions[row] = start
        batch.aux_hidden[row * (K + 1) : (row + 1) * (K + 1)] = aux
        return accepted + 1


if __name__ == "__main__":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(shipped_pair()[0] / "tokenizer.json"))
    texts = ["def read_chunk(self, size):\n", "class Counter(dict):\n    def __init__(self"]
    with torch.inference_mode():
        generated, length = Engine().generate([tokenizer.encode(text).ids for text in texts], max_tokens=60)
    for text, ids in zip(texts, generated, strict=True):
        print(text + tokenizer.decode(ids), end="\n\n")
    print(f"mean acceptance length {length:.2f}")
