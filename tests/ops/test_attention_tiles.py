"""Attention cut into programs: every row and key is covered, and no more splits than the rule allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specgraph.kernels.launch import AttentionShape, attention_splits, ceil_div, default_attention

SHAPES = st.builds(
    AttentionShape,
    rows=st.integers(1, 4096), pairs=st.integers(1, 4096), context=st.integers(1, 300_000),
    head_dim=st.sampled_from([16, 64, 96, 128, 256]), itemsize=st.sampled_from([2, 4]),
    compute_units=st.sampled_from([16, 84, 132]),
)  # fmt: skip


def allowed(shape: AttentionShape, rows: int, keys: int, per_unit: int, splits: int) -> bool:
    """Return whether so many splits are still worth it, said once more in other words."""
    programs = shape.pairs * ceil_div(shape.rows, rows) * splits
    shortest = keys if splits <= 16 else 512
    return programs <= per_unit * shape.compute_units and shape.context / splits >= shortest


@given(SHAPES, st.sampled_from([16, 32, 64]), st.sampled_from([32, 64, 128]), st.sampled_from([2, 4]))
def test_the_most_splits_that_the_rule_allows(shape, rows, keys, per_unit):
    every = [2**power for power in range(7)]
    wanted = max((s for s in every[1:] if allowed(shape, rows, keys, per_unit, s)), default=1)
    assert attention_splits(shape, rows, keys, per_unit) == wanted


@given(SHAPES)
def test_tiles_fit_the_kernel_and_100_kib(shape):
    tile = default_attention(shape)
    for size in (tile.rows, tile.keys, tile.splits):
        assert size & (size - 1) == 0
    assert tile.rows >= 16
    dims = 1 << (shape.head_dim - 1).bit_length()
    assert tile.stages * 2 * tile.keys * dims * shape.itemsize <= 100 << 10
