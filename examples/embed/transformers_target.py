"""A target that is not built by specgraph, any causal language model of transformers, with an EAGLE-3 head of ours.

    python examples/embed/transformers_target.py TARGET_FOLDER DRAFT_FOLDER "def main("

The head's folder says which of the target's hidden states it takes; `load_drafter` takes sizes, embedding and lm_head
from the model itself. One request, greedy; ../one_file.py has batches, and docs/embedding.md has the steps.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from specgraph import DraftConfig, Drafter, allocate_caches, load_drafter, open_platform

BLOCK = 16


class TransformersTarget:
    """A transformers model with its cache: logits and hidden states of consecutive rows."""

    def __init__(self, model) -> None:
        from transformers import DynamicCache

        self.model, self.past = model, DynamicCache(config=model.config)

    def rows(self, token_ids: list[int], aux_layers) -> tuple[Tensor, Tensor]:
        """(logits [T, vocab], the states that enter `aux_layers` [T, len(aux_layers) * hidden_size])"""
        out = self.model(torch.tensor([token_ids]), cache=self.past, output_hidden_states=True)
        # hidden_states[k] enters layer k; the last one is normalised, as a head without aux layers takes it
        return out.logits[0], torch.cat([out.hidden_states[k][0] for k in aux_layers or (-1,)], dim=-1)

    def keep(self, length: int) -> None:
        """Forget the rows after the first `length`."""
        if rejected := self.past.get_seq_length() - length:
            self.past.crop(-rejected)


def generate(model, draft_folder: str, prompt: list[int], max_tokens: int, k: int = 4, max_len: int = 128):
    """Greedy continuation of a prompt, and the mean acceptance length."""
    head = load_drafter(draft_folder, model)
    platform = open_platform("cpu")
    config = DraftConfig(num_speculative_tokens=k, max_num_requests=1, max_model_len=max_len, block_size=BLOCK)
    blocks = list(range(1, 1 + -(-max_len // BLOCK)))  # block 0 is the null block
    caches = allocate_caches(head.attention_layers, 1 + len(blocks), BLOCK, head.dtype, platform.device)
    drafter = Drafter(head, caches, platform, config)
    drafter.capture()
    target, batch = TransformersTarget(model), drafter.inputs(1)
    logits, aux = target.rows(prompt, head.aux_layers)
    hidden, chunk = None, config.prefill_rows[-1]
    for start in range(0, len(prompt), chunk):
        positions = range(start, min(start + chunk, len(prompt)))
        hidden = drafter.prefill(prompt, positions, blocks, aux[start : positions.stop])
    batch.block_table.zero_()
    batch.block_table[0, : len(blocks)] = torch.tensor(blocks)
    batch.start_positions[0] = len(prompt) - 1
    batch.join(0, logits[-1].argmax(), hidden)
    tokens, rounds = [*prompt, int(logits[-1].argmax())], 0
    while len(tokens) < len(prompt) + max_tokens:
        drafts, start = drafter.propose(batch).token_ids[0].tolist(), len(tokens) - 1
        logits, aux = target.rows([tokens[-1], *drafts], head.aux_layers)
        best = logits.argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != best[i]), k)
        target.keep(start + accepted + 1)
        tokens, rounds = tokens + best[: accepted + 1], rounds + 1
        batch.sampled_token_ids[0] = torch.tensor(best)  # accepted drafts, the target's own token, then anything
        batch.num_sampled[0], batch.start_positions[0] = accepted + 1, start
        batch.aux_hidden.copy_(aux)
    drafter.close()
    return tokens[len(prompt) :][:max_tokens], (len(tokens) - len(prompt) - 1) / max(rounds, 1)


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    with torch.inference_mode():
        loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
        ids, length = generate(loaded, sys.argv[2], tokenizer.encode(sys.argv[3]), max_tokens=60)
    print(tokenizer.decode(ids), f"\nmean acceptance length {length:.2f}")
