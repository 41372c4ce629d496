"""An independent small model as drafter."""

import pytest
import torch
from changed_folders import FIXTURES, refused
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target

from specgraph.errors import ConfigError


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


def test_a_model_that_does_not_fit(tmp_path, random_model):
    random_model("Llama", tmp_path / "target")
    target = load_target(tmp_path / "target")
    random_model("Llama", tmp_path / "short", max_position_embeddings=64)
    with refused("64 positions", "128", "max_model_len=64"):
        load_drafter(tmp_path / "short", target)
    assert load_drafter(tmp_path / "short", load_target(tmp_path / "target", max_model_len=64)).draft_vocab_size == 120
    with refused("num_modules 1", "draft_model", error=ConfigError):
        load_drafter(tmp_path / "target", target, num_modules=1)


@pytest.mark.parametrize(
    ("lowering", "prefill_size", "attention"),
    [
        ("step", 3, "host"),
        ("merged", 64, "device"),
    ],
)
@torch.inference_mode()
def test_a_model_that_drafts_for_itself_is_always_right(lowering, prefill_size, attention, decoded):
    """Every draft token is accepted, from the first round to max_model_len: nothing of the sequence is missing."""
    target, prompts = load_target(FIXTURES / "target"), [[5, 9, 2, 7, 1], [3], [8] * 11]
    tokens, decoder = decoded(
        target, load_drafter(FIXTURES / "target", target), prompts, 64, attention, max_num_requests=3,
        max_model_len=64, block_size=8, decode=lowering, prefill_sizes=[prefill_size], capture_sizes=None,
    )  # fmt: skip
    assert [len(prompt) + len(more) for prompt, more in zip(prompts, tokens, strict=True)] == [64] * 3
    assert decoder.metrics.num_drafts > 0
    # Only what stands past max_model_len may go unaccepted: nothing can be drafted there.
    short = [decoder.metrics.num_drafts - accepted for accepted in decoder.metrics.accepted]
    assert max(short) <= len(prompts)
