# Types are checked without SGLang.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""An SGLang engine with its scheduler process, for the scripts of this folder. Nothing is downloaded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

K, MAX_LEN = 5, 1024

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

EAGLE = "EAGLE", "SPECGRAPH_EAGLE"
ALGORITHMS = {"eagle3": ("EAGLE3", "SPECGRAPH"), "eagle": EAGLE, "mtp": EAGLE}


def options(target: str, draft: str, way: str, method: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """Return arguments of `sglang.Engine`: SGLang's attention in Triton, pages of 64 tokens, chains of K draft tokens.

    Args:
        way: "specgraph"; "stock", SGLang's own drafting without the plugin; or "off", SGLang's own drafting with the
            plugin loaded.
    """
    if way == "stock":
        os.environ["SGLANG_PLUGINS"] = "none"  # a list of names: an empty list would load all plugins
    return {
        "model_path": target,
        "speculative_draft_model_path": draft,
        "speculative_algorithm": ALGORITHMS[method][way == "specgraph"],
        "speculative_num_steps": K,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": K + 1,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "page_size": 64,
        "max_running_requests": 64,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
        "disable_prefill_cuda_graph": True,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "random_seed": 0,
        "log_level": "info",
    } | changes


def sglang_draft(folder: Path) -> str:
    """Copy a drafter's folder into the form that SGLang loads, and return the copy.

    For EAGLE-3 each number of an aux layer becomes one less: SGLang counts the layer's output, not its input. For EAGLE
    the architecture becomes SGLang's own class. Its `fc` needs a bias, which is zero here.
    """
    from safetensors.torch import load_file, save_file

    copy = Path(tempfile.mkdtemp()) / "draft"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    if "eagle_config" in config:
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
    else:
        config["architectures"] = ["LlamaForCausalLMEagle"]
        tensors = load_file(copy / "model.safetensors")
        fc = tensors["fc.weight"]
        save_file({**tensors, "fc.bias": fc.new_zeros(fc.shape[0])}, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


class Engine:
    """SGLang with the shipped pair, or with another pair of its sizes, in float16."""

    seeded = False
    """Sampled requests have no seeds, so only the distribution of their tokens can be compared."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints import engine

        self.sglang = engine.Engine(**arguments)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.outputs: list[tuple[str, list[int], bool, int]] = []
        self.woken = asyncio.Event()

    @staticmethod
    def shipped(target: Path, draft: Path | None, way: str, method: str, kv_tokens: int, **changes: Any) -> Engine:
        """Return an engine for a pair with the sizes of the shipped one, in float16.

        Args:
            draft: the drafter's folder. None if the target's folder has the drafter.
            kv_tokens: the tokens that the KV cache holds.
        """
        sizes: dict[str, Any] = {"dtype": "float16", "mem_fraction_static": 0.5, "max_total_tokens": kv_tokens}
        sizes |= {"context_length": MAX_LEN, "cuda_graph_bs_decode": [1, 4, 8, 16, 32, 64]}
        folder = str(target) if draft is None else sglang_draft(draft)
        return Engine(options(str(target), folder, way, method, **sizes | changes))

    @staticmethod
    def agreed(answer: bool) -> bool:
        """Return the answer itself: all ranks of SGLang have this one client."""
        return answer

    @staticmethod
    def room(prompt: list[int]) -> int:
        """Return the most new tokens of a request: SGLang keeps K + 1 positions of the context free."""
        return MAX_LEN - K - 1 - len(prompt)

    def start(self, name: str, prompt: list[int], limit: int, seed: int | None = None) -> None:
        """Add a request. It is greedy without a seed, and at temperature 1 with one (SGLang does not take the seed)."""
        params = {"temperature": 0.0 if seed is None else 1.0, "max_new_tokens": limit, "ignore_eos": True}
        self.tasks[name] = self.sglang.loop.create_task(self.follow(name, prompt, params))

    async def follow(self, name: str, prompt: list[int], params: dict[str, Any]) -> None:
        """Collect the outputs of a request until it ends or is aborted."""
        async for output in await self.sglang.async_generate(
            input_ids=prompt, sampling_params=params, rid=name, stream=True
        ):
            about = output["meta_info"]
            reason = about["finish_reason"]
            if reason is not None and reason["type"] == "abort":
                return
            cached = about.get("cached_tokens") or 0
            self.outputs.append((name, list(output["output_ids"]), reason is not None, cached))
            self.woken.set()

    def abort(self, name: str) -> None:
        """Abort every request with a name that begins with `name`."""
        self.sglang.tokenizer_manager.abort_request(rid=name)

    def step(self) -> list[tuple[str, list[int], bool, int]]:
        """Wait at most 2 ms, and return the new outputs of requests.

        Each is (name, new tokens, True if the request ended, cached tokens of its prompt).
        """

        async def wait() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.woken.wait(), 0.002)
            self.woken.clear()

        self.sglang.loop.run_until_complete(wait())
        for name in [name for name, task in self.tasks.items() if task.done()]:
            self.tasks.pop(name).result()
        found, self.outputs = self.outputs, []
        return found

    def generate(
        self, prompts: list[list[int]], at_once: int, max_tokens: int, sampled: bool = False
    ) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of each prompt, and the number of rounds by accepted draft tokens (0 .. K)."""
        tokens: list[list[int]] = []
        histogram = [0] * (K + 1)
        for begin in range(0, len(prompts), at_once):
            part = prompts[begin : begin + at_once]
            params = [
                {"temperature": float(sampled), "max_new_tokens": min(max_tokens, self.room(p)), "ignore_eos": True}
                for p in part
            ]
            for output in self.sglang.generate(input_ids=part, sampling_params=params):
                tokens.append(list(output["output_ids"]))
                about = output["meta_info"]  # 0.5.17 has the second name
                rounds = about.get("spec_correct_drafts_histogram") or about.get("spec_accept_histogram") or []
                for accepted, count in enumerate(rounds):
                    histogram[accepted] += count
        return tokens, histogram

    def proposes(self) -> dict[str, int]:
        """Return `ProposeCounts.by_reason`. It is empty for stock SGLang."""
        return self.sglang.get_server_info()["internal_states"][0].get("specgraph", {})

    def close(self) -> None:
        self.sglang.shutdown()
