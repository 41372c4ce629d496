"""The oracle of drafts: each kind of drafter for one request, with dense attention, in float64, on the host.

It shares no kernels, buffers, padding, block arithmetic or lowerings with the device. The caller gives the drafted
tokens, and the oracle returns each one's logit gap to the best token, so that a near tie counts as no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from specgraph.draft import BlockKind, ChainKind, DraftModelKind, Kind, MaskedKind, ModulesKind, ParallelKind
from specgraph.draft.protocol import DraftHead, DraftOutput, MaskedHead, ModelHead, ParallelHead
from specgraph.errors import ConfigError
from specgraph.ops.linear import Weight
from specgraph_models.dspark import DSparkHead
from specgraph_models.mtp import MtpHead
from torch import Tensor

from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.tiny_models import Head


@dataclass(frozen=True, slots=True)
class Context:
    """One request before a propose: the rows of the propose, and the keys and values before them."""

    token_ids: Tensor
    """int64 [n]: the accepted tokens and the target's own, one per row."""
    aux_hidden: Tensor
    """[n, aux_size]: the target's hidden states of these rows."""
    start: int
    """The position of the first row, with the drafter's `position_offset`."""
    keys: Sequence[Tensor]
    """For each layer, the keys of the positions before the first row, [start, kv_heads, dim]."""
    values: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class DenseDraft:
    """The oracle's results for one request."""

    short: Tensor
    """float64 [K]: the best logit minus the drafted token's, for each draft."""
    keys: list[Tensor]
    """The keys of each layer after the propose, [n, kv_heads, dim]."""
    values: list[Tensor]


def dense_draft(head: Head, context: Context, drafted: Sequence[int]) -> DenseDraft:
    """Draft for one request, by the head's protocol.

    Args:
        head: the head in float64, on the host.
        drafted: the device's drafts. Each later draft is computed after these tokens.
    """
    logits, dense = dense_logits(head, context, list(drafted) or [0])  # with K = 0 the first pass runs, for its KV
    ids = torch.arange(logits.shape[1])
    if head.draft_to_target is not None:
        ids = ids + head.draft_to_target
    taken = (ids == torch.tensor(drafted, dtype=torch.int64)[:, None]).double().argmax(dim=1)
    assert ids[taken].tolist() == list(drafted), "a drafted token is not of the drafter's vocabulary"
    logits = logits[: len(drafted)]
    short = logits.max(dim=1).values - logits.gather(1, taken[:, None])[:, 0]
    return DenseDraft(short, dense.keys, dense.values)


def dense_logits(head: Head, context: Context, drafted: Sequence[int]) -> tuple[Tensor, DenseKeys]:
    """Return the logits of each draft, float64 [K, draft_vocab], and the keys and values after the propose."""
    dense, aux_hidden = dense_keys(head, context), context.aux_hidden.double()
    return oracle_of(head).drafts(head, dense, context.token_ids, aux_hidden, context.start, drafted), dense


def dense_keys(head: Head, context: Context) -> DenseKeys:
    """Return the keys and values of a request before a propose."""
    # A parallel drafter's rows see all keys of their request, even if its layers are marked as causal.
    causal = oracle_of(head).is_causal
    layers = [replace(layer, causal=causal) for layer in head.attention_layers]
    return DenseKeys(layers, context.keys, context.values)


def dense_prompt(
    head: Head, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, num_modules: int
) -> None:
    """Run one prefill pass, as `DraftProgram.prefill` documents it, and keep its keys and values in `dense`.

    Args:
        token_ids: int64, the token of each row, and then the following tokens, which later modules take. Modules repeat
            the last token past the end.
        aux_hidden: [n, aux_size].
        start: position of the first row.
        num_modules: the number of modules used, if the head has one per draft step.
    """
    n = len(aux_hidden)
    dense.at(range(start, start + n))
    hidden = cast(ModelHead, head).combine(aux_hidden.double())
    oracle_of(head).prompt(head, dense, token_ids, hidden, num_modules)


def oracle_of(head: Head) -> Oracle:
    """Return the oracle of a head's kind. Raises ConfigError if there is none."""
    if (oracle := ORACLES.get(head.kind)) is None:
        raise ConfigError(
            f"no float64 drafter is known for heads of the kind {head.kind}: add an Oracle to "
            "specgraph_conformance.draft_oracles.ORACLES"
        )
    return oracle


def _chain(
    head: DraftHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """Run the batch's rows, then one row per draft step, with the token and hidden state of the row before it."""
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
    """Run module `number` as a head of its own. The oracle thus fixes the order of modules, not the head's code."""
    alone = MtpHead(head.sizes, [head.modules[number]], head.embed_tokens, head.lm_head)
    return alone.forward(token_ids, hidden, lambda index, query, key, value: dense.attend(number, query, key, value))


def _modules(
    head: MtpHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """Run the batch's rows through each module in turn. Tokens move up by one each time; the latest draft comes
    last."""
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
    """Return the logits of a block with rows that don't depend on its draft tokens."""
    return head.logits(block_rows(head, dense, token_ids, aux_hidden, start, len(drafted)))


def _in_order(
    head: DSparkHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """Return the logits of a block's rows, each computed after the token that the device drafted before it."""
    rows = block_rows(head, dense, token_ids, aux_hidden, start, len(drafted))
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


def _linear(weight: Weight, *parts: Tensor) -> Tensor:
    assert weight.bias is not None
    return weight.matrix @ torch.cat(parts) + weight.bias


def block_rows(
    head: ParallelHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, num_drafts: int
) -> Tensor:
    """Make context keys from the batch's hidden states, then run one pass over the sampled token and the masks. Return
    the rows that predict a token."""
    dense.at(range(start, start + len(token_ids)))
    head.store_context(head.combine(aux_hidden), dense.store)
    begin, masks = start + len(token_ids), num_drafts - head.sample_from_anchor
    dense.at(range(begin, begin + 1 + masks))
    block = torch.tensor([int(token_ids[-1]), *[head.mask_token_id] * masks])
    return head.forward(block, dense.attend)[-num_drafts:]


def _masked(
    head: MaskedHead, dense: DenseKeys, token_ids: Tensor, aux_hidden: Tensor, start: int, drafted: Sequence[int]
) -> Tensor:
    """Run one causal pass over the batch's rows, followed by a masked row for each draft token except the first."""
    masks = len(drafted) - 1
    dense.at(range(start, start + len(token_ids) + masks))
    hidden = torch.cat([head.combine(aux_hidden), head.mask_hidden.repeat(masks, 1)])
    tokens = torch.cat([token_ids, torch.full((masks,), head.mask_token_id)])
    return head.logits(head.forward(tokens, hidden, dense.attend).hidden[-len(drafted) :])


def _row_prompt(head: DraftHead, dense: DenseKeys, token_ids: Tensor, hidden: Tensor, num_modules: int) -> None:
    """Run one pass over all rows of a prompt."""
    head.forward(token_ids[: len(hidden)], hidden, dense.attend)


def _context_prompt(head: ParallelHead, dense: DenseKeys, token_ids: Tensor, hidden: Tensor, num_modules: int) -> None:
    """Make the context keys of a prompt from its hidden states."""
    head.store_context(hidden, dense.store)


def _modules_prompt(head: MtpHead, dense: DenseKeys, token_ids: Tensor, hidden: Tensor, num_modules: int) -> None:
    """Run each module in turn over a prompt. Each takes tokens one further on than the module before it."""
    for module in range(num_modules):
        hidden = _module(head, module, token_ids[: len(hidden)], hidden, dense).carry
        token_ids = torch.cat([token_ids[1:], token_ids[-1:]])


class Oracle(NamedTuple):
    """The drafts and the prompts of one kind of drafter."""

    drafts: Callable[..., Tensor]
    """(head, dense, token_ids, aux_hidden, start, drafted) -> the logits of each draft."""
    prompt: Callable[..., None] = _row_prompt
    """(head, dense, token_ids, hidden, num_modules) -> None. The keys and values go into `dense`."""
    is_causal: bool = True


ORACLES: dict[Kind[Any], Oracle] = {
    ChainKind(): Oracle(_chain),
    DraftModelKind(): Oracle(_chain),
    ModulesKind(): Oracle(_modules, _modules_prompt),
    MaskedKind(): Oracle(_masked),
    ParallelKind(): Oracle(_block, _context_prompt, is_causal=False),
    BlockKind(): Oracle(_in_order, _context_prompt, is_causal=False),
}
"""The oracle of each kind of head. `NgramKind` has none, as it has no model. A kind of your own
is one more entry."""
