"""The choice of attention: by name, and by what each backend says of the layers."""

from __future__ import annotations

import pytest
import torch

from specgraph.attention import AttentionLayer, PagedAttention, PagedHostAttention, choose_attention
from specgraph.cpu import CpuPlatform
from specgraph.device import no, yes
from specgraph.errors import ConfigError, UnsupportedError

NARROW, WIDE = AttentionLayer(4, 2, 32, 1.0), AttentionLayer(4, 2, 128, 1.0)


class Fused(PagedAttention):
    """Takes heads of 128 in bfloat16, and blocks of 128 tokens or more."""

    def supports(self, layer, dtype, block_size):
        if dtype is not torch.bfloat16:
            return no("it takes bfloat16")
        if block_size < 128:
            return no(f"blocks of {block_size} tokens; it takes 128")
        return yes() if layer.head_dim == 128 else no(f"head_dim {layer.head_dim}; it takes 128")


class WithItsOwn(CpuPlatform):
    def attention_backends(self):
        return {
            "fused": lambda platform: Fused("fused", (), 128),
            "other": lambda platform: PagedAttention("other", (), 32),
        }


def test_the_core_s_attention_where_the_platform_has_none():
    platform = CpuPlatform()
    assert isinstance(choose_attention("auto", platform).backend, PagedAttention)
    assert isinstance(choose_attention("device", platform).backend, PagedAttention)
    assert isinstance(choose_attention("host", platform).backend, PagedHostAttention)


def test_the_platform_s_own_comes_first_and_by_name():
    platform = WithItsOwn()
    assert choose_attention("auto", platform).backend.name == "fused"
    assert choose_attention("other", platform).backend.name == "other"
    assert choose_attention("device", platform).backend.name == "paged"


@pytest.mark.parametrize(
    ("layers", "dtype", "block_size", "chosen", "reason"),
    [
        ([WIDE, WIDE], torch.bfloat16, None, ("fused", 128), ""),
        ([WIDE, WIDE], torch.bfloat16, 256, ("fused", 256), ""),
        ([WIDE, NARROW], torch.bfloat16, None, ("other", 32), "attention 'fused': head_dim 32; it takes 128"),
        ([WIDE], torch.float32, None, ("other", 32), "attention 'fused': it takes bfloat16"),
        ([WIDE], torch.bfloat16, 16, ("other", 16), "attention 'fused': blocks of 16 tokens; it takes 128"),
    ],
)
def test_auto_goes_by_shape_and_says_why(layers, dtype, block_size, chosen, reason):
    choice = choose_attention("auto", WithItsOwn(), layers, dtype, block_size)
    assert (choice.backend.name, choice.block_size) == chosen
    assert choice.reason == reason


def test_a_name_that_does_not_support_the_layers_is_refused():
    with pytest.raises(UnsupportedError, match="attention 'fused': head_dim 32; it takes 128"):
        choose_attention("fused", WithItsOwn(), [NARROW], torch.bfloat16)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError, match="no attention 'flash' on platform 'cpu'; there are auto, device"):
        choose_attention("flash", WithItsOwn())
