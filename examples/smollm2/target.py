"""The target in plain torch: passes over whole texts, and answers to many prompts at once.

specgraph reads its weights: a Hugging Face folder or GGUF file of a Llama with one embedding for input and output.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from head import rotate
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from specgraph.checkpoints import load_target
from specgraph.models.layers import DecoderLayer

STOP = 2
"""The token <|im_end|>, with which an answer ends."""


class Prompt(NamedTuple):
    """Tokens of a prompt, and the temperature at which it is answered; 0 is greedy."""

    tokens: list[int]
    temperature: float


class Target:
    """A Llama with tied embeddings on one device, in one dtype."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        model = load_target(path, device, dtype)
        self.sizes, self.layers, self.embedding, self.norm = model.sizes, model.layers, model.embed_tokens, model.norm
        self.output = self.embedding
        self.theta, self.eps = model.sizes.rotary.theta, model.sizes.rms_norm_eps
        self.device, self.dtype = device, dtype

    def qkv(self, layer: DecoderLayer, x: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return rotated queries and keys, and values, [B, heads, T, D], of x [B, T, hidden], positions [B or 1, T]."""
        sizes = self.sizes
        packed = F.linear(F.rms_norm(x, (x.shape[-1],), layer.input_norm, self.eps), layer.qkv.matrix)
        heads = packed.unflatten(-1, (-1, sizes.head_dim)).transpose(1, 2)
        query, key, value = heads.split([sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], dim=1)
        return [rotate(query, positions, self.theta), rotate(key, positions, self.theta), value]

    def finish(self, layer: DecoderLayer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream [B, T, hidden] after a layer, for attention's output [B, T, hidden]."""
        x = x + F.linear(attended, layer.output.matrix)
        normed = F.rms_norm(x, (x.shape[-1],), layer.post_norm, self.eps)
        gate, up = F.linear(normed, layer.gate_up.matrix).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down.matrix)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden], after the last norm -> [N, vocabulary]."""
        return F.linear(hidden, self.output)

    @torch.no_grad()
    def forward(
        self, tokens: torch.Tensor, aux_layers: Sequence[int] = (), keep: list[tuple[torch.Tensor, ...]] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run over tokens [B, T]; return the state after the last norm, and those that enter `aux_layers`.

        Keys and values [B, kv heads, T, D] of each layer are appended to `keep`.
        """
        x = self.embedding[tokens]
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        entering = list[torch.Tensor]()
        for layer in self.layers:
            entering.append(x)
            query, key, value = self.qkv(layer, x, positions)
            if keep is not None:
                keep.append((key, value))
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = self.finish(layer, x, attended.transpose(1, 2).flatten(2))
        return F.rms_norm(x, (x.shape[-1],), self.norm, self.eps), [entering[i] for i in aux_layers]


class Answers:
    """Answers prompts in `rows` rows at once; one that has ended gives its row to the next prompt.

    On a GPU a decode step is one graph. Every tensor that it touches is an attribute, written in place.
    """

    CANDIDATES = 64
    """Tokens that a row which samples can take; the nucleus is chosen among them."""

    def __init__(self, target: Target, rows: int, longest: int, top_p: float) -> None:
        """longest: tokens of a prompt and its answer."""
        self.target, self.rows, self.longest, self.top_p = target, rows, longest, top_p
        sizes, device = target.sizes, target.device
        shape = (sizes.num_layers, rows, sizes.num_kv_heads, longest, sizes.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=target.dtype) for _ in range(2))
        self.text = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limit = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.ended = torch.ones(rows, dtype=torch.bool, device=device)
        self.each = torch.arange(rows, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.step()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Write the token after each row's position, and go there; a row that has ended stays."""
        target = self.target
        x = target.embedding[self.text[self.each, self.position]][:, None]
        seen = torch.arange(self.longest, device=x.device) <= self.position[:, None]
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, float("-inf"))[:, None, None]
        for index, layer in enumerate(target.layers):
            query, key, value = target.qkv(layer, x, self.position[:, None])
            keys, values = self.keys[index], self.values[index]
            keys[self.each, :, self.position] = key[:, :, 0]
            values[self.each, :, self.position] = value[:, :, 0]
            group = query.shape[1] // key.shape[1]
            query = query.view(self.rows, key.shape[1], group, -1)  # the rows of a group share their keys
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                mask = bias.expand(self.rows, key.shape[1], group, self.longest)
                attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = target.finish(layer, x, attended.reshape(self.rows, 1, -1))
        hidden = F.rms_norm(x[:, 0], (x.shape[-1],), target.norm, target.eps)
        token = self._choose(F.linear(hidden, target.embedding))
        after = self.position + 1
        going = ~self.ended
        self.text[self.each, after.clamp(max=self.longest - 1)] = torch.where(
            going, token, self.text[self.each, after.clamp(max=self.longest - 1)]
        )
        self.position.add_(going)
        self.ended |= (token == STOP) | (self.position + 1 >= self.limit)

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return tokens [B] of logits [B, V]: the greedy one, or one of the nucleus at the row's temperature."""
        best, ids = logits.topk(self.CANDIDATES, dim=-1)
        scaled = best.float() / self.temperature.clamp(min=1e-3)[:, None]
        shares = scaled.softmax(-1)
        scaled = scaled.masked_fill(shares.cumsum(-1) - shares >= self.top_p, float("-inf"))
        noise = -torch.empty_like(scaled).exponential_().log()  # Gumbel's
        scaled = scaled + noise * (self.temperature > 0)[:, None]
        return ids.gather(1, scaled.argmax(-1, keepdim=True))[:, 0]

    @torch.no_grad()
    def _join(self, rows: list[int], prompts: list[Prompt], most: int) -> None:
        """Put prompts into rows: keys and values of all their tokens but the last, which the next step reads."""
        width = -(-max(len(prompt.tokens) for prompt in prompts) // 32) * 32
        padded = torch.zeros(len(prompts), width, dtype=torch.int64)
        for line, prompt in zip(padded, prompts, strict=True):
            line[: len(prompt.tokens)] = torch.tensor(prompt.tokens)
        padded, index = padded.to(self.target.device), torch.tensor(rows, device=self.target.device)
        kept: list[tuple[torch.Tensor, ...]] = []
        self.target.forward(padded, keep=kept)
        for layer, (key, value) in enumerate(kept):
            self.keys[layer, index, :, :width] = key
            self.values[layer, index, :, :width] = value
        lengths = torch.tensor([len(prompt.tokens) for prompt in prompts], device=index.device)
        self.text[index, :width] = padded
        self.position[index] = lengths - 1
        self.limit[index] = (lengths + most).clamp(max=self.longest)
        self.temperature[index] = torch.tensor([prompt.temperature for prompt in prompts], device=index.device)
        self.ended[index] = False

    def answer(
        self, prompts: Sequence[Prompt], most: int, seconds: float = math.inf, most_joined: int = 128
    ) -> list[tuple[int, list[int]]]:
        """Return (index of the prompt, its tokens and its answer's), at most `most` tokens each, as they end.

        Prompts that have not begun after so many seconds are left out.
        """
        start = time.perf_counter()
        written: list[tuple[int, list[int]]] = []
        taken = [-1] * self.rows
        following = 0
        while True:
            ended = self.ended.tolist()
            free = [row for row in range(self.rows) if ended[row]]
            full = [row for row in free if taken[row] >= 0]
            if full:
                texts, ends = self.text[full].tolist(), self.position[full].tolist()
                written += [(taken[row], text[: end + 1]) for row, text, end in zip(full, texts, ends, strict=True)]
                for row in full:
                    taken[row] = -1
            if time.perf_counter() - start > seconds:
                following = len(prompts)
            while free and following < len(prompts):
                rows, free = free[:most_joined], free[most_joined:]
                joining = prompts[following : following + len(rows)]
                rows = rows[: len(joining)]
                for offset, row in enumerate(rows):
                    taken[row] = following + offset
                self._join(rows, list(joining), most)
                following += len(joining)
            if all(index < 0 for index in taken):
                return written
            for _ in range(16):
                if self.graph is None:
                    self.step()
                else:
                    self.graph.replay()
