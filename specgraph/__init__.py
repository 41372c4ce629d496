"""Draft speculative tokens through device graphs, on any accelerator.

The names are listed in `specgraph/api.py`, which is imported at the first use of one of them. `import specgraph`,
`specgraph --help` and a backend's plugin therefore don't import torch.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specgraph.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module
        from importlib.util import find_spec

        # `from specgraph import ops` calls this first: a package that is not imported yet is left to the import system.
        if (name.startswith("_") and name != "__all__") or find_spec(f"specgraph.{name}") is not None:
            raise AttributeError(f"module 'specgraph' has no attribute '{name}'")
        try:
            return getattr(import_module("specgraph.api"), name)
        except AttributeError:
            raise AttributeError(f"module 'specgraph' has no attribute '{name}'") from None

    def __dir__() -> list[str]:
        return ["__version__", *__getattr__("__all__")]
