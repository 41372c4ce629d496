"""Text from checkpoint folders: templates, tokens to text as it streams, and loading a pair of folders."""

from specgraph_run.text.generator import TextGenerator
from specgraph_run.text.load import load_generator, shipped_pair

__all__ = ["TextGenerator", "load_generator", "shipped_pair"]
