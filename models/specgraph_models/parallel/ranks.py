"""The ranks of a run, their process groups of torch.distributed, and exchanges between their hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from specgraph.errors import ConfigError, RankError, first_line
from specgraph.parallel import ALL_GATHER, register_ranks, unregister_ranks
from specgraph.validation import checked

_dist: Any = torch.distributed
"""torch.distributed without its types: some are private, or marked deprecated, in some versions."""

_HEADER = 224
"""The bytes at the start of a host exchange that name it."""
_PAYLOAD, _DATA = 136, 16384
"""The bytes after the header: `_PAYLOAD` for integers, or `_DATA` on the CPU, for tensors too."""
_MOST_VALUES = 16
_FAILED = "failed: "
"""The label of a rank that can't go on begins with it."""
_GRACE_S, _LOOK_S = 5.0, 0.02
"""The seconds that a rank which gave up waiting looks for the others' places, and the seconds between two looks."""
_GONE = "rank 0 has ended (or torchrun, which started it), and the store of the ranks with it"


@dataclass(slots=True)
class Ranks:
    """The processes that run one model, as one of them sees it. Made by `join_ranks`.

    Host exchanges (`exchange`, `same`, `smallest`) use the process group of the hosts, never the device. Each ends
    within `timeout` on every rank: with values, or with a `RankError` that names the difference between the ranks.
    """

    name: str
    """The name of these ranks: captured collectives find them by it, with `specgraph.parallel.ranks_named`."""
    rank: int
    size: int
    device: Any
    """The process group of the device's tensors."""
    host: Any
    """The process group of the hosts. On the CPU it is the same group."""
    store: Any
    """torch's key-value store, which all ranks reach."""
    timeout: timedelta
    compares: bool
    """True on the CPU: the hosts then compare every collective before it runs, also in a replay."""
    started: bool
    """True if torch.distributed was started for these ranks."""
    members: tuple[int, ...]
    """The numbers of these ranks among all processes, for messages."""
    exchanges: int = 0
    """The number of host exchanges so far."""
    failure: Exception | None = None
    """The error that this rank has told the others with `fail`."""
    patience: timedelta | None = None
    """The time that a failing rank waits for the others to hear of it; set by `agreed`. None: as in any exchange."""
    parts: list[Ranks] = field(default_factory=list["Ranks"])
    """The ranks that `part` made. They are closed with these ranks."""

    @checked
    def exchange(self, what: str, values: Sequence[int] = ()) -> list[list[int]]:
        """Return every rank's `values`, by rank. All ranks must be at the same exchange: `what` is compared too.

        Args:
            what: the name of the exchange for messages, the same on every rank.
            values: at most 16 integers, the same number on every rank.

        Raises:
            ConfigError: there are more values, or a value is no integer.
            RankError: another rank is at another exchange, failed, ended, or did not come within `timeout`.
        """
        if len(values) > _MOST_VALUES:
            raise ConfigError(f"exchange: {len(values)} values: an exchange carries at most {_MOST_VALUES}")
        numbers = torch.tensor([len(values), *values], dtype=torch.int64)
        return [each[1 : 1 + each[0]] for each in self._gather(what, numbers).tolist()]

    def gather_small(self, what: str, x: torch.Tensor) -> torch.Tensor | None:
        """Compare a collective over the hosts before it runs, if `compares` is set. A small tensor is gathered with it.

        Args:
            what: the collective, its dtype and shape.

        Returns:
            x of every rank, [size, *x.shape]. None if a collective of the device still has to gather it.

        Raises:
            RankError: as in `exchange`.
        """
        if not self.compares:
            return None
        if x.nbytes > _DATA:
            self.exchange(what)
            return None
        return self._gather(what, x)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, at their current or next exchange, that this rank can't go on.

        Returns if each of them has an error of its own.

        Raises:
            RankError: on every rank, if only some fail. It names the first of them, and its error. Or the other ranks
                did not come.
        """
        self.failure, said = error, f"{_FAILED}{type(error).__name__}: {first_line(error)}"
        if self._announces:
            self._announce(self.exchanges + 1)
            try:
                self.store.wait([self._place(self.exchanges + 1, rank) for rank in range(self.size)], self.patience)
            except RuntimeError as late:
                raise RankError(
                    f"rank {self.members[self.rank]} {said}; it ends without the other ranks, which did not come to "
                    f"hear of it. {_reason(late)}"
                ) from error
        self._gather(said, torch.zeros(0))

    @property
    def _announces(self) -> bool:
        """True if ranks may wait for a failing rank elsewhere: on the device, or in an exchange of one of `parts`."""
        return self.patience is not None and (not self.compares or bool(self.parts))

    def _gather(self, what: str, x: torch.Tensor) -> torch.Tensor:
        """Return x of every rank, [size, *x.shape]. x must fit into the bytes after the header."""
        self.exchanges += 1
        if self._announces:
            self._announce(self.exchanges)
        label = f"{what} (exchange {self.exchanges})".encode()[:_HEADER].ljust(_HEADER, b"\0")
        mine = torch.zeros(_HEADER + (_DATA if self.compares else _PAYLOAD), dtype=torch.uint8)
        mine[:_HEADER] = torch.frombuffer(bytearray(label), dtype=torch.uint8)
        mine[_HEADER : _HEADER + x.nbytes] = x.contiguous().view(-1).view(torch.uint8)
        theirs = mine.new_empty(self.size * len(mine))
        self._call(what, ALL_GATHER, theirs, mine, group=self.host)
        headers, payloads = theirs.view(self.size, -1).split((_HEADER, len(mine) - _HEADER), dim=1)
        if not torch.equal(headers, headers[:1].expand_as(headers)):
            labels = [bytes(each).rstrip(b"\0").decode(errors="replace") for each in headers.tolist()]
            failed = [rank for rank, label in enumerate(labels) if label.startswith(_FAILED)]
            if failed and len(failed) < self.size:
                raise RankError(f"rank {self.members[failed[0]]} {labels[failed[0]]}", everywhere=True)
            if not failed:
                other = next(rank for rank, label in enumerate(labels) if label != labels[0])
                raise RankError(
                    f"the ranks are not at the same point: rank {self.members[0]} is at {labels[0]}, rank "
                    f"{self.members[other]} at {labels[other]}; all ranks must run the same passes in the same order. "
                    "They end here, where devices would wait for ever",
                    everywhere=True,
                )
        given = x.new_empty(self.size, x.numel())
        given.view(torch.uint8).copy_(payloads[:, : x.nbytes])
        return given.view(self.size, *x.shape)

    def _announce(self, exchange: int) -> None:
        """Let a failing rank know that this rank is at an exchange."""
        try:
            self.store.set(self._place(exchange, self.rank), "")
        except RuntimeError as error:
            raise RankError(f"{_GONE}. {_reason(error)}") from error

    def _place(self, exchange: int, rank: int) -> str:
        return f"{self.name}/at/{exchange}/{rank}"

    def run(self, what: str, function: str, *tensors: torch.Tensor) -> None:
        """Call torch.distributed's `function` on device tensors. Raises RankError, with `what` in its text, if it fails
        or takes longer than `timeout`.
        """
        self._call(what, function, *tensors, group=self.device)

    def _call(self, what: str, function: str, *args: Any, group: Any) -> None:
        try:
            getattr(_dist, function)(*args, group=group)
        except RuntimeError as error:
            own = self.members[self.rank]
            raise RankError(f"rank {own} waited at {what}: {self._absent(what)}. {_reason(error)}") from error

    @checked
    def same(self, what: str, values: Mapping[str, object]) -> None:
        """Compare a configuration over the ranks.

        Raises:
            RankError: it differs, or a rank did not come within `timeout`. Every rank's error names the same first key
                that differs, with the values of two ranks.
        """
        mine = {name: str(value) for name, value in values.items()}
        everyone = self.tell(what, json.dumps(mine))
        first: dict[str, str] = json.loads(everyone[0])
        for rank, text in enumerate(everyone):
            theirs: dict[str, str] = json.loads(text)
            for name in [*first, *theirs]:
                if first.get(name) != theirs.get(name):
                    raise RankError(
                        f"rank {self.members[rank]} has {name} {theirs.get(name)}, rank {self.members[0]} has "
                        f"{first.get(name)}: start every rank with the same options, folders and versions",
                        everywhere=True,
                    )

    @checked
    def smallest(self, what: str, value: int) -> int:
        """Return the smallest `value` over the ranks."""
        return min(values[0] for values in self.exchange(what, [value]))

    @checked
    def part(self, what: str, groups: Sequence[Sequence[int]]) -> Ranks:
        """Return the ranks of the group that this rank is in, named after `what`. All ranks call it with equal groups.

        Args:
            groups: the numbers of the ranks in each group; every rank is in exactly one.

        Raises:
            ConfigError: a rank is in no group, or more than once in the groups.
        """
        if sorted(rank for members in groups for rank in members) != [*range(self.size)]:
            raise ConfigError(f"part: groups of {self.size} ranks hold each of 0 to {self.size - 1} once")
        found: Ranks | None = None
        for members in groups:
            numbers = [self.members[rank] for rank in members]
            group: Any = _dist.new_group(numbers, timeout=self.timeout)
            host: Any = group if self.compares else _dist.new_group(numbers, timeout=self.timeout, backend="gloo")
            if self.rank in members:
                name, place = f"{self.name}-{what}-{len(self.parts)}-{numbers[0]}", list(members).index(self.rank)
                store = _dist.PrefixStore(name, self.store)
                found = Ranks(
                    name, place, len(numbers), group, host, store, self.timeout, self.compares, False, tuple(numbers)
                )
        assert found is not None, "it is in one of them"
        self.parts.append(found)
        register_ranks(found)
        found.exchange("the first exchange")
        return found

    def close(self) -> None:
        """Leave the ranks. Their captured collectives must not be replayed afterwards. If torch.distributed was started
        for ranks, it is stopped when the last ranks of this process close."""
        for each in (self, *self.parts):
            unregister_ranks(each.name)
        if OPEN.pop(self.name, None) is not None:
            others = list(OPEN.values())
            if self.started and others:
                others[0].started = True
            elif self.started:
                _dist.destroy_process_group()
                for each in (self, *self.parts):
                    each.device = each.host = None  # the last references: now the others see that this rank has left

    def tell(self, what: str, text: str) -> list[str]:
        """Return every rank's text, of any length, by rank. The store carries the texts. The exchange before they are
        read fails at once if a rank has left.

        Raises:
            RankError: as in `exchange`, or the rank that holds the store ended before its texts were read.
        """
        key = f"{self.name}/{self.exchanges}"
        try:
            self.store.set(f"{key}/{self.rank}", text)
            self.exchange(what)
            return [self.store.get(f"{key}/{rank}").decode() for rank in range(self.size)]
        except RuntimeError as error:  # torch's errors of the store are RuntimeErrors
            raise RankError(f"{_GONE} at {what}. {_reason(error)}") from error

    def _absent(self, what: str) -> str:
        """Say which other ranks are elsewhere. Each rank that gives up waiting writes its place to the store."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        places: dict[int, str] = {}
        end = time.monotonic() + _GRACE_S
        try:
            self.store.set(self._waits(self.rank), what)
            while len(places) < len(others) and time.monotonic() < end:
                for rank in others:
                    if rank not in places and self.store.check([self._waits(rank)]):
                        places[rank] = self.store.get(self._waits(rank)).decode()
                time.sleep(_LOOK_S)
        except RuntimeError:  # the store is gone; rank 0, which held it, was there if it wrote its place before
            if 0 not in [self.members[rank] for rank in places]:
                return _GONE
        if gone := [self.members[rank] for rank in others if rank not in places]:
            return f"rank {', '.join(map(str, gone))} did not come there (ended, or runs other passes)"
        elsewhere = {place: self.members[rank] for rank, place in places.items() if place != what}
        return "; ".join(f"rank {rank} waits at {place}" for place, rank in elsewhere.items()) or "all ranks were there"

    def _waits(self, rank: int) -> str:
        return f"{self.name}/waiting/{rank}"


OPEN: dict[str, Ranks] = {}
"""The ranks of this process that are not closed, without their parts, by name: the last to close stops
torch.distributed."""


def _reason(error: Exception) -> str:
    return f"The communication library says: {first_line(error)[:160]}"
