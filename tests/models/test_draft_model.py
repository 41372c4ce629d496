"""An independent small model as drafter."""

import pytest
import torch
from changed_folders import FIXTURES, refused

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.checkpoints import drafter_format, load_drafter, load_target
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig
from specgraph.engine.decoder import SpeculativeDecoder
from specgraph.engine.request import Request
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
    random_model("Llama", tmp_path / "other", vocab_size=119)
    with refused("vocabulary 119", "120"):
        load_drafter(tmp_path / "other", target)
    random_model("Llama", tmp_path / "short", max_position_embeddings=64)
    with refused("64 positions", "128", "max_model_len=64"):
        load_drafter(tmp_path / "short", target)
    assert load_drafter(tmp_path / "short", load_target(tmp_path / "target", max_model_len=64)).draft_vocab_size == 120
    with refused("num_modules 1", "draft_model", error=ConfigError):
        load_drafter(tmp_path / "target", target, num_modules=1)


@pytest.mark.parametrize(
    ("lowering", "prefill_chunk", "attention"),
    [
        ("eager", 3, PagedAttention),
        ("step", 64, PagedAttention),
        ("step", 3, PagedHostAttention),
        ("merged", 3, PagedAttention),
        ("merged", 64, PagedHostAttention),
    ],
)
@torch.inference_mode()
def test_a_model_that_drafts_for_itself_is_always_right(lowering, prefill_chunk, attention):
    """Every draft token is accepted, from the first round to max_model_len: nothing of the sequence is missing."""
    platform = CpuPlatform()
    target = load_target(FIXTURES / "target")
    config = EngineConfig(
        num_speculative_tokens=3,
        max_num_requests=3,
        max_model_len=64,
        block_size=8,
        decode=lowering,
        prefill_chunk=prefill_chunk,
    )
    backend = attention(platform) if attention is PagedHostAttention else attention()
    decoder = SpeculativeDecoder(target, load_drafter(FIXTURES / "target", target), platform, config, attention=backend)
    decoder.capture()
    prompts = [[5, 9, 2, 7, 1], [3], [8] * 11]
    requests = [Request(prompt_token_ids=prompt, max_tokens=64) for prompt in prompts]
    for result, prompt in zip(decoder.generate(requests), prompts, strict=True):
        assert len(prompt) + len(result.token_ids) == 64
    assert decoder.metrics.num_drafts > 0
    # Only what stands past max_model_len may go unaccepted: nothing can be drafted there.
    short = [decoder.metrics.num_drafts - accepted for accepted in decoder.metrics.accepted]
    assert max(short) <= len(prompts)
