"""Test equipment: a simulator of torch_musa, with the names of 2.7.1 that specgraph calls and their signatures.

It is not torch_musa and drives no Moore Threads device: specgraph's recorded graphs on the CPU run underneath. Tensors
are `cpu` tensors, and every version and device name shows that it is simulated. What it does as the vendor's code does
has the vendor's file, line and release beside it; backends/musa/README.md has them as a table.
"""

import sys

import torch

from torch_musa import simulated as simulated
from torch_musa.device import *  # noqa: F403
from torch_musa.graphs import *  # noqa: F403
from torch_musa.handles import *  # noqa: F403

__version__ = f"{torch.__version__.partition('+')[0]}+simulator.cpu"

torch.musa = sys.modules[__name__]
torch.version.musa = "simulated over cpu"
