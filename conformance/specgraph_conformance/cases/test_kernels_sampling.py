"""Drafting and verification ops: exact tokens where greedy, distributions by chi-square where sampled."""

from __future__ import annotations

import pytest
import torch
from specgraph import kernels
from specgraph.platforms import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mapped", [False, True], ids=["same-vocabulary", "own-vocabulary"])
@case(
    "kernels.draft-greedy",
    "The most likely token, mapped to the target's ids, goes to the next step and to its own column only.",
    hazard="draft-step-column",
    cause="draft_greedy: the column index, or the vocabulary map applied twice or not at all",
    quick=True,
)
def test_greedy(platform: Platform, way: str, mapped: bool, seed: int) -> None:
    device, generator = platform.device, torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 1000, generator=generator)
    logits[1, 17] = logits[1, 400] = 50.0  # a tie: the first index wins
    offsets = torch.arange(1000) * 2 if mapped else None
    token_ids = torch.full((5,), -7, device=device)
    drafts = torch.full((5, 3), -7, device=device)
    step = torch.tensor([1], device=device)
    on_device = None if offsets is None else offsets.to(device)
    there = logits.to(device)
    run_op(platform, way, lambda: kernels.draft_greedy(there, on_device, step, token_ids, drafts), [token_ids, drafts])
    best = [row.index(max(row)) for row in logits.tolist()]
    wanted = [3 * b if mapped else b for b in best]
    assert on_host(token_ids).tolist() == wanted
    assert on_host(drafts).tolist() == [[-7, w, -7] for w in wanted]


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.draft-gumbel",
    "Sampled tokens follow softmax(logits / temperature), and the distribution written is that one.",
    hazard="gumbel-seed-position",
    cause="draft_gumbel: noise that isn't Gumbel, or a temperature applied after it",
)
def test_gumbel(platform: Platform, way: str) -> None:
    device, draws, vocab = platform.device, 4000, 6
    logits = torch.tensor([0.3, 1.2, -0.5, 0.0, 2.0, -2.0])
    temperature = torch.full((draws,), 0.8)
    temperature[0] = 0.0
    there = logits.expand(draws, vocab).contiguous().to(device)
    token_ids, drafts = (
        torch.zeros(draws, dtype=torch.int64, device=device),
        torch.zeros(draws, 1, device=device).long(),
    )
    probs = torch.zeros(draws, 1, vocab, device=device)
    inputs = (
        temperature.to(device),
        torch.arange(draws, device=device),
        torch.full((draws,), 9, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    written = token_ids, drafts, probs
    run_op(platform, way, lambda: kernels.draft_gumbel(there, None, *inputs, *written), written)
    wanted = (logits.double() / 0.8).softmax(0)
    expect_close(on_host(probs)[1, 0], wanted, 1e-5, "the distribution")
    assert on_host(token_ids)[0] == 4
    assert on_host(probs)[0, 0].tolist() == [0, 0, 0, 0, 1, 0]
    counts = on_host(token_ids)[1:].bincount(minlength=vocab).double()
    chi_square = ((counts - wanted * (draws - 1)) ** 2 / (wanted * (draws - 1))).sum()
    assert chi_square < 25.7, f"chi-square {chi_square:.1f} with 5 degrees of freedom"  # p = 1e-4
    expect_equal(on_host(drafts)[:, 0], on_host(token_ids))


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-greedy",
    "Draft tokens are accepted while they are the target's most likely ones; the target's own follows, then -1.",
    cause="verify_greedy: an accepted count off by one, or an inert request that samples",
    quick=True,
)
def test_verify_greedy(platform: Platform, way: str, seed: int) -> None:
    device, k, vocab = platform.device, 3, 50
    logits = torch.randn(5 * (k + 1), vocab, generator=torch.Generator().manual_seed(seed))
    best = logits.argmax(-1).view(5, k + 1)
    drafts = best[:, :k].clone()
    drafts[1, 1] += 1
    drafts[2, 0] = (drafts[2, 0] + 1) % vocab
    drafts[3, 2] = -1
    starts = torch.tensor([5, 6, 7, 8, -1])
    sampled = torch.full((5, k + 1), -9, device=device)
    counts = torch.full((5,), -9, dtype=torch.int32, device=device)
    inputs = logits.to(device), drafts.to(device), starts.to(device)
    run_op(platform, way, lambda: kernels.verify_greedy(*inputs, sampled, counts), [sampled, counts])
    assert on_host(counts).tolist() == [4, 2, 1, 3, 0]
    for r, count in enumerate([4, 2, 1, 3, 0]):
        wanted = [*drafts[r, : max(count - 1, 0)].tolist(), *([best[r, count - 1].item()] if count else [])]
        assert on_host(sampled)[r].tolist() == wanted + [-1] * (k + 1 - count)


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-sampled",
    "Tokens after rejection sampling have the target's distribution for any drafter: chi-square test over two tokens.",
    hazard="gumbel-seed-position",
    cause="verify_sampled: noise shared between drafting and accepting, or a residual that isn't max(p - q, 0)",
)
def test_verify_sampled(platform: Platform, way: str, seed: int) -> None:
    device, draws, vocab, k = platform.device, 6000, 4, 2
    generator = torch.Generator().manual_seed(seed + 1)
    p_logits, q_logits = (torch.randn(k + 1, vocab, generator=generator) * 1.5 for _ in range(2))
    q = q_logits[:k].softmax(-1)
    start = torch.full((draws,), 20)
    temperature, seeds = torch.ones(draws, device=device), torch.arange(draws, device=device) * 7919
    drafts = torch.zeros(draws, k, dtype=torch.int64, device=device)
    probs = torch.zeros(draws, k, vocab, device=device)
    ids = torch.zeros(draws, dtype=torch.int64, device=device)
    for step in range(k):
        there = q_logits[step].expand(draws, vocab).contiguous().to(device)
        column = torch.tensor([step], device=device)
        # The draft token of column i has position start + 1 + i; its row attended to start + i + 1 keys.
        seq_lens = torch.full((draws,), 20 + step, dtype=torch.int32, device=device)
        kernels.draft_gumbel(there, None, temperature, seeds, seq_lens, column, ids, drafts, probs)
    expect_close(on_host(probs)[0], q.double(), 1e-5, "the drafter's distributions")
    logits = p_logits.expand(draws, k + 1, vocab).reshape(-1, vocab).contiguous().to(device)
    sampled = torch.zeros(draws, k + 1, dtype=torch.int64, device=device)
    counts = torch.zeros(draws, dtype=torch.int32, device=device)
    inputs = logits, drafts, probs, None, temperature, seeds, start.to(device)
    run_op(platform, way, lambda: kernels.verify_sampled(*inputs, sampled, counts), [sampled, counts])
    p, seen, lengths = p_logits.double().softmax(-1), on_host(sampled), on_host(counts)
    for position in range(2):
        tokens = seen[lengths > position][:, position]
        got, wanted = tokens.bincount(minlength=vocab).double(), p[position] * len(tokens)
        chi_square = ((got - wanted) ** 2 / wanted).sum()
        assert chi_square < 21.1, (  # p = 1e-4
            f"token {position} has frequencies {rounded(got / len(tokens))}, and the target's distribution is "
            f"{rounded(p[position])} (chi-square {chi_square:.0f}, 3 degrees of freedom)"
        )
    accepted = (lengths > 1).double().mean()
    overlap = torch.minimum(p[0], q[0].double()).sum()
    assert abs(accepted - overlap) < 0.03, f"{accepted:.3f} accepted at position 0, {overlap:.3f} is the overlap"


TEMPERATURES = (0.0, 0.5, 2.0, 1.0, 1.0)
"""Of the five kinds of request of `kernels.verify-mixed`, which alternate in one batch."""
VOCAB, DRAWS, K = 5, 2500, 2
LIMIT = 30.0
"""Of chi-square with 4 degrees of freedom: p = 5e-6."""


def rounded(values: Tensor) -> list[float]:
    """For a message."""
    return [round(value, 3) for value in values.tolist()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafts_from", ["distribution", "draft-vocabulary", "one-token"])
@case(
    "kernels.verify-mixed",
    "In one batch of requests at temperatures 0, 0.5, 1 and 2, with and without draft tokens, some inert, each request "
    "follows the target's distribution at its own temperature.",
    hazard="mixed-requests-in-verify",
    cause="verify_sampled: one request's temperature for all, -1 taken for token 0, missing draft probabilities, or "
    "draft ids that are not mapped to the target's",
)
def test_verify_mixed(platform: Platform, way: str, drafts_from: str, seed: int) -> None:
    device, generator = platform.device, torch.Generator().manual_seed(seed + 5)
    kinds = len(TEMPERATURES)
    requests = kinds * DRAWS
    kind = torch.arange(requests) % kinds
    temperature = torch.tensor(TEMPERATURES)[kind]
    p_logits = torch.randn(kinds, K + 1, VOCAB, generator=generator) * 0.6
    mapped = drafts_from == "draft-vocabulary"
    ids = torch.tensor([1, 2, 4]) if mapped else torch.arange(VOCAB)
    q = (torch.randn(kinds, K, len(ids), generator=generator) * 0.6).softmax(-1)
    if drafts_from == "one-token":  # the drafter is certain: no distribution is handed over
        q = torch.nn.functional.one_hot(q.argmax(-1), VOCAB).float()
    rows = q[kind].view(-1, len(ids))
    drafts = ids[torch.multinomial(rows, 1, generator=generator)[:, 0]].view(requests, K)
    drafts[kind == 3] = -1
    starts = torch.full((requests,), 20)
    starts[kind == 4] = -1
    sampled = torch.full((requests, K + 1), -9, device=device)
    counts = torch.full((requests,), -9, dtype=torch.int32, device=device)
    inputs = (
        p_logits[kind].view(-1, VOCAB).to(device),
        drafts.to(device),
        None if drafts_from == "one-token" else q[kind].contiguous().to(device),
        (ids - torch.arange(len(ids))).to(device) if mapped else None,
        temperature.to(device),
        (torch.arange(requests) * 7919).to(device),
        starts.to(device),
    )
    run_op(platform, way, lambda: kernels.verify_sampled(*inputs, sampled, counts), [sampled, counts])
    tokens, lengths = on_host(sampled), on_host(counts)
    assert lengths[kind == 4].unique().tolist() == [0], "an inert request was given tokens"
    assert tokens[kind == 4].unique().tolist() == [-1], "an inert request was given tokens"
    assert lengths[kind == 3].unique().tolist() == [1], "a request without draft tokens (-1) had one accepted"
    greedy = p_logits[0].argmax(-1)
    for row, n in zip(tokens[kind == 0].tolist(), lengths[kind == 0].tolist(), strict=True):
        assert row[:n] == greedy[:n].tolist(), f"at temperature 0 a request got {row[:n]}, not {greedy[:n].tolist()}"
    for number in (1, 2, 3):
        mine, lens = tokens[kind == number], lengths[kind == number]
        wanted = (p_logits[number].double() / TEMPERATURES[number]).softmax(-1)
        for position in range(2 if number < 3 else 1):
            got = mine[lens > position][:, position].bincount(minlength=VOCAB).double()
            if (count := got.sum()) < 400:
                continue  # too few were accepted to say anything
            chi_square = float(((got - wanted[position] * count) ** 2 / (wanted[position] * count)).sum())
            assert chi_square < LIMIT, (
                f"token {position} at temperature {TEMPERATURES[number]:g}: frequencies {rounded(got / count)} instead "
                f"of {rounded(wanted[position])} (chi-square {chi_square:.0f})"
            )
        if number < 3:
            full = torch.zeros(VOCAB, dtype=torch.float64).index_copy_(0, ids, q[number, 0].double())
            overlap, seen = torch.minimum(wanted[0], full).sum(), (lens > 1).double().mean()
            assert abs(seen - overlap) < 0.05, (
                f"{seen:.3f} of the first drafts were accepted at temperature {TEMPERATURES[number]:g}; target and "
                f"drafter overlap by {overlap:.3f}"
            )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mapped", [False, True], ids=["same-vocabulary", "own-vocabulary"])
@case(
    "kernels.draft-block-greedy",
    "The most likely token of each masked row, mapped to the target's ids, has the row's place in the draft tokens.",
    hazard="parallel-block-sampling",
    cause="draft_block_greedy: rows and columns exchanged, or the vocabulary map not applied",
    quick=True,
)
def test_block_greedy(platform: Platform, way: str, mapped: bool, seed: int) -> None:
    requests, k, vocab = 9, 4, 500
    logits = torch.randn(requests * k, vocab, generator=torch.Generator().manual_seed(seed))
    offsets = torch.arange(vocab) if mapped else None
    there, on_device = logits.to(platform.device), None if offsets is None else offsets.to(platform.device)
    drafts = torch.full((requests, k), -7, device=platform.device)
    run_op(platform, way, lambda: kernels.draft_block_greedy(there, on_device, drafts), [drafts])
    best = torch.tensor([row.index(max(row)) for row in logits.tolist()]).view(requests, k)
    expect_equal(on_host(drafts), best * 2 if mapped else best, "the draft tokens")


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.draft-block-gumbel",
    "Tokens of masked rows follow softmax(logits / temperature) at each request's own temperature, and the "
    "distributions written are those.",
    hazard="parallel-block-sampling",
    cause="draft_block_gumbel: the temperature left out of the distribution, or one request's temperature for all",
)
def test_block_gumbel(platform: Platform, way: str, seed: int) -> None:
    device, draws, k, vocab = platform.device, 3000, 2, 5
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.tensor([0.0, 0.5, 2.0])
    requests = 3 * draws
    kind = torch.arange(requests) % 3
    logits = torch.randn(3, k, vocab, generator=generator) * 0.6
    drafts = torch.full((requests, k), -7, device=device)
    probs = torch.full((requests, k, vocab), -7.0, device=device)
    inputs = (
        logits[kind].view(-1, vocab).to(device),
        None,
        temperatures[kind].to(device),
        (torch.arange(requests) * 7919).to(device),
        (torch.arange(requests) % 50).to(device),
        torch.full((requests,), 2, dtype=torch.int32, device=device),
    )
    run_op(platform, way, lambda: kernels.draft_block_gumbel(*inputs, drafts, probs), [drafts, probs])
    tokens, seen = on_host(drafts), on_host(probs)
    best = logits[0].argmax(-1)
    expect_equal(tokens[kind == 0], best.expand(draws, k), "the draft tokens at temperature 0")
    one_hot = torch.nn.functional.one_hot(best, vocab).float()
    expect_equal(seen[kind == 0], one_hot.expand(draws, k, vocab), "the distributions at temperature 0")
    for number in (1, 2):
        at = f"at temperature {temperatures[number]:g}"
        wanted = (logits[number].double() / temperatures[number].double()).softmax(-1)
        difference = (seen[kind == number].double() - wanted).abs().max()
        assert difference < 1e-5, f"a distribution {at} is {difference:.3g} off softmax(logits / temperature)"
        for step in range(k):
            got = tokens[kind == number][:, step].bincount(minlength=vocab).double()
            chi_square = float(((got - wanted[step] * draws) ** 2 / (wanted[step] * draws)).sum())
            assert chi_square < LIMIT, (
                f"draft token {step} {at}: frequencies {rounded(got / draws)} instead of {rounded(wanted[step])}"
            )
    assert not torch.equal(tokens[kind == 2][:, 0], tokens[kind == 2][:, 1]), "both rows of a block drew one noise"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.verify-synthetic",
    "Draft token i is accepted with the given chance if those before it are; requests that are inert or have no draft "
    "token are as in verify_greedy.",
    hazard="synthetic-acceptance",
    cause="verify_synthetic: the chances of the wrong column, or -1 accepted",
)
def test_verify_synthetic(platform: Platform, way: str, seed: int) -> None:
    device, draws, k, vocab = platform.device, 4000, 3, 20
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(draws * (k + 1), vocab, generator=generator)
    best = logits.argmax(-1).view(draws, k + 1)
    drafts = torch.randint(0, vocab, (draws, k), generator=generator)
    drafts[1, 1] = -1
    starts = torch.arange(draws) % 100
    starts[2] = -1
    chances = torch.tensor([0.8, 0.5, 1.0])
    sampled = torch.full((draws, k + 1), -9, device=device)
    counts = torch.full((draws,), -9, dtype=torch.int32, device=device)
    seeds = torch.arange(draws) * 7919
    inputs = logits.to(device), drafts.to(device), chances.to(device), seeds.to(device), starts.to(device)
    run_op(platform, way, lambda: kernels.verify_synthetic(*inputs, sampled, counts), [sampled, counts])
    tokens, lengths = on_host(sampled), on_host(counts)
    assert int(lengths[2]) == 0
    assert int(lengths[1]) <= 2, "draft token -1 was accepted"
    for r, count in enumerate(lengths.tolist()):
        if count:
            wanted = [*drafts[r, : count - 1].tolist(), int(best[r, count - 1]), *[-1] * (k + 1 - count)]
            assert tokens[r].tolist() == wanted, f"request {r}, of which {count - 1} drafts were accepted"
    rest = lengths[3:]
    for position, chance in enumerate(chances.tolist()):
        reached, accepted = (rest > position).sum(), (rest > position + 1).sum()
        share = float(accepted / reached)
        assert abs(share - chance) < 0.04, f"{share:.3f} of draft tokens {position} accepted, the chance is {chance:g}"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.gumbel-head",
    "The fused norm, output projection and sampling write the distribution of float64's logits at each request's own "
    "temperature, and tokens that follow it.",
    hazard="fused-sampling",
    cause="gumbel_head: the norm or the temperature left out, one request's noise for all, or the column index",
)
def test_gumbel_head(platform: Platform, way: str, seed: int) -> None:
    device, draws, size, vocab = platform.device, 3000, 32, 5
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.tensor([0.0, 0.5, 2.0])
    requests = 3 * draws
    kind = torch.arange(requests) % 3
    x, norm = torch.randn(3, size, generator=generator), 1 + torch.randn(size, generator=generator) / 4
    weight = torch.randn(vocab, size, generator=generator) * 0.12
    ids = torch.full((requests,), -7, device=device)
    drafts = torch.full((requests, 3), -7, device=device)
    probs = torch.full((requests, 3, vocab), -7.0, device=device)
    lengths = (torch.arange(requests) % 50 + 1).int()
    tensors = x[kind], norm, weight, torch.arange(vocab), temperatures[kind], torch.arange(requests) * 7919, lengths
    rows, scale, matrix, offsets, temperature, seeds, seq_lens = (t.to(device) for t in tensors)
    step = torch.tensor([1], device=device)
    run_op(
        platform,
        way,
        lambda: kernels.gumbel_head(
            rows, scale, 1e-6, matrix, offsets, temperature, seeds, seq_lens, step, ids, drafts, probs
        ),
        [ids, drafts, probs],
    )
    tokens, seen = on_host(ids), on_host(probs)[:, 1]
    expect_equal(on_host(drafts)[:, 1], tokens, "the column of the step")
    assert on_host(drafts)[:, [0, 2]].unique().tolist() == [-7], "another column was written"
    wide = x.double()
    logits = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double() @ weight.double().T
    best = int(logits[0].argmax())
    assert tokens[kind == 0].unique().tolist() == [2 * best], "at temperature 0 the token is not the most likely one"
    for number in (1, 2):
        wanted = (logits[number] / temperatures[number].double()).softmax(-1)
        at = f"at temperature {temperatures[number]:g}"
        expect_close(seen[kind == number], wanted.expand(draws, vocab), 1e-4, f"the distribution {at}")
        got = (tokens[kind == number] // 2).bincount(minlength=vocab).double()
        chi_square = float(((got - wanted * draws) ** 2 / (wanted * draws)).sum())
        assert chi_square < LIMIT, f"tokens {at}: frequencies {rounded(got / draws)} instead of {rounded(wanted)}"
