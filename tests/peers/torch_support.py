"""Stand-ins for two packages that torch's test support imports and that no test run here uses: a pytest plugin for
torch's tests that need no adapter."""

from __future__ import annotations

import sys
import unittest
from types import ModuleType

from peers.left_out import pytest_collection_modifyitems as pytest_collection_modifyitems

for name, contents in (("expecttest", {"TestCase": unittest.TestCase}), ("psutil", {})):
    vars(sys.modules.setdefault(name, ModuleType(name))).update(contents)
