"""The processes that run one model together: the ranks, the part of the model that each holds, and host exchanges.

Collectives on the device are ops of the core (`specgraph.ops.collectives`).
"""

from specgraph_models.parallel.join import join_ranks
from specgraph_models.parallel.ranks import Ranks
from specgraph_models.parallel.splits import WHOLE, ExpertParallel, Share, TensorParallel, split_over

__all__ = [
    "WHOLE",
    "ExpertParallel",
    "Ranks",
    "Share",
    "TensorParallel",
    "join_ranks",
    "split_over",
]
