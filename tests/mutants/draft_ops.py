"""Broken draft ops: rows of a pass, copies, sampling, verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mutants.registry import mutant
from torch import Tensor

import specgraph.ops.draft_sampling
import specgraph.ops.kv_cache
import specgraph.ops.noise
from specgraph import ops
from specgraph.draft import Drafter
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.copies import RoundTensors
from specgraph.ops.past_rows import PastRows


def replace_op(patch: pytest.MonkeyPatch, name: str, broken: Callable[..., Any]) -> None:
    """`ops.name` becomes `broken(real, *args, **options)`."""
    real = getattr(ops, name)

    def replaced(*args: Any, **options: Any) -> Any:
        return broken(real, *args, **options)

    vars(replaced)["on"] = lambda device: replaced  # see `Op.on`
    patch.setattr(ops, name, replaced)


def change_arguments(patch: pytest.MonkeyPatch, name: str, change: Callable[..., tuple[Any, ...]]) -> None:
    """The op runs with `change(*args)` instead of its positional arguments."""
    replace_op(patch, name, lambda real, *args, **options: real(*change(*args), **options))


def change_draws(patch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Both ops that draw tokens run with `change(source, ..., drafts, draws)`."""
    for name in ("draft_from_logits", "draft_from_hidden"):
        replace_op(patch, name, lambda real, *args: real(*change(*(args if _is_draws(args[-1]) else (*args, None)))))


def _is_draws(value: Any) -> bool:
    return value is None or isinstance(value, ops.Draws)


def change_acceptance(patch: pytest.MonkeyPatch, change: Callable[[Tensor, ops.Acceptance], ops.Acceptance]) -> None:
    """A verify of chains by temperature runs with `change(target_logits, acceptance)`."""

    def broken(logits: Tensor, drafts: Any, starts: Any, acceptance: ops.Acceptance, sampled: Any) -> tuple[Any, ...]:
        changed = acceptance if acceptance.temperature is None else change(logits, acceptance)
        return logits, drafts, starts, changed, sampled

    change_arguments(patch, "verify_drafts", broken)


@mutant("mixed-requests-in-verify", "kernel")
def one_temperature(patch: pytest.MonkeyPatch) -> None:
    """Rejection sampling takes request 0's temperature for all requests."""
    change_acceptance(
        patch, lambda logits, how: how._replace(temperature=how.temperature[:1].expand_as(how.temperature))
    )


@mutant("mixed-requests-in-verify-largest", "kernel", hazard="mixed-requests-in-verify")
def largest_temperature(patch: pytest.MonkeyPatch) -> None:
    """Rejection sampling takes the largest temperature of the batch for all requests that sample."""

    def broken(logits: Tensor, how: ops.Acceptance) -> ops.Acceptance:
        warm = how.temperature
        return how._replace(temperature=torch.where(warm > 0, warm.max(), warm))

    change_acceptance(patch, broken)


@mutant("mixed-requests-in-verify-no-draft", "kernel", hazard="mixed-requests-in-verify")
def no_draft_is_token_0(patch: pytest.MonkeyPatch) -> None:
    """Verification takes -1, no draft token, for token 0."""
    change_arguments(patch, "verify_drafts", lambda logits, drafts, *rest: (logits, drafts.clamp(min=0), *rest))


@mutant("mixed-requests-in-verify-inert", "kernel", hazard="mixed-requests-in-verify")
def inert_requests_sample(patch: pytest.MonkeyPatch) -> None:
    """Verification gives tokens to inert requests."""
    change_arguments(
        patch, "verify_drafts", lambda logits, drafts, starts, *rest: (logits, drafts, starts.clamp(min=0), *rest)
    )


@mutant("mixed-requests-in-verify-no-probs", "kernel", hazard="mixed-requests-in-verify")
def missing_probs_are_uniform(patch: pytest.MonkeyPatch) -> None:
    """Without draft probabilities, rejection sampling takes a uniform distribution for the drafter's."""

    def broken(
        logits: Tensor, drafts: Tensor, starts: Any, acceptance: ops.Acceptance, sampled: Any
    ) -> tuple[Any, ...]:
        vocab = logits.shape[-1]
        if acceptance.temperature is not None and acceptance.draft_probs is None:
            uniform = torch.full((*drafts.shape, vocab), 1 / vocab, device=logits.device)
            acceptance = acceptance._replace(draft_probs=uniform)
        return logits, drafts, starts, acceptance, sampled

    change_arguments(patch, "verify_drafts", broken)


@mutant("mixed-requests-in-verify-no-map", "kernel", hazard="mixed-requests-in-verify")
def vocabulary_map_ignored(patch: pytest.MonkeyPatch) -> None:
    """Rejection sampling reads the drafter's probabilities as if its token ids were the target's."""

    def broken(logits: Tensor, how: ops.Acceptance) -> ops.Acceptance:
        probs = how.draft_probs
        if probs is not None and how.draft_to_target is not None:
            probs = torch.nn.functional.pad(probs, (0, logits.shape[-1] - probs.shape[-1]))
        return how._replace(draft_probs=probs, draft_to_target=None)

    change_acceptance(patch, broken)


@mutant("parallel-block-sampling", "kernel")
def block_temperature_ignored(patch: pytest.MonkeyPatch) -> None:
    """A parallel drafter's distributions leave out the temperature."""

    def broken(real: Any, logits: Tensor, drafts: ops.Drafts, draws: ops.Draws | None = None) -> None:
        real(logits, drafts, draws)
        if draws is not None and drafts.draft_step is None:
            probs = draws.draft_probs
            plain = logits.float().softmax(-1).view(probs.shape)
            probs.copy_(torch.where((draws.temperature > 0)[:, None, None], plain, probs))

    replace_op(patch, "draft_from_logits", broken)


@mutant("parallel-block-sampling-one-noise", "kernel", hazard="parallel-block-sampling")
def block_noise_shared(patch: pytest.MonkeyPatch) -> None:
    """All rows of a parallel drafter's block take the noise and the logits of the first one."""

    def broken(real: Any, logits: Tensor, drafts: ops.Drafts, draws: ops.Draws | None = None) -> None:
        if draws is not None and drafts.draft_step is None:
            shape = drafts.draft_token_ids.shape
            logits = logits.view(*shape, -1)[:, :1].expand(*shape, -1).reshape(logits.shape)
        real(logits, drafts, draws)

    replace_op(patch, "draft_from_logits", broken)


@mutant("parallel-block-sampling-transposed", "kernel", hazard="parallel-block-sampling")
def block_transposed(patch: pytest.MonkeyPatch) -> None:
    """A parallel drafter's greedy tokens have rows and columns exchanged."""

    def broken(real: Any, logits: Tensor, drafts: ops.Drafts, draws: ops.Draws | None = None) -> None:
        real(logits, drafts, draws)
        if draws is None and drafts.draft_step is None:
            tokens = drafts.draft_token_ids
            tokens.copy_(tokens.T.reshape(tokens.shape).clone())

    replace_op(patch, "draft_from_logits", broken)


@mutant("parallel-block-rows", "kernel")
def block_begins_early(patch: pytest.MonkeyPatch) -> None:
    """A parallel drafter's block begins at the last accepted row instead of after it."""

    def broken(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
        real(given, plan, rows, *past)
        if plan.after_sampled:
            rows.positions.copy_((rows.positions - 1).clamp(min=0))

    replace_op(patch, "begin_rows", broken)


@mutant("parallel-block-rows-rejected", "kernel", hazard="parallel-block-rows")
def block_stores_rejected(patch: pytest.MonkeyPatch) -> None:
    """Rejected rows of a parallel drafter's context are written to the cache."""

    def broken(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
        real(given, plan, rows, *past)
        if rows.context_slots is not None:
            only = {"context_positions": torch.empty_like(rows.context_slots), "rows_without_block": None}
            others = Rows(*(None if tensor is None else tensor.clone() for tensor in rows))
            real(every_token_sampled(given), plan, others._replace(context_slots=rows.context_slots, **only), *past)

    replace_op(patch, "begin_rows", broken)


def every_token_sampled(given: RowInputs) -> RowInputs:
    """The round as if nothing of it had been rejected."""
    assert given.token_ids is not None
    assert given.num_sampled is not None
    counts = torch.where(given.num_sampled > 0, given.token_ids.shape[1], 0)
    return given._replace(num_sampled=counts.to(given.num_sampled.dtype))


@mutant("parallel-block-rows-masked", "kernel", hazard="parallel-block-rows")
def masked_rows_after_rejected(patch: pytest.MonkeyPatch) -> None:
    """Masked rows (P-EAGLE) follow the last row of the round instead of the last accepted one."""

    def broken(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
        real(given, plan if rows.hidden_rows is None else every_token_sampled(given), rows, *past)

    replace_op(patch, "begin_rows", broken)


@mutant("prompt-padding", "kernel")
def prompt_padding_writes(patch: pytest.MonkeyPatch) -> None:
    """Padded rows of a prompt pass have slots."""

    def broken(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
        counts = given.num_sampled
        if counts is not None and given.token_ids is None:
            given = given._replace(num_sampled=torch.where(counts > 0, counts + 1, counts))
        real(given, plan, rows, *past)

    replace_op(patch, "begin_rows", broken)


@mutant("prompt-padding-length", "kernel", hazard="prompt-padding")
def prompt_length_of_real_rows(patch: pytest.MonkeyPatch) -> None:
    """The length of a padded prompt pass counts its real rows only, so that each row sees too few keys."""

    def broken(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
        real(given, plan, rows, *past)
        counts = given.num_sampled
        if counts is not None and given.token_ids is None:
            rows.seq_lens.copy_(torch.where(counts > 0, given.start_positions + counts, 0))

    replace_op(patch, "begin_rows", broken)


@mutant("stale-block-table", "kernel")
def stale_block_table(patch: pytest.MonkeyPatch) -> None:
    """A smaller block table leaves the columns of the larger one before it."""

    def broken(real: Any, given: RoundTensors, to: RoundTensors) -> None:
        n, width = given.block_table.shape
        tail = to.block_table[:n, width:].clone()
        real(given, to)
        to.block_table[:n, width:].copy_(tail)

    replace_op(patch, "load_round", broken)


@mutant("stale-block-table-requests", "kernel", hazard="stale-block-table")
def stale_requests(patch: pytest.MonkeyPatch) -> None:
    """A smaller round leaves the requests after it alive."""

    def broken(real: Any, given: RoundTensors, to: RoundTensors) -> None:
        n = given.num_sampled.shape[0]
        tail = to.num_sampled[n:].clone()
        real(given, to)
        to.num_sampled[n:].copy_(tail)

    replace_op(patch, "load_round", broken)


@mutant("module-token-shift", "kernel")
def latest_in_the_last_row(patch: pytest.MonkeyPatch) -> None:
    """The latest draft token goes to the last row of a request instead of its last accepted one."""

    def broken(ids: Tensor, last_rows: Tensor, latest: Tensor, *rest: Any) -> tuple[Any, ...]:
        q = ids.shape[0] // latest.shape[0]
        return ids, torch.arange(1, latest.shape[0] + 1, device=ids.device) * q - 1, latest, *rest

    change_arguments(patch, "shift_token_ids", broken)


@mutant("module-past-rows", "kernel")
def rejected_rows_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Rows of a round are kept for later rounds whether accepted or not."""

    def broken(real: Any, tokens: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, *rest: Any) -> None:
        block_size = rest[-1]
        after = torch.cat([slots[:1], torch.where(slots[:-1] % block_size < block_size - 1, slots[:-1] + 1, -1)])
        follows = (slots < 0) & (positions > 0) & (after > 0)
        real(tokens, hidden, positions, torch.where(follows, after, slots), *rest)

    replace_op(patch, "keep_rows", broken)


@mutant("module-past-rows-first", "kernel", hazard="module-past-rows")
def earlier_rows_stay(patch: pytest.MonkeyPatch) -> None:
    """A row is kept only where its entry is empty: an entry is not written twice."""

    def broken(real: Any, *args: Any) -> None:
        past: PastRows = args[4]
        before, used = [tensor.clone() for tensor in past], past.positions >= 0
        real(*args)
        for tensor, old in zip(past, before, strict=True):
            tensor.copy_(torch.where(used[..., None] if tensor.dim() == 3 else used, old, tensor))

    replace_op(patch, "keep_rows", broken)


@mutant("module-past-rows-any", "kernel", hazard="module-past-rows")
def positions_of_entries_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Past rows take the entry of their place in the block, whatever position it holds."""

    def broken(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None = None) -> None:
        if past is not None:
            wanted, kept, size = past.positions.clone(), past.positions.shape[1], plan.block_size
            for back in range(1, plan.past + 1):
                position = (given.start_positions - back).clamp(min=0)
                block = given.block_table.gather(1, (position // size)[:, None])[:, 0].long()
                wanted.view(-1).index_put_((block * kept + position % size % kept,), position)
            past = past._replace(positions=wanted)
        real(given, plan, rows, past)

    replace_op(patch, "begin_rows", broken)


@mutant("module-past-rows-none", "kernel", hazard="module-past-rows")
def past_rows_are_not_found(patch: pytest.MonkeyPatch) -> None:
    """No row before the round is computed again, so keys that were written with draft tokens stay."""

    def broken(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None = None) -> None:
        if past is not None:
            past = past._replace(positions=torch.full_like(past.positions, -1))
        real(given, plan, rows, past)

    replace_op(patch, "begin_rows", broken)


@mutant("synthetic-acceptance", "kernel")
def first_chance_for_all(patch: pytest.MonkeyPatch) -> None:
    """Synthetic verification accepts every draft token with the chance of the first."""

    def broken(*args: Any) -> tuple[Any, ...]:
        *given, acceptance, sampled = args
        if (chances := acceptance.chances) is not None:
            acceptance = acceptance._replace(chances=chances[:1].expand_as(chances).contiguous())
        return *given, acceptance, sampled

    change_arguments(patch, "verify_drafts", broken)


@mutant("fused-linears", "kernel")
def gate_and_up_exchanged(patch: pytest.MonkeyPatch) -> None:
    """Gate and up rows of a fused MLP are exchanged."""

    def broken(x: Any, norm: Any, weight: Any) -> tuple[Any, ...]:
        return x, norm, weight._replace(matrix=torch.cat(weight.matrix.chunk(2)[::-1]))

    change_arguments(patch, "norm_gate_up", broken)


@mutant("fused-linears-one-norm", "kernel", hazard="fused-linears")
def hidden_norm_dropped(patch: pytest.MonkeyPatch) -> None:
    """The fused first linear of a draft head leaves the hidden state's norm out."""

    def broken(ids: Any, hidden: Any, pair: Any, weight: Any) -> tuple[Any, ...]:
        return ids, hidden, pair._replace(hidden_norm=None), weight

    change_arguments(patch, "pair_linear", broken)


@mutant("attention-op-rows", "kernel")
def requests_from_the_eighth(patch: pytest.MonkeyPatch) -> None:
    """Attention of requests from the eighth on reads the blocks of the one before."""

    def change(query: Any, cache: Any, table: Tensor, *rest: Any) -> tuple[Any, ...]:
        return query, cache, torch.cat([table[:7], table[6:-1]]) if len(table) > 7 else table, *rest

    change_arguments(patch, "paged_attention", change)


@mutant("fused-sampling", "kernel")
def fused_temperature_ignored(patch: pytest.MonkeyPatch) -> None:
    """The fused head samples at temperature 1, whatever was asked for."""

    change_arguments(patch, "draft_from_hidden", at_temperature_1)


def at_temperature_1(x: Any, head: Any, drafts: Any, draws: ops.Draws | None = None) -> tuple[Any, ...]:
    """Arguments of `draft_from_hidden` that ask for no other temperature."""
    return x, head, drafts, None if draws is None else draws._replace(temperature=(draws.temperature > 0).float())


@mutant("fused-sampling-one-noise", "kernel", hazard="fused-sampling")
def fused_noise_shared(patch: pytest.MonkeyPatch) -> None:
    """The fused head draws the noise of request 0 for all requests."""

    def broken(x: Any, head: Any, drafts: Any, draws: ops.Draws | None = None) -> tuple[Any, ...]:
        if draws is not None:
            seeds, positions = (part[:1].expand_as(part) for part in (draws.seeds, draws.positions))
            draws = draws._replace(seeds=seeds, positions=positions)
        return x, head, drafts, draws

    change_arguments(patch, "draft_from_hidden", broken)


@mutant("noise-of-another-position", "kernel")
def noise_of_the_row(patch: pytest.MonkeyPatch) -> None:
    """A draft token takes the noise of the position before its own."""
    module = specgraph.ops.draft_sampling
    real = module.sample_rows

    def broken(logits: Tensor, rows: int, draws: ops.Draws) -> tuple[Tensor, Tensor]:
        return real(logits, rows, draws._replace(positions=draws.positions - 1))

    patch.setattr(module, "sample_rows", broken)


@mutant("noise-of-another-position-constant", "kernel", hazard="noise-of-another-position")
def noise_of_another_hash(patch: pytest.MonkeyPatch) -> None:
    """One constant of the noise's hash is off by two, so that this device draws other tokens than others."""
    patch.setattr(specgraph.ops.noise, "_GOLDEN", specgraph.ops.noise._GOLDEN + 2)


@mutant("part-of-the-head-rotated", "kernel")
def rest_of_the_head_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Elements past the rotated ones are zero instead of passed through."""
    module = specgraph.ops.kv_cache
    real = module.rotate

    def rotate(x: Tensor, rotary: Tensor, positions: Tensor) -> Tensor:
        out = real(x, rotary, positions).clone()
        out[..., rotary.shape[1] :] = 0
        return out

    patch.setattr(module, "rotate", rotate)


@mutant("draft-probs-of-another-row", "engine")
def drafts_without_their_distributions(patch: pytest.MonkeyPatch) -> None:
    """The verify is given zeros for the distributions that the drafts came from."""
    real = Drafter.propose

    def propose(self: Any, *args: Any, **given: Any) -> Any:
        drafts = real(self, *args, **given)
        if self.buffers.draft_probs is not None:
            self.buffers.draft_probs.zero_()
        return drafts

    patch.setattr(Drafter, "propose", propose)
