"""Text from checkpoint folders: chat templates, text while tokens are generated, and loading a pair."""

from specgraph_run.text.generator import TextGenerator
from specgraph_run.text.load import load_generator, shipped_pair

__all__ = ["TextGenerator", "load_generator", "shipped_pair"]
