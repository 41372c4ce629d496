"""The EAGLE-3 head that `examples/smollm2` trained for SmolLM2-135M-Instruct."""

from pathlib import Path

EAGLE3 = Path(__file__).parent / "eagle3"
"""The head's folder, in the format of the algorithm's authors: config.json and model.safetensors, bfloat16."""
