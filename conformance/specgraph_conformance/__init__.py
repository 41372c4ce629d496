"""The conformance suite of specgraph. It tests whether drafting through a backend's device graphs is correct."""

__version__ = "0.1.0"
