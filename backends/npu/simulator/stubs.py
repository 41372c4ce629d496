"""Write a C++ file with stubs of the functions that the installed torch_npu links to and this runtime lacks.

    python stubs.py SITE_PACKAGES DEFINED_LIBRARY OUTPUT

Each stub fails and names itself, so that a call that is not simulated never looks like a success.
"""

import re
import subprocess
import sys
from pathlib import Path

WANTED = re.compile(r"(acl[A-Zrmop]|Msprof|rtDev|rtFunc|rtGet|rtKernel|Hccl)")


def symbols(library: Path, kind: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", kind, str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}


def main(site: Path, defined: Path, output: Path) -> None:
    package = site / "torch_npu"
    libraries = [*package.glob("lib/*.so"), *package.glob("_C*.so")]
    if not libraries:
        raise SystemExit(f"no torch_npu under {site}: install torch_npu==2.13.0 into this environment first")
    needed = set[str]().union(*(symbols(library, "--undefined-only") for library in libraries))
    missing = sorted(n for n in needed if WANTED.match(n))
    have = symbols(defined, "--defined-only")
    lines = ['extern "C" int ascendsim_unsupported(const char*);\n']
    lines += [f'extern "C" int {n}() {{ return ascendsim_unsupported("{n}"); }}\n' for n in missing if n not in have]
    output.write_text("".join(lines))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
