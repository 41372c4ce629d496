"""The drafter over a paged cache, against a dense float64 chain recomputed from each request's whole history."""

from __future__ import annotations

import json

import pytest
import torch
from draft.rounds import LoggedHead
from specgraph_models.checkpoints import load_drafter, load_target
from tiny_checkpoints import VOCAB, write_eagle3, write_target

from specgraph.attention import PagedAttention, PagedHostAttention, allocate_caches
from specgraph.cpu import CpuPlatform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch

LENGTH, BLOCK = 64, 4


def dense_attend(layers, positions, past, window=None, stored=lambda x: x, causal=True):
    """Attention in float64 over `past` and these rows, at most `window` keys; `past` gets keys and values, as
    `stored` leaves them."""

    def turn(x, layer):
        cos, sin = layer.rotary.double()[positions][:, None].chunk(2, -1)
        a, b, rest = x.tensor_split((cos.shape[-1], 2 * cos.shape[-1]), -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def attend(index, query, key, value):
        layer = layers[index]
        query, key, value = turn(query, layer), stored(turn(key, layer)), stored(value)
        if index in past:
            key, value = torch.cat((past[index][0], key)), torch.cat((past[index][1], value))
        past[index] = key, value
        group = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * layer.scale
        rows, columns = query.shape[0], key.shape[0]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows if causal else columns)
        if window is not None:
            seen = seen.triu(columns - rows - window + 1)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))

    return attend


def dense_chain(head, tokens, aux, k, window=None, stored=lambda x: x):
    """Logits [k, draft_vocab] and draft tokens after rows (tokens[i], aux[i]) at positions 0.., greedy."""
    past, logits, drafts = {}, [], []
    layers = head.attention_layers
    out = head.forward(tokens, head.combine(aux), dense_attend(layers, torch.arange(len(tokens)), past, window, stored))
    hidden, carry = out.hidden[-1:], out.carry[-1:]
    for step in range(k):
        logits.append(head.logits(hidden)[0])
        token = logits[-1].argmax()
        if head.draft_to_target is not None:
            token = token + head.draft_to_target[token]
        drafts.append(int(token))
        position = torch.tensor([len(tokens) + step])
        out = head.forward(token[None], carry, dense_attend(layers, position, past, window, stored))
        hidden, carry = out.hidden, out.carry
    return torch.stack(logits), drafts


@pytest.mark.parametrize("lengths", ["device", "host"])
@pytest.mark.parametrize(("lowering", "window"), [("eager", None), ("merged", None), ("merged", 5)])
def test_drafts_follow_the_whole_accepted_history(tmp_path, lowering, window, lengths):
    """Or the last `window` tokens of it, with a head whose layer has a sliding window."""
    k, platform, g = 4, CpuPlatform(), torch.Generator().manual_seed(7)
    write_target(tmp_path / "t")
    write_eagle3(tmp_path / "d")
    if window is not None:
        path = tmp_path / "d" / "config.json"
        sliding = {"sliding_window": window, "layer_types": ["sliding_attention"]}
        path.write_text(json.dumps(json.loads(path.read_text()) | sliding))
    oracle = load_drafter(tmp_path / "d", load_target(tmp_path / "t", dtype=torch.float64))
    head = load_drafter(tmp_path / "d", load_target(tmp_path / "t"))
    logged = LoggedHead(head, torch.zeros(k, 3, head.draft_vocab_size))
    config = DraftConfig(
        num_speculative_tokens=k, max_num_requests=3, max_model_len=LENGTH, block_size=BLOCK, decode=lowering
    )
    caches = allocate_caches(head.attention_layers, 1 + 3 * LENGTH // BLOCK, BLOCK, torch.float32, platform.device)
    attention = PagedHostAttention(platform) if lengths == "host" else PagedAttention()
    drafter = Drafter(logged, caches, platform, config, attention=attention)
    logged.draft_step = drafter.buffers.draft_step
    drafter.capture()
    order = (torch.randperm(3 * LENGTH // BLOCK, generator=g) + 1).view(3, -1).int()
    prompts = [3, 4, 17]
    tokens = [torch.randint(0, VOCAB, (n,), generator=g) for n in prompts]
    aux = [torch.randn(n, head.aux_size, generator=g) for n in prompts]
    for r, n in enumerate(prompts):  # rows 0 .. n-2; the last row enters the first propose
        prompt = [0, *tokens[r][:-1].tolist()]  # a row takes the token after it
        drafter.prefill(prompt, range(n), order[r].tolist(), aux[r])
    compared = 0
    for round_ in range(8):
        n = (3, 2, 1, 3)[round_ % 4] if round_ else 3
        counts, sampled, rows, starts = [], torch.randint(0, VOCAB, (n, k + 1), generator=g), [], []
        for r in range(n):
            if round_ == 0:
                sampled[r, 0], fresh = tokens[r][-1], aux[r][-1:]
                counts.append(1)
                starts.append(len(tokens[r]) - 1)
            else:
                counts.append(int(torch.randint(1, k + 2, (), generator=g)))
                starts.append(len(tokens[r]))
                fresh = torch.randn(counts[r], head.aux_size, generator=g)
                tokens[r] = torch.cat([tokens[r], sampled[r, : counts[r]]])
                aux[r] = torch.cat([aux[r], fresh])
            junk = torch.randn(k + 1 - counts[r], head.aux_size, generator=g) * 5  # rejected rows
            rows += [fresh, junk]
        result = drafter.propose(
            ProposeBatch(
                sampled_token_ids=sampled,
                num_sampled=torch.tensor(counts, dtype=torch.int32),
                start_positions=torch.tensor(starts),
                aux_hidden=torch.cat(rows),
                block_table=order[:n],
            )
        )
        for r in range(n):
            logits, drafts = dense_chain(oracle, tokens[r], aux[r].double(), k, window)
            torch.testing.assert_close(logged.log[:, r].double(), logits, atol=2e-4, rtol=1e-4)
            top = logits.topk(2).values
            assert ((top[:, 0] - top[:, 1]) > 1e-3).all(), "a near tie: choose another seed"
            assert result.token_ids[r].tolist() == drafts
            compared += 1
    assert compared > 15
