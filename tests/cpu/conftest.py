from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specgraph.device.cpu import CpuPlatform


@pytest.fixture
def platform():
    return CpuPlatform()


@pytest.fixture
def side(platform):
    """A second stream."""
    return platform.stream()


@dataclass
class PagedDecoder:
    """A small decoder with a paged KV cache: the oracle's program, in plain torch, one token per request."""

    dtype: torch.dtype
    layers: int = 2
    heads: int = 4
    head_dim: int = 16
    vocab: int = 97
    blocks: int = 16
    block_size: int = 4
    requests: int = 3
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        width, per_request = self.heads * self.head_dim, self.blocks // self.requests

        def init(*size: int) -> torch.Tensor:
            return (torch.randn(*size) / math.sqrt(size[-1])).to(self.dtype)

        w = self.weights
        w["embed"], w["head"], w["norm"] = init(self.vocab, width), init(self.vocab, width), init(width)
        for i in range(self.layers):
            w |= {f"qkv{i}": init(3 * width, width), f"o{i}": init(width, width), f"n{i}": init(width)}
            w |= {f"up{i}": init(4 * width, width), f"down{i}": init(width, 4 * width), f"m{i}": init(width)}
        s = self.state
        s["ids"] = torch.randint(0, self.vocab, (self.requests,))
        s["positions"] = torch.randint(0, 2 * self.block_size, (self.requests,))
        s["table"] = torch.randperm(self.blocks)[: self.requests * per_request].view(self.requests, per_request)
        for i in range(self.layers):
            for kind in "kv":
                s[f"{kind}{i}"] = torch.randn(self.blocks, self.block_size, self.heads, self.head_dim).to(self.dtype)
        s["draft"] = torch.zeros(self.requests, 8, dtype=torch.long)
        s["step"] = torch.zeros(1, dtype=torch.long)

    def copy_state(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in self.state.items()}

    def step(self, s: dict[str, torch.Tensor]) -> torch.Tensor:
        """One token per request: logits [requests, vocab]; moves ids, positions, caches and the draft row on."""
        w, n, b, d = self.weights, self.requests, self.block_size, self.head_dim
        length = s["table"].size(1) * b
        x = F.embedding(s["ids"], w["embed"])
        slot = s["table"].gather(1, (s["positions"] // b)[:, None])[:, 0] * b + s["positions"] % b
        for i in range(self.layers):
            h = F.rms_norm(x, (x.size(-1),), w[f"n{i}"])
            q, k, v = F.linear(h, w[f"qkv{i}"]).view(n, 3, self.heads, d).unbind(1)
            s[f"k{i}"].view(-1, self.heads, d).index_put_((slot,), k)
            s[f"v{i}"].view(-1, self.heads, d).index_put_((slot,), v)
            keys, values = (s[f"{c}{i}"][s["table"]].view(n, length, self.heads, d).transpose(1, 2) for c in "kv")
            mask = (torch.arange(length)[None, :] <= s["positions"][:, None])[:, None, None, :]
            a = F.scaled_dot_product_attention(q[:, :, None, :], keys, values, attn_mask=mask)
            x = x + F.linear(a.transpose(1, 2).reshape(n, -1), w[f"o{i}"])
            h = F.rms_norm(x, (x.size(-1),), w[f"m{i}"])
            gate = F.linear(h, w[f"up{i}"])
            x = x + F.linear(F.silu(gate), w[f"down{i}"])
        logits = F.linear(F.rms_norm(x, (x.size(-1),), w["norm"]), w["head"])
        chosen = logits.argmax(-1)
        s["draft"].index_copy_(1, s["step"], chosen[:, None])
        s["ids"].copy_(chosen)
        s["positions"].add_(1)
        s["step"].add_(1)
        return logits


@pytest.fixture
def paged_decoder() -> Callable[..., PagedDecoder]:
    def make(dtype: torch.dtype = torch.float32, **sizes: Any) -> PagedDecoder:
        torch.manual_seed(1)
        return PagedDecoder(dtype, **sizes)

    return make
