"""Broken draft ops: rows of a pass, copies, sampling, verification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants.registry import mutant
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

import specgraph.ops.draft_sampling
import specgraph.ops.kv_cache
import specgraph.ops.noise
from specgraph import ops
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.copies import BatchTensors
from specgraph.ops.past_rows import PastRows


@mutant("mixed-requests-in-verify", "specgraph_run.decoder.ops:verify_drafts")
def one_temperature(
    real: Any, logits: Tensor, drafts: Any, starts: Any, how: decoder_ops.Acceptance, sampled: Any
) -> Any:
    """Rejection sampling takes request 0's temperature for all requests."""
    if (warm := how.temperature) is not None:
        how = how._replace(temperature=warm[:1].expand_as(warm))
    return real(logits, drafts, starts, how, sampled)


@mutant("mixed-requests-in-verify-largest", "specgraph_run.decoder.ops:verify_drafts")
def largest_temperature(
    real: Any, logits: Tensor, drafts: Any, starts: Any, how: decoder_ops.Acceptance, sampled: Any
) -> Any:
    """Rejection sampling takes the largest temperature of the batch for all requests that sample."""
    if (warm := how.temperature) is not None:
        how = how._replace(temperature=torch.where(warm > 0, warm.max(), warm))
    return real(logits, drafts, starts, how, sampled)


@mutant("mixed-requests-in-verify-no-draft", "specgraph_run.decoder.ops:verify_drafts")
def no_draft_is_token_0(real: Any, logits: Any, drafts: Any, *rest: Any) -> Any:
    """Verification takes -1, no draft token, for token 0."""
    return real(logits, drafts.clamp(min=0), *rest)


@mutant("mixed-requests-in-verify-inert", "specgraph_run.decoder.ops:verify_drafts")
def inert_requests_sample(real: Any, logits: Any, drafts: Any, starts: Any, *rest: Any) -> Any:
    """Verification gives tokens to inert requests."""
    return real(logits, drafts, starts.clamp(min=0), *rest)


@mutant("mixed-requests-in-verify-no-probs", "specgraph_run.decoder.ops:verify_drafts")
def missing_probs_are_uniform(
    real: Any, logits: Tensor, drafts: Tensor, starts: Any, acceptance: decoder_ops.Acceptance, sampled: Any
) -> Any:
    """Without draft probabilities, rejection sampling takes a uniform distribution for the drafter's."""
    vocab = logits.shape[-1]
    if acceptance.temperature is not None and acceptance.draft_probs is None:
        uniform = torch.full((*drafts.shape, vocab), 1 / vocab, device=logits.device)
        acceptance = acceptance._replace(draft_probs=uniform)
    return real(logits, drafts, starts, acceptance, sampled)


@mutant("mixed-requests-in-verify-no-map", "specgraph_run.decoder.ops:verify_drafts")
def vocabulary_map_ignored(
    real: Any, logits: Tensor, drafts: Any, starts: Any, how: decoder_ops.Acceptance, sampled: Any
) -> Any:
    """Rejection sampling reads the drafter's probabilities as if its token ids were the target's."""
    probs = how.draft_probs
    if how.temperature is not None:
        if probs is not None and how.draft_to_target is not None:
            probs = torch.nn.functional.pad(probs, (0, logits.shape[-1] - probs.shape[-1]))
        how = how._replace(draft_probs=probs, draft_to_target=None)
    return real(logits, drafts, starts, how, sampled)


@mutant("parallel-block-sampling", "specgraph.ops:draft_from_logits")
def block_temperature_ignored(real: Any, logits: Tensor, drafts: ops.Drafts, draws: ops.Draws | None = None) -> None:
    """A parallel drafter's distributions leave out the temperature."""
    real(logits, drafts, draws)
    if draws is not None and drafts.draft_step is None:
        probs = draws.draft_probs
        plain = logits.float().softmax(-1).view(probs.shape)
        probs.copy_(torch.where((draws.temperature > 0)[:, None, None], plain, probs))


@mutant("parallel-block-sampling-one-noise", "specgraph.ops:draft_from_logits")
def block_noise_shared(real: Any, logits: Tensor, drafts: ops.Drafts, draws: ops.Draws | None = None) -> None:
    """All rows of a parallel drafter's block take the noise and the logits of the first one."""
    if draws is not None and drafts.draft_step is None:
        shape = drafts.draft_token_ids.shape
        logits = logits.view(*shape, -1)[:, :1].expand(*shape, -1).reshape(logits.shape)
    real(logits, drafts, draws)


@mutant("parallel-block-sampling-transposed", "specgraph.ops:draft_from_logits")
def block_transposed(real: Any, logits: Tensor, drafts: ops.Drafts, draws: ops.Draws | None = None) -> None:
    """A parallel drafter's greedy tokens have rows and columns exchanged."""
    real(logits, drafts, draws)
    if draws is None and drafts.draft_step is None:
        tokens = drafts.draft_token_ids
        tokens.copy_(tokens.T.reshape(tokens.shape).clone())


@mutant("parallel-block-rows", "specgraph.ops:begin_rows")
def block_begins_early(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
    """A parallel drafter's block begins at the last accepted row instead of after it."""
    real(given, plan, rows, *past)
    if plan.after_sampled:
        rows.positions.copy_((rows.positions - 1).clamp(min=0))


@mutant("parallel-block-rows-rejected", "specgraph.ops:begin_rows")
def block_stores_rejected(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
    """Rejected rows of a parallel drafter's context are written to the cache."""
    real(given, plan, rows, *past)
    if rows.context_slots is not None:
        only = {"context_positions": torch.empty_like(rows.context_slots), "rows_without_block": None}
        others = Rows(*(None if tensor is None else tensor.clone() for tensor in rows))
        real(every_token_sampled(given), plan, others._replace(context_slots=rows.context_slots, **only), *past)


def every_token_sampled(given: RowInputs) -> RowInputs:
    """The round as if nothing of it had been rejected."""
    assert given.token_ids is not None
    assert given.num_sampled is not None
    counts = torch.where(given.num_sampled > 0, given.token_ids.shape[1], 0)
    return given._replace(num_sampled=counts.to(given.num_sampled.dtype))


@mutant("parallel-block-rows-masked", "specgraph.ops:begin_rows")
def masked_rows_after_rejected(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
    """Masked rows (P-EAGLE) follow the last row of the round instead of the last accepted one."""
    real(given, plan if rows.hidden_rows is None else every_token_sampled(given), rows, *past)


@mutant("prompt-padding", "specgraph.ops:begin_rows")
def prompt_padding_writes(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
    """Padded rows of a prompt pass have slots."""
    counts = given.num_sampled
    if counts is not None and given.token_ids is None:
        given = given._replace(num_sampled=torch.where(counts > 0, counts + 1, counts))
    real(given, plan, rows, *past)


@mutant("prompt-padding-length", "specgraph.ops:begin_rows")
def prompt_length_of_real_rows(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
    """The length of a padded prompt pass counts its real rows only, so that each row sees too few keys."""
    real(given, plan, rows, *past)
    counts = given.num_sampled
    if counts is not None and given.token_ids is None:
        rows.seq_lens.copy_(torch.where(counts > 0, given.start_positions + counts, 0))


@mutant("stale-block-table", "specgraph.ops:load_batch")
def stale_block_table(real: Any, given: BatchTensors, to: BatchTensors) -> None:
    """A smaller block table leaves the columns of the larger one before it."""
    n, width = given.block_table.shape
    tail = to.block_table[:n, width:].clone()
    real(given, to)
    to.block_table[:n, width:].copy_(tail)


@mutant("stale-block-table-requests", "specgraph.ops:load_batch")
def stale_requests(real: Any, given: BatchTensors, to: BatchTensors) -> None:
    """A smaller round leaves the requests after it alive."""
    n = given.num_sampled.shape[0]
    tail = to.num_sampled[n:].clone()
    real(given, to)
    to.num_sampled[n:].copy_(tail)


@mutant("module-token-shift", "specgraph.ops:shift_token_ids")
def latest_in_the_last_row(real: Any, ids: Tensor, last_rows: Tensor, latest: Tensor, *rest: Any) -> Any:
    """The latest draft token goes to the last row of a request instead of its last accepted one."""
    q = ids.shape[0] // latest.shape[0]
    return real(ids, torch.arange(1, latest.shape[0] + 1, device=ids.device) * q - 1, latest, *rest)


@mutant("module-past-rows", "specgraph.ops:keep_rows")
def rejected_rows_are_kept(
    real: Any, tokens: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, *rest: Any
) -> None:
    """Rows of a round are kept for later rounds whether accepted or not."""
    block_size = rest[-1]
    after = torch.cat([slots[:1], torch.where(slots[:-1] % block_size < block_size - 1, slots[:-1] + 1, -1)])
    follows = (slots < 0) & (positions > 0) & (after > 0)
    real(tokens, hidden, positions, torch.where(follows, after, slots), *rest)


@mutant("module-past-rows-first", "specgraph.ops:keep_rows")
def earlier_rows_stay(real: Any, *args: Any) -> None:
    """A row is kept only where its entry is empty: an entry is not written twice."""
    past: PastRows = args[4]
    before, used = [tensor.clone() for tensor in past], past.positions >= 0
    real(*args)
    for tensor, old in zip(past, before, strict=True):
        tensor.copy_(torch.where(used[..., None] if tensor.dim() == 3 else used, old, tensor))


@mutant("module-past-rows-any", "specgraph.ops:begin_rows")
def positions_of_entries_are_not_compared(
    real: Any, given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None = None
) -> None:
    """Past rows take the entry of their place in the block, whatever position it holds."""
    if past is not None:
        wanted, kept, size = past.positions.clone(), past.positions.shape[1], plan.block_size
        for back in range(1, plan.past + 1):
            position = (given.start_positions - back).clamp(min=0)
            block = given.block_table.gather(1, (position // size)[:, None])[:, 0].long()
            wanted.view(-1).index_put_((block * kept + position % size % kept,), position)
        past = past._replace(positions=wanted)
    real(given, plan, rows, past)


@mutant("module-past-rows-none", "specgraph.ops:begin_rows")
def past_rows_are_not_found(
    real: Any, given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None = None
) -> None:
    """No row before the round is computed again, so keys that were written with draft tokens stay."""
    if past is not None:
        past = past._replace(positions=torch.full_like(past.positions, -1))
    real(given, plan, rows, past)


@mutant("synthetic-acceptance", "specgraph_run.decoder.ops:verify_drafts")
def first_chance_for_all(real: Any, *args: Any) -> Any:
    """Synthetic verification accepts every draft token with the chance of the first."""
    *given, acceptance, sampled = args
    if (chances := acceptance.chances) is not None:
        acceptance = acceptance._replace(chances=chances[:1].expand_as(chances).contiguous())
    return real(*given, acceptance, sampled)


@mutant("fused-linears", "specgraph_models.ops:norm_gate_up")
def gate_and_up_exchanged(real: Any, x: Any, norm: Any, weight: Any) -> Any:
    """Gate and up rows of a fused MLP are exchanged."""
    return real(x, norm, weight._replace(matrix=torch.cat(weight.matrix.chunk(2)[::-1])))


@mutant("fused-linears-one-norm", "specgraph_models.ops:pair_linear")
def hidden_norm_dropped(real: Any, ids: Any, hidden: Any, pair: Any, weight: Any) -> Any:
    """The fused first linear of a draft head leaves the hidden state's norm out."""
    return real(ids, hidden, pair._replace(hidden_norm=None), weight)


@mutant("fused-linears-taps", "specgraph_models.ops:convolve_blocks")
def whole_text(real: Any, x: Tensor, base: Tensor, groups: Tensor, rows: int) -> Tensor:
    """A convolution inside blocks goes on from the block before."""
    return real(x, base, groups, x.shape[0])


@mutant("fused-linears-gates", "specgraph_models.ops:next_state")
def gates_exchanged(real: Any, ids: Tensor, table: Tensor, state: Tensor, taken: Any, kept: Any) -> Tensor:
    """Reset and update gate of a recurrent state are exchanged."""
    order = torch.arange(taken.matrix.shape[0]).view(3, -1)[[1, 0, 2]].flatten()
    return real(ids, table, state, taken.rows(order), kept.rows(order))


@mutant("node-ties-differ-shortlist", "specgraph_models.ops:draft_from_shortlist")
def first_of_the_list(real: Any, shortlist: Any, drafts: Any) -> None:
    """A draw among candidates ignores the token before it."""
    real(shortlist._replace(token_ids=torch.zeros_like(shortlist.token_ids)), drafts)


@mutant("node-ties-differ-top", "specgraph_models.ops:top_logits")
def one_more_of_the_best(real: Any, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits of a row come without the largest."""
    values, ids = real(logits, min(count + 1, logits.shape[1]))
    return values[:, -count:], ids[:, -count:]


@mutant("attention-op-rows", "specgraph.ops:paged_attention")
def requests_from_the_eighth(real: Any, query: Any, cache: Any, table: Tensor, *rest: Any, **options: Any) -> Any:
    """Attention of requests from the eighth on reads the blocks of the one before."""
    return real(query, cache, torch.cat([table[:7], table[6:-1]]) if len(table) > 7 else table, *rest, **options)


@mutant("fused-sampling", "specgraph.ops:draft_from_hidden")
def fused_temperature_ignored(real: Any, x: Any, head: Any, drafts: Any, draws: ops.Draws | None = None) -> Any:
    """The fused head samples at temperature 1, whatever was asked for."""
    return real(x, head, drafts, draws and draws._replace(temperature=(draws.temperature > 0).float()))


@mutant("fused-sampling-one-noise", "specgraph.ops:draft_from_hidden")
def fused_noise_shared(real: Any, x: Any, head: Any, drafts: Any, draws: ops.Draws | None = None) -> Any:
    """The fused head draws the noise of request 0 for all requests."""
    if draws is not None:
        seeds, positions = (part[:1].expand_as(part) for part in (draws.seeds, draws.positions))
        draws = draws._replace(seeds=seeds, positions=positions)
    return real(x, head, drafts, draws)


@mutant("gumbel-seed-position-before", "specgraph.ops.draft_sampling:sample_rows")
def noise_of_the_row(real: Any, logits: Tensor, rows: int, draws: ops.Draws) -> tuple[Tensor, Tensor]:
    """A draft token takes the noise of the position before its own."""
    return real(logits, rows, draws._replace(positions=draws.positions - 1))


@mutant("noise-of-another-position")
def noise_of_another_hash(patch: pytest.MonkeyPatch) -> None:
    """One constant of the noise's hash is off by two, so that this device draws other tokens than others."""
    patch.setattr(specgraph.ops.noise, "_GOLDEN", specgraph.ops.noise._GOLDEN + 2)


@mutant("unlikely-tokens", "specgraph.ops.noise:gumbel")
def noise_of_what_1_lacks(real: Any, *args: Any) -> Tensor:
    """The exponential noise is -log(u): what is small of it is what a number next to 1 lacks to 1."""
    return -torch.log(-torch.log1p(-(1 - specgraph.ops.noise.uniform(*args))))


@mutant("unlikely-tokens-24-bits", "specgraph.ops.noise:uniform")
def noise_of_24_bits(real: Any, *args: Any) -> Tensor:
    """Noise has 24 bits after the point."""
    return (real(*args) * 2**24).floor().clamp(min=0.5) / 2**24


@mutant("noise-of-another-position-one-purpose", "specgraph.ops.noise:uniform")
def purpose_ignored(real: Any, seeds: Tensor, positions: Tensor, purpose: int, count: int) -> Tensor:
    """Drafts, acceptance and what replaces a rejected draft share their noise."""
    return real(seeds, positions, specgraph.ops.noise.DRAFT, count)


@mutant("noise-of-another-position-residual", "specgraph.ops.noise:gumbel")
def residual_shares_noise_of_drafts(real: Any, seeds: Tensor, positions: Tensor, purpose: int, count: int) -> Tensor:
    """The token after a rejection is drawn with the noise of the draft that was rejected."""
    return real(seeds, positions, specgraph.ops.noise.DRAFT, count)


@mutant("noise-of-another-position-62-bits", "specgraph.ops.noise:uniform")
def seeds_lose_two_bits(real: Any, seeds: Tensor, *args: Any) -> Tensor:
    """Seeds s and s + 2^62 give the same noise."""
    return real(seeds * 4, *args)


@mutant("part-of-the-head-rotated", "specgraph.ops.kv_cache:rotate")
def rest_of_the_head_is_lost(real: Any, x: Tensor, rotary: Tensor, positions: Tensor) -> Tensor:
    """Elements past the rotated ones are zero instead of passed through."""
    out = real(x, rotary, positions).clone()
    out[..., rotary.shape[1] :] = 0
    return out


@mutant("draft-probs-of-another-row", "specgraph.draft.drafter:Drafter.propose")
def drafts_without_their_distributions(real: Any, self: Any, *args: Any, **given: Any) -> Any:
    """The verify is given zeros for the distributions that the drafts came from."""
    drafts = real(self, *args, **given)
    if self.buffers.draft_probs is not None:
        self.buffers.draft_probs.zero_()
    return drafts


@mutant("drafts-of-one-noise", "specgraph.ops.noise:draft_seeds")
def noise_of_positions(real: Any, seeds: Tensor, lengths: Tensor, out: Tensor) -> None:
    """The noise of a draft is a function of seed and position alone: after a rejection it comes again."""
    out.copy_(seeds)


@mutant("drafts-of-one-noise-sum", "specgraph.ops.noise:draft_seeds")
def noise_of_the_next_seed(real: Any, seeds: Tensor, lengths: Tensor, out: Tensor) -> None:
    """The noise of a draft is that of seed + length: the next seed has it at a text that is one token shorter."""
    out.copy_(seeds + lengths)


@mutant("drafts-of-one-noise-neighbour", "specgraph.ops.noise:draft_seeds")
def noise_of_a_neighbours_length(real: Any, seeds: Tensor, lengths: Tensor, out: Tensor) -> None:
    """The noise of drafts takes the length of request 0's text for all requests."""
    real(seeds, lengths[:1].expand_as(seeds), out)
