"""A float64 target and EAGLE head in plain formulas: nothing of the code of models is in it.

The other oracles run a head's own code in float64, so they find errors of a device, a graph or a buffer. These oracles
find errors of that code and of its inputs: rotary angles, norms, and the row and token of a prompt. Every pass computes
the whole sequence again; nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from specgraph_conformance.decode_rig import MODEL_SEED
from specgraph_conformance.oracles import attention
from specgraph_conformance.tiny_models import CONFIG, HIDDEN, make_head, make_target
from specgraph_models.llama import LlamaTarget
from torch import Tensor

from specgraph.ops import Mask

THETA = 10000.0
"""The rotary base of the tiny models."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a whole sequence of n tokens."""

    hidden: Tensor
    """[n, hidden_size], after the last layer, and after the final norm if the model has one."""
    keys: list[Tensor]
    """The rotated keys of each layer, [n, num_kv_heads, head_dim]."""


def rotate(x: Tensor) -> Tensor:
    """Rotate x [n, heads, dim] by positions 0 to n - 1: components i and i + dim / 2 turn by position * frequency."""
    n, _, dim = x.shape
    frequency = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(n, dtype=torch.float64)[:, None, None] * frequency
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x divided by its root mean square, times `weight`."""
    return x / (x.square().mean(dim=-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight


def run_layers(x: Tensor, layers: Sequence[Any]) -> Pass:
    """Run x [n, hidden_size], positions 0 to n - 1, through decoder layers with causal attention."""
    n, heads, kv_heads, dim = x.shape[0], CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
    all_keys: list[Tensor] = []
    for layer in layers:
        qkv = rms_norm(x, layer.input_norm) @ layer.qkv.matrix.T
        query, keys, values = qkv.view(n, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
        keys = rotate(keys)
        x = x + attention(rotate(query), keys, values, dim**-0.5, Mask()).reshape(n, -1) @ layer.output.matrix.T
        gate, up = (rms_norm(x, layer.post_norm) @ layer.gate_up.matrix.T).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.down.matrix.T
        all_keys.append(keys)
    return Pass(x, all_keys)


def run_target(target: Any, token_ids: Sequence[int]) -> Pass:
    """Run the target over a sequence. `target` holds float64 weights on the host."""
    out = run_layers(target.embed_tokens[list(token_ids)], target.layers)
    return Pass(rms_norm(out.hidden, target.norm), out.keys)


def run_eagle(head: Any, target_hidden: Tensor, following: Sequence[int]) -> Pass:
    """Run the EAGLE head over rows 0 to n - 1. Row i takes the target's hidden state of position i and the next
    token."""
    rows = torch.cat([head.embed_tokens[list(following)], target_hidden], dim=-1) @ head.fc.matrix.T
    return run_layers(rows, head.layers)


def prompt_rows(target: Any, head: Any, prompt: Sequence[int]) -> tuple[Tensor, list[int], Pass]:
    """Return the target's hidden states of a prompt, the token after each row, and the EAGLE head's pass over both."""
    hidden = run_target(target, prompt).hidden
    following = [*prompt[1:], int((hidden[-1] @ target.lm_head.T).argmax())]
    return hidden, following, run_eagle(head, hidden, following)


def short_of_best(target: Any, head: Any, prompt: Sequence[int], drafted: Sequence[int]) -> list[float]:
    """Return the logit gap between the best token and each drafted token, in a propose right after a prompt.

    The gap is 0 if the token is the most likely one, and close to 0 if two tokens nearly tie in float64.
    """
    hidden, following, out = prompt_rows(target, head, prompt)
    short: list[float] = []
    for token in drafted:
        logits = out.hidden[-1] @ head.lm_head.T
        short.append(float(logits.max() - logits[token]))
        hidden, following = torch.cat([hidden, out.hidden[-1:]]), [*following, token]
        out = run_eagle(head, hidden, following)
    return short


def float64_pair() -> tuple[LlamaTarget, Any]:
    """Return the decoders' target and EAGLE head, in float64 on the host."""
    host = torch.device("cpu")
    target = make_target(MODEL_SEED, host, compute=torch.float64)
    return target, make_head("eagle", MODEL_SEED, host, compute=torch.float64)


def reads_hidden_states(head: Any) -> None:
    """Change an EAGLE head in place, so that its drafts depend on hidden states as much as on tokens."""
    head.fc.matrix[:, HIDDEN:] *= 3
