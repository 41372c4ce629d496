"""Ops that copy a round or rows into buffers, bit for bit, eagerly and in a graph."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_equal, on_host, run_op


class Load(NamedTuple):
    """Sizes of the buffers of a round, and of a round that is loaded into them."""

    requests: int
    taken: int
    """Requests of the round."""
    query_len: int
    aux_size: int
    width: int
    """Columns of the buffer's block table."""
    columns: int
    """Columns of the round's block table."""
    spare: int = 0
    """Auxiliary values of the tensor that the round's are a part of."""


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.load-round",
    "A smaller round written over a larger one leaves nothing of it: later requests are inert, and block tables end in "
    "null blocks.",
    hazard="stale-block-table",
    cause="load_round copies the new columns of the block table, or the new requests, and leaves the tail as it was",
    quick=True,
)
def test_load_round(platform: Platform, way: str, seed: int) -> None:
    _load(platform, way, Load(requests=11, taken=9, query_len=3, aux_size=8, width=6, columns=4), seed)


def _load(platform: Platform, way: str, of: Load, seed: int) -> None:
    device, (requests, n, q, aux, width, columns, spare) = platform.device, of
    generator = torch.Generator().manual_seed(seed)
    held = {
        "to_sampled_token_ids": torch.full((requests, q), 77),
        "to_num_sampled": torch.full((requests,), 7, dtype=torch.int32),
        "to_start_positions": torch.full((requests,), 77),
        "to_aux_hidden": torch.full((requests * q, aux), 7.0),
        "to_block_table": torch.full((requests, width), 77, dtype=torch.int32),
    }
    out = {name: tensor.to(device) for name, tensor in held.items()}
    given = (
        torch.randint(0, 60, (n, q), generator=generator),
        torch.randint(1, q + 1, (n,), generator=generator).int(),
        torch.randint(0, 60, (n,), generator=generator),
        torch.randn(n * q, aux + spare, generator=generator)[:, spare // 2 : aux + spare // 2],
        torch.randint(1, 60, (n, columns), generator=generator).int(),
    )
    there = [tensor.to(device) for tensor in given]
    run_op(platform, way, lambda: ops.load_round(*there, **out), out.values())
    for (name, tensor), source in zip(out.items(), given, strict=True):
        seen = on_host(tensor)
        wanted = seen[: source.shape[0]] if source.dim() == 1 else seen[: source.shape[0], : source.shape[1]]
        expect_equal(wanted, source, name)
    assert on_host(out["to_num_sampled"])[n:].unique().tolist() == [0], "requests after the round are not inert"
    tail = on_host(out["to_block_table"])[:n, columns:].unique().tolist()
    assert tail == [0], f"block tables end in blocks {tail} of an earlier round instead of the null block"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.copies-of-wide-rows",
    "A round of 70 requests with 12,288 auxiliary values per row and 130 blocks each is loaded bit for bit; rows of "
    "that width, and of 77 values, are taken from and into parts of wider tensors.",
    hazard="wide-rows",
    cause="load_round or take_rows: values past a chunk, rows counted by their width instead of their stride",
)
def test_wide(platform: Platform, way: str, seed: int) -> None:
    size = 12_288
    _load(platform, way, Load(80, 70, 2, size, width=300, columns=130), seed)
    _load(platform, way, Load(5, 3, 4, 77, width=40, columns=2, spare=12), seed)
    for width in (size, 77):
        _take(platform, way, width, seed)


def _take(platform: Platform, way: str, size: int, seed: int) -> None:
    wide = torch.randn(17, size + 40, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    rows = torch.tensor([16, 0, 3, 3, 9, 11, 1, 2, 15])
    there, selected = wide.to(platform.device), rows.to(platform.device)
    out = torch.full((9, size + 8), -7.0, dtype=torch.bfloat16, device=platform.device)
    run_op(platform, way, lambda: ops.take_rows(there[:, 8 : size + 8], selected, out[:, :size]), [out])
    expect_equal(on_host(out)[:, :size], wide[rows, 8 : size + 8], "the selected rows")
    assert on_host(out)[:, size:].unique().tolist() == [-7], "columns behind the rows were written"


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.take-rows",
    "take_rows copies the selected rows, or all rows without a selection, bit for bit.",
    cause="take_rows: rows counted from the wrong request, or the selection ignored",
)
def test_take_rows(platform: Platform, way: str, seed: int) -> None:
    source = torch.randn(17, 24, generator=torch.Generator().manual_seed(seed))
    rows = torch.tensor([16, 0, 3, 3, 9, 11, 1, 2, 15])
    there, out, copy = source.to(platform.device), torch.zeros(9, 24).to(platform.device), torch.zeros(17, 24)
    copy = copy.to(platform.device)
    selected = rows.to(platform.device)
    run_op(platform, way, lambda: ops.take_rows(there, selected, out), [out])
    run_op(platform, way, lambda: ops.take_rows(there, None, copy), [copy])
    expect_equal(on_host(out), source[rows], "the selected rows")
    expect_equal(on_host(copy), source, "the copy of all rows")
