"""Draft ops on the device against plain Python loops, eagerly and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specgraph import kernels
from specgraph.attention import NULL_SLOT
from specgraph.platforms import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, on_host

WAYS = ("eager", "captured")


def run(platform: Platform, way: str, body: Callable[[], Any]) -> None:
    """Run an op that writes its arguments."""
    if way == "eager":
        body()
    else:
        graph = captured(platform, body, warm_up=False)
        graph.replay()
        platform.synchronize()
        graph.close()
    platform.synchronize()


def slot_of(position: int, blocks: list[int], limit: int, block: int) -> int:
    """The paged slot of a position, or NULL_SLOT."""
    if not 0 <= position < limit or blocks[position // block] == 0:
        return NULL_SLOT
    return blocks[position // block] * block + position % block


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 2, 5])
@case(
    "kernels.begin-propose",
    "Rows, positions, lengths, slots and last rows of a propose are those of a host loop; inert requests are inert.",
    hazard="query-len-zero",
    cause="begin_propose: an inert request's last row, a filler token, or the end of max_model_len",
    quick=True,
)
def test_begin_propose(platform: Platform, way: str, k: int, seed: int) -> None:
    device, q, limit, block = platform.device, k + 1, 40, 16
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 100, (4, q), generator=generator)
    counts, starts = [q, 0, 1, min(2, q)], [14, 3, 39, 31]
    blocks = [[5, 2, 0], [1, 0, 0], [3, 4, 6], [8, 7, 9]]
    rows = 4 * q

    def full(n: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((n,), -77, dtype=dtype, device=device)

    out = {"token_ids": full(rows), "positions": full(rows), "slot_mapping": full(rows), "last_rows": full(4)}
    out |= {"seq_lens": full(4, torch.int32), "step_positions": full(4), "step_seq_lens": full(4, torch.int32)}
    out["draft_step"] = full(1)
    inputs = (
        tokens.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(starts, device=device),
        torch.tensor(blocks, dtype=torch.int32, device=device),
    )
    run(platform, way, lambda: kernels.begin_propose(*inputs, max_model_len=limit, block_size=block, **out))
    seen = {name: on_host(tensor).tolist() for name, tensor in out.items()}
    for r in range(4):
        live = counts[r] > 0
        assert seen["seq_lens"][r] == (starts[r] + q if live else 0)
        assert seen["step_seq_lens"][r] == (starts[r] + counts[r] if live else 0)
        assert r * q <= seen["last_rows"][r] < (r + 1) * q
        if live:
            assert seen["last_rows"][r] == r * q + counts[r] - 1
            assert seen["step_positions"][r] == min(starts[r] + counts[r] - 1, limit - 1)
        for i in range(q):
            row, position = r * q + i, starts[r] + i
            if live and i < counts[r]:
                assert seen["token_ids"][row] == tokens[r, i]
            assert 0 <= seen["token_ids"][row] < 100
            assert 0 <= seen["positions"][row] < limit
            if live:
                assert seen["positions"][row] == min(position, limit - 1)
            wanted = slot_of(position, blocks[r], limit, block) if live else NULL_SLOT
            assert seen["slot_mapping"][row] == wanted
    assert seen["draft_step"] == [0]


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.begin-verify",
    "Rows, positions, lengths and slots of a verify pass are those of a host loop; inert requests are inert.",
    hazard="num-reqs-unpadded",
    cause="begin_verify: a padded request that keeps a length or a slot",
    quick=True,
)
def test_begin_verify(platform: Platform, way: str) -> None:
    device, k, limit, block = platform.device, 3, 40, 16
    last, drafts = [11, 12, 13], [[1, 2, 3], [4, -1, -1], [7, 8, 9]]
    starts, blocks = [14, -1, 38], [[5, 2, 0], [1, 1, 1], [3, 4, 6]]
    rows = 3 * (k + 1)
    token_ids, positions, slots = (torch.full((rows,), -77, device=device) for _ in range(3))
    seq_lens = torch.full((3,), -77, dtype=torch.int32, device=device)
    inputs = (
        torch.tensor(last, device=device),
        torch.tensor(drafts, device=device),
        torch.tensor(starts, device=device),
        torch.tensor(blocks, dtype=torch.int32, device=device),
    )
    out = {"token_ids": token_ids, "positions": positions, "slot_mapping": slots, "seq_lens": seq_lens}
    run(platform, way, lambda: kernels.begin_verify(*inputs, max_model_len=limit, block_size=block, **out))
    assert on_host(seq_lens).tolist() == [18, 0, 42]
    for r in range(3):
        for i in range(k + 1):
            row, position = r * (k + 1) + i, starts[r] + i
            if starts[r] < 0:
                assert on_host(slots)[row] == NULL_SLOT
                continue
            assert on_host(token_ids)[row] == max(([last[r], *drafts[r]])[i], 0)
            assert on_host(positions)[row] == min(position, limit - 1)
            assert on_host(slots)[row] == slot_of(position, blocks[r], limit, block)


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
    run(platform, way, lambda: kernels.draft_greedy(there, on_device, step, token_ids, drafts))
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
    run(platform, way, lambda: kernels.draft_gumbel(there, None, *inputs, token_ids, drafts, probs))
    wanted = (logits.double() / 0.8).softmax(0)
    torch.testing.assert_close(on_host(probs)[1, 0].double(), wanted, atol=1e-5, rtol=1e-5)
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
    run(platform, way, lambda: kernels.verify_greedy(*inputs, sampled, counts))
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
    torch.testing.assert_close(on_host(probs)[0], q, atol=1e-5, rtol=1e-5)
    logits = p_logits.expand(draws, k + 1, vocab).reshape(-1, vocab).contiguous().to(device)
    sampled = torch.zeros(draws, k + 1, dtype=torch.int64, device=device)
    counts = torch.zeros(draws, dtype=torch.int32, device=device)
    inputs = logits, drafts, probs, None, temperature, seeds, start.to(device)
    run(platform, way, lambda: kernels.verify_sampled(*inputs, sampled, counts))
    p, seen, lengths = p_logits.double().softmax(-1), on_host(sampled), on_host(counts)
    for position in range(2):
        tokens = seen[lengths > position][:, position]
        got, wanted = tokens.bincount(minlength=vocab).double(), p[position] * len(tokens)
        chi_square = ((got - wanted) ** 2 / wanted).sum()
        assert chi_square < 21.1, f"token {position}: chi-square {chi_square:.1f}, 3 degrees of freedom"  # p = 1e-4
    accepted = (lengths > 1).double().mean()
    overlap = torch.minimum(p[0], q[0].double()).sum()
    assert abs(accepted - overlap) < 0.03, f"{accepted:.3f} accepted at position 0, {overlap:.3f} is the overlap"


@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@case(
    "kernels.norm-linear",
    "A fused norm and projection is within rounding of float64.",
    cause="norm_linear on this device: the sum of squares or the product in the narrow type",
)
def test_norm_linear(platform: Platform, rows: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 256, generator=generator).to(dtype)
    norm = (1 + torch.randn(256, generator=generator) / 8).to(dtype)
    weight = (torch.randn(384, 256, generator=generator) / 16).to(dtype)
    there = [t.to(platform.device) for t in (x, norm, weight)]
    seen = on_host(kernels.norm_linear(there[0], there[1], 1e-6, there[2])).double()
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    tolerance = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(seen, normed @ weight.double().T, atol=tolerance, rtol=tolerance)
