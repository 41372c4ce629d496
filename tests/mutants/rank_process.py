"""One rank of the suite's cases between ranks, with a bug of `mutants.ranks` if this rank has it.

python -m mutants.rank_process BUG PLATFORM RANK WORLD_SIZE STORE SEED TASK
"""

from __future__ import annotations

import sys

from mutants.ranks import put_in
from specgraph_conformance.rank import main

if __name__ == "__main__":
    name, platform, number, *rest = sys.argv[1:]
    put_in(name, number)
    main(platform, number, *rest)
