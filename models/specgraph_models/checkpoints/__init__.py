"""Hugging Face folders: reads their configuration and tensors, and builds targets and draft heads from them.

target = load_target("Llama-3.1-8B-Instruct", device, torch.bfloat16)
print(drafter_format("EAGLE3-LLaMA3.1-Instruct-8B"))     # eagle3, authors layout (...)
head = load_drafter("EAGLE3-LLaMA3.1-Instruct-8B", target)
head = load_drafter("Qwen3-30B-A3B-EAGLE3", "Qwen3-30B-A3B")  # a host engine's target: only its shape is read

Every function here raises CheckpointError if it cannot read a folder: one line with the file, the key or tensor, its
value, and the value that it should have.
"""

from specgraph_models.checkpoints.draft_vocab import read_draft_vocab
from specgraph_models.checkpoints.formats import DrafterFormat
from specgraph_models.checkpoints.load import drafter_format, load_drafter, load_target
from specgraph_models.checkpoints.target_shape import TargetShape, target_shape

__all__ = [
    "DrafterFormat",
    "TargetShape",
    "drafter_format",
    "load_drafter",
    "load_target",
    "read_draft_vocab",
    "target_shape",
]
