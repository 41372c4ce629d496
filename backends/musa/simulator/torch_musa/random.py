"""The default generator's state."""

import torch

__all__ = ["get_rng_state", "set_rng_state"]


def get_rng_state(device="musa"):
    return torch.get_rng_state()


def set_rng_state(new_state, device="musa"):
    torch.set_rng_state(new_state)
