"""Hugging Face folders: reading their configuration and tensors, and building targets and draft heads from them.

target = load_target("Llama-3.1-8B-Instruct", device, torch.bfloat16)
print(drafter_format("EAGLE3-LLaMA3.1-Instruct-8B"))     # eagle3, authors layout (...)
head = load_drafter("EAGLE3-LLaMA3.1-Instruct-8B", target)
head = load_drafter("Qwen3-30B-A3B-EAGLE3", "Qwen3-30B-A3B")  # an engine's own target: only its shape is read

Every function here raises CheckpointError for a folder that it cannot read: one line that names the file, and the key
or tensor with what it is and what it should be.
"""

from specgraph_models.checkpoints.formats import DrafterFormat
from specgraph_models.checkpoints.load import drafter_format, load_drafter, load_target
from specgraph_models.checkpoints.target_shape import TargetShape, target_shape

__all__ = ["DrafterFormat", "TargetShape", "drafter_format", "load_drafter", "load_target", "target_shape"]
