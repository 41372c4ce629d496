"""Train the MTP module on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import torch
import unrolled
from decoder import LayerSizes
from mtp_head import MtpConfig, MtpModule
from transformers import LlamaConfig

INTERMEDIATE_SIZE = 1024


def make(target: LlamaConfig, lm_head: torch.Tensor) -> MtpModule:
    """An untrained module for the target."""
    config = MtpConfig(
        layer=LayerSizes.of_target(target, INTERMEDIATE_SIZE),
        vocab_size=target.vocab_size,
        max_positions=target.max_position_embeddings,
        target_layers=target.num_hidden_layers,
    )
    return MtpModule(config, lm_head)


if __name__ == "__main__":
    unrolled.train(__doc__, "mtp", make, MtpModule.load)
