"""Draft speculative tokens through device graphs, on any accelerator.

The public names are listed in `specgraph/api.py`. They are imported at the first use of one of them, so that
`import specgraph`, `specgraph --help` and a backend's plugin don't pay for torch.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specgraph.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'specgraph' has no attribute '{name}'")
        try:
            return getattr(import_module("specgraph.api"), name)
        except AttributeError:
            raise AttributeError(f"module 'specgraph' has no attribute '{name}'") from None

    def __dir__() -> list[str]:
        return ["__version__", *__getattr__("__all__")]
