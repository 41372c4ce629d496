"""The ops that only the decoder uses. They are declared as the draft ops are, and name their Triton kernels."""

from specgraph.ops.library import name_kernels
from specgraph_run.decoder.ops.after_verify import count_tokens, emitted_logprobs, next_verify
from specgraph_run.decoder.ops.ragged import RaggedRows, begin_ragged_rows
from specgraph_run.decoder.ops.rejection import Acceptance, Sampled, accept_greedy, verify_drafts
from specgraph_run.decoder.ops.sampling_parameters import SamplingParameters, adjust_logits
from specgraph_run.decoder.ops.tree_verify import AcceptedPath, move_kv, verify_tree

name_kernels("specgraph_run.decoder.kernels.implement:KERNELS")

__all__ = [
    "Acceptance",
    "AcceptedPath",
    "RaggedRows",
    "Sampled",
    "SamplingParameters",
    "accept_greedy",
    "adjust_logits",
    "begin_ragged_rows",
    "count_tokens",
    "emitted_logprobs",
    "move_kv",
    "next_verify",
    "verify_drafts",
    "verify_tree",
]
