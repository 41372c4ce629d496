"""A round brings numbers to the host once: the finished tokens. Nothing else waits for the device, in either direction.

On a CPU no address says which tensor is a device's. So each tensor that a graph may touch counts as one, graph pools
too, and so does each that is made of one. `.tolist()`, `int()`, `nonzero` and the like of such a tensor are transfers,
and so is a copy of it into any other. A copy to it must say `non_blocking`, or a device waits for all earlier work.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoder.pair_decoder import make_pair_decoder
from draft.pairs import DRAFTERS, VOCAB
from random_prompts import prompt
from specgraph_run.decoder import Request
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specgraph.cpu import CpuPlatform
from specgraph.cpu.checks.refusals import _READS
from specgraph.cpu.stream import CpuEvent, CpuStream

SYNCHRONISING = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"}


def storage(tensor):
    return tensor.untyped_storage()._cdata


class Transfers(TorchDispatchMode):
    """Names every transfer of the work in its block."""

    def __init__(self, named, pools=()):
        super().__init__()
        self.device, self.alive, self.seen = {storage(t) for t in named}, list(named), []
        self.pools, self.uploads = pools, 0
        self.reads = Reads(self)

    def __enter__(self):
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.reads.__exit__(*error)

    def is_device(self, tensor):
        return storage(tensor) in self.device or any(pool.covers(tensor.data_ptr()) for pool in self.pools)

    def made(self, result):
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.alive.append(tensor)  # so that no later tensor gets its address
                self.device.add(storage(tensor))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        touched = any(map(self.is_device, tensors))
        by_mask = name.startswith("index") and any(t.dtype == torch.bool for t in tensors[1:])
        if touched and (name in SYNCHRONISING or by_mask):
            self.seen.append(name)
        if name == "copy_":
            into, source = map(self.is_device, args[:2])
            self.uploads += into and not source and args[1].dim() > 0
            waits = not (kwargs.get("non_blocking") or True in args[2:])
            if source and not into:
                self.seen.append("copy to the host")
            elif into and not source and args[1].dim() and waits:
                self.seen.append("blocking copy from the host")
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if touched:
            self.made(result)
        return result


class Reads(TorchFunctionMode):
    """Counts what no dispatch shows: reads below it, and tensors made on a device by name."""

    def __init__(self, transfers):
        super().__init__()
        self.transfers = transfers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _READS and self.transfers.is_device(args[0]):
            self.transfers.seen.append(_READS[func])
        result = func(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device):
            self.transfers.made(result)
        return result


def make_decoder(kind, lengths="device", **settings):
    limits = {"max_num_requests": 3, "max_model_len": 48, "capture_sizes": [1, 3], "prefill": "full"}
    return make_pair_decoder(kind, lengths, **(limits | settings))


def transfers_by_round(decoder, monkeypatch, requests, uploads=None):
    """Return what each round transferred, and how often it waited; add how much it uploaded to `uploads`."""
    waits, rounds, run = [], [], decoder._step
    for owner in (CpuEvent, CpuStream, CpuPlatform):
        real = owner.synchronize
        monkeypatch.setattr(owner, "synchronize", lambda self, real=real: (waits.append(self), real(self))[1])
    owners = list(decoder.runners.values())
    pools = [owner.graphs._pool for owner in owners if owner.graphs]
    named = [tensor for owner in owners for tensor in owner.read_set().values()]

    own = [value for value in vars(decoder.rounds).values() if isinstance(value, torch.Tensor)]

    def watched():
        waits.clear()
        with Transfers([*named, *own], pools) as transfers:
            chunks = run()
        if uploads is not None:
            uploads.append(transfers.uploads)
        rounds.append((transfers.seen, len(waits)))
        return chunks

    decoder._step = watched
    results = decoder.generate(requests)
    assert [len(r.token_ids) for r in results] == [r.max_tokens for r in requests]
    return rounds


def requests(temperature=0.0, seed=0):
    """Five for three places: two join later, one of them with a prompt in chunks."""
    shapes = ((1, 6), (5, 9), (12, 4), (9, 7), (3, 1))
    return [
        Request(
            prompt_token_ids=[t % VOCAB for t in prompt(n, seed=n)], max_tokens=m, temperature=temperature, seed=seed
        )
        for n, m in shapes
    ]


WAYS = (("merged", 1), ("merged", 0), ("step", 1))
"""Lowerings and rounds ahead; the drafters take turns in them."""
ONE = (["copy to the host"], 1)


@pytest.mark.parametrize("kind", [None, "eagle", "dflash"])
def test_one_transfer_a_round(kind, monkeypatch):
    decoder = make_decoder(kind, rounds_ahead=0)
    rounds = transfers_by_round(decoder, monkeypatch, requests())
    assert len(rounds) > 5
    assert rounds == [ONE] * len(rounds)


@pytest.mark.parametrize(
    "modes", [{"decode": "eager", "prefill": "eager"}, {"decode": "merged", "prefill": "piecewise"}]
)
def test_in_modes_that_run_passes_eagerly(modes, monkeypatch):
    rounds = transfers_by_round(make_decoder("eagle", **modes, rounds_ahead=0), monkeypatch, requests())
    assert rounds == [ONE] * len(rounds)


def test_with_sampling_and_a_schedule(monkeypatch):
    decoder = make_decoder("mtp", rounds_ahead=0, sampled=True, draft_schedule={1: 3, 3: 1})
    rounds = transfers_by_round(decoder, monkeypatch, requests(temperature=0.8))
    assert rounds == [ONE] * len(rounds)


@pytest.mark.parametrize(
    ("kind", "decode", "ahead"),
    [(kind, *way) for number, kind in enumerate(DRAFTERS) for way in (WAYS if kind == "eagle" else [WAYS[number % 3]])],
)
def test_a_round_uploads_nothing_while_nobody_joins_or_leaves(kind, decode, ahead, monkeypatch):
    """One wait, and one copy of the tokens for each launch."""
    decoder = make_decoder(kind, decode=decode, rounds_ahead=ahead, sampled=True)
    uploads, launched = [], []
    launch = decoder.rounds._launch
    monkeypatch.setattr(decoder.rounds, "_launch", lambda *args: (launched.append(len(uploads)), launch(*args)))
    longer = [replace(each, max_tokens=each.max_tokens + 6) for each in requests(temperature=0.7, seed=2)[1:4]]
    rounds = transfers_by_round(decoder, monkeypatch, longer, uploads)
    leaves = [i for i in range(1, len(rounds)) if uploads[i]]
    # Passes of 8 rows over prompts of 5, 12 and 9 tokens: 1 + 2 + 2 of the target, as many of a draft model. The other
    # drafters leave a prompt's last token to the first round, so the last prompt is one pass. And three joins of four.
    assert uploads[0] == 5 + (5 if kind == "draft-model" else 4) + 3 * 4
    assert len(leaves) <= 2 < len(rounds) - 2  # three requests, moved together at most twice
    launches = [launched.count(i) for i in range(len(rounds))]
    steady = launches.index(0, 1) if 0 in launches[1:] else len(rounds)  # then the host waits for the last ones' ends
    assert len(rounds) - 3 <= steady
    assert launches[:steady] == [ahead] + [1] * (steady - 1)
    assert rounds[:steady] == [(["copy to the host"] * (1 + ahead), 1)] + [ONE] * (steady - 1)
    assert sum(launches) <= len(rounds)


def test_host_lengths_take_the_counts_from_the_same_transfer(monkeypatch):
    rounds = transfers_by_round(make_decoder("eagle", "host"), monkeypatch, requests())
    assert rounds == [ONE] * len(rounds)


@pytest.mark.parametrize(
    ("work", "seen"),
    [
        (lambda t: t.tolist(), [".tolist()"]),
        (lambda t: int(t[0] + 1), ["item"]),
        (lambda t: t[t > 0], ["index"]),
        (lambda t: torch.empty(3).copy_(t * 2), ["copy to the host"]),
        (lambda t: t.copy_(torch.tensor([1.0, 2.0, 3.0])), ["blocking copy from the host"]),
        (lambda t: t.copy_(torch.tensor([1.0, 2.0, 3.0]), non_blocking=True), []),
        (lambda t: t.copy_(torch.ones(3, device=t.device)), []),
        (lambda t: torch.tensor([1, 2]).tolist(), []),
    ],
)
def test_the_watch_sees_transfers(work, seen):
    tensor = torch.ones(3)
    with Transfers([tensor]) as transfers:
        work(tensor)
    assert transfers.seen == seen
