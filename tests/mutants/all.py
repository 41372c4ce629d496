"""Every mutant, by name."""

from importlib import import_module

from mutants.registry import MUTANTS

__all__ = ["MUTANTS"]

for part in (
    "attention",
    "backend_authors",
    "backend_slips",
    "blocks",
    "draft_ops",
    "core",
    "fast_sizes",
    "field",
    "later_work",
    "limits",
    "models",
    "ngrams",
    "platform_devices",
    "platform_graphs",
    "platform_lifetimes",
    "platform_tasks",
    "ranks",
    "rarer_paths",
    "rounds",
    "states",
    "trees",
    "usual_cases",
):
    import_module(f"mutants.{part}")
