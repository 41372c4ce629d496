"""The conformance suite of specgraph: tests whether drafts through a backend's device graphs are right."""

__version__ = "0.1.0"
