"""Speculative decoding in transformers' `generate`: `model.generate(..., custom_generate=speculative(draft=...))`."""

from specgraph_transformers.speculative import Speculative, speculative

__all__ = ["Speculative", "speculative"]
