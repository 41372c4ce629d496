# type: ignore  (what Triton compiles is not what a type checker reads)
"""Programmatic dependent launch: a kernel starts, and prefetches weights, before the kernel before it has ended.

The instructions are PTX's griddepcontrol (compute capability 9.0 and newer); kernels are launched with `launch_pdl`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def overlap_previous(lines=None, START: tl.constexpr = True, WAIT: tl.constexpr = True):
    """See `specgraph.kernels.triton.launch.LaunchOptions.overlap`."""
    if START:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    if lines is not None:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )
    if WAIT:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
