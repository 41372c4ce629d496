"""Several processes that run one model: which ranks there are, what each holds, and exchanges between their hosts.

Collectives on the device are ops (`specgraph.ops.collectives`); they find their process group here, by name.
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
