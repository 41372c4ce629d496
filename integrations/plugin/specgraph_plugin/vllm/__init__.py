"""Drafters and settings of vLLM, shared by its plugins: heads over its modules, its KV caches, its configurations."""
