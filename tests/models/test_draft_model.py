"""An independent small model as drafter."""

import pytest
import torch

from specgraph.errors import CheckpointError, ConfigError
from specgraph.models.load import drafter_format, load_drafter, load_target


@torch.no_grad()
def test_drafts_what_the_model_says_by_itself(tmp_path, random_model, dense_attend):
    """Rows take the token after their position, so row i is the model on tokens 1 to i + 1."""
    random_model("Llama", tmp_path / "target")
    small = random_model("Qwen3", tmp_path / "small", hidden_size=16, num_hidden_layers=2, head_dim=8)
    target = load_target(tmp_path / "target", max_model_len=100)
    head = load_drafter(tmp_path / "small", target)
    assert str(drafter_format(tmp_path / "small")) == "draft_model, transformers layout (a whole qwen3 model)"

    tokens = torch.randint(0, 120, (12,), generator=torch.Generator().manual_seed(2))
    expected = small(tokens[None, 1:]).logits[0]
    aux = torch.randn(8, head.aux_size)
    assert head.aux_size == target.hidden_size
    caches = {}
    attend = dense_attend(head.attention_layers, torch.arange(8), caches)
    out = head.forward(tokens[1:9], head.combine(aux), attend)
    torch.testing.assert_close(head.logits(out.hidden), expected[:8], rtol=0, atol=1e-4)
    for position in (8, 9, 10):
        attend = dense_attend(head.attention_layers, torch.tensor([position]), caches)
        out = head.forward(tokens[position + 1 : position + 2], out.carry[-1:], attend)
        torch.testing.assert_close(head.logits(out.hidden)[0], expected[position], rtol=0, atol=1e-4)


def test_another_vocabulary(tmp_path, random_model):
    random_model("Llama", tmp_path / "target")
    random_model("Llama", tmp_path / "small", vocab_size=119)
    with pytest.raises(CheckpointError, match=r"vocabulary 119.*120"):
        load_drafter(tmp_path / "small", load_target(tmp_path / "target"))


def test_fewer_positions(tmp_path, random_model):
    random_model("Llama", tmp_path / "target")
    random_model("Llama", tmp_path / "small", max_position_embeddings=64)
    with pytest.raises(CheckpointError, match=r"64 positions.*128.*max_model_len=64"):
        load_drafter(tmp_path / "small", load_target(tmp_path / "target"))
    assert load_drafter(tmp_path / "small", load_target(tmp_path / "target", max_model_len=64)).draft_vocab_size == 120


def test_it_has_no_modules(tmp_path, random_model):
    random_model("Llama", tmp_path / "target")
    with pytest.raises(ConfigError, match=r"num_modules 1.*draft_model"):
        load_drafter(tmp_path / "target", load_target(tmp_path / "target"), num_modules=1)
