"""Repeats every call to a FastPath on the cpu platform, over a KV cache of its own, and compares the drafts."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from specgraph_models import load_drafter, load_target
from specgraph_plugin import FastPath

from specgraph import KVCache
from specgraph.cpu import CpuPlatform


def on_host(given: Any) -> Any:
    """Return a VerifyOutput or PromptPass with its tensors in host memory."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cpu()
        return [moved(each) for each in value] if isinstance(value, list) else value

    return replace(given, **{field.name: moved(getattr(given, field.name)) for field in fields(given)})


class Mirror:
    """Drafts of the device and of the cpu platform, which reads the drafter's folder by itself."""

    def __init__(self, drafter: Any, models: Path, folder: str, draft_vocab: Path | None = None) -> None:
        """drafter: the adopted proposer, with its graphs. draft_vocab: the file of the drafter's tokens, if any."""
        target = load_target(models / "target")
        fast, head = drafter.fast_path, load_drafter(models / folder, target, draft_vocab=draft_vocab)
        layer = fast.drafter.head.attention_layers[0]
        # vLLM rounds its table of cosines and sines to the model's dtype
        head.attention_layers = tuple(replace(own, rotary=layer.rotary.cpu()) for own in head.attention_layers)
        caches = [KVCache(torch.zeros_like(c.key, device="cpu"), torch.zeros_like(c.value, device="cpu"))
                  for c in fast.drafter.caches]  # fmt: skip
        config = fast.config
        self.fast, self.calls = fast, (fast.write_prompts, fast.fill, fast.propose)
        self.own = FastPath(
            head, caches, CpuPlatform(), num_speculative_tokens=config.num_speculative_tokens,
            max_num_requests=config.max_num_requests, max_model_len=config.max_model_len,
            block_size=config.block_size, max_num_rows=64, capture_sizes=config.sizes,
        )  # fmt: skip
        self.rounds: list[dict[str, Any]] = []
        """Per propose: the drafts of the device, those of the cpu platform, and the counts of sampled tokens."""
        self.update = fast.propose
        """Proposes on the device; a test may put another function there."""
        fast.write_prompts, fast.fill, fast.propose = self.write_prompts, self.fill, self.propose

    def pause(self) -> None:
        """Let the device draft alone."""
        self.fast.write_prompts, self.fast.fill, self.fast.propose = self.calls

    def write_prompts(self, given: Any) -> None:
        self.calls[0](given)
        self.own.write_prompts(on_host(given))

    def fill(self, end: Any) -> None:
        self.counts = end.num_sampled.tolist()
        self.calls[1](end)
        self.own.fill(on_host(end))

    def propose(self, num_requests: int, *host: Any) -> Any:
        drafts = self.update(num_requests, *host)
        mine, theirs = drafts.token_ids.tolist(), self.own.propose(num_requests).token_ids.tolist()
        live = [i for i, count in enumerate(self.counts) if count]
        self.rounds.append(
            {"device": [mine[i] for i in live], "cpu": [theirs[i] for i in live], "sampled": self.counts}
        )
        return drafts


def differing(rounds: list[dict[str, Any]]) -> int:
    """Return the number of proposes with other drafts."""
    return sum(each["device"] != each["cpu"] for each in rounds)
