"""The processes that run one model together: the ranks, the part of the model that each holds, and host exchanges.

Collectives on the device are ops (`specgraph.ops.collectives`). They find their process group here by its name.
"""

from specgraph.parallel.join import join_ranks
from specgraph.parallel.place import ContextParallel, RankPlace
from specgraph.parallel.ranks import Ranks

__all__ = ["ContextParallel", "RankPlace", "Ranks", "join_ranks"]
