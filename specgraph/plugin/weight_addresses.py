"""The addresses of an engine's weights, so that a replaced tensor is found before a graph reads the old memory."""

from __future__ import annotations

from typing import Any


class WeightAddresses:
    """The memory of every parameter of a module. An update in place leaves it where it is."""

    def __init__(self, module: Any) -> None:
        """
        Args:
            module: a torch module, its weights on the device.
        """
        owners = [owner._parameters for owner in module.modules()]
        self._places = [(owner, name) for owner in owners for name, tensor in owner.items() if tensor is not None]
        self._addresses = self._now()

    def _now(self) -> list[int]:
        return [0 if (tensor := owner.get(name)) is None else tensor.data_ptr() for owner, name in self._places]

    def moved(self) -> bool:
        """Return whether a parameter has other memory than at first."""
        return self._now() != self._addresses
