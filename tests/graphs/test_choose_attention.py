"""Attention by name: the platform's own before the core's."""

from __future__ import annotations

import pytest

from specgraph.attention import PagedAttention, PagedHostAttention, choose_attention
from specgraph.errors import ConfigError
from specgraph.reference import CpuPlatform


class WithItsOwn(CpuPlatform):
    def attention_backends(self):
        return {"fused": lambda platform: ("fused", platform), "other": lambda platform: ("other", platform)}


def test_the_core_s_attention_where_the_platform_has_none():
    platform = CpuPlatform()
    assert isinstance(choose_attention("auto", platform), PagedAttention)
    assert isinstance(choose_attention("device", platform), PagedAttention)
    assert isinstance(choose_attention("host", platform), PagedHostAttention)


def test_the_platform_s_own_comes_first_and_by_name():
    platform = WithItsOwn()
    assert choose_attention("auto", platform) == ("fused", platform)
    assert choose_attention("other", platform) == ("other", platform)
    assert isinstance(choose_attention("device", platform), PagedAttention)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError, match="no attention 'flash' on platform 'cpu'; there are auto, device"):
        choose_attention("flash", WithItsOwn())
