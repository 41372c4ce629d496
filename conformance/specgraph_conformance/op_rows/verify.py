"""Rows of the acceptance of drafts: greedy, by rejection sampling and by chance, against distributions and float64."""

from __future__ import annotations

import math

import torch
from specgraph import ops
from torch import Tensor

from specgraph_conformance.noise_oracles import ACCEPT, RESAMPLE, uniform
from specgraph_conformance.op_rows.draws import drafts_for, draw, draws_for, large_seeds
from specgraph_conformance.op_table import FLOATS, Run, Table
from specgraph_conformance.oracles import expect_shares
from specgraph_conformance.rig import expect_close

TABLE = Table()


def verified(
    run: Run, logits: Tensor, drafts: Tensor, starts: Tensor, acceptance: ops.Acceptance
) -> tuple[Tensor, Tensor]:
    """The sampled tokens [R, K + 1] and their counts [R]."""
    sampled = ops.Sampled(drafts.new_full((len(drafts), drafts.shape[1] + 1), -7), torch.full((len(drafts),), -7).int())
    run(ops.verify_drafts, logits, drafts, starts, acceptance, sampled, written=sampled)
    return sampled.token_ids, sampled.num_sampled


@TABLE.row(
    "verify-greedy",
    "Draft tokens are accepted while they are the target's most likely ones; the target's own follows, then -1.",
    cause="verify_drafts: an accepted count off by one, or an inert request that samples",
    quick=True,
)
def verify_greedy(run: Run, g: torch.Generator) -> None:
    k, vocab = 3, 50
    logits = torch.randn(5 * (k + 1), vocab, generator=g)
    best = logits.argmax(-1).view(5, k + 1)
    drafts = best[:, :k].clone()
    drafts[1, 1] = (drafts[1, 1] + 1) % vocab
    drafts[2, 0] = (drafts[2, 0] + 1) % vocab
    drafts[3, 2] = -1
    tokens, counts = verified(run, logits, drafts, torch.tensor([5, 6, 7, 8, -1]), ops.Acceptance())
    assert counts.tolist() == [4, 2, 1, 3, 0]
    for r, count in enumerate([4, 2, 1, 3, 0]):
        assert tokens[r].tolist() == best[r, :count].tolist() + [-1] * (k + 1 - count), f"tokens of request {r}"
    nothing = torch.zeros(20, 0, dtype=torch.int64)
    tokens, counts = verified(run, logits, nothing, torch.arange(20), ops.Acceptance())
    assert (tokens[:, 0].tolist(), counts.tolist()) == (best.flatten().tolist(), [1] * 20), "without drafts"


@TABLE.row(
    "many-drafts-verified",
    "Of 9 and of 20 drafts per request as many are accepted as the target agrees with, from none to all, greedily, "
    "sampled and synthetically.",
    hazard="drafts-past-a-number",
    cause="verify_drafts: drafts past a fixed number, or rows past a tile",
    k=[9, 20],
)
def many_drafts(run: Run, g: torch.Generator, k: int) -> None:
    requests, vocab = k + 1, 40
    logits = torch.randn(requests * (k + 1), vocab, generator=g)
    best = torch.randint(0, vocab, (requests, k + 1), generator=g)
    logits[torch.arange(len(logits)), best.flatten()] = 60.0  # far above what noise can change
    drafts = best[:, :k].clone()
    for r in range(k):  # request r accepts r drafts, the last one all of them
        drafts[r, r] = (drafts[r, r] + 1) % vocab
    each, warm, evenly = torch.arange(requests), torch.ones(requests), torch.full((requests, k, vocab), 1 / vocab)
    ways = {
        "greedily": ops.Acceptance(),
        "without distributions": ops.Acceptance(warm, each * 3),
        "sampled": ops.Acceptance(warm, each * 3, evenly),
    }
    for name, acceptance in ways.items():
        tokens, counts = verified(run, logits, drafts, each * 7, acceptance)
        for r, seen in enumerate(tokens.tolist()):
            wanted = [*best[r, : r + 1].tolist(), *[-1] * (k - r)]
            assert seen == wanted, f"{name}: request {r} of {k} drafts is given {seen} instead of {wanted}"
        assert counts.tolist() == list(range(1, requests + 1)), f"counts {name}"
    _, counts = verified(run, logits, drafts, each * 7, ops.Acceptance(seeds=each * 3, chances=torch.ones(k)))
    assert counts.tolist() == [k + 1] * requests, "with chances of 1"


@TABLE.row(
    "verify-sampled",
    "Tokens after rejection sampling have the target's distribution for any drafter: chi-square test over two tokens.",
    hazard="gumbel-seed-position",
    cause="verify_drafts: noise shared between drafting and accepting, or a residual that isn't max(p - q, 0)",
)
def verify_sampled(run: Run, g: torch.Generator) -> None:
    requests, vocab, k = 6000, 4, 2
    p_logits, q_logits = (torch.randn(k + 1, vocab, generator=g) * 1.5 for _ in range(2))
    temperature, seeds = torch.ones(requests), torch.arange(requests) * 7919
    draws = draws_for(drafts_for(requests, k), vocab, temperature, seeds, torch.empty(0))
    drafts = torch.full((requests, k), -7)
    for step in range(k):
        # The draft token of column i has position start + 1 + i; its row attended to start + i + 1 keys.
        lengths = torch.full((requests,), 20 + step, dtype=torch.int32)
        to = drafts_for(requests, k, step=step)._replace(draft_token_ids=drafts)
        draw(run, (q_logits[step].expand(requests, vocab).contiguous(),), to, draws._replace(positions=lengths))
    p, q = p_logits.double().softmax(-1), q_logits[:k].double().softmax(-1)
    expect_close(draws.draft_probs[0], q, 1e-5, "the drafter's distributions")
    logits = p_logits.expand(requests, k + 1, vocab).reshape(-1, vocab).contiguous()
    acceptance = ops.Acceptance(temperature, seeds, draws.draft_probs)
    tokens, lengths = verified(run, logits, drafts, torch.full((requests,), 20), acceptance)
    for position in range(2):
        reached = tokens[lengths > position][:, position]
        expect_shares(reached, p[position], f"token {position}", limit=21.1)  # 3 degrees of freedom: p = 1e-4
    accepted, overlap = (lengths > 1).double().mean(), torch.minimum(p[0], q[0]).sum()
    assert abs(accepted - overlap) < 0.03, f"{accepted:.3f} accepted at position 0, {overlap:.3f} is the overlap"


@TABLE.row(
    "verify-mixed",
    "In one batch of requests at temperatures 0, 0.5, 1 and 2, with and without draft tokens, some inert, each request "
    "follows the target's distribution at its own temperature.",
    hazard="mixed-requests-in-verify",
    cause="verify_drafts: one request's temperature for all, -1 taken for token 0, missing draft probabilities, or "
    "draft ids that are not mapped to the target's",
    kind=["distribution", "draft-vocabulary", "one-token"],
)
def verify_mixed(run: Run, g: torch.Generator, kind: str) -> None:
    temperatures, k, vocab = torch.tensor([0.0, 0.5, 2.0, 1.0, 1.0]), 2, 5  # of five kinds of request
    requests = len(temperatures) * 2500
    group = torch.arange(requests) % len(temperatures)
    p_logits = torch.randn(len(temperatures), k + 1, vocab, generator=g) * 0.6
    mapped = kind == "draft-vocabulary"
    ids = torch.tensor([1, 2, 4]) if mapped else torch.arange(vocab)
    q = (torch.randn(len(temperatures), k, len(ids), generator=g) * 0.6).softmax(-1)
    if kind == "one-token":  # the drafter is certain: no distribution is handed over
        q = torch.nn.functional.one_hot(q.argmax(-1), vocab).float()
    drafts = ids[torch.multinomial(q[group].view(-1, len(ids)), 1, generator=g)[:, 0]].view(requests, k)
    drafts[group == 3] = -1
    starts = torch.full((requests,), 20)
    starts[group == 4] = -1
    acceptance = ops.Acceptance(
        temperatures[group],
        torch.arange(requests) * 7919,
        None if kind == "one-token" else q[group].contiguous(),
        ids - torch.arange(len(ids)) if mapped else None,
    )
    tokens, lengths = verified(run, p_logits[group].view(-1, vocab), drafts, starts, acceptance)
    assert lengths[group == 4].unique().tolist() == [0], "an inert request was given tokens"
    assert tokens[group == 4].unique().tolist() == [-1], "an inert request was given tokens"
    assert lengths[group == 3].unique().tolist() == [1], "a request without draft tokens (-1) had one accepted"
    greedy = p_logits[0].argmax(-1)
    for row, n in zip(tokens[group == 0].tolist(), lengths[group == 0].tolist(), strict=True):
        assert row[:n] == greedy[:n].tolist(), f"at temperature 0 a request got {row[:n]}, not {greedy[:n].tolist()}"
    for number in (1, 2, 3):
        at = f"at temperature {temperatures[number]:g}"
        mine, lens = tokens[group == number], lengths[group == number]
        wanted = (p_logits[number].double() / temperatures[number].double()).softmax(-1)
        for position in range(2 if number < 3 else 1):
            got = mine[lens > position][:, position]
            if len(got) >= 400:  # fewer accepted ones say nothing
                expect_shares(got, wanted[position], f"token {position} {at}")
        if number < 3:
            full = torch.zeros(vocab, dtype=torch.float64).index_copy_(0, ids, q[number, 0].double())
            overlap, seen = torch.minimum(wanted[0], full).sum(), (lens > 1).double().mean()
            assert abs(seen - overlap) < 0.05, (
                f"{seen:.3f} of the first drafts were accepted {at}; target and drafter overlap by {overlap:.3f}"
            )


@TABLE.row(
    "verify-synthetic",
    "Draft token i is accepted with the given chance if those before it are; requests that are inert or have no draft "
    "token are as in a greedy verify.",
    hazard="synthetic-acceptance",
    cause="verify_drafts: the chances of the wrong column, or -1 accepted",
)
def verify_synthetic(run: Run, g: torch.Generator) -> None:
    requests, k, vocab = 4000, 3, 20
    logits = torch.randn(requests * (k + 1), vocab, generator=g)
    best = logits.argmax(-1).view(requests, k + 1)
    drafts = torch.randint(0, vocab, (requests, k), generator=g)
    drafts[1, 1] = -1
    starts = torch.arange(requests) % 100
    starts[2] = -1
    chances = torch.tensor([0.8, 0.5, 1.0])
    acceptance = ops.Acceptance(seeds=torch.arange(requests) * 7919, chances=chances)
    tokens, lengths = verified(run, logits, drafts, starts, acceptance)
    assert int(lengths[2]) == 0
    assert int(lengths[1]) <= 2, "draft token -1 was accepted"
    for r, count in enumerate(lengths.tolist()):
        if count:
            wanted = [*drafts[r, : count - 1].tolist(), int(best[r, count - 1]), *[-1] * (k + 1 - count)]
            assert tokens[r].tolist() == wanted, f"request {r}, of which {count - 1} drafts were accepted"
    rest = lengths[3:]
    for position, chance in enumerate(chances.tolist()):
        share = float((rest > position + 1).sum() / (rest > position).sum())
        assert abs(share - chance) < 0.04, f"{share:.3f} of draft tokens {position} accepted, the chance is {chance:g}"


@TABLE.row(
    "verify-decides-as-float64",
    "Each of 3,000 drafts is accepted, or replaced by the token, as float64 decides with the noise of its position.",
    hazard="verify-rounds-probabilities",
    cause="verify_drafts: probabilities rounded to the dtype of the logits, or noise of another purpose or position",
    dtype=FLOATS,
)
def decisions(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    requests, vocab, temperature = 3000, 6, 0.8
    logits = (torch.randn(requests, 2, vocab, generator=g) * 1.5).to(dtype)
    q = (logits[:, 0].float() + torch.randn(requests, vocab, generator=g) * 0.5).softmax(-1)
    drafts = torch.multinomial(q, 1, generator=g)
    starts, seeds = torch.randint(0, 3000, (requests,), generator=g), large_seeds(g, requests)
    p = (logits.double() / temperature).softmax(-1)
    acceptance = ops.Acceptance(torch.full((requests,), temperature), seeds, q[:, None])
    tokens, _ = verified(run, logits.flatten(0, 1), drafts, starts, acceptance)
    wrong, compared = list[str](), 0
    for r, seen in enumerate(tokens.tolist()):
        draft, start, own = int(drafts[r]), int(starts[r]), int(seeds[r])
        ratio = float(p[r, 0, draft]) - uniform(own, start + 1, ACCEPT, 1)[0] * float(q[r, draft])
        accepted = ratio > 0
        share = p[r, 1] if accepted else (p[r, 0] - q[r].double()).clamp(min=0)
        noise = uniform(own, start + 1 + accepted, RESAMPLE, vocab)
        keys = sorted(
            (math.log(x) - math.log(-math.log(u)), token)
            for token, (x, u) in enumerate(zip(share.tolist(), noise, strict=True))
            if x > 1e-5  # rounding may leave less than that out, or in: it is hardly ever drawn
        )
        lead = keys[-1][0] - keys[-2][0] if len(keys) > 1 else 1.0
        wanted = [draft, keys[-1][1]] if accepted else [keys[-1][1], -1]
        if abs(ratio) < 1e-6 or lead < 1e-3:  # else rounding may decide
            continue
        compared += 1
        if seen != wanted:
            wrong.append(f"request {r}: {seen} instead of {wanted}")
    assert compared > 2900
    assert not wrong, f"{len(wrong)} of {compared} decisions are not float64's, the first: {wrong[0]}"
