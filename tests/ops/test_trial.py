"""The trial of a device's ops: any op that gives one other number is named."""

from __future__ import annotations

import pytest
import specgraph_plugin.verify_output  # noqa: F401  (declares its op)
import torch
from specgraph_models.kernels import model_ops
from specgraph_plugin.kernels import verified_rounds
from specgraph_run.decoder.kernels import sampled_verify
from torch import Tensor
from torch.utils._pytree import tree_leaves

from specgraph.kernels.trial import agrees_with_reference, draft_round
from specgraph.ops.library import declared

TRIALS = {
    draft_round: ["begin_rows", "norm_linear", "paged_attention", "draft_from_logits", "advance"],
    model_ops: ["norm_gate_up", "gated_delta_rule", "gated_norm"],
    sampled_verify: ["verify_drafts"],
    verified_rounds: ["load_verify_output"],
}


class WrongOnce:
    """The plain torch ops; one of them changes one element, number `index`, of the `which`-th tensor that it gives."""

    def __init__(self, name, which, index):
        self.name, self.which, self.index, self.changed = name, which, index, None

    def __getattr__(self, name):
        def call(**arguments):
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            before = [tensor.clone() for tensor in tensors]
            result = declared()[name].reference(**arguments)
            if name == self.name:
                written = [now for now, then in zip(tensors, before, strict=True) if not torch.equal(now, then)]
                written += [result] if isinstance(result, Tensor) else []
                if self.which < len(written):
                    self.changed = written[self.which].view(-1)
                    self.changed[self.index] += 1
            return result

        return call


@pytest.mark.parametrize(("calls", "name"), [(calls, name) for calls, names in TRIALS.items() for name in names])
def test_one_wrong_number_is_found(calls, name):
    found = 0
    for which in range(8):
        for index in (0, -1):
            ops = WrongOnce(name, which, index)
            said = agrees_with_reference(ops, calls, torch.device("cpu"))
            assert (said is None) == (ops.changed is None)
            assert said is None or said.startswith(f"{name} in Triton differs from plain torch in ")
            found += said is not None
    assert found >= 2
