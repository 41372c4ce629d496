"""The first hour on a Moore Threads device: 22 questions that no public source answers, asked in one run.

    python backends/musa/first_hour.py first-hour.json             # 10 to 60 minutes; send the file
    python backends/musa/first_hour.py first-hour.json 8 10        # these questions only

Install specgraph, specgraph-conformance and specgraph-musa first (README.md). Each question runs in a process of its
own with a time limit, since a device fault ends its process: once plain and, if it is installed, once more with
torchada loaded. The file has what each answered, how its process ended, and its last words. Nothing is sent anywhere.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ASKED: dict[str, tuple[Callable[[], Any], int]] = {}
"""Question -> its function and its time limit in seconds. A name begins with the question's number."""


def asked(number: int, limit: int = 120, *parts: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a question. Each of its parts gets a process of its own."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for part in parts or ("",):
            name = f"{number}-{function.__name__}" + (f"-{part}" if part else "")
            ASKED[name] = (lambda part=part: function(part) if parts else function()), limit
        return function

    return register


def musa() -> Any:
    import torch_musa  # pyright: ignore[reportMissingImports]

    return torch_musa


def device() -> torch.device:
    return musa().current_stream(0).device


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=device())


def told(function: Callable[[], Any]) -> Any:
    """Return what a call gives, or its error in one line."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def on_new_stream() -> Any:
    stream = musa().Stream()
    stream.wait_stream(musa().current_stream())
    with musa().stream(stream):
        yield stream
    musa().current_stream().wait_stream(stream)


def captured(body: Callable[[], Any], pool: Any = None, mode: str = "thread_local", **options: Any) -> tuple[Any, Any]:
    """Capture by the vendor's own calls. Return the graph and what the body gave."""
    raw = musa().MUSAGraph(**options)
    with on_new_stream():
        raw.capture_begin(pool or musa().graph_pool_handle(), capture_error_mode=mode)
        try:
            given = body()
        finally:
            raw.capture_end()
    return raw, given


def opened() -> Any:
    """Return the platform, with the trials run in this process."""
    from specgraph import open_platform

    os.environ["SPECGRAPH_MUSA_TRIALS"] = "skip"
    return open_platform("musa:0")


def still_works() -> Any:
    """Return whether a graph captures and replays after what was done."""
    x = ones(4)
    raw, y = captured(lambda: x * 3)
    x.fill_(5)
    raw.replay()
    musa().synchronize()
    return y.tolist() == [15.0] * 4


@asked(1)
def versions() -> Any:
    found = {}
    for name in ("torch", "torch_musa", "torchada", "triton", "vllm", "vllm-musa", "sglang", "mate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    properties = musa().get_device_properties(0)
    fields = {name: str(getattr(properties, name)) for name in dir(properties) if name[0] != "_"}
    from specgraph.device import discover

    probes = {name: [item.probe().available, item.probe().reason] for name, item in discover().items()}
    return found | {
        "python": sys.version, "torch.version.cuda": torch.version.cuda, "probes": probes, "properties": fields,
        "torch.version.musa": getattr(torch.version, "musa", None), "devices": musa().device_count(),
        "simulated": hasattr(musa(), "simulated"),
    }  # fmt: skip


@asked(2)
def signatures() -> Any:
    """The names of the wheel, for backends/musa/api."""
    found: dict[str, Any] = {}
    for name, value in vars(musa()).items():
        if inspect.isclass(value):
            members = {n: told(lambda m=m: str(inspect.signature(m))) for n, m in vars(value).items() if callable(m)}
            found[name] = {"": told(lambda v=value: str(inspect.signature(v))), **members}
        elif callable(value):
            found[name] = told(lambda v=value: str(inspect.signature(v)))
    from specgraph.device.installed import missing_names

    import torch_musa._MUSAC as binary  # pyright: ignore[reportMissingImports]
    from specgraph_musa.probe import CALLS

    return {"missing": missing_names(musa(), CALLS), "torch.musa": found, "_MUSAC": sorted(dir(binary))}


@asked(3)
def sources() -> Any:
    """The Python files of the wheel that no public release has, whole."""
    root, found = Path(musa().__file__).parent, {}
    for name in ("__init__.py", "musa_graph/graphs.py", "core/stream.py", "core/random.py", "core/memory.py"):
        if (file := root / name).exists():
            text = file.read_text()
            found[name] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
    return found


@asked(4)
def accelerator() -> Any:
    api = torch.accelerator
    return {
        "current": told(lambda: str(api.current_accelerator())), "synchronize": told(lambda: api.synchronize()),
        "memory_allocated": told(lambda: api.memory_allocated()), "has Graph": hasattr(api, "Graph"),
        "stream": told(lambda: str(torch.Stream(device=device()))),
        "event": told(lambda: str(torch.Event(device=device()))),
    }  # fmt: skip


@asked(5)
def triton_target() -> Any:
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    return {"target": str(driver.active.get_current_target()), "driver": type(driver.active).__module__}


@asked(6, 600)
def kernels() -> Any:
    """Each Triton op by itself, against plain torch."""
    from pkgutil import resolve_name

    from specgraph.kernels.trial import agrees_with_reference
    from specgraph.ops.library import import_installed, kernel_places

    import specgraph_musa.triton_ops as of_device

    platform, found = opened(), {}
    options = of_device.launch_options(platform)
    import_installed()
    for place in kernel_places():
        kernels = resolve_name(place)
        for i, call in enumerate(kernels.trial()):
            one = told(
                partial(agrees_with_reference, kernels.launcher(options), partial(iter, [call]), platform.device)
            )
            found[f"{call[0]} {i}"] = "agrees" if one is None else one
    return found


@asked(7)
def release() -> Any:
    from specgraph_musa.trials import find_release

    pool = told(lambda: musa().MemPool())
    return {"reset": find_release(opened()), "MemPool.use_count": told(lambda: pool.use_count())}


@asked(8, 60, "host-read", "exception", "other-stream", "illegal-op")
def failed_capture(way: str) -> Any:
    """What a failed capture leaves behind, and whether specgraph's clean-up is enough."""
    from specgraph_musa.graph import end_recording, holds_capture

    x, handle = ones(4), musa().graph_pool_handle()
    keeper, kept = captured(lambda: x + 1)

    def body() -> None:
        if way == "host-read":
            (x * 2).sum().item()
        if way == "exception":
            raise KeyError("the body's own")
        if way == "illegal-op":
            torch.nonzero(x)

    raw = musa().MUSAGraph()
    with on_new_stream():
        raw.capture_begin(handle, capture_error_mode="thread_local")
        failure = told(body)
        if way == "other-stream":
            with on_new_stream():
                failure = told(raw.capture_end)
        ended = told(raw.capture_end)
    left = {"body": str(failure), "capture_end": str(ended), "accepted": holds_capture(raw)}
    left["replay of another"] = told(lambda: keeper.replay())
    left["random"] = told(lambda: torch.rand(2, device=device()).shape[0])
    left["recording"], left["reset"] = end_recording(0, handle), told(raw.reset)
    left["works"] = told(still_works)
    left["another replays"] = told(lambda: [keeper.replay(), musa().synchronize(), kept.tolist()][2])
    platform = opened()
    graph = platform.graph()

    def ours() -> None:
        with graph.capture():
            body()

    left["through specgraph"], left["works then"] = str(told(ours)), told(still_works)
    return left


@asked(
    9, 60, *(f"{what}-{mode}" for what in ("empty", "new", "free") for mode in ("global", "thread_local", "relaxed"))
)
def allocator_in_capture(way: str) -> Any:
    what, _, mode = way.partition("-")
    held = [ones(1 << 20)]

    def body() -> Any:
        if what == "empty":
            return told(musa().empty_cache)
        return told(lambda: held.clear()) if what == "free" else told(lambda: ones(1 << 26).shape[0])

    return {"captured": told(lambda: captured(body, mode=mode)[1]), "works": told(still_works)}


def until_it_fails(most: int, **options: Any) -> Any:
    """Capture graphs of one op until one fails. The count goes to the file even if the process ends."""
    x, pool, graphs = ones(8), musa().graph_pool_handle(), []
    for _ in range(most):
        try:
            graphs.append(captured(lambda: x + 1, pool, **options)[0])
        except Exception as error:
            return {"graphs": len(graphs), "error": str(error).splitlines()[0], "works": told(still_works)}
        if len(graphs) % 64 == 0:
            say({"graphs so far": len(graphs)})
    return {"graphs": len(graphs), "replay of the first": told(graphs[0].replay), "again after reset": reset(graphs)}


def reset(graphs: list[Any]) -> Any:
    for graph in graphs:
        graph.reset()
    return told(still_works)


@asked(10, 600, "executables", "templates")
def graph_limit(of: str) -> Any:
    return until_it_fails(2200, **({"keep_graph": True} if of == "templates" else {}))


@asked(11, 600)
def rotation() -> Any:
    """The time of a replay beyond what torchada keeps, and specgraph's budget beside it."""
    from specgraph_musa.graph import is_rotating

    module = sys.modules.get("torchada._graph_rotation")
    if module is None or not is_rotating():
        return "torchada is not loaded, or does not rotate"
    x, pool = ones(8), musa().graph_pool_handle()
    graphs = [captured(lambda: x + 1, pool)[0] for _ in range(module.stats()["cap"] + 50)]
    platform = opened()
    return {
        "evicted replay, us": timed(graphs[0].replay, 1), "replay, us": timed(graphs[-1].replay, 20),
        "claimed": platform.capabilities.max_live_graphs, "stats": module.stats(),
    }  # fmt: skip


@asked(12)
def shared_pools() -> Any:
    x, pool = ones(16), musa().graph_pool_handle()
    (first, a), (second, b) = captured(lambda: x * 2, pool), captured(lambda: (x * 3).cumsum(0), pool)
    seen = []
    for order in ((first, second), (second, first)):
        x.add_(1)
        for graph in order:
            graph.replay()
        musa().synchronize()
        seen.append([a[-1].item(), b[-1].item()])
    with on_new_stream():
        first.replay()
        first.replay()
    second.replay()
    musa().synchronize()
    return {"seen": seen, "expected": [[4.0, 96.0], [6.0, 144.0]], "twice in flight": a[0].item()}


@asked(13)
def loops() -> Any:
    """Dependent steps in one graph against eager."""

    def steps(x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = (x * 1.01 + 0.5).sin()
        return x

    found = {}
    for count in (24, 200, 2000):
        x = torch.rand(256, device=device())
        eager = steps(x, count)
        graph, y = captured(lambda x=x, count=count: steps(x, count))
        graph.replay()
        musa().synchronize()
        found[count] = {"equal": torch.equal(y, eager), "replay, us": timed(graph.replay, 10)}
    return found


@asked(14)
def random_numbers() -> Any:
    from specgraph.device import trial

    platform, found = opened(), {}
    for inside in (False, True):
        with torch.inference_mode(inside):
            found[f"inference mode {inside}"] = told(
                lambda: trial.random_goes_on(
                    platform, lambda: musa().get_rng_state(0), lambda state: musa().set_rng_state(state, 0)
                )
            )
    return found


@asked(15)
def external_events() -> Any:
    def both_ways() -> Any:
        event, x = musa().Event(external=True), ones(1 << 20)
        graph, _ = captured(lambda: [x.mul_(2), event.record()])
        graph.replay()
        with on_new_stream():
            event.wait()
            seen = x[0].clone()
        musa().synchronize()
        return seen.item()

    return {"recorded in a graph, waited for outside (2.0)": told(both_ways)}


@asked(16)
def foreign_stream() -> Any:
    return {"record": told(lambda: musa().Event().record(torch.Stream(device=device()))), "works": told(still_works)}


@asked(17, 300)
def collectives() -> Any:
    """Two ranks, two all-reduces in one graph, 100 replays, against eager."""
    if musa().device_count() < 2:
        return "needs two devices"
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import first_hour; first_hour.one_rank()"
    file = tempfile.mktemp()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {"RANK": str(rank), "STORE": file}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    return [rank.communicate()[0][-2000:] for rank in ranks]


def one_rank() -> None:
    rank = int(os.environ["RANK"])
    store = torch.distributed.FileStore(os.environ["STORE"], 2)
    with musa().device(rank):
        torch.distributed.init_process_group("mccl", store=store, rank=rank, world_size=2)
        x = torch.full((4096,), float(rank + 1), device=f"musa:{rank}")
        y = x.clone()
        torch.distributed.all_reduce(y)

        def body() -> None:
            y.copy_(x)
            torch.distributed.all_reduce(y)
            y.mul_(0.5)
            torch.distributed.all_reduce(y)

        graph, wrong = captured(body)[0], 0
        for _ in range(100):
            graph.replay()
            musa().synchronize()
            wrong += y[0].item() != 3.0
        print(f"rank {rank}: {wrong} of 100 replays wrong, last {y[0].item()}, expected 3.0")


@asked(18, 1800)
def suite() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "specgraph_run", "conformance", "musa", "--quick", "--json", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return {"end": done.stdout[-3000:], "report": json.loads(report.read_text()) if report.exists() else None}


def timed(function: Callable[[], Any], count: int) -> float:
    """Return the median time of a call with a synchronize behind it, in microseconds."""
    taken = []
    for _ in range(count):
        musa().synchronize()
        begin = time.perf_counter()
        function()
        musa().synchronize()
        taken.append(time.perf_counter() - begin)
    return round(statistics.median(taken) * 1e6, 1)


@asked(19, 300)
def launch_cost() -> Any:
    x, found = ones(1024), {}
    found["eager op, us"] = timed(lambda: x.add_(1), 50)
    for nodes in (1, 100, 1000):
        before, begin = musa().memory_reserved(0), time.perf_counter()
        graph, _ = captured(lambda nodes=nodes: [x.add_(1) for _ in range(nodes)])
        found[nodes] = {
            "capture, us": round((time.perf_counter() - begin) * 1e6, 1), "replay, us": timed(graph.replay, 20),
            "bytes": musa().memory_reserved(0) - before,
        }  # fmt: skip
    return found


@asked(20)
def numerics() -> Any:
    from specgraph.device import trial

    found: dict[str, Any] = {"float8": told(lambda: trial.float8_is_copied(opened()))}
    for rows, columns, depth in ((6, 4096, 4096), (48, 14336, 4096), (512, 4096, 14336)):
        x, w = torch.randn(rows, depth), torch.randn(columns, depth) / depth**0.5
        exact = x.bfloat16().float() @ w.bfloat16().float().T
        given = (x.to(device()).bfloat16() @ w.to(device()).bfloat16().T).float().cpu()
        found[f"bf16 {rows}x{columns}x{depth}, largest error"] = (given - exact).abs().max().item()
    return found


@asked(21, 1200, "stock", "specgraph")
def vllm(way: str) -> Any:
    """The KV caches and the speculator of vLLM with an EAGLE-3 drafter, and the plugin's drafts beside vLLM's own."""
    if find_spec("vllm") is None:
        return "vllm is not installed"
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if "VLLM_PLUGINS" in os.environ:
        os.environ["VLLM_PLUGINS"] += ",specgraph"
    from specgraph_run import shipped_pair
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    target, drafter = map(str, shipped_pair())
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
    config = {"specgraph": {}} if way == "specgraph" else {}
    llm = LLM(target, speculative_config=speculative, additional_config=config, dtype="float16", max_model_len=512)

    def seen(worker: Any) -> Any:
        runner = worker.model_runner
        context = runner.vllm_config.compilation_config.static_forward_context
        caches = {n: getattr(layer, "kv_cache", None) for n, layer in context.items()}
        speculator = getattr(runner, "speculator", None)
        return {
            "runner": type(runner).__module__, "speculator": [kind.__qualname__ for kind in type(speculator).__mro__],
            "caches": {n: [str(t.dtype), [*t.shape], [*t.stride()]] for n, t in caches.items() if hasattr(t, "shape")},
            "proposes": dict(getattr(getattr(speculator, "counts", None), "by_reason", {})),
            "init_speculator": told(lambda: inspect.getsource(sys.modules[type(runner).__module__].init_speculator)),
        }  # fmt: skip

    options = SamplingParams(temperature=0, max_tokens=64)
    outputs = llm.generate(["def add(a, b):\n", "import os\n", "class Point:\n"], options)
    return {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "worker": llm.collective_rpc(seen)}


@asked(22, 1200)
def sglang() -> Any:
    """The runner that SGLang takes for draft-extend graphs, and whether an engine with it drafts."""
    if find_spec("sglang") is None:
        return "sglang is not installed"
    import sglang as engine_package  # pyright: ignore[reportMissingImports]
    from specgraph_run import shipped_pair

    source = (Path(engine_package.__file__).parent / "srt/speculative/eagle_worker_v2.py").read_text()
    lines = [line.strip() for line in source.splitlines() if '"musa"' in line or "CudaGraphRunner" in line]

    def drafted() -> Any:
        target, drafter = map(str, shipped_pair())
        engine = engine_package.Engine(
            model_path=target, speculative_draft_model_path=drafter, speculative_algorithm="EAGLE3",
            speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4, dtype="float16",
            attention_backend="triton", context_length=512, log_level="info",
        )  # fmt: skip
        try:
            made = engine.generate(["def add(a, b):\n"], {"temperature": 0, "max_new_tokens": 64})
            return [each["meta_info"] for each in made]
        finally:
            engine.shutdown()

    return {"source": lines, "engine": told(drafted)}


def say(answer: Any) -> None:
    print("ANSWER " + json.dumps(answer, default=str), flush=True)


def ask(name: str, with_torchada: bool) -> dict[str, Any]:
    """Run one question in a process of its own."""
    command = [sys.executable, __file__, "--one", name, *(["--torchada"] if with_torchada else [])]
    begin, limit = time.perf_counter(), ASKED[name][1]
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended: Any = child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)  # with what it has started
            ended = f"stopped after {limit} s"
            child.wait()
        out.seek(0)
        lines = out.read().splitlines()
    answers = [json.loads(line.removeprefix("ANSWER ")) for line in lines if line.startswith("ANSWER ")]
    words = [line for line in lines if not line.startswith("ANSWER ")]
    return {
        "question": name, "torchada": with_torchada, "ended": ended, "answer": answers[-1] if answers else None,
        "seconds": round(time.perf_counter() - begin, 1), "words": [] if ended == 0 else words[-40:],
    }  # fmt: skip


def main() -> None:
    if "--one" in sys.argv:
        musa()
        if "--torchada" in sys.argv:
            import torchada  # noqa: F401  # pyright: ignore[reportMissingImports]
        say(ASKED[sys.argv[2]][0]())
        return
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    file, numbers = Path(sys.argv[1]), sys.argv[2:]
    names = [name for name in ASKED if not numbers or name.partition("-")[0] in numbers]
    found = []
    for with_torchada in (False, True) if find_spec("torchada") else (False,):
        for name in names:
            found.append(ask(name, with_torchada))
            print(f"{name}{' (torchada)' if with_torchada else ''}: {found[-1]['ended']}, {found[-1]['seconds']} s")
            file.write_text(json.dumps(found, indent=1, default=str))  # what is known so far survives anything


if __name__ == "__main__":
    main()
