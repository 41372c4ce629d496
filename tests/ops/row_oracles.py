"""Host loops and float64 for the references that the rows of the op table compare with, one per op.

An oracle takes the op's arguments as they were before the call and as they are after it, and its results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import product
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from specgraph_conformance.linear_oracles import TOLERANCE, expect_magnitudes, first_of_largest, gated, normed
from specgraph_conformance.noise_oracles import ACCEPT, RESAMPLE, drawn, uniform
from specgraph_conformance.op_run import run_on
from specgraph_conformance.rig import expect_close, expect_equal, slot_of
from torch import Tensor

from specgraph.attention import NULL_BLOCK, NULL_SLOT
from specgraph.cpu import CpuPlatform
from specgraph.ops import Norm, RowPlan, Weight
from specgraph.ops.begin_rows import RowInputs
from specgraph.ops.past_rows import PastRows

Oracle = Callable[[SimpleNamespace, SimpleNamespace, Any], None]
ORACLES: dict[str, Oracle] = {}


def oracle(check: Oracle) -> Oracle:
    """Register the oracle of the op of its name."""
    ORACLES[check.__name__] = check
    return check


class Judged:
    """Runs ops like `run_on`, and holds each call of an op that has an oracle to it."""

    def __init__(self) -> None:
        self._run = run_on(CpuPlatform())

    def __call__(self, op: Callable[..., Any], *args: Any, written: Iterable[Tensor] = (), **kwargs: Any) -> Any:
        check = ORACLES.get(getattr(op, "name", ""))
        before, written = deepcopy((args, kwargs)), list(written)
        results = self._run(op, *args, written=written, **kwargs)
        if check is not None:
            check(_named(op, *before), _named(op, args, kwargs), results)
        return results


def _named(op: Any, args: Any, kwargs: Any) -> SimpleNamespace:
    bound = inspect.signature(op.reference).bind(*args, **kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def i32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@oracle
def begin_rows(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """Request by request and row by row."""
    given, plan, past = before.given, before.plan, before.past
    wanted = _rows(plan, given, past, before.rows)
    for name, tensor in after.rows._asdict().items():
        if tensor is not None:
            expect_equal(tensor, wanted[name], name)


def _rows(plan: RowPlan, given: RowInputs, past: PastRows | None, rows: Any) -> dict[str, Tensor]:
    starts, blocks = given.start_positions.tolist(), given.block_table.tolist()
    columns = torch.zeros(len(starts), 0, dtype=torch.int64) if given.token_ids is None else given.token_ids
    if given.draft_token_ids is not None:
        columns = torch.cat([columns, given.draft_token_ids], dim=1).clamp(min=0)
    query_len, per_request, limit = columns.shape[1], plan.rows, plan.max_model_len
    num_last = 0 if rows.last_rows is None else len(rows.last_rows) // len(starts)
    out: dict[str, list[int]] = {name: [] for name in rows._fields}
    hidden: list[Tensor] = []
    without = 0 if rows.rows_without_block is None else int(rows.rows_without_block)
    for r, start in enumerate(starts):
        start += plan.position_offset
        count = (per_request if start >= 0 else 0) if given.num_sampled is None else int(given.num_sampled[r])
        begin = start + count if plan.after_sampled else max(start - plan.past, 0)
        end = min(begin + per_request, limit) if plan.after_sampled else begin + per_request
        places = [(begin + i, i + count - 1 if plan.after_sampled else begin + i - start) for i in range(per_request)]
        kept = _kept(past, blocks[r], begin, start, plan.block_size) if count else {}
        for row, (position, column) in enumerate(places):
            token, state, has_slot = plan.filler, torch.zeros(0), False
            if given.hidden is not None:
                state = torch.zeros_like(given.hidden[0])
            if position in kept and past is not None:
                token, state, has_slot = int(past.token_ids[kept[position]]), past.hidden[kept[position]], True
            elif 0 <= column < count:
                has_slot = True
                token = int(columns[r, column]) if query_len else token
                state = state if given.hidden is None else given.hidden[r * query_len + column]
            elif count and column >= count:
                has_slot = plan.slots_of_rejected or column < count + plan.rows_behind
            known = 0 <= column < count
            out["token_ids"].append(token)
            path, reserved = [*range(row + 1)], limit
            if given.draft_parents is not None:
                path, reserved = _path_to(given.draft_parents[r].tolist(), row), len(blocks[r]) * plan.block_size
                word = sum(1 << each for each in path)
                out["ancestors"].append(word - (1 << 64) if word >> 63 else word)
            rotary = position if given.draft_parents is None else start + len(path) - 1
            out["positions"].append(min(rotary, limit - 1) if count else 0)
            slot = slot_of(position, blocks[r], reserved, plan.block_size) if has_slot else NULL_SLOT
            out["slot_mapping"].append(slot)
            out["hidden_rows"].append(r * query_len + column if known else len(starts) * query_len)
            hidden.append(state)
        for column in range(query_len):
            position, known = start + column, column < count
            out["context_positions"].append(min(position, limit - 1) if known else 0)
            out["context_slots"].append(slot_of(position, blocks[r], limit, plan.block_size) if known else NULL_SLOT)
        last = r * per_request + max(start - begin + count - 1, 0)
        out["last_rows"] += range(last, last + num_last)
        out["seq_lens"].append(end if count else 0)
        out["step_seq_lens"].append(start + count if count else 0)
        out["step_positions"].append(min(start + count - 1, limit - 1) if count else 0)
        if count:
            end = min(start + count + plan.rows_behind, limit)
            without += sum(blocks[r][position // plan.block_size] == NULL_BLOCK for position in range(start, end))
    out |= {"draft_step": [0], "rows_without_block": [without]}
    lengths = {"seq_lens", "step_seq_lens"}
    tensors = {name: i32(each) if name in lengths else torch.tensor(each) for name, each in out.items()}
    return tensors | ({} if given.hidden is None else {"hidden": torch.stack(hidden)})


def _path_to(parents: list[int], row: int) -> list[int]:
    """Return the path to a row of a tree: the rows from row 0 on."""
    return [0] if row == 0 else [*_path_to(parents, parents[row - 1]), row]


def _kept(past: PastRows | None, blocks: list[int], begin: int, start: int, size: int) -> dict[int, tuple[int, int]]:
    """Return the kept past positions, without a gap up to the batch's first position, with their entries."""
    found: dict[int, tuple[int, int]] = {}
    for position in reversed(range(begin, start if past is not None else begin)):
        assert past is not None
        entry = blocks[position // size], position % size % past.positions.shape[1]
        if entry[0] == NULL_BLOCK or int(past.positions[entry]) != position:
            break
        found[position] = entry
    return found


@oracle
def keep_rows(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """The last row of an entry stays."""
    given, size = before, before.block_size
    for row, slot in enumerate(given.slot_mapping.tolist()):
        if slot != NULL_SLOT:
            entry = slot // size, slot % size % given.past.positions.shape[1]
            for tensor, source in zip(given.past, (given.token_ids, given.positions, given.hidden), strict=True):
                tensor[entry] = source[row]
    for name, tensor in given.past._asdict().items():
        expect_equal(getattr(after.past, name), tensor, name)


@oracle
def advance(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    limit, size = before.max_model_len, before.block_size
    now = [length + 1 if length else 0 for length in before.seq_lens.tolist()]
    expect_equal(after.seq_lens, i32(now), "lengths")
    expect_equal(after.positions, torch.tensor([min(max(n - 1, 0), limit - 1) for n in now]), "positions")
    slots = [slot_of(n - 1, row, limit, size) for n, row in zip(now, before.block_table.tolist(), strict=True)]
    expect_equal(after.slot_mapping, torch.tensor(slots), "slots")
    assert int(after.draft_step) == int(before.draft_step) + 1


@oracle
def advance_tree(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """The k rows of a step have the next k slots of their own request, also past max_model_len, and one position."""
    lengths, step, limit = before.base_lens.tolist(), int(before.draft_step), before.max_model_len
    k = len(before.positions) // len(lengths)
    expect_equal(after.seq_lens, i32([n + before.tree_len if n else 0 for n in lengths]), "lengths")
    live = before.base_lens.repeat_interleave(k) > 0
    positions = torch.tensor([min(n + step, limit - 1) for n in lengths for _ in range(k)])
    expect_equal(after.positions[live], positions[live], "positions")
    room = before.block_table.shape[1] * before.block_size
    slots = [
        slot_of(n + step * k + j, row, room, before.block_size) if n else NULL_SLOT
        for n, row in zip(lengths, before.block_table.tolist(), strict=True)
        for j in range(k)
    ]
    expect_equal(after.slot_mapping, torch.tensor(slots), "slots")
    assert int(after.draft_step) == step + 1


@oracle
def move_kv(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """All are read before any is written."""
    for old, new in ((before.key_cache, after.key_cache), (before.value_cache, after.value_cache)):
        cells = old.flatten(0, 1)
        moved = cells.clone()
        moved[before.to_slots] = cells[before.from_slots]
        expect_equal(new, moved.view_as(old), "moved cells")


@oracle
def begin_ragged_rows(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """Sort the drafts in Python."""
    plan, given, size = before.plan, before.given, before.plan.block_size
    starts, table = given.start_positions.tolist(), given.block_table
    drafts, steps = given.draft_token_ids, given.draft_token_ids.shape[1]
    counts = _split(before.ragged.confidence, starts, len(before.rows.positions) - len(starts))
    begins, rows, lines = [0], list[tuple[int, int, int]](), list[int]()
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for column, token in enumerate([int(given.token_ids[r, 0]), *drafts[r, :count].tolist()]):
            position = start + column
            inside = start >= 0 and position < plan.max_model_len
            slot = int(table[r, position // size]) * size + position % size if inside else NULL_SLOT
            rows.append((token, min(position, plan.max_model_len - 1) if start >= 0 else 0, slot))
        lines += [begins[-1] + min(column, count) for column in range(steps + 1)]
        begins.append(begins[-1] + count + 1)
    tokens, positions, slots = (torch.tensor(values) for values in zip(*rows, strict=True))
    lengths = [start + count + 1 if start >= 0 else 0 for start, count in zip(starts, counts, strict=True)]
    left = [
        [token if i < count else -1 for i, token in enumerate(row)]
        for row, count in zip(drafts.tolist(), counts, strict=True)
    ]
    for what, got, want in (
        ("tokens", after.rows.token_ids, tokens),
        ("positions", after.rows.positions, positions),
        ("slots", after.rows.slot_mapping, slots),
        ("lengths", after.rows.seq_lens, i32(lengths)),
        ("first rows", after.ragged.query_start_loc, i32(begins)),
        ("rows of columns", after.ragged.columns, torch.tensor(lines)),
        ("drafts", after.given.draft_token_ids, torch.tensor(left)),
    ):
        expect_equal(got, want, what)


def _split(confidence: Tensor, starts: list[int], num_drafts: int) -> list[int]:
    """Return the number of each request's drafts among the `num_drafts` likeliest of all."""
    chances = list[tuple[float, int, int]]()
    for r, (row, start) in enumerate(zip(confidence.tolist(), starts, strict=True)):
        chance = 1.0
        for column, value in enumerate(row):
            chance *= value
            chances.append((-chance if start >= 0 else 1.0, column, r))
    chosen = [r for _, _, r in sorted(chances)[:num_drafts]]
    return [chosen.count(r) for r in range(len(starts))]


@oracle
def load_batch(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    n = len(before.given.num_sampled)
    for into, source in zip(before.to, before.given, strict=True):
        part = into[: len(source)]
        (part if part.dim() == 1 else part[:, : source.shape[1]]).copy_(source)
    before.to.num_sampled[n:] = 0
    before.to.block_table[:n, before.given.block_table.shape[1] :] = 0
    for name, tensor in before.to._asdict().items():
        expect_equal(getattr(after.to, name), tensor, name)


@oracle
def take_rows(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    expect_equal(after.out, before.source if before.rows is None else before.source[before.rows], "the rows")


@oracle
def next_verify(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    counts, starts = before.num_sampled.tolist(), before.start_positions.tolist()
    places = [start + count if count else -1 for start, count in zip(starts, counts, strict=True)]
    expect_equal(after.start_positions, torch.tensor(places), "positions")
    latest = [int(row[n - 1]) if n else 0 for row, n in zip(before.sampled_token_ids, counts, strict=True)]
    expect_equal(after.last_token_ids, torch.tensor(latest), "last tokens")
    expect_equal(after.to_draft_token_ids, before.draft_token_ids, "drafts")


@oracle
def greedy_next_step(before: SimpleNamespace, after: SimpleNamespace, pair: Tensor) -> None:
    step, limit, to = int(before.drafts.draft_step), before.max_model_len, before.drafts
    best = first_of_largest(before.x.float() @ before.head.weight.float().T)  # small integers: exact in float32
    tokens = best + to.draft_to_target[best]
    expect_equal(after.drafts.token_ids, tokens, "tokens")
    to.draft_token_ids[:, step] = tokens
    expect_equal(after.drafts.draft_token_ids, to.draft_token_ids, "columns")
    now = [n + 1 if n else 0 for n in before.seq_lens.tolist()]
    expect_equal(after.seq_lens, i32(now), "lengths")
    expect_equal(after.positions, torch.tensor([min(max(n - 1, 0), limit - 1) for n in now]), "positions")
    table = before.block_table.tolist()
    slots = [slot_of(n - 1, row, limit, before.block_size) for n, row in zip(now, table, strict=True)]
    expect_equal(after.slot_mapping, torch.tensor(slots), "slots")
    given, dtype = before.pair, before.x.dtype
    parts = (given.table[tokens], given.table_norm), (before.hidden, given.hidden_norm)
    wanted = torch.cat([normed(values, norm, given.eps) for values, norm in parts], dim=-1)
    expect_close(pair, wanted, 1e-4 if dtype == torch.float32 else TOLERANCE[dtype], "the next input")


@oracle
def count_tokens(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    each = torch.arange(before.output_counts.shape[1])
    counts = before.output_counts + (before.token_ids[..., None] == each).sum(1)
    expect_equal(after.output_counts, counts.int(), "counts")


@oracle
def adjust_logits(before: SimpleNamespace, after: SimpleNamespace, out: Tensor) -> None:
    """Penalties alone: `test_sampling_parameters.py` has the filters."""
    asked, drafts = before.parameters, before.draft_token_ids
    if asked.top_k.any() or (asked.top_p < 1).any() or asked.min_p.any():
        return
    steps, offsets = len(before.logits) // len(drafts), before.draft_to_target
    ids = torch.arange(before.logits.shape[1]) if offsets is None else torch.arange(len(offsets)) + offsets
    wanted = before.logits.double().clone()
    for row, logits in enumerate(wanted):
        r, word = row // steps, -1 if before.ancestors is None else int(before.ancestors[row])
        own = [int(token) for column, token in enumerate(drafts[r]) if word >> (column + 1) & 1]
        for column, token in enumerate(ids.tolist()):
            times, x = int(asked.output_counts[r, token]) + own.count(token), logits[column] + asked.bias[r, token]
            if times or asked.in_prompt[r, token]:
                x = x / asked.repetition_penalty[r] if x > 0 else x * asked.repetition_penalty[r]
            logits[column] = x - asked.frequency_penalty[r] * times - asked.presence_penalty[r] * bool(times)
    expect_close(out, wanted, 1e-5, "logits")


@oracle
def expert_mlp(before: SimpleNamespace, after: SimpleNamespace, seen: Tensor) -> None:
    """Row by row, expert by expert, in float64."""
    x, first = before.x.double(), before.first_expert
    wanted = torch.zeros_like(x)
    for row, (ids, shares) in enumerate(zip(before.expert_ids.tolist(), before.expert_weights.double(), strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            if 0 <= expert - first < len(before.gate_up.matrix):
                both = _product(x[row], before.gate_up, expert - first)
                inner = gated(both)
                if before.limit:
                    gate, up = both.chunk(2)
                    gate, up = gate.clamp(max=before.limit), up.clamp(-before.limit, before.limit)
                    inner = gate * torch.sigmoid(before.alpha * gate) * (up + 1)
                wanted[row] += share * _product(inner, before.down, expert - first)
    expect_close(seen, wanted, TOLERANCE[before.x.dtype], "the mixture")


def _product(x: Tensor, stacked: Any, expert: int) -> Tensor:
    out = stacked.matrix[expert].double() @ x
    return out if stacked.bias is None else out + stacked.bias[expert].double()


def _convolution(given: SimpleNamespace) -> Tensor:
    x, (taps, size) = given.x.double(), given.base.shape
    wanted, groups = torch.zeros_like(x), given.groups.shape[1] // taps
    for t in range(len(x)):
        for tap in range(min(taps, t % given.rows + 1)):
            added = given.groups[t, tap * groups : (tap + 1) * groups].double().repeat_interleave(size // groups)
            wanted[t] += x[t - tap] * (given.base[tap].double() + added)
    return wanted


@oracle
def convolve_blocks(before: SimpleNamespace, after: SimpleNamespace, seen: Tensor) -> None:
    expect_close(seen, _convolution(before), TOLERANCE[before.x.dtype], "the convolution")


@oracle
def convolve_and_norm(before: SimpleNamespace, after: SimpleNamespace, seen: Any) -> None:
    total = _convolution(before) + before.residual.double()
    for values, wanted in zip(seen, (total, normed(total, *before.norm)), strict=True):
        expect_close(values, wanted, TOLERANCE[before.x.dtype], "the sum with the residual, or its norm")


@oracle
def draft_from_shortlist(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    short, offsets = before.shortlist, before.drafts.draft_to_target
    factors = (short.state * short.predecessor[short.token_ids]).double()
    scores = short.logits.double() + (short.successor[short.ids].double() * factors[:, None]).sum(-1)
    whole = torch.full((len(scores), len(short.successor)), float("-inf"), dtype=torch.float64)
    best = first_of_largest(whole.scatter_(1, short.ids, scores))
    wanted = best if offsets is None else best + offsets[best]
    expect_equal(after.drafts.draft_token_ids[:, 0], wanted, "the drafts")


@oracle
def next_state(before: SimpleNamespace, after: SimpleNamespace, seen: Tensor) -> None:
    """A gated recurrent unit."""
    state = before.state.double()
    of_token = (before.table[before.token_ids].double() @ before.taken.matrix.double().T).chunk(3, dim=1)
    of_state = (state @ before.kept.matrix.double().T).chunk(3, dim=1)
    reset, update = (torch.sigmoid(of_token[i] + of_state[i]) for i in range(2))
    new = torch.tanh(of_token[2] + reset * of_state[2])
    expect_close(seen, (1 - update) * new + update * state, TOLERANCE[before.state.dtype], "the state")


def _to_target(token: int, draft_to_target: Tensor | None) -> int:
    return token if draft_to_target is None else token + int(draft_to_target[token])


def _ordered(scores: list[float]) -> list[int]:
    """Return the places of the scores, best first. Of equals, up to rounding, the first one comes first."""
    return sorted(range(len(scores)), key=lambda i: (-round(scores[i], 4), i))


@oracle
def grow_tree(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """Search the whole vocabulary, after the beams that were there."""
    step, (requests, k), first = int(before.draft_step), before.beams.candidates.shape, before.first
    begin = 0 if first else k + (step - 1) * k * k
    rows = before.logits.double().view(requests, -1, before.logits.shape[1])
    for r in range(requests):
        found: list[tuple[float, int, int]] = []  # score, token, parent's number
        for b, row in enumerate(rows[r]):
            best = [t for _, t in sorted((-value, t) for t, value in enumerate(row.tolist()))][:k]
            score, number = (
                (0.0, -1) if first else (float(before.beams.scores[r, b]), int(before.beams.candidates[r, b]))
            )
            shares = row.log_softmax(0)
            found += [(score + float(shares[t]), _to_target(t, before.draft_to_target), number) for t in best]
        own = slice(begin, begin + len(found))
        assert after.candidates.token_ids[r, own].tolist() == [token for _, token, _ in found], f"tokens of request {r}"
        assert after.candidates.parents[r, own].tolist() == [parent for *_, parent in found], f"parents of request {r}"
        scores = torch.tensor([score for score, *_ in found], dtype=torch.float64)
        expect_close(after.candidates.scores[r, own], scores, 1e-4, f"scores of request {r}")
        expanded = [begin + i for i in _ordered(scores.tolist())[:k]]
        assert after.beams.candidates[r].tolist() == expanded, f"expanded nodes of request {r}"


@oracle
def choose_nodes(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    for r, scores in enumerate(before.candidates.scores.tolist()):
        tokens, parents = (part[r].tolist() for part in (before.candidates.token_ids, before.candidates.parents))
        chosen = sorted(_ordered(scores)[: after.tree.token_ids.shape[1]])
        assert after.tree.token_ids[r].tolist() == [tokens[i] for i in chosen], f"tokens of request {r}"
        rows = [0 if parents[i] < 0 else 1 + chosen.index(parents[i]) for i in chosen]
        assert after.tree.parents[r].tolist() == rows, f"parents of request {r}"


@oracle
def draft_block_tree(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """The best of all paths."""
    requests, nodes = before.tree.token_ids.shape
    logits = before.logits.double().view(requests, -1, before.logits.shape[1])
    steps, k = logits.shape[1], before.top_k
    for r in range(requests):
        scores = logits[r].log_softmax(-1).tolist()
        best = [[t for _, t in sorted((-value, t) for t, value in enumerate(row))][:k] for row in logits[r].tolist()]
        paths = [path for length in range(1, steps + 1) for path in product(range(k), repeat=length)]
        total = {path: sum(scores[i][best[i][j]] for i, j in enumerate(path)) for path in paths}
        ranked = sorted((-round(total[path], 4), len(path), path) for path in paths)
        chosen = [path for _, _, path in sorted(ranked[:nodes], key=itemgetter(1, 2))]
        wanted = [_to_target(best[len(p) - 1][p[-1]], before.draft_to_target) for p in chosen]
        assert after.tree.token_ids[r].tolist() == wanted, f"tokens of request {r}"
        follows = [1 + chosen.index(p[:-1]) if len(p) > 1 else 0 for p in chosen]
        assert after.tree.parents[r].tolist() == follows, f"parents of request {r}"


@oracle
def verify_tree(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """The path that the target's tokens follow, drawn with the noise of their positions, or to the depth by chance."""
    how, starts, tree = before.acceptance, before.start_positions.tolist(), before.tree
    requests, rows = len(starts), tree.token_ids.shape[1] + 1
    most = after.sampled.token_ids.shape[1]
    logits, slots = before.target_logits.view(requests, rows, -1), before.slot_mapping.view(requests, rows).tolist()
    places, sources, targets = (part.view(requests, -1).tolist() for part in after.path)
    for r, start in enumerate(starts):
        tokens, parents = tree.token_ids[r].tolist(), tree.parents[r].tolist()
        path, last = [0], 0
        while start >= 0:
            warm = 0.0 if how.temperature is None else float(how.temperature[r])
            seed = 0 if how.seeds is None else int(how.seeds[r])
            last, lead = drawn(logits[r, path[-1]], seed, start + len(path), RESAMPLE, warm)
            assert lead > 1e-3, "too close to call: change the seed of the row"
            match = [i + 1 for i, parent in enumerate(parents) if parent == path[-1] and tokens[i] == last]
            if how.chances is not None:  # place i + 1 is row N - S + i
                number, place = uniform(seed, start + len(path), ACCEPT, 1)[0], len(path) - 1
                match = [rows - most + len(path)] if place < most - 1 and number < how.chances[place] else []
            if not match:
                break
            path.append(match[0])
        own = [*(tokens[row - 1] for row in path[1:]), last] if start >= 0 else []
        assert int(after.sampled.num_sampled[r]) == len(own), f"request {r} accepts the path {path}"
        assert after.sampled.token_ids[r].tolist() == own + [-1] * (most - len(own)), f"tokens of request {r}"
        if start < 0:
            assert sources[r] == targets[r], "keys of an inert request move"
            continue
        behind = most - len(path) if how.chances is None else 0
        known = [r * rows + row for row in [*path, *[path[-1]] * behind]]
        assert places[r][: len(known)] == known, f"path of request {r}"
        moves = {slots[r][i]: slots[r][row] for i, row in enumerate(path) if i != row}
        made = dict(zip(targets[r], sources[r], strict=True))
        assert {to: source for to, source in made.items() if to != source} == moves, f"moves of request {r}"


def _wide(weight: Weight) -> Tensor:
    """Return the matrix in float64, with its scales multiplied out."""
    matrix, scale = weight.matrix.double(), weight.scale
    return (
        matrix if scale is None else (matrix.view(*scale.shape[::-1], -1) * scale.double().t()[:, :, None]).flatten(1)
    )


def _linear(x: Tensor, weight: Weight, norm: Norm | None = None) -> Tensor:
    y = x.double() if norm is None else normed(x, *norm)
    return y @ _wide(weight).T + (0 if weight.bias is None else weight.bias.double())


@oracle
def norm_linear(before: SimpleNamespace, after: SimpleNamespace, seen: Tensor) -> None:
    added = 0 if before.residual is None else before.residual.double()
    expect_magnitudes(seen, _linear(before.x, before.weight, before.norm) + added, "the linear")


@oracle
def norm_gate_up(before: SimpleNamespace, after: SimpleNamespace, seen: Tensor) -> None:
    expect_magnitudes(seen, gated(_linear(before.x, before.weight, before.norm)), "the gate")


@oracle
def pair_linear(before: SimpleNamespace, after: SimpleNamespace, seen: Tensor) -> None:
    pair = before.pair
    parts = (pair.table[before.token_ids], pair.table_norm), (before.hidden, pair.hidden_norm)
    both = torch.cat([normed(values, norm, pair.eps) for values, norm in parts], dim=-1)
    expect_magnitudes(seen, _linear(both, before.weight), "the linear of a pair")


@oracle
def linear_norm_linear(before: SimpleNamespace, after: SimpleNamespace, seen: Any) -> None:
    total = _linear(before.x, before.weight) + before.residual.double()
    expect_magnitudes(seen[0], total, "the sum")
    expect_magnitudes(seen[1], _linear(total, before.following, before.norm), "the second linear")


@oracle
def linear_norm_gate_up(before: SimpleNamespace, after: SimpleNamespace, seen: Any) -> None:
    total = _linear(before.x, before.weight) + before.residual.double()
    expect_magnitudes(seen[0], total, "the sum")
    expect_magnitudes(seen[1], gated(_linear(total, before.following, before.norm)), "the gate")


@oracle
def verify_drafts(before: SimpleNamespace, after: SimpleNamespace, results: None) -> None:
    """Request by request, with the noise of its positions. What rounding may decide is left out."""
    how, drafts = before.acceptance, before.draft_token_ids
    requests, k = drafts.shape
    logits = before.target_logits.view(requests, k + 1, -1)
    probs = torch.zeros(requests, k, logits.shape[2]) if how.draft_probs is None else how.draft_probs
    if how.draft_probs is not None:
        ids = torch.arange(probs.shape[2]) + (0 if how.draft_to_target is None else how.draft_to_target)
        probs = torch.zeros(requests, k, logits.shape[2]).index_copy_(2, ids, probs)
    for r, start in enumerate(before.start_positions.tolist()):
        wanted, is_sure = list[int](), True
        if start >= 0 and how.chances is not None:
            accepted = 0
            while accepted < k and drafts[r, accepted] >= 0:
                if uniform(int(how.seeds[r]), start + 1 + accepted, ACCEPT, 1)[0] >= how.chances[accepted]:
                    break
                accepted += 1
            wanted = [*drafts[r, :accepted].tolist(), int(logits[r, accepted].argmax())]
        elif start >= 0:
            warm = 0.0 if how.temperature is None else float(how.temperature[r])
            seed, own = 0 if how.seeds is None else int(how.seeds[r]), drafts[r].tolist()
            if how.draft_probs is None and warm:  # the drafter was certain
                probs[r] = torch.nn.functional.one_hot(drafts[r].clamp(min=0), logits.shape[2])
            wanted, is_sure = decided(logits[r], own, probs[r], seed, start, warm)
        if is_sure:
            seen = after.sampled.token_ids[r].tolist(), int(after.sampled.num_sampled[r])
            assert seen == ([*wanted, *[-1] * (k + 1 - len(wanted))], len(wanted)), f"request {r} is given {seen}"


def decided(
    logits: Tensor, drafts: Sequence[int], probs: Tensor, seed: int, start: int, temperature: float
) -> tuple[list[int], bool]:
    """Return one request's tokens after the verify of a chain, in float64, and True if rounding can't change them.

    Args:
        logits: [K + 1, vocab], the target's logits.
        drafts: K draft tokens; -1 for none.
        probs: [K, vocab], the distributions that the drafts were drawn from.
        start: the position of the first row.
    """
    tokens, is_sure = list[int](), True
    for row, draft in enumerate([*drafts, -1]):
        position, own, accepted = start + 1 + row, logits[row].double(), False
        if temperature:
            p = (own / temperature).softmax(-1)
            shares = p
            if draft >= 0:
                q = probs[row].double()
                lead = float(p[draft] - uniform(seed, position, ACCEPT, 1)[0] * q[draft])
                shares, accepted, is_sure = (p - q).clamp(min=0), lead > 0, is_sure and abs(lead) >= 1e-6
            # Rounding may add or drop a share below that; such a token is hardly ever drawn.
            own = shares.where(shares > 1e-5, 0.0).log()
        chosen, lead = drawn(own, seed, position, RESAMPLE, 1.0 if temperature else 0.0)
        if not temperature:
            accepted = chosen == draft
        tokens.append(draft if accepted else chosen)
        if not accepted:
            return tokens, is_sure and lead >= 1e-3
    raise AssertionError("the row after the last draft was accepted")
