"""The example of attention with host lengths: FlashAttention through task updates."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph import ops
from specgraph.attention import AttentionLayer, AttentionMetadata, HostLengths, KVCache, StepContext
from specgraph.device import Platform
from specgraph.tools.audit import AuditCase, as_text, audit
from specgraph.tools.shapes import SHAPES, random_head

EXAMPLE = Path(__file__).parents[3] / "examples/host_lengths/flash.py"


@pytest.fixture
def flash() -> Any:
    spec = importlib.util.spec_from_file_location("flash", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["flash"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("platform 'cuda' is not available: "), done.stderr
    assert "Traceback" not in done.stderr


def test_it_refuses_what_flash_attention_does_not_take(flash: Any) -> None:
    backend = flash.FlashAttention(None)
    assert backend.supports(AttentionLayer(8, 2, 64, 0.125), torch.bfloat16, 16)
    assert "float32" in backend.supports(AttentionLayer(8, 2, 64, 0.125), torch.float32, 16).reason
    assert "windows" in backend.supports(AttentionLayer(8, 2, 64, 0.125, window=32), torch.float16, 16).reason
    assert "260" in backend.supports(AttentionLayer(8, 2, 260, 0.125), torch.float16, 16).reason


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_float64s(updating: Platform, flash: Any, query_len: int, causal: bool) -> None:
    torch.manual_seed(5)
    seq_lens, heads, kv_heads, dim = [4, 37, 0, 90], 8, 2, 64
    requests, rows = len(seq_lens), len(seq_lens) * query_len
    angles = torch.outer(torch.arange(128.0), 10000.0 ** (-torch.arange(32.0) / 32))
    rotary = torch.cat([angles.cos(), angles.sin()], 1)
    table = (torch.randperm(requests * 6) + 1).view(requests, 6).int()
    positions = torch.tensor([max(n - query_len + i, 0) for n in seq_lens for i in range(query_len)])
    owner = torch.arange(rows) // query_len
    slots = table[owner, positions // 16].long() * 16 + positions % 16
    slots = torch.where(torch.tensor(seq_lens)[owner] > 0, slots, -1)
    shapes = (rows, heads, dim), (rows, kv_heads, dim), (rows, kv_heads, dim), *[(25, 16, kv_heads, dim)] * 2
    query, key, value, *cache = (torch.randn(*shape).bfloat16() for shape in shapes)
    starts = torch.arange(0, rows + 1, query_len).int()
    new = ops.NewRows(key.double(), value.double(), rotary.double(), positions, slots)
    wide, lengths = ops.KVCache(*(part.double() for part in cache)), torch.tensor(seq_lens).int()
    placed = table, ops.DeviceLengths(lengths, starts, query_len), ops.Mask(causal)
    wanted = ops.paged_attention(query.double(), wide, *placed, new, scale=dim**-0.5)

    def there(x: torch.Tensor) -> torch.Tensor:
        return x.to(updating.device)

    layer = AttentionLayer(heads, kv_heads, dim, dim**-0.5, there(rotary), causal)
    metadata = AttentionMetadata(
        query_start_loc=there(starts),
        seq_lens=there(torch.tensor(seq_lens).int()),
        positions=there(positions),
        slot_mapping=there(slots),
        block_table=there(table),
        query_len=query_len,
    )
    context = StepContext(metadata, lengths=HostLengths([query_len] * requests, seq_lens))
    backend = flash.FlashAttention(updating)
    found = backend.forward(layer, 0, there(query), there(key), there(value), KVCache(*map(there, cache)), context)
    assert float((found.cpu().double() - wanted).norm() / wanted.norm()) < 8e-3
    assert not found[2 * query_len : 3 * query_len].any()


def test_captured_drafts_are_eagers(updating: Platform, flash: Any) -> None:
    head = random_head(SHAPES["eagle3-tiny-python"], updating.device, torch.bfloat16, 256)
    case = AuditCase(rounds=60, max_num_requests=4, vocab_size=SHAPES["eagle3-tiny-python"].vocab_size)
    report = audit(updating, head, case, attention=flash.FlashAttention(updating))
    assert report["equal"], as_text(report, case.lowerings)
    assert not report["refused"]


def test_it_runs(updating: Platform) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "12 task updates, 3 launches" in done.stdout
