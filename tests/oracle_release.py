"""The release of transformers that readings of text are compared with: those that Python 3.10 has read otherwise.

Only tests of a reading that has changed since are left out where an earlier one is installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.version import Version

RELEASE = Version("5.24")


def read_since_then(change: str) -> pytest.MarkDecorator:
    """Skip a test where transformers is older than the change that it is the oracle of."""
    try:
        installed = Version(version("transformers"))
    except PackageNotFoundError:  # and so nothing to compare with
        installed = RELEASE
    reason = f"{change} as in transformers {RELEASE}, for which equality is claimed; here is {installed}"
    return pytest.mark.skipif(installed < RELEASE, reason=reason)
