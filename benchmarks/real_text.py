"""Tokens per second on real prompts, one request at a time: specgraph, transformers and llama.cpp with one GGUF file.

    python benchmarks/real_text.py model.gguf drafters/smollm2/specgraph_smollm2/eagle3 --json FILE

Each way runs in a process of its own, all in turns: it loads, answers one prompt to warm up, then all, greedily. A time
has the prompt's pass in it, not the load. llama.cpp multiplies by the file's 4-bit weights; all others turn them into
`--dtype` first: in float32 all of those must write the same tokens, in bfloat16 near-ties may fall otherwise where
another number of rows is multiplied at once. `--llama-python` is one that has xllamacpp.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

WAYS = {
    "specgraph, target alone": "alone", "specgraph, EAGLE-3 chain, K = 5": "chain",
    "specgraph, EAGLE-3 tree, 5 steps, 16 rows": "tree", "specgraph, n-grams, K = 5": "ngram",
    "transformers generate": "plain", "transformers prompt lookup, 5 tokens": "lookup",
    "transformers assisted by the first 15 layers": "assisted",
    "llama.cpp, 4-bit weights": "llama", "llama.cpp n-grams, 4-bit weights": "llama-ngram",
}  # fmt: skip
TREE = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
TRANSFORMERS: dict[str, dict[str, int]] = {
    "plain": {}, "lookup": {"prompt_lookup_num_tokens": 5}, "assisted": {"assistant_early_exit": 15},
}  # fmt: skip
"""Arguments of `generate`. No smaller model of this family is on PyPI, so a part of the target assists it."""
HELD_OUT = Path(__file__).parents[1] / "examples/smollm2/held_out.jsonl"
Answer = Callable[[list[int], int], list[int]]
"""Returns at most so many tokens after those of a prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the GGUF file")
    parser.add_argument("head", type=Path, help="the folder of the EAGLE-3 head")
    parser.add_argument("--per-category", type=int, default=3, help="held-out prompts of each category")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=list(WAYS.values()), choices=WAYS.values())
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=WAYS.values(), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measure(asked.child, asked, json.load(sys.stdin))))
        return
    prompts = read_prompts(asked.target, asked.per_category)
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in asked.ways}
    names = {short: long for long, short in WAYS.items()}
    for _ in range(asked.turns):
        for way, taken in results.items():
            python = asked.llama_python if way.startswith("llama") else sys.executable
            environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
            run = subprocess.run(
                [python, __file__, *sys.argv[1:], "--child", way],
                input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, env=environment, check=True,
            )  # fmt: skip
            taken.append(json.loads(run.stdout.splitlines()[-1]))
            print(f"{way}: {rate(taken[-1]):.1f} tokens/s, loaded in {taken[-1]['load_seconds']:.1f} s", flush=True)
        wanted = next((results[way][0]["tokens"] for way in ("alone", "plain") if way in results), None)
        rows = [row(names[way], taken, wanted) for way, taken in results.items()]
        if asked.json:
            from specgraph.cli.env import cpu_name  # not at the top: --llama-python may lack specgraph

            versions = {name: version(name) for name in ("torch", "transformers")}
            versions |= {name: v for taken in results.values() for name, v in taken[0]["versions"].items()}
            document = {
                "command": " ".join(["python benchmarks/real_text.py", *sys.argv[1:]]), "cpu": cpu_name(),
                "versions": {**versions, "python": platform.python_version()}, "threads": asked.threads,
                "dtype": asked.dtype, "prompts": len(prompts), "rows": rows,
            }  # fmt: skip
            asked.json.write_text(json.dumps(document, indent=1) + "\n")
    print(*(json.dumps(each) for each in rows), sep="\n")


def rate(result: dict[str, Any]) -> float:
    """Return the tokens per second over all prompts."""
    return sum(map(len, result["tokens"])) / sum(result["seconds"])


def row(name: str, taken: list[dict[str, Any]], wanted: list[list[int]] | None) -> dict[str, Any]:
    """Return what the result file says about a way that was run len(taken) times."""
    rates = [rate(result) for result in taken]
    found: dict[str, Any] = {
        "way": name, "tokens_per_s": round(statistics.median(rates), 1), "each_turn": [round(r, 1) for r in rates],
        "load_seconds": [round(result["load_seconds"], 1) for result in taken],
        "cpu_seconds_per_token": round(taken[0]["cpu_seconds"] / sum(map(len, taken[0]["tokens"])), 4),
    }  # fmt: skip
    if wanted is not None:
        same = sum(a == b for a, b in zip(taken[0]["tokens"], wanted, strict=True))
        found["texts_as_of_the_target_alone"] = f"{same} of {len(wanted)}"
    if (length := taken[0]["mean_acceptance_length"]) is not None:
        found["mean_acceptance_length"] = round(length, 3)
    return found


def read_prompts(target: Path, per_category: int) -> list[list[int]]:
    """Return the tokens of held-out prompts, in the target's chat template."""
    from specgraph.checkpoints.tokens import read_tokenizer
    from specgraph.engine.chat_template import render_chat

    tokenizer = read_tokenizer(target)
    texts = dict[str, list[str]]()
    for line in map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines()):
        texts.setdefault(line["category"], []).append(line["prompt"])
    chosen = [text for each in texts.values() for text in each[:per_category]]
    rendered = (render_chat(target, [{"role": "user", "content": text}]) for text in chosen)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in rendered]


def measure(way: str, asked: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the tokens and seconds of each prompt, answered in one way."""
    start = time.perf_counter()
    load = load_llama if way.startswith("llama") else load_transformers if way in TRANSFORMERS else load_ours
    answer, acceptance, versions = load(way, asked)
    loaded = time.perf_counter() - start
    answer(prompts[0], 16)
    answers, seconds, cpu = list[list[int]](), list[float](), time.process_time()
    for prompt in prompts:
        start = time.perf_counter()
        answers.append(answer(prompt, asked.new_tokens))
        seconds.append(time.perf_counter() - start)
    return {
        "tokens": answers, "seconds": seconds, "cpu_seconds": time.process_time() - cpu, "load_seconds": loaded,
        "mean_acceptance_length": acceptance(), "versions": versions,
    }  # fmt: skip


Loaded = tuple[Answer, Callable[[], float | None], dict[str, str]]
"""How to answer, the acceptance length so far, and versions."""


def load_ours(way: str, asked: argparse.Namespace) -> Loaded:
    import torch

    from specgraph import load_generator
    from specgraph.engine.request import Request

    torch.set_num_threads(asked.threads)
    generator = load_generator(
        asked.target, "ngram" if way == "ngram" else asked.head, platform="cpu", dtype=asked.dtype, max_model_len=640,
        speculate=way != "alone", num_speculative_tokens=5, **(TREE if way == "tree" else {}),
    )  # fmt: skip

    def answer(prompt: list[int], new: int) -> list[int]:
        request = Request(prompt_token_ids=prompt, max_tokens=new, stop_token_ids=generator.stop_token_ids)
        return generator.generate([request])[0].token_ids

    return answer, lambda: None if way == "alone" else generator.decoder.metrics.mean_acceptance_length, {}


def load_transformers(way: str, asked: argparse.Namespace) -> Loaded:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(asked.threads)
    folder, name = asked.target.parent, asked.target.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=getattr(torch, asked.dtype)).eval()
    arguments = TRANSFORMERS[way]

    def answer(prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, **arguments)
        return out[0, len(prompt) :].tolist()

    return answer, lambda: None, {}


def load_llama(way: str, asked: argparse.Namespace) -> Loaded:
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(asked.target), 640, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    if way == "llama-ngram":
        params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = llama.Server(params)

    def answer(prompt: list[int], new: int) -> list[int]:
        asks = {"prompt": prompt, "n_predict": new, "temperature": 0.0, "return_tokens": True, "cache_prompt": False}
        with urllib.request.urlopen(f"{server.listening_address}/completion", json.dumps(asks).encode()) as reply:
            return json.load(reply)["tokens"]

    return answer, lambda: None, {"xllamacpp": version("xllamacpp")}


if __name__ == "__main__":
    main()
