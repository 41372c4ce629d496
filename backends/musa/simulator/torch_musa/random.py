"""The default generator's state and seed."""

from torch_musa import form
from torch_musa.device import index_of

__all__ = ["get_rng_state", "manual_seed", "manual_seed_all", "set_rng_state"]


def get_rng_state(device="musa"):
    return form.get_rng_state(index_of(device))


def set_rng_state(new_state, device="musa"):
    form.set_rng_state(new_state, index_of(device))


def manual_seed(seed):
    form.manual_seed(seed)


def manual_seed_all(seed):
    form.manual_seed(seed)
