"""The conformance suite of specgraph: whether drafts through a backend's device graphs can be trusted."""

__version__ = "0.1.0"
