"""The plugin of vLLM 0.28 on the device, over the KV cache of vllm-musa's FLASH_ATTN, against a dense float64 chain."""

from __future__ import annotations

import pytest
import torch
from engine_rounds import Engine
from vllm_objects import separate_kv_cache


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "dspark"])
def test_drafts_follow_the_whole_history(musa, tmp_path, monkeypatch, kind):
    opened = []
    monkeypatch.setattr("specgraph_vllm.speculator.open_platform", lambda name: opened.append(name) or musa)
    engine = Engine(tmp_path, kind, divided=False if kind == "mtp" else None, allocate=separate_kv_cache)
    with torch.inference_mode():  # as vLLM calls it
        engine.start()
    assert opened == [str(musa.device)]
    for slot, length in ((2, 3), (0, 15), (4, 40)):
        engine.prompt(slot, length)
    draw = torch.Generator().manual_seed(5)
    for slots in ([2, 0, 4], [4], [0, 2]):
        counts = torch.randint(1, 6, (len(slots),), generator=draw).tolist()
        drafts, want = engine.round(slots, counts)
        greedy = [i for i, slot in enumerate(slots) if engine.speculator.draft_logits is None or slot == 0]
        assert [drafts[i].tolist() for i in greedy] == [want[i] for i in greedy]
    ids = torch.randint(0, engine.vocab, (7,), generator=engine.g)
    for slot in (3, 1):
        engine.tokens[slot], engine.aux[slot] = ids[:0], torch.zeros(0, engine.oracle.aux_size)
    drafts, want = engine.mixed({3: (ids, 0, 5), 1: (ids[:4], 1, 0)})  # a chunk of a prompt, and a prompt's end
    assert want[1] == drafts[1].tolist() or engine.speculator.draft_logits is not None
    assert engine.speculator.counts.by_reason == {"specgraph": 4}
    assert engine.speculator.proposed == []
    drafter = engine.speculator.fast_path.drafter
    assert drafter.platform is musa
    assert drafter.resolution.lowering == "step"
    drafter.close()
