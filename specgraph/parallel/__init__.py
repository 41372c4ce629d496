"""The processes that run one model together: the ranks, the part of the model that each holds, and host exchanges.

Collectives on the device are ops (`specgraph.ops.collectives`). They find their process group here by its name.
"""

from specgraph.parallel.join import join_ranks
from specgraph.parallel.layout import ParallelLayout, join_layout
from specgraph.parallel.ranks import Ranks
from specgraph.parallel.split import WHOLE, ContextParallel, ExpertParallel, Share, TensorParallel

__all__ = [
    "WHOLE",
    "ContextParallel",
    "ExpertParallel",
    "ParallelLayout",
    "Ranks",
    "Share",
    "TensorParallel",
    "join_layout",
    "join_ranks",
]
