"""What the simulator runs on: SPECGRAPH_MUSA_SIMULATOR, which has no default, says."""

import os
from importlib import import_module

VARIABLE = "SPECGRAPH_MUSA_SIMULATOR"

_name = os.environ.get(VARIABLE)
if _name not in ("cpu", "cuda"):
    raise ImportError(
        f"this torch_musa is specgraph's simulator, test equipment that drives no MUSA device, and {VARIABLE} is "
        f"{_name!r}: set it to cpu or cuda to run tests on it, or take it off the path to use the real torch_musa"
    )

form = import_module(f"torch_musa.forms.{_name}")
