"""Every mutant, by name."""

from mutants import attention, engine, platforms
from mutants.registry import MUTANTS

__all__ = ["MUTANTS", "attention", "engine", "platforms"]
