"""The time limit of a case grows with the load of the machine.

At a load of 20 on two cores a case gets ten times its seconds. A hang is thus found later, but no healthy case fails
because other processes use the machine.
"""

from __future__ import annotations

import os


def load_factor() -> float:
    """Return the runnable processes per core over the last minute, at least 1. It is 1 if the system can't tell."""
    try:
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    except (AttributeError, OSError):
        return 1.0
