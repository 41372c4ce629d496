"""Greedy speculative decoding of the held-out prompts in plain torch and transformers: what the pair accepts.

Independent of specgraph on purpose: its figures are what specgraph's own are compared with. float32, one request at a
time, no graphs. Metrics are vLLM's: mean acceptance length = 1 + accepted / drafts; acceptance at position i = drafts
whose token i was accepted / drafts.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import corpus
import figures
import torch
from chain_heads import Eagle3Head
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM


@dataclass
class Target:
    """The target and the keys and values of the tokens it has seen."""

    model: LlamaForCausalLM
    aux_layers: tuple[int, int, int]
    cache: DynamicCache = field(default_factory=DynamicCache)

    def forward(self, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
        """Append tokens; return the greedy token after each, and their auxiliary hidden states [1, T, 3H]."""
        ids = torch.tensor([tokens])
        output = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, output_hidden_states=True)
        aux = torch.cat([output.hidden_states[layer] for layer in self.aux_layers], dim=-1)
        return output.logits[0].argmax(-1).tolist(), aux


class Drafter:
    """The head and the keys and values of its rows."""

    def __init__(self, head: Eagle3Head, embedding: torch.nn.Embedding) -> None:
        self.head, self.embedding, self.target_ids = head, embedding, head.target_ids().tolist()
        shape = (1, head.sizes.kv_heads, 0, head.sizes.head_dim)
        self.keys, self.values = torch.empty(shape), torch.empty(shape)

    def rows(self, tokens: list[int], hidden: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Append rows; return the last row's draft token (a target id) and its hidden state [1, 1, H]."""
        past, new = self.keys.shape[2], len(tokens)
        positions = torch.arange(past, past + new)
        query, key, value, residual = self.head.rows(self.embedding(torch.tensor([tokens])), hidden, positions)
        self.keys, self.values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        visible = torch.arange(past + new) <= positions[:, None]
        attended = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=visible, enable_gqa=True)
        logits, hidden = self.head.finish(attended, residual)
        return self.target_ids[int(logits[0, -1].argmax())], hidden[:, -1:]

    def propose(self, tokens: list[int], aux: torch.Tensor, count: int) -> list[int]:
        """Draft `count` tokens. Row i of `tokens` is the token after the one whose aux states are row i of `aux`."""
        kept = self.keys.shape[2] + len(tokens)
        token, hidden = self.rows(tokens, self.head.combine(aux))
        drafts = [token]
        while len(drafts) < count:
            token, hidden = self.rows([token], hidden)
            drafts.append(token)
        # Rows of the chain hold the head's own hidden states; the next round writes them again from the target's.
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        return drafts


@dataclass
class Acceptance:
    """Counts over all rounds."""

    drafts: int = 0
    per_position: list[int] = field(default_factory=list)

    def add(self, accepted: int, count: int) -> None:
        self.drafts += 1
        self.per_position = self.per_position or [0] * count
        for position in range(accepted):
            self.per_position[position] += 1

    @property
    def mean_length(self) -> float:
        return 1 + sum(self.per_position) / self.drafts

    @property
    def rates(self) -> list[float]:
        return [count / self.drafts for count in self.per_position]


def speculate(
    target: Target, drafter: Drafter, prompt: list[int], new_tokens: int, count: int, eos: int, totals: Acceptance
) -> list[int]:
    """Generate until `new_tokens` or eos; adds every round to `totals` and returns the new tokens."""
    greedy, aux = target.forward(prompt)
    generated = [greedy[-1]]
    pending = [*prompt[1:], greedy[-1]]  # tokens that the drafter has not seen, one behind the aux states' tokens
    while len(generated) < new_tokens and eos not in generated:
        drafts = drafter.propose(pending, aux, count)
        greedy, aux = target.forward([generated[-1], *drafts])
        accepted = 0
        while accepted < count and drafts[accepted] == greedy[accepted]:
            accepted += 1
        totals.add(accepted, count)
        generated += greedy[: accepted + 1]
        pending, aux = greedy[: accepted + 1], aux[:, : accepted + 1]
        if accepted < count:
            target.cache.crop(accepted - count)  # a negative number: how many tokens to take away
    return trim(generated, new_tokens, eos)


def continue_greedily(target: Target, prompt: list[int], new_tokens: int, eos: int) -> list[int]:
    """The target alone, one token at a time."""
    generated = [target.forward(prompt)[0][-1]]
    while len(generated) < new_tokens and generated[-1] != eos:
        generated.append(target.forward(generated[-1:])[0][-1])
    return generated


def trim(tokens: list[int], count: int, eos: int) -> list[int]:
    """At most `count` tokens, and none after the first eos."""
    tokens = tokens[:count]
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def main() -> None:
    here = Path(__file__).parent
    pair = here.parents[1] / "specgraph" / "pairs" / "tiny-python"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=pair / "target")
    parser.add_argument("--draft", type=Path, default=pair / "eagle3")
    parser.add_argument("--prompts", type=Path, default=here / "prompts.jsonl")
    parser.add_argument("--figures", type=Path, help="also record the figures in this file")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, help="only so many prompts")
    parser.add_argument("--show", action="store_true", help="print every continuation")
    arguments = parser.parse_args()

    model = LlamaForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    head = Eagle3Head.load(arguments.draft).eval()
    encoder = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    eos, count, new_tokens = model.config.eos_token_id, arguments.num_speculative_tokens, arguments.new_tokens
    totals, equal, written, seconds = Acceptance(), 0, 0, {"speculative": 0.0, "target": 0.0}
    prompts = corpus.read_prompts(arguments.prompts)[: arguments.limit]
    with torch.inference_mode():
        for prompt in prompts:
            ids = encoder.encode(prompt["text"]).ids
            start = time.perf_counter()
            drafter = Drafter(head, model.get_input_embeddings())
            tokens = speculate(Target(model, head.aux_layers), drafter, ids, new_tokens, count, eos, totals)
            middle = time.perf_counter()
            expected = continue_greedily(Target(model, head.aux_layers), ids, new_tokens, eos)
            seconds["speculative"] += middle - start
            seconds["target"] += time.perf_counter() - middle
            equal += tokens == expected
            written += len(tokens)
            if arguments.show:
                print(f"--- {prompt['id']} {prompt['source']}\n{prompt['text']}\x1b[32m{encoder.decode(tokens)}\x1b[0m")

    measured = {
        "prompts": len(prompts),
        "num_speculative_tokens": count,
        "new_tokens": new_tokens,
        "tokens_written": written,
        "rounds": totals.drafts,
        "mean_acceptance_length": round(totals.mean_length, 4),
        "acceptance_per_position": [round(rate, 4) for rate in totals.rates],
        "outputs_equal_to_target_only": equal,
        "tokens_per_second": {name: round(written / value, 1) for name, value in seconds.items()},
    }
    for name, value in measured.items():
        print(f"{name:30} {value}")
    if arguments.figures:
        figures.record(arguments.figures, "evaluation", measured, torch.device("cpu"))


if __name__ == "__main__":
    main()
