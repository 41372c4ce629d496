"""Settings for the tests of the core and of the integrations."""

from __future__ import annotations

import gc
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: tests of Ctrl-C send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Torch and transformers stay loaded: without this the collector goes through all of them again and again."""
    gc.collect()
    gc.freeze()
