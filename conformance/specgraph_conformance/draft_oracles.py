"""The oracle of drafts: each kind of drafter for one request, with dense attention, in float64, on the host.

Independent of kernels, buffers, padding, block arithmetic and lowerings. The drafted tokens are given: an oracle says
how far each falls short of the best, so that a near tie on the device is no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from specgraph.draft.protocol import DraftHead, DraftOutput, MaskedHead, ModelHead, ParallelHead
from specgraph.ops.linear import Weight
from specgraph_models.dspark import DSparkHead
from specgraph_models.mtp import MtpHead
from torch import Tensor

from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.tiny_models import Head


@dataclass(frozen=True, slots=True)
class DenseDraft:
    """One request's drafts by the oracle."""

    short: Tensor
    """float64 [K]: how much lower than the best each drafted token's logit is."""
    keys: list[Tensor]
    """Per layer, all keys after the propose, [n, kv_heads, dim]."""
    values: list[Tensor]


def dense_draft(
    head: Head,
    token_ids: Tensor,
    aux_hidden: Tensor,
    start: int,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    drafted: Sequence[int],
    position_offset: int = 0,
) -> DenseDraft:
    """Draft for one request, as the head's protocol says.

    Args:
        head: in float64, on the host.
        token_ids: int64 [n], the accepted tokens and the target's own, one per row.
        aux_hidden: [n, aux_size], the target's hidden states of these rows.
        start: the target's position of the first row.
        keys, values: per layer, those of the positions before the first row.
        drafted: the device's drafts, which the oracle goes on with.
        position_offset: see `Drafter.position_offset`.
    """
    dense = _dense(head, keys, values)
    aux_hidden, steps = aux_hidden.double(), list(drafted) or [0]  # with K 0 the first pass runs for its KV
    logits = ORACLES[head.kind].drafts(head, dense, token_ids, aux_hidden, start + position_offset, steps)
    ids = torch.arange(logits.shape[1])
    if head.draft_to_target is not None:
        ids = ids + head.draft_to_target
    taken = (ids == torch.tensor(drafted, dtype=torch.int64)[:, None]).double().argmax(dim=1)
    assert ids[taken].tolist() == list(drafted), "a drafted token is not of the drafter's vocabulary"
    logits = logits[: len(drafted)]
    short = logits.max(dim=1).values - logits.gather(1, taken[:, None])[:, 0]
    return DenseDraft(short, dense.keys, dense.values)


def one_pass_logits(
    head: Head,
    token_ids: Tensor,
    aux_hidden: Tensor,
    start: int,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    num_drafts: int,
) -> Tensor:
    """The logits of a drafter that drafts all positions in one pass, float64 [num_drafts, draft_vocab]; arguments as in
    `dense_draft`."""
    dense = _dense(head, keys, values)
    return ORACLES[head.kind].drafts(head, dense, token_ids, aux_hidden.double(), start, [0] * num_drafts)


def block_rows(
    head: ParallelHead,
    token_ids: Tensor,
    aux_hidden: Tensor,
    start: int,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    num_drafts: int,
) -> Tensor:
    """The rows of a block that predict a token, float64 [num_drafts, hidden_size]; arguments as in `dense_draft`."""
    return _block_rows(head, _dense(head, keys, values), token_ids, aux_hidden.double(), start, num_drafts)


def dense_prompt(
    head: Head, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, num_modules: int
) -> None:
    """Run one pass of a prompt, as `DraftProgram.prefill` says, into `dense`.

    Args:
        token_ids: int64 [n], what the rows take, and for later modules tokens that follow; past the last one, the last.
        aux_hidden: [n, aux_size].
        start: position of the first row.
        num_modules: how many modules are used, of a head with one per step.
    """
    n = len(aux_hidden)
    dense.at(range(start, start + n))
    hidden = cast(ModelHead, head).combine(aux_hidden.double())
    ORACLES[head.kind].prompt(head, dense, token_ids, hidden, num_modules)


def _dense(head: Head, keys: Sequence[Tensor], values: Sequence[Tensor]) -> DenseKeys:
    # A parallel drafter's rows see all keys of their request, whatever its layers say of themselves.
    causal = ORACLES[head.kind].is_causal
    return DenseKeys([replace(layer, causal=causal) for layer in head.attention_layers], keys, values)


def _chain(
    head: DraftHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """Rows of the round, then one row per step, each with the token and the hidden state of the one before."""
    dense.at(range(start, start + len(token_ids)))
    out = head.forward(token_ids, head.combine(aux_hidden), dense.attend)
    logits = [head.logits(out.hidden[-1:])]
    carry = out.carry[-1:]
    for step, token in enumerate(drafted[:-1]):
        dense.at([start + len(token_ids) + step])
        out = head.forward(torch.tensor([token]), carry, dense.attend)
        carry = out.carry
        logits.append(head.logits(out.hidden))
    return torch.cat(logits)


def _module(head: MtpHead, number: int, token_ids: Tensor, hidden: Tensor, dense: DenseKeys) -> DraftOutput:
    """Module `number` as a head of its own, so that the order of modules is the oracle's and not the head's."""
    alone = MtpHead(head.sizes, [head.modules[number]], head.embed_tokens, head.lm_head)
    return alone.forward(token_ids, hidden, lambda index, query, key, value: dense.attend(number, query, key, value))


def _modules(
    head: MtpHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """Rows of the round through each module in turn, their tokens moved up by one, the latest draft last."""
    hidden, logits = head.combine(aux_hidden), list[Tensor]()
    for module, token in enumerate(drafted):
        dense.at(range(start, start + len(token_ids)))
        out = _module(head, module, token_ids, hidden, dense)
        hidden = out.carry
        logits.append(head.logits(out.hidden[-1:]))
        token_ids = torch.cat([token_ids[1:], torch.tensor([token])])
    return torch.cat(logits)


def _block(
    head: ParallelHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """The logits of a block whose rows know no draft token."""
    return head.logits(_block_rows(head, dense, token_ids, aux_hidden, start, len(drafted)))


def _in_order(
    head: DSparkHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """The logits of a block's rows, each after the token that the device drafted before it."""
    rows = _block_rows(head, dense, token_ids, aux_hidden, start, len(drafted))
    before, markov, logits = [int(token_ids[-1]), *drafted[:-1]], head.markov, head.logits(rows)
    state, added = torch.zeros_like(markov.embed[0]), list[Tensor]()
    for row, token in zip(rows, before, strict=True):
        taken = markov.embed[token]
        if markov.gate is not None:
            taken = taken * torch.sigmoid(_linear(markov.gate, row, taken))
        if markov.cell is not None:
            gate, candidate, out = _linear(markov.cell, state, taken, row).chunk(3)
            state = torch.sigmoid(gate) * state + torch.sigmoid(-gate) * torch.tanh(candidate)
            taken = torch.tanh(out)
        added.append(markov.output.matrix @ taken)
    return logits + torch.stack(added)


def dense_confidence(head: DSparkHead, rows: Tensor, before: Sequence[int]) -> Tensor:
    """The confidence of rows [K, hidden_size], each after the token before it."""
    confidence = head.confidence_head
    assert confidence is not None
    known = torch.cat((rows, head.markov.embed[list(before)]), dim=1)
    return torch.sigmoid(known @ confidence.weight[0])


def _linear(weight: Weight, *parts: Tensor) -> Tensor:
    assert weight.bias is not None
    return weight.matrix @ torch.cat(parts) + weight.bias


def _block_rows(
    head: ParallelHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, num_drafts: int
) -> Tensor:
    """Context keys from the round's hidden states, then one pass over the sampled token and masks: the rows that
    predict a token."""
    dense.at(range(start, start + len(token_ids)))
    head.store_context(head.combine(aux_hidden), dense.store)
    begin, masks = start + len(token_ids), num_drafts - head.sample_from_anchor
    dense.at(range(begin, begin + 1 + masks))
    block = torch.tensor([int(token_ids[-1]), *[head.mask_token_id] * masks])
    return head.forward(block, dense.attend)[-num_drafts:]


def _masked(
    head: MaskedHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """One causal pass over the round's rows and, behind them, a masked row for each draft token but the first."""
    masks = len(drafted) - 1
    dense.at(range(start, start + len(token_ids) + masks))
    hidden = torch.cat([head.combine(aux_hidden), head.mask_hidden.repeat(masks, 1)])
    tokens = torch.cat([token_ids, torch.full((masks,), head.mask_token_id)])
    return head.logits(head.forward(tokens, hidden, dense.attend).hidden[-len(drafted) :])


def _row_prompt(head: DraftHead, dense: DenseKeys, token_ids: Tensor, hidden: Tensor, num_modules: int) -> None:
    """One pass over all rows."""
    head.forward(token_ids[: len(hidden)], hidden, dense.attend)


def _context_prompt(head: ParallelHead, dense: DenseKeys, token_ids: Tensor, hidden: Tensor, num_modules: int) -> None:
    """Context alone, of hidden states."""
    head.store_context(hidden, dense.store)


def _modules_prompt(head: MtpHead, dense: DenseKeys, token_ids: Tensor, hidden: Tensor, num_modules: int) -> None:
    """Each module in turn, whose tokens are one further on."""
    for module in range(num_modules):
        hidden = _module(head, module, token_ids[: len(hidden)], hidden, dense).carry
        token_ids = torch.cat([token_ids[1:], token_ids[-1:]])


class Oracle(NamedTuple):
    """The drafts and the prompts of one kind of drafter."""

    drafts: Callable[..., Tensor]
    """(head, dense, token_ids, aux_hidden, start, drafted) -> the logits of each draft"""
    prompt: Callable[..., None] = _row_prompt
    """(head, dense, token_ids, hidden, num_modules)"""
    is_causal: bool = True


ORACLES = {
    "chain": Oracle(_chain),
    "draft_model": Oracle(_chain),
    "modules": Oracle(_modules, _modules_prompt),
    "masked": Oracle(_masked),
    "parallel": Oracle(_block, _context_prompt, is_causal=False),
    "block": Oracle(_in_order, _context_prompt, is_causal=False),
}
"""The oracle of each kind of head that is a model."""
