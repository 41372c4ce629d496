"""The implementations of the ops of the decoder."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from specgraph.engine.kernels.after_verify import NextVerifyOps
from specgraph.engine.kernels.tree_verify import VerifyTreeOps
from specgraph.engine.kernels.trial import sampled_verify
from specgraph.engine.kernels.verify import VerifyOps
from specgraph.kernels.implement import Kernels


class DecoderOps(VerifyOps, VerifyTreeOps, NextVerifyOps):
    """Launchers of the ops of the decoder."""

    __slots__ = ()


KERNELS = Kernels(DecoderOps, sampled_verify)
