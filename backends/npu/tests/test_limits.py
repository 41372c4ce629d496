"""Each limit of the simulated runtime: refused with it, taken without it. See simulator/runtime/limits.cpp."""

from __future__ import annotations

import pytest
import torch
from specgraph_npu.host_ops import HOST_OPS, make_call
from specgraph_npu.kv_cache import write

from specgraph.attention import HostLengths

pytestmark = pytest.mark.usefixtures("all_limits")


def attend(
    dim: int = 128,
    block: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    kv_heads: int = 1,
    sparse: int = 3,
    mask: bool = True,
    query_lens: tuple[int, ...] = (2, 1),
    seq_lens: tuple[int, ...] = (5, 1),
    rope: int = 0,
    before: int = 2,
    sink: torch.dtype | None = None,
) -> None:
    """Ask the op for its workspace, where it checks all of its arguments."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device="npu")

    requests, lengths = len(query_lens), HostLengths(list(query_lens), list(seq_lens))
    query, cache = zeros(sum(query_lens), heads, dim), zeros(2, block, kv_heads * dim)
    tensors = {"block_table": torch.zeros(requests, 2, dtype=torch.int32, device="npu")}
    if mask:
        tensors["atten_mask"] = torch.ones(2048, 2048, dtype=torch.bool, device="npu")
    if rope:
        tensors |= {"query_rope": zeros(sum(query_lens), heads, rope), "key_rope": zeros(2, block, kv_heads * rope)}
    if sink is not None:
        tensors["learnable_sink"] = torch.zeros(heads, dtype=sink, device="npu")
    name = "fia-mla" if rope else "fia" if sink is None else "fia-v2"
    make_call(
        HOST_OPS[name], torch.empty_like(query), lengths, query=query, key=cache, value=cache, **tensors, scale=1.0,
        num_heads=heads, num_key_value_heads=kv_heads, sparse_mode=sparse, block_size=block, pre_tokens=before,
        next_tokens=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"block": 512},
        {"dim": 192, "heads": 1},
        {"rope": 64},
        {"sparse": 4},
        {"sparse": 4, "query_lens": (1, 1)},
        {"sink": torch.bfloat16},
        {"sparse": 0, "mask": False, "query_lens": (1, 1), "seq_lens": (5, 0)},
        {"query_lens": (2, 1, 1), "seq_lens": (5, 0, 0)},  # a batch padded to the size of its graph
        {"dim": 512, "rope": 64, "block": 16, "heads": 8},
        {"dim": 512, "rope": 64, "dtype": torch.float16},
    ],
)
def test_shapes_that_the_sources_allow(npu, shape):
    attend(**shape)


@pytest.mark.parametrize(
    ("limit", "shape"),
    [
        ("fia-dtype", {"dtype": torch.float16}),
        ("fia-dtype", {"dtype": torch.float32}),
        ("fia-head-dim", {"dim": 64}),
        ("fia-head-dim", {"dim": 192}),  # with grouped heads
        ("fia-head-dim", {"rope": 32}),
        ("fia-block-size", {"block": 16}),
        ("fia-block-size", {"block": 1024}),
        ("fia-mask", {"sparse": 0}),
        ("fia-mask", {"sparse": 4, "dim": 192, "heads": 1}),
        ("fia-mask", {"sparse": 4, "before": -1}),
        ("fia-sink", {"sink": torch.float32}),
        ("fia-sink", {"sink": torch.bfloat16, "dim": 192, "heads": 1}),
        ("fia-lengths", {"seq_lens": (1, 1)}),
        ("fia-lengths", {"query_lens": (1, 2), "seq_lens": (0, 1)}),
        ("fia-latent", {"dim": 512, "rope": 32}),
        ("fia-latent", {"dim": 512, "rope": 64, "block": 64}),
        ("fia-latent", {"dim": 512, "rope": 64, "heads": 6}),
        ("fia-latent", {"dim": 512, "rope": 64, "dtype": torch.float32}),
    ],
)
def test_attention_shapes_and_lengths(npu, runtime, limit, shape):
    with pytest.raises(RuntimeError, match=f"limit '{limit}'"):
        attend(**shape)
    runtime.lenient("all")
    attend(**shape)


@pytest.mark.parametrize("wrong", ["dtype", "dense"])
def test_cache_writes(npu, runtime, wrong):
    dtype = torch.float32 if wrong == "dtype" else torch.bfloat16
    rows, cache = torch.ones(2, 1, 32, dtype=dtype, device="npu"), torch.zeros(2, 16, 2, 32, dtype=dtype, device="npu")
    cache = cache[:, :, :1] if wrong == "dense" else cache[:, :, :1].contiguous()
    slots = torch.tensor([3, 17], device="npu")
    with pytest.raises(RuntimeError, match="limit 'cache-write'"):
        write(rows, rows, cache, cache, slots)
    runtime.lenient("cache-write")
    write(rows, rows, cache, cache, slots)
    assert cache.cpu()[:, :, 0, 0].nonzero().tolist() == [[0, 3], [1, 1]]


CAPTURE = """
import torch
from specgraph_npu.platform import NpuPlatform
npu = NpuPlatform(0)
side, event, x, y = npu.stream(), npu.event(), torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
host = torch.ones(4).pin_memory()
event.record(side)
npu.synchronize()
graph = npu.graph()
try:
    with graph.capture():
        main = npu.current_stream()
        {work}
    print("captured")
except Exception as error:
    print(type(error).__name__, error)
import os, sys
sys.stdout.flush()
os._exit(0)
"""
COPY_IN_A_GROUP = """
        with npu.task_group():
            x.fill_(1)
            x.copy_(host, non_blocking=True)
"""
WORK_BESIDE_A_GROUP = """
        side.wait_stream(main)
        with npu.task_group():
            x.fill_(1)
            with npu.use(side):
                y.fill_(1)
        main.wait_stream(side)
"""
WAIT_FOR_OUTSIDE = """
        main.wait_event(event)
        x.fill_(1)
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("limit", "work"),
    [
        ("group-kernels-only", COPY_IN_A_GROUP),
        ("group-other-streams", WORK_BESIDE_A_GROUP),
        ("capture-outside-event", WAIT_FOR_OUTSIDE),
    ],
)
def test_captures(run_script, limit, work):
    """In processes of their own, without torch_npu's task queue: an op that fails at its launch ends that queue."""
    strict = run_script(CAPTURE.format(work=work.strip()), lenient="", TASK_QUEUE_ENABLE=0)
    assert strict.stdout.startswith("CaptureError"), strict.stdout + strict.stderr
    assert f"limit '{limit}'" in strict.stdout
    lenient = run_script(CAPTURE.format(work=work.strip()), lenient="all", TASK_QUEUE_ENABLE=0)
    assert lenient.stdout == "captured\n", lenient.stdout + lenient.stderr


SWALLOWED = CAPTURE.replace(
    "import os, sys",
    """
for use in (npu.synchronize, lambda: npu.graph().capture().__enter__()):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
import os, sys""",
)


@pytest.mark.once
@pytest.mark.parametrize(
    "work",
    [
        WAIT_FOR_OUTSIDE,
        """
        try:
            main.wait_event(event)
            npu.synchronize()
        except RuntimeError:
            pass
""",
    ],
    ids=["at the end", "swallowed"],
)
def test_an_op_of_a_capture_that_ends_the_task_queue_ends_the_platform(run_script, work):
    done = run_script(SWALLOWED.format(work=work.strip()), lenient="", TASK_QUEUE_ENABLE=1)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert lines[0].startswith("CaptureError the capture failed")
    assert all(line.startswith("PlatformError an op of a failed capture ended torch_npu's") for line in lines[1:])


def streams_of(npu, runtime, work) -> int:
    """Streams of the device that a graph of `work` takes."""
    before, graph = runtime.report()["streams_used"][0], npu.graph()
    with graph.capture():
        work()
    taken = runtime.report()["streams_used"][0] - before
    graph.close()
    return taken


@pytest.mark.once
def test_long_captures_take_further_streams(npu, runtime):
    x = torch.zeros(1, device="npu")

    def tasks() -> None:
        for _ in range(2100):
            x.add_(1)

    def groups() -> None:
        for _ in range(250):  # of one kernel and 8 empty tasks each, and the gates
            with npu.task_group():
                x.add_(1)

    assert (streams_of(npu, runtime, tasks), streams_of(npu, runtime, groups)) == (2, 2)
    runtime.lenient("group-prefetch", "capture-cascade")
    assert (streams_of(npu, runtime, tasks), streams_of(npu, runtime, groups)) == (1, 1)


@pytest.mark.once
@pytest.mark.parametrize(("lenient", "outcome"), [("", "[3.0, 3.0]"), ("update-kernel-types", "UpdateError")])
def test_kernels_that_an_update_may_issue(run_script, lenient, outcome):
    """On, as the source has it, another kernel of the same cores takes the captured one's place. Off, names count."""
    done = run_script(
        """
        import torch
        from specgraph_npu.platform import NpuPlatform
        npu, x = NpuPlatform(0), torch.zeros(2, device="npu")
        graph = npu.graph()
        with graph.capture(), npu.task_group() as group:
            x.fill_(1)
        graph.replay()
        try:
            with npu.task_update(group):
                x.add_(3)
            print(x.cpu().tolist())
        except Exception as error:
            print(type(error).__name__, error)
        import os
        os._exit(0)
        """,
        lenient=lenient,
        TASK_QUEUE_ENABLE=0,
    )
    assert done.stdout.startswith(outcome), done.stdout + done.stderr
    assert ("limit 'update-kernel-types'" in done.stdout) == bool(lenient)


@pytest.mark.events
def test_external_events_and_the_host(run_script):
    """torch_npu turns the refusal into a warning, and returns at once: the platform's own event refuses before."""
    code = """
    import torch
    from specgraph_npu.platform import NpuPlatform
    event = NpuPlatform(0).event(external=True)
    event.record()
    torch.npu.synchronize()
    print(event._event.query())
    try:
        event.query()
    except Exception as error:
        print(type(error).__name__, error)
    import os, sys
    sys.stdout.flush()
    os._exit(0)
    """
    strict = run_script(code, lenient="").stdout.splitlines()[-2:]
    assert strict[0] == "False"
    assert strict[1].startswith("UnsupportedError an external event of an NPU can't be queried")
    lenient = run_script(code, lenient="external-event-host").stdout.splitlines()[-2:]
    assert lenient[0] == "True"


@pytest.mark.once
@pytest.mark.parametrize(("lenient", "code"), [("", 107004), ("replay-device", 0)])
def test_replay_while_another_device_is_current(run_script, lenient, code):
    """Through the runtime's own calls: torch_npu's replay makes the graph's device current by itself."""
    done = run_script(
        """
        import ctypes
        acl, stream, graph = runtime.library, ctypes.c_void_p(), ctypes.c_void_p()
        acl.aclInit(None)
        acl.aclrtSetDevice(0)
        acl.aclrtCreateStream(ctypes.byref(stream))
        acl.aclmdlRICaptureBegin(stream, 1)
        acl.aclmdlRICaptureEnd(stream, ctypes.byref(graph))
        print(acl.aclmdlRIExecuteAsync(graph, stream))
        acl.aclrtSetDevice(1)
        print(acl.aclmdlRIExecuteAsync(graph, stream))
        """,
        devices=2,
        lenient=lenient,
    )
    assert [int(line) for line in done.stdout.split()] == [0, code], done.stderr


def test_unknown_limit(runtime):
    with pytest.raises(ValueError, match="no limit 'fia'; there are fia-dtype, "):
        runtime.lenient("fia")
    assert all(limit["on"] for limit in runtime.limits())
