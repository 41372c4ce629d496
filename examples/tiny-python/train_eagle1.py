"""Train the EAGLE-1 head on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import torch
import unrolled
from decoder import LayerSizes
from eagle1_head import Eagle1Config, Eagle1Head
from transformers import LlamaConfig

INTERMEDIATE_SIZE = 1024


def make(target: LlamaConfig, lm_head: torch.Tensor) -> Eagle1Head:
    """An untrained head for the target."""
    sizes = LayerSizes.of_target(target, INTERMEDIATE_SIZE)
    return Eagle1Head(Eagle1Config(sizes, target.vocab_size, target.max_position_embeddings), lm_head)


if __name__ == "__main__":
    unrolled.train(__doc__, "eagle1", make, Eagle1Head.load)
