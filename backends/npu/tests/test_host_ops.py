"""Every row of the table of host ops, captured in a task group and updated, against float64.

The shapes are ones that a device takes: all limits of the simulated runtime are on."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from random import Random

import pytest
import torch
from specgraph_npu.attention import make_attention
from specgraph_npu.host_ops import HOST_OPS, make_call
from test_random_graphs import SCHEDULES
from test_wheel_names import keywords

from specgraph import ops
from specgraph.attention import AttentionLayer, ForwardContext, HostLengths, KVCache
from specgraph.attention.metadata import allocate_metadata
from specgraph.capture import UpdatePlan
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.parallel import ContextParallel

HEADS, DIM, LATENT, ROPE, BLOCK, BLOCKS, WIDTH = 4, 128, 512, 64, 128, 12, 3
ROUNDS = (HostLengths([1, 3, 2], [9, 300, 4]), HostLengths([3, 1, 2], [384, 3, 20]), HostLengths([2, 2, 2], [2, 2, 7]))
TOLERANCE = {"atol": 2**-7, "rtol": 2**-7}
"""Outputs are bfloat16, of 8 significant bits; sums are float32."""


pytestmark = pytest.mark.usefixtures("all_limits")


class Problem:
    """Random caches and queries of 3 requests in bfloat16, the same on host and device."""

    def __init__(self, kv_heads: int, rope: bool = False, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.kv_heads, self.rope = kv_heads, rope
        dim = LATENT if rope else DIM

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).bfloat16()

        self.query = random(6, HEADS, dim)
        self.key, self.value = (random(BLOCKS, BLOCK, kv_heads, dim) for _ in range(2))
        self.query_rope, self.key_rope = random(6, HEADS, ROPE), random(BLOCKS, BLOCK, kv_heads, ROPE)
        self.table = torch.randperm(BLOCKS, generator=g)[: 3 * WIDTH].view(3, WIDTH).int()
        self.mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        self.scale = (dim + (ROPE if rope else 0)) ** -0.5

    def reference(self, lengths: HostLengths, sink: torch.Tensor | None = None) -> torch.Tensor:
        """Attention [T, heads, dim] in float64; rows without keys are 0."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        ends = list(accumulate(lengths.query_lens))
        for r, (rows, end, n) in enumerate(zip(lengths.query_lens, ends, lengths.seq_lens, strict=True)):
            parts = [(self.query, self.key)] + ([(self.query_rope, self.key_rope)] if self.rope else [])
            scores = torch.zeros(HEADS, rows, n, dtype=torch.float64)
            for query, cache in parts:
                keys = self.pages(cache, r, n)
                scores += torch.einsum("qhd,khd->hqk", query[end - rows : end].double(), keys)
            scores *= self.scale
            for row in range(rows):
                visible = n - rows + 1 + row
                if visible <= 0:
                    continue
                s = scores[:, row, :visible]
                total = s.logsumexp(-1)
                if sink is not None:
                    total = torch.logaddexp(total, sink.double())
                values = self.pages(self.value, r, n)[:visible]
                out[end - rows + row] = torch.einsum("hk,khd->hd", (s - total[:, None]).exp(), values)
        return out

    def pages(self, cache: torch.Tensor, request: int, n: int) -> torch.Tensor:
        rows = cache[self.table[request].long()].flatten(0, 1)[:n].double()
        return rows.repeat_interleave(HEADS // self.kv_heads, 1)


def run(npu, problem, name, *, sink=None):
    """Capture with short lengths, then update to each of ROUNDS and compare."""
    row = HOST_OPS[name]
    query, key, value = problem.query, problem.key.flatten(2), problem.value.flatten(2)
    tensors = {"query": query, "key": key, "value": value, "block_table": problem.table, "atten_mask": problem.mask}
    if problem.rope:
        tensors |= {"query_rope": problem.query_rope, "key_rope": problem.key_rope.flatten(2)}
    if sink is not None:
        tensors["learnable_sink"] = sink
    out, inert = torch.empty_like(query, device="npu"), HostLengths([2, 2, 2], [2, 2, 2])
    call = make_call(
        row, out, inert, **{k: v.npu() for k, v in tensors.items()}, num_heads=HEADS, scale=problem.scale,
        num_key_value_heads=problem.kv_heads, sparse_mode=3, block_size=BLOCK,
    )  # fmt: skip
    graph = npu.graph()
    with graph.capture(), npu.task_group() as group:
        row.with_lengths(call, inert)()
    for lengths in ROUNDS:
        graph.replay()
        with npu.task_update(group):
            row.with_lengths(call, lengths)()
        torch.testing.assert_close(out.cpu().double(), problem.reference(lengths, sink), **TOLERANCE)
    graph.close()


@pytest.mark.parametrize("name", ["fia", "fia-v2"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(npu, runtime, name, kv_heads):
    run(npu, Problem(kv_heads), name)


@pytest.mark.parametrize("name", ["fia-mla", "fia-v2-mla"])
def test_mla_rope_parts(npu, runtime, name):
    run(npu, Problem(1, rope=True), name)


def test_learnable_sink(npu, runtime):
    run(npu, Problem(2), "fia-v2", sink=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16))


def test_lengths_that_do_not_fit_are_refused(npu, runtime):
    problem = Problem(2)
    query = problem.query.npu()
    call = partial(
        make_call, HOST_OPS["fia"], torch.empty_like(query), query=query, key=problem.key.flatten(2).npu(),
        value=problem.value.flatten(2).npu(), num_heads=HEADS, num_key_value_heads=2, scale=1.0, sparse_mode=3,
        block_size=BLOCK, block_table=problem.table.npu(), atten_mask=problem.mask.npu(),
    )  # fmt: skip
    for lengths, why in (
        (HostLengths([2, 2], [4, 4]), "ends at 4, query has 6 tokens"),
        (HostLengths([2, 2, 2], [4, 4]), "2 kv lengths for 3 sequences"),
        (HostLengths([2, 2, 2], [4, 4, 385]), "kv length 385 of sequence 2, there is room for 384"),
    ):
        with pytest.raises(RuntimeError, match=why):
            call(lengths=lengths)


def test_workspace_that_is_too_small_is_refused(run_script):
    done = run_script(
        """
        import torch
        from functools import partial
        from test_host_ops import *
        from specgraph_npu.platform import NpuPlatform
        npu, problem = NpuPlatform(0), Problem(2)
        query = problem.query.npu()
        call = make_call(HOST_OPS["fia"], torch.empty_like(query), ROUNDS[1], query=query,
                         key=problem.key.flatten(2).npu(), value=problem.value.flatten(2).npu(),
                         num_heads=HEADS, num_key_value_heads=2, scale=1.0, block_table=problem.table.npu(),
                         atten_mask=problem.mask.npu(), sparse_mode=3, block_size=BLOCK)
        HOST_OPS["fia"].with_lengths(partial(call, workspace=torch.empty(64, device="npu")), ROUNDS[1])()
        npu.synchronize()
        """,
        lenient="",
        TASK_QUEUE_ENABLE=0,
    )
    assert done.returncode != 0
    assert "needs a workspace of" in done.stderr


def test_table_refuses_what_a_row_does_not_take(npu, runtime):
    x = torch.zeros(1, 1, 1)
    with pytest.raises(ConfigError, match="takes no query_rope"):
        make_call(HOST_OPS["fia"], x, ROUNDS[0], query=x, key=x, value=x, query_rope=x)
    with pytest.raises(ConfigError, match="there are fia"):
        make_attention(npu, "nonsense")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_paged_attention_sees_the_keys_of_each_row(npu, runtime, kv_heads):
    """ATB: every row is a request; its workspace, asked for once, is enough for every update."""
    problem, row = Problem(kv_heads), HOST_OPS["atb-paged"]
    tensors = {"query": problem.query, "key": problem.key, "value": problem.value}
    tensors["block_table"] = problem.table.repeat_interleave(2, 0)
    out = torch.empty_like(problem.query, device="npu")
    first = HostLengths([1] * 6, [1] * 6)
    call = make_call(
        row, out, first, **{k: v.npu() for k, v in tensors.items()}, num_heads=HEADS, scale=problem.scale,
        num_key_value_heads=kv_heads,
    )  # fmt: skip
    graph = npu.graph()
    with graph.capture(), npu.task_group() as group:
        row.with_lengths(call, first)()
    for lengths in (HostLengths([2, 2, 2], [9, 300, 4]), HostLengths([2, 2, 2], [384, 3, 20])):
        graph.replay()
        with npu.task_update(group):
            row.with_lengths(call, HostLengths([1] * 6, [n - 1 + i for n in lengths.seq_lens for i in range(2)]))()
        torch.testing.assert_close(out.cpu().double(), problem.reference(lengths), **TOLERANCE)
    graph.close()


def test_paged_attention_without_atb_says_what_is_missing(npu, runtime, monkeypatch):
    monkeypatch.setattr("specgraph_npu.host_ops.library", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"libatb\.so is missing"):
        make_attention(npu, "atb-paged")


@pytest.mark.parametrize("name", HOST_OPS)
def test_names_are_those_of_the_installed_wheel(npu, name):
    row = HOST_OPS[name]
    ops = getattr(torch.ops, row.namespace)
    out = getattr(getattr(ops, row.op), row.overload)._schema
    workspace = getattr(ops, row.workspace_op).default._schema
    assert keywords(row) | {"workspace", "out"} <= {argument.name for argument in out.arguments}
    assert keywords(row) <= {argument.name for argument in workspace.arguments}


@pytest.mark.parametrize("name", ["fia", "fia-v2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_keys(npu, runtime, monkeypatch, name, ranks):
    """Each rank's part, captured with no keys and updated under random schedules, added up: attention over all keys.

    A rank may hold none.
    """
    problem, attention = Problem(2), make_attention(npu, name)
    room = min(383, BLOCK * ranks)
    monkeypatch.setattr("specgraph_npu.attention.own_heads", lambda part, *_: part)
    pages = problem.table.long()
    captured = []
    for rank in range(ranks):
        layer = AttentionLayer(HEADS, 2, DIM, problem.scale, ranks=ContextParallel(rank, ranks, ""))
        assert attention.supports(layer, torch.bfloat16, 128 * ranks)
        assert not attention.supports(layer, torch.bfloat16, 128)
        # blocks of ranks * BLOCK tokens: request r's first WIDTH // ranks pages hold its keys, every ranks-th one here
        whole = [part[pages].flatten(1, 2) for part in (problem.key, problem.value)]
        cells = [torch.full((3, BLOCK, 2, DIM), float("nan")).bfloat16() for _ in whole]
        for cell, rows in zip(cells, whole, strict=True):
            own = rows[:, rank::ranks][:, :BLOCK]
            cell[:, : own.shape[1]] = own
        cache = KVCache(*(torch.cat((cell[:1], cell)).npu() for cell in cells))
        metadata = allocate_metadata(3, [2], torch.tensor([[1], [2], [3]], dtype=torch.int32).npu())
        query, key = problem.query.npu(), torch.zeros(6, 2, DIM).bfloat16().npu()
        updates, graph = UpdatePlan(npu, 3), npu.graph()
        inert = HostLengths([2, 2, 2], [0, 0, 0])
        with graph.capture():
            part = attention.forward(layer, 0, query, key, key, cache, ForwardContext(metadata, 0, inert, updates))
        captured.append((graph, updates, part, cache, metadata, query, key))  # graphs keep no tensors of others
    random = Random(ranks)
    for seed in range(max(3, SCHEDULES // 5)):
        seen = [random.choice((0, random.randint(2, room), random.randint(2, 9))) for _ in range(3)]
        lengths = HostLengths([2, 2, 2], seen if seed else [room, 2, 0])
        runtime.schedule(seed, delay_us=200, percent=25)
        for graph, updates, *_ in captured:
            graph.replay()
            updates.apply_in_order({0: lengths})
        found = ops.sum_parts(torch.cat([part.cpu() for _, _, part, *_ in captured]), ranks, 0, HEADS)
        torch.testing.assert_close(found.double(), problem.reference(lengths), **TOLERANCE)
    for graph, *_ in captured:
        graph.close()
