"""`rank_parts` names the weights of which a rank has a part: exactly those whose shape is another one when split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from parallel.mixtures import write_mixture
from specgraph_models.checkpoints import load_drafter, load_target
from specgraph_models.parallel import ExpertParallel, TensorParallel

FIXTURES = Path(__file__).parent / "speculators_fixtures"
RANKS = TensorParallel(1, 2, "two")
EXPERTS = ExpertParallel(1, 2, "two")


def check(whole, split):
    """Compare what each rank has with the whole model."""
    one, other = whole.weights(), split.weights()
    assert whole.rank_parts() == frozenset()
    assert one.keys() == other.keys()
    assert split.rank_parts() == {name for name, tensor in other.items() if tensor.shape != one[name].shape}


@pytest.mark.parametrize(
    "name", ["eagle", "eagle3-llama", "eagle3-qwen3", "peagle", "mtp", "dflash", "dflash2", "dspark", "target"]
)
def test_heads_of_folders(name):
    whole, split = (load_target(FIXTURES / "target", tensor_parallel=ranks) for ranks in (TensorParallel(), RANKS))
    check(*(load_drafter(FIXTURES / name, target) for target in (whole, split)))
    assert "layers.0.qkv" in load_drafter(FIXTURES / name, split).rank_parts()
    check(whole, split)


@pytest.mark.parametrize("ranks", [RANKS, replace(RANKS, experts=EXPERTS), TensorParallel(experts=EXPERTS)], ids=str)
@pytest.mark.parametrize("architecture", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_mixtures_of_experts(architecture, ranks, tmp_path):
    pytest.importorskip("transformers")
    folder = write_mixture(architecture, tmp_path)
    check(*(load_target(folder, max_model_len=32, tensor_parallel=each) for each in (TensorParallel(), ranks)))
