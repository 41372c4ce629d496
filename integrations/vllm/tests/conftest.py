"""The tests convert checkpoints with the scripts of `gpu/`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
