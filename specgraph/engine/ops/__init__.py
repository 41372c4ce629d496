"""The ops of the decoder alone, declared as the draft ops are, and where their Triton kernels are."""

from specgraph.engine.ops.after_verify import count_tokens, emitted_logprobs, next_verify
from specgraph.engine.ops.ragged import RaggedRows, begin_ragged_rows
from specgraph.engine.ops.rejection import Acceptance, Sampled, accept_greedy, verify_drafts
from specgraph.engine.ops.tree_verify import AcceptedPath, verify_tree
from specgraph.ops.library import name_kernels

name_kernels("specgraph.engine.kernels.implement:KERNELS")

__all__ = [
    "Acceptance",
    "AcceptedPath",
    "RaggedRows",
    "Sampled",
    "accept_greedy",
    "begin_ragged_rows",
    "count_tokens",
    "emitted_logprobs",
    "next_verify",
    "verify_drafts",
    "verify_tree",
]
