"""Compare sampled text with the target's exact distribution: chi-square over the tokens after each frequent beginning.

    python examples/smollm2/chi_square.py model.gguf drafters/smollm2/specgraph_smollm2/eagle3 --platform cuda

Each held-out prompt is answered many times, a few tokens, with a seed each. Wherever `--least` answers begin alike, the
next tokens are counted against transformers' distribution in float64, after the temperature and top-p. The first token
comes from the prompt's pass, those after it from drafts that were accepted, or drawn where one was rejected. `outside`
are tokens beyond the top-p. `p_wrong` is the p of a temperature that is 10 % too high: it shows that counts would tell.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specgraph import load_generator
from specgraph.engine.request import Request
from specgraph.engine.text import TextGenerator

NEW = 6
"""Tokens of an answer."""
WAYS: dict[str, dict[str, Any]] = {
    "chain, K = 5": {"num_speculative_tokens": 5},
    "chain, K = 5, one launch per round": {"num_speculative_tokens": 5, "decode": "round"},
    "tree, 5 steps, 16 rows": {
        "speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16,
    },
}  # fmt: skip
SETTINGS = ((1.0, 1.0), (0.7, 0.9))
"""Temperatures and top-p."""
Prefix = tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the GGUF file")
    parser.add_argument("head", type=Path, help="the folder of the EAGLE-3 head")
    parser.add_argument("--platform", default="cpu", help="NAME or NAME:INDEX")
    parser.add_argument("--contexts", type=int, default=1, help="held-out prompts of each category")
    parser.add_argument("--answers", type=int, default=2000, help="to each prompt")
    parser.add_argument("--least", type=int, default=400, help="answers that must begin alike")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--categories", nargs="*", default=["chat", "code", "summary", "list"])
    parser.add_argument("--requests", type=int, default=100, help="decoded at once")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    held_out = Path(__file__).parent / "held_out.jsonl"
    texts = defaultdict[str, list[str]](list)
    for line in map(json.loads, held_out.read_text(encoding="utf-8").splitlines()):
        texts[line["category"]].append(line["prompt"])
    chosen = {f"{name} {i}": text for name in asked.categories for i, text in enumerate(texts[name][: asked.contexts])}
    document: dict[str, Any] = {"command": " ".join(["python examples/smollm2/chi_square.py", *sys.argv[1:]])}
    document |= {"answers": asked.answers, "tokens_each": NEW, "rows": []}
    exact: Exact | None = None
    for way in asked.ways:
        with load_generator(
            asked.target, asked.head, platform=asked.platform, dtype="float32", max_num_requests=asked.requests,
            capture_sizes=[asked.requests], max_model_len=640, sampled=True, sampling_parameters=True, **WAYS[way],
        ) as generator:  # fmt: skip
            exact = exact or Exact(asked.target, generator.platform.device, asked.least)
            document |= {"device": generator.platform.info.device_name, "versions": generator.platform.info.versions}
            for temperature, top_p in SETTINGS:
                for name, text in chosen.items():
                    prompt = generator.request(text, chat=True, max_tokens=NEW).prompt_token_ids
                    answers = draw(generator, prompt, asked.answers, temperature, top_p)
                    row: dict[str, Any] = {"way": way, "prompt": name, "temperature": temperature, "top_p": top_p}
                    row |= exact.compare(prompt, answers, temperature, top_p)
                    row["p_wrong"] = exact.compare(prompt, answers, 1.1 * temperature, top_p)["p"]
                    document["rows"].append(row)
                    row["mean_acceptance_length"] = round(generator.decoder.metrics.mean_acceptance_length, 3)
                    print(json.dumps(row), flush=True)
                    if asked.json:
                        asked.json.write_text(json.dumps(document, indent=1) + "\n")


def draw(generator: TextGenerator, prompt: list[int], count: int, temperature: float, top_p: float) -> list[list[int]]:
    """Return `count` answers of NEW tokens."""
    requests = [
        Request(prompt_token_ids=prompt, max_tokens=NEW, temperature=temperature, top_p=top_p, seed=seed)
        for seed in range(count)
    ]
    return [result.token_ids for result in generator.generate(requests)]


class Exact:
    """transformers' distributions in float64."""

    def __init__(self, target: Path, device: torch.device, least: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(target.parent, gguf_file=target.name, dtype=torch.float32)
        self.model, self.device, self.least = model.double().to(device).eval(), device, least
        self.known = dict[Prefix, torch.Tensor]()

    @torch.no_grad()
    def logits(self, tokens: Prefix) -> torch.Tensor:
        """Return the logits [V] after the tokens, on the host."""
        if tokens not in self.known:
            self.known[tokens] = self.model(torch.tensor([tokens], device=self.device)).logits[0, -1].cpu()
        return self.known[tokens]

    def shares(self, tokens: Prefix, temperature: float, top_p: float) -> torch.Tensor:
        """Return the distribution [V]: of the likeliest tokens, those that are needed to reach `top_p`."""
        shares, ids = (self.logits(tokens) / temperature).softmax(-1).sort(descending=True)
        kept = shares * (shares.cumsum(-1) - shares < top_p)
        return torch.zeros_like(shares).scatter(0, ids, kept / kept.sum())

    def compare(
        self, prompt: list[int], answers: list[list[int]], temperature: float, top_p: float
    ) -> dict[str, float | None]:
        """Return chi-square, summed over all beginnings, its degrees of freedom and its p, None without any.

        Tokens that fewer than 5 are expected of are counted together.
        """
        following = defaultdict[Prefix, Counter[int]](Counter)
        for answer in answers:
            for place, token in enumerate(answer):
                following[tuple(answer[:place])][token] += 1
        total, freedom, beginnings, outside = 0.0, 0, 0, 0
        for beginning, counts in following.items():
            number = counts.total()
            if number < self.least:
                continue
            expected = self.shares((*prompt, *beginning), temperature, top_p) * number
            seen = torch.zeros_like(expected)
            seen[list(counts)] = torch.tensor(list(counts.values()), dtype=seen.dtype)
            outside += int(seen[expected == 0].sum())
            often = expected >= 5
            pairs = [(seen[often], expected[often]), (seen[~often].sum()[None], expected[~often].sum()[None])]
            got, wanted = (torch.cat(each) for each in zip(*pairs, strict=True))
            if wanted[-1] < 5:  # too few for a class of their own: they join the rarest one
                got, wanted = ((each[:-1] + each[-1] * (torch.arange(len(each) - 1) == wanted[:-1].argmin()))
                               for each in (got, wanted))  # fmt: skip
            total += float(((got - wanted) ** 2 / wanted).sum())
            freedom, beginnings = freedom + len(got) - 1, beginnings + 1
        p = float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(total / 2.0, dtype=torch.float64)))
        return {"beginnings": beginnings, "chi_square": round(total, 1), "degrees_of_freedom": freedom,
                "p": p if freedom else None, "outside": outside}  # fmt: skip


if __name__ == "__main__":
    main()
