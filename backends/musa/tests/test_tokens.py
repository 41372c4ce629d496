"""Tokens equal those of the `cpu` platform, on the simulated runtime."""

from __future__ import annotations

import os

import pytest
import torch
from draft.on_platform import batches_for, decoded, make_drafter, propose
from recurrent_targets import with_cancels

LOWERINGS = ["eager", "piecewise", "step", "merged"]


def compare(drafter, expected, rounds, count):
    for number in range(count):
        batch = rounds.next(num_requests=(1, 5, 2, 4, 3)[number] if number < 5 else None)
        assert torch.equal(propose(drafter, batch), propose(expected, batch)), number


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_drafts_are_what_cpu_drafts(musa, forced, cpu, kind, lowering, k):
    expected = make_drafter(cpu, "eager", k, kind)
    drafter = make_drafter(forced if lowering == "merged" else musa, lowering, k, kind)
    assert drafter.resolution.lowering == lowering
    compare(drafter, expected, batches_for(expected, seed=k), 8)
    passes = k if kind == "eagle3" else 1
    launches = {"merged": 1, "step": passes, "eager": 0}.get(lowering)
    if launches is not None:
        assert drafter.launches["propose"] == launches * drafter.num_proposes
    drafter.close()


def captured_rows(platform, k):
    """Numbers of rows of a DFlash drafter's graphs, ascending, and the number that one request is padded to."""
    drafter = make_drafter(platform, "auto", k, "dflash", max_num_requests=8, capture_sizes=None)
    assert drafter.buffers.step_token_ids.shape[0] == 8 * (1 + k)
    rows = sorted(d.num_tokens for d in drafter.graphs.descriptors if d.phase != "prefill")
    smallest = drafter.dispatch(1).descriptor.num_tokens
    drafter.close()
    return rows, smallest


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_parallel_rows_are_multiples_of_1_plus_k_from_the_smallest_on(musa, k):
    """block-misaligned-sizes: on this device, other sizes gave an illegal access, and large sizes only a slow draft."""
    rows, smallest = captured_rows(musa, k)
    assert rows == [(1 + k) * n for n in (1, 2, 4, 8)]  # K = 8: 9, 18, 36, 72
    assert smallest == 1 + k


WAYS = {
    "eagle3": LOWERINGS,
    "mtp": ("merged",),
    "latent": ("merged",),
    "dflash": ("step", "merged"),
    "dspark": ("merged",),
    "dflash2": ("merged",),
    "domino": ("step",),
    "ngram": ("merged",),
    "dspark-ragged": ("merged",),
    "dspark-ragged-auto": ("merged",),
}
"""Lowerings that each kind decodes with: a chain and a block with all of them. The backend knows of no kind; the suite
has every kind in every lowering on the cpu platform's recorder, which the simulator runs on."""


@pytest.mark.parametrize("kind", WAYS)
def test_generation_gives_what_cpu_gives(musa, forced, cpu, kind):
    expected, _ = decoded(cpu, kind, "eager", 3)
    for lowering in WAYS[kind]:
        platform = musa if lowering in ("eager", "piecewise", "step") else forced
        assert decoded(platform, kind, lowering, 3)[0] == expected, lowering


LONG = bool(os.environ.get("SPECGRAPH_HYBRID_CONFIGS"))
"""All kinds and lowerings over a recurrent target."""


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash", "ngram"] if LONG else ["mtp"])
def test_recurrent_targets_have_the_bits_of_eager(musa, forced, cpu, kind):
    """Requests join, end and are cancelled. Tokens are those of the cpu platform."""
    eager = with_cancels(musa, kind, "eager")
    for lowering in ("piecewise", "step", "merged") if LONG else ("merged",):
        assert with_cancels(forced if lowering == "merged" else musa, kind, lowering) == eager, lowering
    for (tokens, _), (own, _) in zip(eager, with_cancels(cpu, None, "eager"), strict=True):
        assert tokens[: len(own)] == own[: len(tokens)]
