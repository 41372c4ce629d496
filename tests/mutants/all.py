"""Every mutant, by name."""

from mutants import attention, draft_ops, engine, models, platforms
from mutants.registry import MUTANTS

__all__ = ["MUTANTS", "attention", "draft_ops", "engine", "models", "platforms"]
