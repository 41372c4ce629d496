"""Groups of ranks in the core: any object that meets the protocol, found by its name."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from specgraph import ops
from specgraph.errors import ConfigError, RankError
from specgraph.parallel import ranks_named, register_ranks, unregister_ranks


@dataclass
class Doubled:
    """Two ranks with equal tensors, without any library: a host engine's own group."""

    name: str
    ran: list[str] = field(default_factory=list)

    def gather_small(self, what: str, x: Tensor) -> Tensor | None:
        return torch.stack((x, x)) if x.numel() < 4 else None

    def run(self, what: str, function: str, *tensors: Tensor) -> None:
        self.ran.append(what)
        tensors[0].mul_(2)


def test_collectives_find_a_registered_group():
    group = Doubled("doubled")
    register_ranks(group)
    try:
        small, large = torch.ones(2), torch.ones(2, 4)
        ops.all_reduce(small, "doubled")
        ops.all_reduce(large, "doubled")
        assert small.tolist() == [2.0, 2.0]
        assert torch.equal(large, torch.full((2, 4), 2.0))
        assert group.ran == ["all_reduce of float32 [2, 4]"]
        assert ops.all_gather(torch.tensor([3.0]), "doubled", 2).tolist() == [3.0, 3.0]
        register_ranks(group)
        with pytest.raises(ConfigError, match="ranks 'doubled' are registered already"):
            register_ranks(Doubled("doubled"))
    finally:
        unregister_ranks("doubled")
    with pytest.raises(RankError, match="no ranks 'doubled' are registered in this process"):
        ops.all_reduce(torch.ones(2), "doubled")
    with pytest.raises(RankError, match="join the ranks first"):
        ranks_named("doubled")


def test_no_group_is_refused():
    with pytest.raises(ConfigError, match=r"group must be a RankGroup \(name, gather_small, run\), got 3"):
        register_ranks(3)
