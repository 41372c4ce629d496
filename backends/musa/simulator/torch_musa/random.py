"""The default generator's state."""

from torch_musa import form
from torch_musa.device import index_of

__all__ = ["get_rng_state", "set_rng_state"]


def get_rng_state(device="musa"):
    return form.get_rng_state(index_of(device))


def set_rng_state(new_state, device="musa"):
    form.set_rng_state(new_state, index_of(device))
