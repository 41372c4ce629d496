"""Every model's pass reads only what `weights()` names, and all of it: the read set of its captured graphs."""

from pathlib import Path

import pytest
import torch
from specgraph_models.checkpoints import load_drafter, load_target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FIXTURES = Path(__file__).parent / "speculators_fixtures"
ROWS = 6


@pytest.fixture(scope="module")
def target():
    return load_target(FIXTURES / "target")


def chain_pass(head, token_ids, states, attend):
    out = head.forward(token_ids, head.combine(states), attend)
    return head.logits(out.hidden), out.carry


def target_pass(model, token_ids, states, attend):
    out = model.forward(token_ids, attend, aux_layers=(0, 2, 4))
    return model.logits(out.hidden), out.aux_hidden


def dflash_pass(head, token_ids, states, attend):
    stored = []
    head.store_context(head.combine(states), lambda index, key, value: stored.extend((key + 0, value + 0)))
    return head.logits(head.forward(token_ids, attend)), *stored


PASSES = {
    "target": target_pass,
    "eagle": chain_pass,
    "eagle3-llama": chain_pass,
    "eagle3-qwen3": chain_pass,
    "mtp": chain_pass,
    "draft model": chain_pass,
    "dflash": dflash_pass,
}


@pytest.fixture(params=PASSES.items(), ids=PASSES.keys())
def model_pass(request, target):
    """(model, its pass, columns of the states that it takes)"""
    name, run = request.param
    if name == "target":
        return target, run, 1
    head = load_drafter(FIXTURES / ("target" if name == "draft model" else name), target)
    return head, run, head.aux_size


def test_weights_name_every_tensor_that_a_pass_reads(model_pass, dense_attend):
    """A tensor that no operator of the pass produced must be a weight or an input."""
    model, run, columns = model_pass
    positions, token_ids, states = torch.arange(ROWS), torch.arange(ROWS), torch.ones(ROWS, columns)
    named = {name: tensor for name, tensor in model.weights().items() if name != "draft_to_target"}
    known = {t.untyped_storage().data_ptr() for t in (*named.values(), positions, token_ids, states)}
    foreign, read, alive = [], set(), []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, torch.Tensor):
                    address = leaf.untyped_storage().data_ptr()
                    read.add(address)
                    if address not in known:
                        foreign.append(str(func))
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    alive.append(leaf)  # keep it, so that no later tensor gets its address
                    known.add(leaf.untyped_storage().data_ptr())
            return result

    with torch.no_grad(), Reads():
        run(model, token_ids, states, dense_attend(model.attention_layers, positions))
    assert foreign == []
    assert [name for name, tensor in named.items() if tensor.untyped_storage().data_ptr() not in read] == []
