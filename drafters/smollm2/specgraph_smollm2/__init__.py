"""The EAGLE-3 drafter for SmolLM2-135M-Instruct, trained as in `examples/smollm2`."""

from pathlib import Path

EAGLE3 = Path(__file__).parent / "eagle3"
"""The drafter's folder, in the format of EAGLE-3's authors: config.json and model.safetensors, bfloat16."""
