"""Several processes that run one model: which ranks there are, what each holds, and exchanges between their hosts.

Collectives on the device are ops (`specgraph.kernels.collectives`); they find their process group here, by name.
"""

from specgraph.parallel.ranks import Ranks, join_ranks, local_rank, ranks_named, world_size
from specgraph.parallel.split import WHOLE, Share, TensorParallel

__all__ = ["WHOLE", "Ranks", "Share", "TensorParallel", "join_ranks", "local_rank", "ranks_named", "world_size"]
