"""Graph modes: one vocabulary for target and drafter, saying which passes run from graphs and how."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from specgraph.errors import ConfigError

PassMode = Literal["eager", "piecewise", "full"]
"""How one kind of pass runs: op by op; from graphs between eager attention calls; from one graph."""


class GraphMode(Enum):
    """The field's names. *decode* passes are uniform batches (verify, propose), *prefill* passes are prompts."""

    NONE = ("eager", "eager")
    """Nothing is captured."""
    PIECEWISE = ("piecewise", "piecewise")
    """Graphs between attention calls, attention itself eager."""
    FULL = ("full", "full")
    """Every pass is captured whole."""
    FULL_DECODE_ONLY = ("full", "eager")
    """Uniform batches are captured whole, prompts run eagerly."""
    FULL_AND_PIECEWISE = ("full", "piecewise")
    """Uniform batches are captured whole, prompts between attention calls."""

    def __init__(self, decode: PassMode, prefill: PassMode) -> None:
        self.decode: PassMode = decode
        self.prefill: PassMode = prefill

    def __str__(self) -> str:
        return self.name

    @classmethod
    def named(cls, name: str) -> GraphMode:
        """The mode of that name.

        Raises:
            ConfigError: there is none.
        """
        if name not in cls.__members__:
            raise ConfigError(f"unknown graph mode '{name}'; there are auto, {', '.join(cls.__members__)}")
        return cls[name]
