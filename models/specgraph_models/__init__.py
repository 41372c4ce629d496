"""Targets and draft heads as plain tensor code, and the checkpoint folders that hold them.

A head here implements a protocol of `specgraph.draft`, and a target implements `Target`. `load_target` and
`load_drafter` build them from folders. `eagle_head_from_module` and `eagle3_head_from_module` build heads from the
modules of a host engine.
"""

from specgraph_models.checkpoints.load import drafter_format, load_drafter, load_target
from specgraph_models.from_modules import eagle3_head_from_module, eagle_head_from_module
from specgraph_models.parallel import WHOLE, ExpertParallel, Share, TensorParallel
from specgraph_models.target import Target, TargetOutput

__all__ = [
    "WHOLE",
    "ExpertParallel",
    "Share",
    "Target",
    "TargetOutput",
    "TensorParallel",
    "drafter_format",
    "eagle3_head_from_module",
    "eagle_head_from_module",
    "load_drafter",
    "load_target",
]
