"""Targets and draft heads as plain tensor code, and the checkpoint folders that hold them.

A head here implements a protocol of `specgraph.draft`, and a target implements `Target`. `load_target` and
`load_drafter` build them from folders. `eagle_head_from_module` and `eagle3_head_from_module` build heads from the
modules of a host engine.

Each name is imported at its first use: the options of commands import parts of this package without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgraph_models.checkpoints.load import drafter_format, load_drafter, load_target
    from specgraph_models.draft_vocab import DraftVocabulary, cut_vocabulary
    from specgraph_models.from_modules import eagle3_head_from_module, eagle_head_from_module
    from specgraph_models.parallel import WHOLE, ExpertParallel, Share, TensorParallel
    from specgraph_models.target import Target, TargetOutput
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _PLACES:
            raise AttributeError(f"module 'specgraph_models' has no attribute '{name}'")
        return getattr(import_module(f"specgraph_models.{_PLACES[name]}"), name)


_PLACES = {
    "WHOLE": "parallel",
    "DraftVocabulary": "draft_vocab",
    "ExpertParallel": "parallel",
    "Share": "parallel",
    "Target": "target",
    "TargetOutput": "target",
    "TensorParallel": "parallel",
    "cut_vocabulary": "draft_vocab",
    "drafter_format": "checkpoints.load",
    "eagle3_head_from_module": "from_modules",
    "eagle_head_from_module": "from_modules",
    "load_drafter": "checkpoints.load",
    "load_target": "checkpoints.load",
}

__all__ = [
    "WHOLE",
    "DraftVocabulary",
    "ExpertParallel",
    "Share",
    "Target",
    "TargetOutput",
    "TensorParallel",
    "cut_vocabulary",
    "drafter_format",
    "eagle3_head_from_module",
    "eagle_head_from_module",
    "load_drafter",
    "load_target",
]
