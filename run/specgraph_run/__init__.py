"""Speculative decoding around a `specgraph.Drafter`: the decoder, text from checkpoint folders, and the command.

Each name is imported at its first use, so that `specgraph --help` runs without torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgraph_run.decoder import SpeculativeDecoder
    from specgraph_run.options import GeneratorOptions
    from specgraph_run.text import TextGenerator, load_generator, shipped_pair
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _PLACES:
            raise AttributeError(f"module 'specgraph_run' has no attribute '{name}'")
        return getattr(import_module(_PLACES[name]), name)


_PLACES = {
    "GeneratorOptions": "specgraph_run.options",
    "SpeculativeDecoder": "specgraph_run.decoder",
    "TextGenerator": "specgraph_run.text",
    "load_generator": "specgraph_run.text",
    "shipped_pair": "specgraph_run.text",
}

__all__ = ["GeneratorOptions", "SpeculativeDecoder", "TextGenerator", "load_generator", "shipped_pair"]
