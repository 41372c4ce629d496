"""The Triton implementations of the decoder's ops."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from specgraph.kernels.implement import Kernels
from specgraph_run.decoder.kernels import sampled_verify
from specgraph_run.decoder.kernels.sampling_parameters import SamplingParameterOps
from specgraph_run.decoder.kernels.tree_verify import VerifyTreeOps
from specgraph_run.decoder.kernels.verify import VerifyOps


class DecoderOps(VerifyOps, VerifyTreeOps, SamplingParameterOps):
    """The launchers of the decoder's ops."""

    __slots__ = ()


KERNELS = Kernels(DecoderOps, sampled_verify)
