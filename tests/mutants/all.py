"""Every mutant, by name."""

from mutants import attention, draft_ops, engine, models, platforms, rounds, trees
from mutants.registry import MUTANTS

__all__ = ["MUTANTS", "attention", "draft_ops", "engine", "models", "platforms", "rounds", "trees"]
