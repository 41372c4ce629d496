"""EAGLE-3 in one file: a draft head in plain torch, its graphs, propose, and the verify of a target. Read it first.

    python examples/one_file.py                              # on the CPU
    SPECGRAPH_PLATFORM=cuda python examples/one_file.py      # each propose is one graph launch

The shipped target continues two prompts at once, greedily. In each round the head drafts K tokens per request
(propose). The target then runs over them in one pass, and keeps the tokens that it would have chosen itself (verify).

`specgraph.Drafter` has the draft loop, its graphs and the head's paged attention. The target's attention is below.
docs/embedding.md explains each part, and the further work of a serving engine.
"""

import os
from functools import partial
from pathlib import Path

import specgraph_models
import specgraph_run
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

import specgraph

K, MAX_LEN, NEW_TOKENS, EPS = 4, 256, 60, 1e-5

# ------------------------------------------------------------------------------------------------------- the head


class Eagle3:
    """One decoder layer over the next token's embedding and three hidden states of the target (arXiv 2503.01840).

    It is a `specgraph.DraftHead`. Row j has position j. It takes the hidden states of position j and the token at
    j + 1, and its logits are for the token at j + 2.
    """

    kind, projection, pair_input, ranks = specgraph.ChainKind(), None, None, None  # its methods do all of it
    aux_layers, dtype = (2, 4, 5), torch.float32  # the states that enter these layers of the target

    def __init__(self, folder: Path, target) -> None:
        self.embed_tokens = target.weights()["embed_tokens"]  # the head shares it with the target
        tensors = load_file(folder / "model.safetensors", device=str(self.embed_tokens.device))
        weights = {name.removesuffix(".weight").removeprefix("midlayer."): each for name, each in tensors.items()}
        self.draft_to_target = weights.pop("d2t")  # offsets from draft ids to the target's ids
        self.w = {name: weight.float() for name, weight in weights.items()}
        self.draft_vocab_size, self.hidden_size = self.w["lm_head"].shape
        self.aux_size = len(self.aux_layers) * self.hidden_size
        self.attention_layers = target.attention_layers[:1]  # one layer, of the sizes of the target's
        self.head_dim, self.rotary = self.attention_layers[0].head_dim, self.attention_layers[0].rotary

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (self.hidden_size,), self.w[name], EPS)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """Return the head's input [T, hidden_size] for the target's hidden states [T, 3 * hidden_size]."""
        return F.linear(aux_hidden, self.w["fc"])

    def forward(self, token_ids: Tensor, hidden: Tensor, attend, rows: Tensor | None = None) -> specgraph.DraftOutput:
        """Return the hidden states of `rows`, or of all rows. `attend` rotates, writes keys and values, and attends."""
        x = torch.cat((self.norm(self.embed_tokens[token_ids], "input_layernorm"), self.norm(hidden, "hidden_norm")), 1)
        q, k, v = (F.linear(x, self.w[f"self_attn.{name}_proj"]).unflatten(1, (-1, self.head_dim)) for name in "qkv")
        attended = attend(0, q, k, v).flatten(1)  # 0: the first of `attention_layers`
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
        x = hidden + F.linear(attended, self.w["self_attn.o_proj"])
        y = self.norm(x, "post_attention_layernorm")
        gated = F.silu(F.linear(y, self.w["mlp.gate_proj"])) * F.linear(y, self.w["mlp.up_proj"])
        x = x + F.linear(gated, self.w["mlp.down_proj"])
        return specgraph.DraftOutput(hidden=x, carry=x)  # for `logits`; for the next draft step, as `hidden`

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden, "norm"), self.w["lm_head"])

    def weights(self) -> dict[str, Tensor]:
        """Return all tensors that a graph of the head may read. The capture fails if it reads another one."""
        return {**self.w, "embed_tokens": self.embed_tokens, "d2t": self.draft_to_target, "rotary": self.rotary}


# -------------------------------------------------------------------- the target, with an attention of the engine's own


class Verifier:
    """The target with its KV cache: keys and values of each layer, [requests, MAX_LEN, kv heads, head_dim]."""

    def __init__(self, target, num_requests: int, device: torch.device) -> None:
        self.target = target
        shapes = [(2, num_requests, MAX_LEN, layer.num_kv_heads, layer.head_dim) for layer in target.attention_layers]
        self.cache = [torch.zeros(shape, device=device) for shape in shapes]

    def run(self, rows: slice, token_ids: Tensor, starts: Tensor, aux_layers=()) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of token_ids [n, q] of the requests `rows`, from the positions `starts` on.

        Keys of rejected rows stay in the cache until the next pass, which begins at their position, overwrites them.
        """
        positions = starts[:, None] + torch.arange(token_ids.shape[1], device=starts.device)
        out = self.target.forward(token_ids.flatten(), partial(self.attend, rows, positions), aux_layers)
        return self.target.logits(out.hidden), out.aux_hidden

    def attend(self, rows: slice, positions: Tensor, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the keys and values of layer `index`, and attend over its cache."""
        layer, (keys, values) = self.target.attention_layers[index], self.cache[index][:, rows]
        cos, sin = layer.rotary[positions.flatten()][:, None].chunk(2, -1)

        def rotate(x: Tensor) -> Tensor:
            left, right = x.chunk(2, -1)
            return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

        request = torch.arange(len(positions), device=positions.device)[:, None]
        keys[request, positions] = rotate(k).unflatten(0, positions.shape)
        values[request, positions] = v.unflatten(0, positions.shape)
        q = rotate(q).unflatten(0, positions.shape).transpose(1, 2)
        seen = torch.arange(MAX_LEN, device=positions.device) <= positions[:, None, :, None]
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


# ---------------------------------------------------------------------------------- capture, propose, verify, repeat


class Engine:
    """A host engine that generates greedily for up to `num_requests` prompts at once."""

    def __init__(self, platform, num_requests: int) -> None:
        target_folder, draft_folder = specgraph_run.shipped_pair()
        target = specgraph_models.load_target(target_folder, platform.device, torch.float32)
        self.verifier, self.head = Verifier(target, num_requests, platform.device), Eagle3(draft_folder, target)
        config = specgraph.DraftConfig(num_speculative_tokens=K, max_num_requests=num_requests, max_model_len=MAX_LEN)
        self.blocks = MAX_LEN // config.block_size  # KV blocks of one request
        sizes = 1 + num_requests * self.blocks, config.block_size  # block 0 is the null block: no request owns it
        caches = specgraph.allocate_caches(self.head.attention_layers, *sizes, torch.float32, platform.device)
        self.drafter = specgraph.Drafter(self.head, caches, platform, config)
        self.drafter.capture()  # captures all graphs now: none is captured while requests run

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], int, int]:
        """Return the new tokens of each prompt, and the numbers of drafted and accepted tokens."""
        batch = self.drafter.inputs(len(prompts))  # views of the drafter's own buffers, which its graphs read
        texts = [[*prompt, self.prefill(batch, row, prompt)] for row, prompt in enumerate(prompts)]
        limits = [len(prompt) + max_tokens for prompt in prompts]
        drafted = accepted = 0
        while any(len(text) < limit for text, limit in zip(texts, limits, strict=True)):
            drafts = self.drafter.propose(batch).token_ids  # [n, K]: one graph launch
            self.verify(batch, texts, drafts)
            for row, count in enumerate(batch.num_sampled.tolist()):
                if len(texts[row]) < limits[row]:
                    texts[row] += batch.sampled_token_ids[row, :count].tolist()
                    drafted, accepted = drafted + K, accepted + count - 1
                if len(texts[row]) >= limits[row]:
                    batch.num_sampled[row] = 0  # the request is inert from now on
        return [text[len(p) : limit] for text, p, limit in zip(texts, prompts, limits, strict=True)], drafted, accepted

    def prefill(self, batch, row: int, prompt: list[int]) -> int:
        """Run target and head over a prompt. It joins the first round with its first token, which is returned."""
        tokens = batch.start_positions.new_tensor([prompt])
        logits, aux = self.verifier.run(slice(row, row + 1), tokens, tokens.new_zeros(1), self.head.aux_layers)
        blocks = list(range(1 + row * self.blocks, 1 + (row + 1) * self.blocks))
        batch.join(row, logits[-1].argmax(), self.drafter.prefill(prompt, range(len(prompt)), blocks, aux))
        batch.start_positions[row] = len(prompt) - 1
        batch.block_table[row, : self.blocks] = batch.block_table.new_tensor(blocks)
        return int(logits[-1].argmax())

    def verify(self, batch, texts: list[list[int]], drafts: Tensor) -> None:
        """Run the target over each request's last token and drafts, and write the results for the next propose."""
        starts = drafts.new_tensor([len(text) - 1 for text in texts])
        last = drafts.new_tensor([text[-1:] for text in texts])
        logits, aux = self.verifier.run(slice(len(texts)), torch.cat((last, drafts), 1), starts, self.head.aux_layers)
        best = logits.argmax(-1).view(-1, K + 1)  # the target's token after each row
        batch.sampled_token_ids.copy_(best)  # accepted drafts, the target's own token, then any tokens
        batch.num_sampled.copy_(1 + (drafts == best[:, :K]).long().cumprod(1).sum(1))
        batch.start_positions.copy_(starts)
        batch.aux_hidden.copy_(aux)

    def plain(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return greedy tokens of the target alone, one pass per token."""
        text = list(prompt)
        for start in [0, *range(len(prompt), len(prompt) + max_tokens - 1)]:
            tokens = self.head.draft_to_target.new_tensor([text[start:]])
            logits, _ = self.verifier.run(slice(1), tokens, tokens.new_tensor([start]))
            text.append(int(logits[-1].argmax()))
        return text[len(prompt) :]


@torch.inference_mode()
def main() -> None:
    encoder = Tokenizer.from_file(str(specgraph_run.shipped_pair()[0] / "tokenizer.json"))
    texts = ["def read_chunk(self, size):\n", "class Counter(dict):\n    def __init__(self"]
    prompts = [encoder.encode(text).ids for text in texts]
    engine = Engine(specgraph.open_platform(os.getenv("SPECGRAPH_PLATFORM", "cpu")), len(prompts))
    generated, drafted, accepted = engine.generate(prompts, NEW_TOKENS)
    for text, ids in zip(texts, generated, strict=True):
        print(text + encoder.decode(ids), end="\n\n")
    same = generated == [engine.plain(prompt, NEW_TOKENS) for prompt in prompts]
    print(f"{drafted} tokens drafted, {accepted} accepted, {engine.drafter.launches['propose']} graph launches")
    print(f"the same tokens as plain greedy decoding: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
