"""Parallel and stepwise drafters over a paged cache, against dense float64 recomputation of each request by itself."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import prompt_metadata
from draft.test_against_dense import dense_attend
from draft.test_drafters_bit_equal import make_drafter

from specgraph.attention import HostLengths
from specgraph.draft import ProposeBatch

K, LENGTH, BLOCK = 3, 64, 4


class DenseBlock:
    """DFlash: context keys of every accepted row, and a block that sees all of them and all of itself."""

    def __init__(self, head):
        self.head, self.aux = head, []

    def prefill(self, tokens, aux):
        self.aux = [aux]

    def propose(self, tokens, aux):
        self.aux.append(aux)
        layers, past = self.head.attention_layers, {}
        context = torch.cat(self.aux)
        begin = context.shape[0]

        def turn(x, layer, positions):
            cos, sin = layer.rotary.double()[positions][:, None].chunk(2, -1)
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        def store(index, key, value):
            past[index] = turn(key, layers[index], torch.arange(begin)), value

        def attend(index, query, key, value):
            layer, positions = layers[index], begin + torch.arange(query.shape[0])
            key = torch.cat((past[index][0], turn(key, layer, positions)))
            value = torch.cat((past[index][1], value))
            group = layer.num_heads // layer.num_kv_heads
            query = turn(query, layer, positions)
            scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * layer.scale
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1))

        self.head.store_context(self.head.combine(context), store)
        block = torch.tensor([int(tokens[-1])] + [self.head.mask_token_id] * K)
        return self.head.logits(self.head.forward(block, attend)[1:])


class DenseModules:
    """MTP: the whole accepted history through each module in turn, tokens moved up by one, drafts filling the end."""

    def __init__(self, head):
        self.head, self.tokens, self.aux = head, [], []

    def prefill(self, tokens, aux):
        self.tokens, self.aux = [tokens], [aux]

    def propose(self, tokens, aux):
        self.tokens.append(tokens)
        self.aux.append(aux)
        head, tokens, logits = self.head, torch.cat(self.tokens), []
        hidden = head.combine(torch.cat(self.aux))
        for module in range(K):
            attend = dense_attend(head.attention_layers, torch.arange(len(tokens)), {})
            out = head.forward_step(module, tokens, hidden, attend)
            hidden = out.carry
            logits.append(head.logits(out.hidden[-1]))
            tokens = torch.cat((tokens[1:], logits[-1].argmax()[None]))
        return torch.stack(logits)


class DenseMasks:
    """P-EAGLE: every accepted row, then K - 1 rows of the mask token and its hidden state, all causal."""

    def __init__(self, head):
        self.head, self.tokens, self.aux = head, [], []

    def prefill(self, tokens, aux):
        self.tokens, self.aux = [tokens], [aux]

    def propose(self, tokens, aux):
        self.tokens.append(tokens)
        self.aux.append(aux)
        head, masks = self.head, torch.full((K - 1,), self.head.mask_token_id)
        hidden = torch.cat((head.combine(torch.cat(self.aux)), head.mask_hidden.expand(K - 1, -1)))
        tokens = torch.cat((*self.tokens, masks))
        out = head.forward(tokens, hidden, dense_attend(head.attention_layers, torch.arange(len(tokens)), {}))
        return head.logits(out.hidden[-K:])


@pytest.mark.parametrize("lengths", ["device", "host"])
@pytest.mark.parametrize(
    ("kind", "dense"), [("dflash", DenseBlock), ("mtp-modules", DenseModules), ("peagle", DenseMasks)]
)
def test_drafts_follow_the_whole_accepted_history(kind, dense, lengths):
    g = torch.Generator().manual_seed(3)
    head, oracle = make_head(kind, make_target()), make_head(kind, make_target(torch.float64))
    drafter = make_drafter(
        head,
        "merged",
        lengths,
        num_speculative_tokens=K,
        max_num_requests=3,
        max_model_len=LENGTH,
        capture_sizes=[1, 3],
    )
    order = (torch.randperm(3 * LENGTH // BLOCK, generator=g) + 1).view(3, -1).int()
    prompts = [1, 4, 9]
    references = [dense(oracle) for _ in prompts]
    last, starts = [], [n - 1 for n in prompts]
    for r, n in enumerate(prompts):
        tokens, aux = torch.randint(0, VOCAB, (n,), generator=g), torch.randn(n, head.aux_size, generator=g)
        last.append((tokens[-1:], aux[-1:]))
        references[r].prefill(tokens[:-1], aux[:-1].double()) if n > 1 else None
        metadata = prompt_metadata(0, n - 1, order[r].tolist(), BLOCK)
        drafter.prefill_ragged(tokens[:-1], aux[:-1], metadata, HostLengths([n - 1], [n - 1]))
    compared = 0
    for round_ in range(7):
        n = (3, 2, 1, 3)[round_ % 4]
        sampled, rows, counts = torch.randint(0, VOCAB, (n, K + 1), generator=g), [], []
        expected = []
        for r in range(n):
            if last[r] is not None:
                count, fresh = 1, last[r][1]
                sampled[r, 0], last[r] = last[r][0], None
            else:
                count = int(torch.randint(1, K + 2, (), generator=g))
                fresh = torch.randn(count, head.aux_size, generator=g)
            counts.append(count)
            rows += [fresh, 9 * torch.randn(K + 1 - count, head.aux_size, generator=g)]
            expected.append(references[r].propose(sampled[r, :count], fresh.double()))
        result = drafter.propose(
            ProposeBatch(
                sampled_token_ids=sampled,
                num_sampled=torch.tensor(counts, dtype=torch.int32),
                start_positions=torch.tensor(starts[:n]),
                aux_hidden=torch.cat(rows),
                block_table=order[:n],
            )
        )
        for r in range(n):
            top = expected[r].topk(2).values
            assert ((top[:, 0] - top[:, 1]) > 1e-4).all(), "a near tie: choose another seed"
            ids = expected[r].argmax(-1)
            wanted = ids if oracle.draft_to_target is None else ids + oracle.draft_to_target[ids]
            assert result.token_ids[r].tolist() == wanted.tolist(), (round_, r)
            starts[r] += counts[r]
            compared += 1
    assert compared > 12
