"""Computes a target's answers to prompts, and its hidden states over whole texts, for the training of a head.

Both use specgraph's own models, so the target can be any model that specgraph loads, on any platform.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from specgraph_models import load_target
from specgraph_run import load_generator

from specgraph import PagedAttention, Platform, allocate_caches, open_platform
from specgraph.attention import AttentionMetadata, ForwardContext

BLOCK = 16
"""Tokens of a KV block."""


class Text(NamedTuple):
    """The tokens of a prompt and its answer, and the prompt's number of tokens."""

    tokens: list[int]
    prompt: int


class Asked(NamedTuple):
    """The target, and the settings of its answers."""

    target: Path
    platform: Platform
    dtype: torch.dtype
    chat: bool
    """If True, prompts go into the target's chat template."""
    requests: int
    """Prompts that are answered at once."""
    max_tokens: int
    """The most tokens of an answer."""
    max_model_len: int
    """The most tokens of a prompt and its answer."""


def asking(parser: argparse.ArgumentParser, max_tokens: int, max_model_len: int) -> None:
    """Add the options of `Asked`, with these defaults, and `--prompts` and `--out`."""
    parser.add_argument("target", type=Path, help="a checkpoint folder or GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help='lines {"prompt": TEXT}')
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--platform", help="NAME or NAME:INDEX")
    parser.add_argument("--chat", action="store_true", help="put prompts into the target's chat template")
    parser.add_argument("--requests", type=int, default=64, help="prompts that are answered at once")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="of an answer")
    parser.add_argument("--max-model-len", type=int, default=max_model_len, help="tokens of a prompt and its answer")


def asked_of(arguments: argparse.Namespace) -> Asked:
    """Return the `Asked` of the options. The target's dtype is float32 on a CPU, and bfloat16 elsewhere."""
    platform = open_platform(arguments.platform)
    dtype = torch.float32 if platform.device.type == "cpu" else torch.bfloat16
    return Asked(
        arguments.target, platform, dtype, arguments.chat, arguments.requests, arguments.max_tokens,
        arguments.max_model_len,
    )  # fmt: skip


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file with lines {"prompt": TEXT}."""
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def answer(
    asked: Asked, prompts: Sequence[Sequence[str]], temperatures: Sequence[float], seconds: float = float("inf")
) -> list[list[Text]]:
    """Let the target answer lists of prompts, each list at its own temperature. Return the texts of each list.

    A prompt is left out if it leaves no room for an answer. After `seconds`, no more prompts of a list are begun.
    """
    settings: dict[str, Any] = {"max_num_requests": asked.requests, "capture_sizes": [asked.requests]}
    if max(temperatures) > 0:
        settings |= {"sampled": True, "sampling_parameters": True}
    with load_generator(
        asked.target, speculate=False, platform=asked.platform, dtype=str(asked.dtype).removeprefix("torch."),
        max_model_len=asked.max_model_len, **settings,
    ) as generator:  # fmt: skip
        print(generator.description, flush=True)
        lists = list[list[Text]]()
        for given, temperature in zip(prompts, temperatures, strict=True):
            chosen = {"temperature": temperature, "top_p": 0.95} if temperature else {}
            requests = [
                generator.request(prompt, chat=asked.chat, max_tokens=asked.max_tokens, seed=seed, **chosen)
                for seed, prompt in enumerate(given)
            ]
            requests = [each for each in requests if len(each.prompt_token_ids) < asked.max_model_len]
            start, texts, at_once = time.perf_counter(), list[Text](), 8 * asked.requests
            for begin in range(0, len(requests), at_once):
                if time.perf_counter() - start > seconds:
                    break
                part = requests[begin : begin + at_once]
                for request, written in zip(part, generator.generate(part), strict=True):
                    prompt = list(request.prompt_token_ids)
                    texts.append(Text([*prompt, *written.token_ids], len(prompt)))
            new, took = sum(len(text.tokens) - text.prompt for text in texts), time.perf_counter() - start
            print(f"{len(texts)} of {len(given)} prompts answered at temperature {temperature}: {new} tokens "
                  f"in {took:.1f} s", flush=True)  # fmt: skip
            lists.append(texts)
        return lists


class TargetPass:
    """A target that runs over whole texts at once, without graphs."""

    def __init__(self, folder: Path, platform: Platform, dtype: torch.dtype) -> None:
        self.model, self.device = load_target(folder, platform.device, dtype), platform.device
        self.sizes, self.logits = self.model.sizes, self.model.logits
        self.embedding, self.output, self.norm = self.model.embed_tokens, self.model.lm_head, self.model.norm
        self._cache = allocate_caches(self.model.attention_layers[:1], 1, BLOCK, dtype, self.device)[0]

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, aux_layers: Sequence[int] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run over texts, int64 [B, T] on the device, padded on the right.

        Returns:
            The states after the final norm, [B, T, H], and the inputs of each of `aux_layers`. The input of layer
            `num_layers` is the last layer's output, before the final norm.
        """
        texts, length = tokens.shape
        blocks = -(-length // BLOCK)
        if self._cache.key.shape[0] < 1 + texts * blocks:  # all layers share one: each writes it before it reads
            shape = self.model.attention_layers[:1]
            self._cache = allocate_caches(shape, 1 + texts * blocks, BLOCK, self.model.dtype, self.device)[0]
        rows = torch.arange(length, device=self.device)
        table = 1 + torch.arange(texts * blocks, device=self.device).view(texts, blocks)
        metadata = AttentionMetadata(
            query_start_loc=torch.arange(texts + 1, dtype=torch.int32, device=self.device) * length,
            seq_lens=torch.full((texts,), length, dtype=torch.int32, device=self.device),
            positions=rows.repeat(texts), slot_mapping=(table[:, :1] * BLOCK + rows).flatten(),
            block_table=table.int(), query_len=length,
        )  # fmt: skip
        attention, shapes, context = PagedAttention(), self.model.attention_layers, ForwardContext(metadata)

        def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attention.forward(shapes[index], index, query, key, value, self._cache, context)

        out = self.model.forward(tokens.flatten(), attend, aux_layers)
        hidden, aux = (each.unflatten(0, (texts, length)) for each in out)
        return hidden, list(aux.chunk(len(aux_layers), dim=-1)) if aux_layers else []
