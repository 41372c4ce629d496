"""Kernels are compiled before the first capture of each model, and the caller is told what it waits for."""

from __future__ import annotations

from itertools import groupby

import pytest
from specgraph_run.decoder import SpeculativeDecoder

from specgraph.config import DraftConfig
from specgraph.cpu.platform import CpuPlatform
from specgraph.errors import ConfigError

CONFIG = DraftConfig(
    num_speculative_tokens=2, max_num_requests=2, max_model_len=64, block_size=4, decode="merged", prefill_sizes=[8]
)


class Compiling(CpuPlatform):
    """A platform with two kernels to compile for whatever it is given."""

    def compile_ahead(self, bodies, progress):
        self.bodies = [*getattr(self, "bodies", []), len(bodies)]
        progress(1, 2)
        progress(2, 2)


def test_kernels_are_compiled_before_the_first_capture(target, shadow):
    platform, told = Compiling(), []
    decoder = SpeculativeDecoder(target, shadow, platform, CONFIG)
    decoder.capture(lambda *said: told.append(said))
    captured = [len(runner.graphs.descriptors) for runner in (decoder.target, decoder.drafter)]
    assert platform.bodies == captured
    assert [(what, len([*said])) for what, said in groupby(told, lambda said: said[0])] == [
        ("compiling kernels", 2), ("capturing", captured[0]), ("compiling kernels", 2), ("capturing", captured[1]),
    ]  # fmt: skip
    assert told[:2] == [("compiling kernels", 1, 2), ("compiling kernels", 2, 2)]
    assert told[-1] == ("capturing", sum(captured), sum(captured))
    decoder.close()
    platform.close()


def test_a_wrong_head_is_refused_before_its_kernels_are_compiled(target, shadow, monkeypatch):
    platform = Compiling()
    decoder = SpeculativeDecoder(target, shadow, platform, CONFIG)
    monkeypatch.setattr(type(shadow), "combine", lambda head, aux_hidden: aux_hidden[:1])
    with pytest.raises(ConfigError, match="combine"):
        decoder.capture()
    assert platform.bodies == [len(decoder.target.graphs.descriptors)]
    decoder.close()
    platform.close()
