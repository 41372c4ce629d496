# SGLang is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""One SGLang engine with its scheduler process, as the scripts of this folder use it. Nothing is downloaded."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

K, MAX_LEN = 5, 1024

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

ALGORITHMS = {"eagle3": ("EAGLE3", "SPECGRAPH"), "eagle": ("EAGLE", "SPECGRAPH_EAGLE")}


def options(target: str, draft: str, way: str, method: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: SGLang's attention in Triton, pages of 64 tokens, chains of K draft tokens.

    `way` is "specgraph"; "stock" for SGLang's own drafting, without the plugin; or "off" for it with the plugin loaded.
    """
    if way == "stock":
        os.environ["SGLANG_PLUGINS"] = "none"  # a list of names; an empty one would load all
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
        "random_seed": 0,
        "log_level": "info",
    } | changes


def sglang_draft(folder: Path) -> str:
    """A copy of a drafter's folder as SGLang loads it.

    EAGLE-3: layer numbers as SGLang counts them, a layer's output, not its input. EAGLE: SGLang's own class, whose `fc`
    has a bias (zeros here).
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
    """SGLang over the shipped pair, or over folders of its sizes, in float16."""

    seeded = False
    """Sampled requests have no seeds: only the distribution of their tokens can be compared."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang.srt.entrypoints import engine

        class CountedEngine(engine.Engine):
            run_scheduler_process_func = staticmethod(run_scheduler_process)

        self.counts = Path(tempfile.mkdtemp()) / "counts"
        os.environ["SPECGRAPH_COUNTS"] = str(self.counts)
        self.sglang = CountedEngine(**arguments)
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    @staticmethod
    def shipped(target: Path, draft: Path | None, way: str, method: str, kv_tokens: int, **changes: Any) -> Engine:
        """An engine for a pair of the shipped one's sizes in float16, with a KV cache for so many tokens."""
        assert draft is not None, "SGLang has no MTP drafter here: give --drafter"
        sizes: dict[str, Any] = {"dtype": "float16", "mem_fraction_static": 0.5, "max_total_tokens": kv_tokens}
        sizes |= {"context_length": MAX_LEN, "cuda_graph_bs_decode": [1, 4, 8, 16, 32, 64]}
        return Engine(options(str(target), sglang_draft(draft), way, method, **sizes | changes))

    @staticmethod
    def room(prompt: list[int]) -> int:
        """The most new tokens that a prompt may ask for: SGLang keeps K + 1 positions of the context free."""
        return MAX_LEN - K - 1 - len(prompt)

    def start(self, name: str, prompt: list[int], limit: int, seed: int | None = None) -> None:
        """Add a request: greedy, or at temperature 1 where there is a seed (which SGLang does not take)."""
        params = {"temperature": 0.0 if seed is None else 1.0, "max_new_tokens": limit, "ignore_eos": True}
        made = self.sglang.async_generate(input_ids=prompt, sampling_params=params, rid=name)
        self.tasks[name] = self.sglang.loop.create_task(made)

    def abort(self, name: str) -> None:
        """Abort every request whose name begins so."""
        self.sglang.tokenizer_manager.abort_request(rid=name)

    def step(self) -> list[tuple[str, list[int], bool, int]]:
        """Some milliseconds; (name, its tokens, True, tokens of its prompt that were cached) of requests that ended."""
        self.sglang.loop.run_until_complete(asyncio.sleep(0.002))
        found: list[tuple[str, list[int], bool, int]] = []
        for name in [name for name, task in self.tasks.items() if task.done()]:
            output = self.tasks.pop(name).result()
            about = output["meta_info"]
            if about["finish_reason"]["type"] != "abort":
                found.append((name, list(output["output_ids"]), True, about.get("cached_tokens") or 0))
        return found

    def generate(
        self, prompts: list[list[int]], at_once: int, max_tokens: int, sampled: bool = False
    ) -> tuple[list[list[int]], list[int]]:
        """(tokens by prompt, rounds by number of accepted draft tokens)."""
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
                for accepted, rounds in enumerate(output["meta_info"].get("spec_accept_histogram") or []):
                    histogram[accepted] += rounds
        return tokens, histogram

    def proposes(self) -> dict[str, int]:
        """Proposes by who drafted, and why; empty for stock SGLang. The scheduler writes them once a second."""
        time.sleep(2)
        return json.loads(self.counts.read_text()) if self.counts.exists() else {}

    def close(self) -> None:
        self.sglang.shutdown()


def when_the_worker_is_made(act: Callable[[Any], None]) -> None:
    """In this scheduler process, call `act` with SGLang's worker once it is made."""
    from sglang.srt.managers import scheduler

    init = scheduler.Scheduler.maybe_init_draft_worker

    def maybe_init_draft_worker(self: Any) -> None:
        init(self)
        act(self.draft_worker)

    scheduler.Scheduler.maybe_init_draft_worker = maybe_init_draft_worker


def run_scheduler_process(*args: Any, **options: Any) -> Any:
    """SGLang's, with a thread that writes the plugin's counts to the file that SPECGRAPH_COUNTS names."""
    from sglang.srt.managers import scheduler

    def act(worker: Any) -> None:
        drafting = getattr(worker._draft_worker, "specgraph", None)
        if drafting is not None:
            threading.Thread(target=write, args=(drafting.counts,), daemon=True).start()

    def write(counts: Any) -> None:
        path = Path(os.environ["SPECGRAPH_COUNTS"])
        while True:
            time.sleep(1)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(dict(counts.by_reason)))
            part.rename(path)

    when_the_worker_is_made(act)
    return scheduler.run_scheduler_process(*args, **options)
