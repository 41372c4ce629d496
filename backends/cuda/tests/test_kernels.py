"""The Triton ops against their plain torch references in float64, at sizes where tiles, blocks and splits end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph import kernels
from specgraph.kernels.kv_cache import rotate
from specgraph.kernels.noise import DRAFT, gumbel
from specgraph.platforms import Platform

HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 3e-6}


@pytest.fixture(autouse=True)
def _triton(platform: Platform) -> None:
    triton = platform.capabilities.notes["triton"]
    if not triton:
        pytest.skip(triton.reason)
    torch.manual_seed(0)


def close(got: Tensor, want: Tensor) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))
    assert error < TOLERANCE[got.dtype], error  # NaN fails too


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 64, 65, 130])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 4096), (6144, 8192), (4096, 14336), (2048, 8192), (1000, 512), (96, 192)]
)
def test_norm_linear(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, norm = make(rows, depth, dtype=dtype), make(depth, dtype=dtype)
    weight, bias = make(columns, depth, dtype=dtype, scale=depth**-0.5), make(columns, dtype=dtype)
    residual = make(rows, columns, dtype=dtype)
    wide = [t.double() for t in (x, norm, weight, bias, residual)]
    close(
        kernels.norm_linear(x, norm, 1e-5, weight, bias, residual),
        kernels.norm_linear.reference(wide[0], wide[1], 1e-5, *wide[2:]),
    )
    close(kernels.norm_linear(x, None, 0.0, weight), wide[0] @ wide[2].T)
    strided = make(rows, depth + 64, dtype=dtype)[:, :depth]
    close(kernels.norm_linear(strided, None, 0.0, weight), strided.double() @ wide[2].T)


@pytest.mark.parametrize("rows", [1, 16, 40, 64, 100])
@pytest.mark.parametrize(("inner", "depth"), [(14336, 4096), (12288, 4096), (8192, 2048), (200, 256)])
def test_norm_gate_up(rows: int, inner: int, depth: int) -> None:
    x, norm, weight = make(rows, depth), make(depth), make(2 * inner, depth, scale=depth**-0.5)
    want = kernels.norm_gate_up.reference(x.double(), norm.double(), 1e-5, weight.double(), None)
    close(kernels.norm_gate_up(x, norm, 1e-5, weight), want)


def fp8(rows: int, columns: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random FP8 weights, their scales, and their products in float64."""
    weight = make(rows, columns, scale=60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(groups, rows, device="cuda") * 0.01 * columns**-0.5
    wide = weight.double().view(rows, groups, -1) * scale.double().T[:, :, None]
    return weight, scale, wide.view(rows, columns)


@pytest.mark.parametrize(
    ("columns", "depth", "groups"), [(6144, 8192, 1), (4096, 14336, 112), (1000, 512, 4), (96, 192, 3), (64, 48, 1)]
)
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (17, torch.float16), (64, torch.bfloat16), (300, torch.bfloat16)]
)
def test_linears_over_fp8(
    platform: Platform, rows: int, columns: int, depth: int, groups: int, dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability(platform.device) < (8, 9):
        pytest.skip("this GPU has no conversion from e4m3: the reference runs")
    weight, scale, wide = fp8(2 * columns, depth, groups)
    x, norm, bias = make(rows, depth, dtype=dtype), make(depth, dtype=dtype), make(2 * columns, dtype=dtype)
    residual = make(rows, 2 * columns, dtype=dtype)
    want = kernels.norm_linear.reference(x.double(), norm.double(), 1e-5, wide, bias.double(), residual.double())
    close(kernels.norm_linear_fp8(x, norm, 1e-5, weight, scale, bias, residual), want)
    skipped = kernels.norm_linear_fp8(x, None, 0.0, weight[columns:], scale[:, columns:])
    close(skipped, x.double() @ wide[columns:].T)
    want = kernels.norm_gate_up.reference(x.double(), norm.double(), 1e-5, wide, bias.double())
    close(kernels.norm_gate_up_fp8(x, norm, 1e-5, weight, scale, bias), want)
    table, ids = make(100, depth - 32, dtype=dtype), torch.randint(0, 100, (rows,), device="cuda")
    want = kernels.pair_linear.reference(ids, table.double(), None, x[:, :32].double(), None, 1e-5, wide, None)
    close(kernels.pair_linear_fp8(ids, table, None, x[:, :32], None, 1e-5, weight, scale), want)


@pytest.mark.parametrize("rows", [1, 17, 64, 200])
@pytest.mark.parametrize("width", [4096, 1000])
def test_pair_linear(rows: int, width: int) -> None:
    table, norms, hidden = make(100, width), (make(width), make(4096)), make(rows, 4096)
    weight, ids = make(6144, width + 4096, scale=8192**-0.5), torch.randint(0, 100, (rows,), device="cuda")
    for first, second in (norms, (None, None), (norms[0], None)):
        want = kernels.pair_linear.reference(
            ids,
            table.double(),
            None if first is None else first.double(),
            hidden.double(),
            None if second is None else second.double(),
            1e-5,
            weight.double(),
            None,
        )
        close(kernels.pair_linear(ids, table, first, hidden, second, 1e-5, weight), want)


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 80])
@pytest.mark.parametrize("vocab", [32000, 500])
def test_greedy_head_picks_a_largest_logit(rows: int, vocab: int) -> None:
    x, norm, weight = make(rows, 4096), make(4096), make(vocab, 4096, scale=4096**-0.5)
    offsets = torch.randint(0, 50, (vocab,), device="cuda")
    step = torch.tensor([2], device="cuda")
    token_ids, result = torch.full((rows,), -7, device="cuda"), torch.full((rows, 4), -7, device="cuda")
    kernels.greedy_head(x, norm, 1e-5, weight, None, step, token_ids, result)
    logits = kernels.norm_linear.reference(x.double(), norm.double(), 1e-5, weight.double(), None, None)
    picked = logits.gather(1, token_ids[:, None])[:, 0]
    assert bool((picked >= logits.amax(1) - 0.05).all())  # half a step of bf16 at the size of the largest logits
    assert torch.equal(result[:, 2], token_ids)
    assert bool((result[:, [0, 1, 3]] == -7).all())
    mapped = torch.empty_like(token_ids)
    kernels.greedy_head(x, norm, 1e-5, weight, offsets, step, mapped, result)
    assert torch.equal(mapped, token_ids + offsets[token_ids])


@pytest.mark.parametrize("vocab", [5, 4096, 4097, 32000, 128256])
def test_draft_greedy_takes_the_first_of_equals(vocab: int) -> None:
    logits = make(6, vocab).round()
    logits[1] = 0
    logits[2] = float("-inf")
    logits[2, vocab - 1] = -1e30
    step = torch.tensor([0], device="cuda")
    token_ids, result = torch.empty(6, dtype=torch.int64, device="cuda"), torch.zeros(6, 1, dtype=torch.int64).cuda()
    kernels.draft_greedy(logits, None, step, token_ids, result)
    best = logits.amax(1, keepdim=True)
    first = torch.where(logits == best, torch.arange(vocab, device="cuda"), vocab).amin(1)
    assert torch.equal(token_ids, first)


def test_a_row_of_nan_still_gives_a_token_that_exists() -> None:
    logits = make(3, 5000)
    logits[1] = float("nan")
    step, result = torch.tensor([0], device="cuda"), torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    token_ids, offsets = torch.empty(3, dtype=torch.int64, device="cuda"), torch.zeros(5000, dtype=torch.int64).cuda()
    kernels.draft_greedy(logits, offsets, step, token_ids, result)
    assert token_ids[1] == 0
    weight = make(5000, 512)
    x = torch.full((3, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    kernels.greedy_head(x, None, 0.0, weight, offsets, step, token_ids, result)
    assert token_ids.tolist() == [0, 0, 0]


def draws(rows: int) -> tuple[Tensor, Tensor]:
    """Temperatures, every third one 0, and seeds."""
    temperature = torch.rand(rows, device="cuda") + 0.3
    temperature[::3] = 0
    return temperature, torch.randint(-(2**62), 2**62, (rows,), device="cuda")


def check_draws(
    ids: Tensor, probs: Tensor, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, atol: float
) -> None:
    """The distributions are softmax(logits / temperature), and each token is the one that the noise picks from them."""
    sampling = temperature > 0
    want = torch.softmax(logits.double() / temperature.double()[:, None], -1)
    torch.testing.assert_close(probs[sampling].double(), want[sampling], atol=atol, rtol=20 * atol)
    keys = (probs.cpu().double().log() + gumbel(seeds.cpu(), positions.cpu(), DRAFT, logits.shape[1]).double()).cuda()
    picked = keys.gather(1, ids[:, None])[:, 0]
    assert bool((picked >= keys.amax(1) - 1e-4)[sampling].all())  # as good as equal keys may fall either way
    assert torch.equal(probs[~sampling], torch.nn.functional.one_hot(ids, logits.shape[1]).float()[~sampling])
    best = logits.double().gather(1, ids[:, None])[:, 0]
    assert bool((best >= logits.double().amax(1) - 2500 * atol)[~sampling].all())


@pytest.mark.parametrize("rows", [1, 5, 64, 80])
@pytest.mark.parametrize("vocab", [7, 4096, 4097, 32000, 128256])
def test_draft_gumbel(rows: int, vocab: int) -> None:
    logits, (temperature, seeds) = make(rows, vocab, scale=3.0), draws(rows)
    offsets, seq_lens = torch.randint(0, 50, (vocab,), device="cuda"), torch.randint(0, 5000, (rows,)).int().cuda()
    step, token_ids = torch.tensor([2], device="cuda"), torch.full((rows,), -7, device="cuda")
    drafts, probs = torch.full((rows, 4), -7, device="cuda"), torch.full((rows, 4, vocab), -7.0, device="cuda")
    kernels.draft_gumbel(logits, None, temperature, seeds, seq_lens, step, token_ids, drafts, probs)
    check_draws(token_ids, probs[:, 2], logits, temperature, seeds, seq_lens.long() + 1, 1e-6)
    assert torch.equal(drafts[:, 2], token_ids)
    assert bool((drafts[:, [0, 1, 3]] == -7).all())
    assert bool((probs[:, [0, 1, 3]] == -7).all())
    mapped = torch.empty_like(token_ids)
    kernels.draft_gumbel(logits, offsets, temperature, seeds, seq_lens, step, mapped, drafts, probs)
    assert torch.equal(mapped, token_ids + offsets[token_ids])


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 80])
@pytest.mark.parametrize("vocab", [32000, 500])
def test_gumbel_head(rows: int, vocab: int) -> None:
    x, norm, weight = make(rows, 4096), make(4096), make(vocab, 4096, scale=4096**-0.5)
    (temperature, seeds), seq_lens = draws(rows), torch.randint(0, 5000, (rows,)).int().cuda()
    step, token_ids = torch.tensor([1], device="cuda"), torch.full((rows,), -7, device="cuda")
    drafts, probs = torch.full((rows, 3), -7, device="cuda"), torch.full((rows, 3, vocab), -7.0, device="cuda")
    kernels.gumbel_head(x, norm, 1e-5, weight, None, temperature, seeds, seq_lens, step, token_ids, drafts, probs)
    logits = kernels.norm_linear.reference(x.double(), norm.double(), 1e-5, weight.double(), None, None)
    check_draws(token_ids, probs[:, 1], logits, temperature, seeds, seq_lens.long() + 1, 4e-3)  # logits in bf16
    again, twice = torch.empty_like(token_ids), torch.empty_like(probs)
    kernels.gumbel_head(x, norm, 1e-5, weight, None, temperature, seeds, seq_lens, step, again, drafts, twice)
    assert torch.equal(again, token_ids)
    assert torch.equal(twice[:, 1], probs[:, 1])


@pytest.mark.parametrize(("requests", "steps", "vocab"), [(1, 15, 151936), (5, 3, 4096), (2, 2, 7)])
def test_draft_block_gumbel(requests: int, steps: int, vocab: int) -> None:
    logits, (temperature, seeds) = make(requests * steps, vocab, scale=3.0), draws(requests)
    starts, counts = torch.randint(0, 900, (requests,)).cuda(), torch.randint(0, 9, (requests,)).int().cuda()
    whole, probs = torch.full((requests, steps + 2), -7).cuda(), torch.zeros(requests, steps, vocab, device="cuda")
    kernels.draft_block_gumbel(logits, None, temperature, seeds, starts, counts, whole[:, :steps], probs)
    positions = (starts + counts)[:, None] + 1 + torch.arange(steps, device="cuda")
    rows = (temperature.repeat_interleave(steps), seeds.repeat_interleave(steps), positions.flatten())
    check_draws(whole[:, :steps].flatten(), probs.flatten(0, 1), logits, *rows, 1e-6)
    assert bool((whole[:, steps:] == -7).all())


CASES = [
    # block size, rows per request, lengths, causal, heads, kv heads, head dim
    (16, 1, [0, 1, 15, 16, 17, 63, 64, 65, 1000], True, 32, 8, 128),
    (64, 1, [5, 64, 0, 129, 2048], True, 8, 8, 64),
    (16, 6, [6, 0, 16, 17, 700, 7], True, 32, 8, 128),
    (64, 6, [64, 65, 0, 9], True, 12, 2, 128),
    (16, 16, [16, 40, 0, 300], False, 32, 8, 128),
    (16, 1, [3, 33], True, 6, 2, 32),
    (16, 1, [3, 33], True, 4, 1, 256),
    (16, 40, [40, 100], True, 32, 8, 128),
    (16, 2, [2, 37], True, 6, 2, 16),
    (256, 1, [1, 255, 256, 257, 0, 1025], True, 8, 2, 64),
    (48, 6, [6, 47, 100], True, 8, 2, 64),
    (32, 6, [6, 0, 33, 300], True, 16, 1, 96),
    (128, 1, [1, 128, 0, 700], True, 32, 2, 96),
    (16, 1, [5, 20], True, 16, 16, 80),
    (16, 3, [5, 200], False, 12, 4, 256),
    (64, 1, [40000, 3], True, 8, 2, 128),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"b{c[0]}q{c[1]}c{c[3]:d}h{c[4]}d{c[6]}")
@pytest.mark.parametrize("packed_caches", [False, True])
def test_attention(case: tuple, dtype: torch.dtype, packed_caches: bool) -> None:
    block, rows, lengths, causal, heads, kv_heads, dim = case
    requests, width = len(lengths), -(-max(lengths) // block) + 3
    keys = make(requests * width + 1, block, kv_heads, dim, dtype=dtype)
    values = make(*keys.shape, dtype=dtype)
    if packed_caches:  # as engines have them: one tensor [blocks, kv_heads, block, 2 * dim]
        whole = torch.cat([keys, values], dim=-1).transpose(1, 2).contiguous()
        keys, values = whole.transpose(1, 2).split(dim, dim=-1)
    table = (torch.randperm(requests * width, device="cuda") + 1).view(requests, width).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device="cuda")
    packed = make(requests * rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    query, key, value = (t.view(requests * rows, -1, dim) for t in packed.split(sizes, dim=-1))
    scale = dim**-0.5

    how = {"query_len": rows, "scale": scale, "causal": causal}
    got = kernels.paged_attention(query, keys, values, table, seq_lens, starts, **how)
    attend = kernels.paged_attention.reference
    want = attend(query.double(), keys.double(), values.double(), table, seq_lens, starts, **how)
    close(got, want)
    assert bool((got.view(requests, rows, heads, dim)[seq_lens == 0] == 0).all())

    rotary = torch.randn(max(lengths) + 1, dim, device="cuda")
    position = (seq_lens.long()[:, None] - rows + torch.arange(rows, device="cuda")).clamp(min=0).flatten()
    request = torch.arange(requests, device="cuda").repeat_interleave(rows)
    slots = table[request, position // block].long() * block + position % block
    slots = torch.where(seq_lens.long()[request] > 0, slots, -1)
    wide = [t.double() for t in (query, key, value, keys, values)]
    turned = [rotate(t, rotary.double(), position) for t in wide[:2]]
    live = slots >= 0
    place = slots[live] // block, slots[live] % block
    wide[3][place], wide[4][place] = turned[1][live].to(dtype).double(), wide[2][live]
    before = keys.clone(), values.clone()
    got = kernels.rotate_store_attend(
        query, key, value, rotary, position, slots, keys, values, table, seq_lens, starts, **how
    )
    want = attend(turned[0].to(dtype).double(), wide[3], wide[4], table, seq_lens, starts, **how)
    close(got, want)
    close(keys, wide[3])
    assert torch.equal(values, wide[4].to(dtype))
    untouched = torch.ones(keys.shape[0] * block, dtype=torch.bool, device="cuda")
    untouched[slots[live]] = False
    for now, then in zip((keys, values), before, strict=True):
        assert torch.equal(now.flatten(0, 1)[untouched], then.flatten(0, 1)[untouched])


def test_a_row_without_a_slot_reads_the_cache_as_it_is(platform: Platform) -> None:
    keys, values = make(4, 16, 8, 128), make(4, 16, 8, 128)
    table = torch.tensor([[1, 2]], dtype=torch.int32, device="cuda")
    seq_lens, starts = torch.tensor([20], dtype=torch.int32).cuda(), torch.tensor([0, 1], dtype=torch.int32).cuda()
    query, key, value = make(1, 32, 128), make(1, 8, 128), make(1, 8, 128)
    before = keys.clone()
    got = kernels.rotate_store_attend(
        query, key, value, None, torch.tensor([19]).cuda(), torch.tensor([-1]).cuda(), keys, values, table, seq_lens,
        starts, query_len=1, scale=0.1,
    )  # fmt: skip
    wide = query.double(), keys.double(), values.double()
    close(got, kernels.paged_attention.reference(*wide, table, seq_lens, starts, query_len=1, scale=0.1))
    assert torch.equal(keys, before)


def _same_on_both(name: str, arguments: list, **named: Tensor | int) -> None:
    """Run one op on the device and, by its reference, on the CPU; every argument must end up equal."""
    op = getattr(torch.ops.specgraph, name).default
    host = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    named_host = {key: a.cpu() if isinstance(a, Tensor) else a for key, a in named.items()}
    op(*arguments, **named)
    op(*host, **named_host)
    pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(arguments, host, strict=True))]
    for what, device, cpu in pairs + [(key, a, named_host[key]) for key, a in named.items()]:
        if isinstance(device, Tensor):
            assert torch.equal(device.cpu(), cpu), f"{name}, argument {what}"


@pytest.mark.parametrize("requests", [1, 5, 64])
@pytest.mark.parametrize("query_len", [1, 2, 6])
def test_rows_positions_and_slots(requests: int, query_len: int) -> None:
    def long(*shape: int, high: int = 90) -> Tensor:
        return torch.randint(0, high, shape, device="cuda")

    table = long(requests, 8, high=50).int()
    counts = long(requests, high=query_len + 1).int()
    rows = requests * query_len
    limits = {"max_model_len": 96, "block_size": 16}

    def rows_out(count: int) -> dict[str, Tensor]:
        tensors = {name: long(count) for name in ("token_ids", "positions", "slot_mapping")}
        return tensors | {"seq_lens": long(requests).int()}

    step_out = {"last_rows": long(requests), "step_positions": long(requests), "step_seq_lens": long(requests).int()}
    step = long(1)
    starts = long(requests, high=140) - 10
    handed = [long(requests, query_len), counts, starts, table]
    _same_on_both("begin_propose", handed, **limits, **rows_out(rows), **step_out, draft_step=step)
    drafts = long(requests, query_len) - 5  # some are negative: no draft token
    verified = [long(requests), drafts, starts, table]
    _same_on_both("begin_verify", verified, **limits, **rows_out(rows + requests))
    verified[0], verified[2] = long(requests, 3)[:, 1], long(requests, 2, high=140)[:, 0] - 10  # columns of others
    _same_on_both("begin_verify", verified, **limits, **rows_out(rows + requests))
    for _ in range(3):
        _same_on_both("advance", [long(requests, high=120).int(), long(requests), long(requests), step, table, 96, 16])
    _same_on_both("take_rows", [make(rows, 4096), long(requests, high=rows), make(requests, 4096)])
    _same_on_both("take_rows", [make(rows, 40), None, make(rows, 40)])
    n = max(1, requests // 2)
    part = [long(n, query_len), counts[:n], starts[:n], make(n * query_len, 12288), table[:n, :5]]
    _same_on_both("load_round", part, **round_buffers(requests, query_len, 12288, 8))
    part[0] = long(n, query_len + 2)[:, :query_len]  # the first columns of a tensor for rounds of more rows
    _same_on_both("load_round", part, **round_buffers(requests, query_len, 12288, 8))
    stops = long(requests, 16, high=6) - 1  # -1 is none
    _same_on_both("stop_finished", [long(requests, query_len, high=9), counts, long(requests, high=9), stops])
    ring, progress, again = long(3, 1502), long(2, high=9), long(1).int()
    live = [long(requests, query_len, high=9), counts, long(requests, high=9), stops]
    for rounds_per_launch in (1, 4, 16):
        _same_on_both("publish_round", [long(1500), *live, ring, progress, again, rounds_per_launch])
    most = long(requests, 8)[:, : query_len - 1]  # of a K below the largest
    moved = [long(requests, query_len), counts, most, starts, long(requests), long(requests, query_len - 1)]
    _same_on_both("next_verify", moved)
    context = {"context_positions": long(rows), "context_slots": long(rows)}
    _same_on_both("begin_block", handed, mask_token_id=7, **limits, **context, **rows_out(requests * 4))
    for drafts in (1, 3, 7):
        length = query_len + drafts - 1
        taken = {"hidden_rows": long(requests * length), "draft_rows": long(requests * drafts)}
        _same_on_both("begin_masked", handed, mask_token_id=7, **limits, **taken, **rows_out(requests * length))


def round_buffers(requests: int, query_len: int, aux_size: int, blocks: int) -> dict[str, Tensor]:
    """What `load_round` writes, filled with other values."""
    return {
        "to_sampled_token_ids": torch.full((requests, query_len), -7, device="cuda"),
        "to_num_sampled": torch.full((requests,), -7, dtype=torch.int32, device="cuda"),
        "to_start_positions": torch.full((requests,), -7, device="cuda"),
        "to_aux_hidden": make(requests * query_len, aux_size),
        "to_block_table": torch.full((requests, blocks), -7, dtype=torch.int32, device="cuda"),
    }


def test_a_round_of_any_alignment_is_loaded() -> None:
    """The first launch compiles for aligned tensors, and what it compiled must not serve others."""
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    for shift in (0, 1, 0, 3):
        flat = torch.randn(12 * 40 + shift, device="cuda").bfloat16()[shift:]
        starts = torch.arange(2 + shift, device="cuda")[shift:]
        counts = torch.ones(2 + shift, dtype=torch.int32, device="cuda")[shift:]
        sampled = torch.randint(0, 9, (2, 6), device="cuda")
        _same_on_both("load_round", [sampled, counts, starts, flat.view(12, 40), table], **round_buffers(3, 6, 40, 6))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_block_of_drafts(mapped: bool) -> None:
    for requests, steps, vocab in ((1, 15, 151936), (5, 3, 4096), (2, 2, 7)):
        logits = make(requests * steps, vocab).round()
        offsets = torch.randint(0, 50, (vocab,), device="cuda") if mapped else None
        whole = torch.full((requests, steps + 2), -7, device="cuda")
        kernels.draft_block_greedy(logits, offsets, whole[:, :steps])
        best = logits.amax(1, keepdim=True)
        first = torch.where(logits == best, torch.arange(vocab, device="cuda"), vocab).amin(1)
        wanted = first if offsets is None else first + offsets[first]
        assert torch.equal(whole[:, :steps].flatten(), wanted)
        assert bool((whole[:, steps:] == -7).all())


def test_caches_that_the_kernels_cannot_take_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    keys, values = make(3, 16, 2, 128)[..., ::2], make(3, 16, 2, 128)[..., ::2]
    table, starts = torch.tensor([[1, 2]], dtype=torch.int32).cuda(), torch.tensor([0, 1], dtype=torch.int32).cuda()
    seq_lens, query = torch.tensor([20], dtype=torch.int32).cuda(), make(1, 4, 64)
    for _ in range(2):
        got = kernels.paged_attention(query, keys, values, table, seq_lens, starts, query_len=1, scale=0.1)
    wide = query.double(), keys.double(), values.double()
    close(got, kernels.paged_attention.reference(*wide, table, seq_lens, starts, query_len=1, scale=0.1))
    assert sum("last stride of the KV caches is 2" in record.message for record in caplog.records) == 1
