"""Every lowering, with device and host lengths, gives the bits that eager gives: tokens, logits, KV caches."""

from __future__ import annotations

import pytest
import torch
from draft.rounds import LoggedHead, Rounds, caches_equal
from tiny_checkpoints import VOCAB, write_eagle3, write_target

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.checkpoints import load_drafter, load_target
from specgraph.device.cpu import CpuPlatform
from specgraph.draft import DraftConfig, Drafter
from specgraph.engine import allocate_caches

WAYS = [(lowering, lengths) for lengths in ("device", "host") for lowering in ("eager", "piecewise", "step", "merged")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target"), write_eagle3(root / "eagle3")


def make_drafter(folders, platform, lowering, lengths, dtype, **settings):
    target = load_target(folders[0], dtype=dtype)
    config = DraftConfig(decode=lowering, check_inputs=True, **settings)
    head = load_drafter(folders[1], target)
    log = torch.zeros(config.num_speculative_tokens, config.max_num_requests, head.draft_vocab_size, dtype=dtype)
    logged = LoggedHead(head, log)
    blocks = 1 + -(-config.max_model_len // config.block_size) * config.max_num_requests
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, dtype, platform.device)
    attention = PagedHostAttention(platform) if lengths == "host" else PagedAttention()
    drafter = Drafter(logged, caches, platform, config, attention=attention)
    logged.draft_step = drafter.buffers.draft_step
    with torch.inference_mode():
        drafter.capture()
    return drafter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_bit_equal(folders, k, dtype, sampled):
    platform = CpuPlatform()
    settings = {
        "num_speculative_tokens": k, "max_num_requests": 9, "max_model_len": 64, "block_size": 4, "sampled": sampled,
        "capture_sizes": [1, 4, 9], "prefill_sizes": [4],  # prompts are test_matrix.py's
    }  # fmt: skip
    drafters = {way: make_drafter(folders, platform, *way, dtype, **settings) for way in WAYS}
    eager = drafters["eager", "device"]
    rounds = Rounds(eager.config, eager.head.aux_size, VOCAB, dtype, seed=k)
    for number in range(9):
        batch = rounds.next(num_requests=(1, 9, 2, 5, 8, 3)[number] if number < 6 else None)
        with torch.inference_mode():
            results = {way: drafter.propose(batch) for way, drafter in drafters.items()}
        expected = results["eager", "device"]
        assert expected.token_ids.shape == (batch.num_requests, k)
        n = batch.num_requests
        for way, result in results.items():
            drafter = drafters[way]
            assert torch.equal(result.token_ids, expected.token_ids), (way, number)
            assert torch.equal(drafter.head.log[:, :n], eager.head.log[:, :n]), (way, number)
            assert caches_equal(drafter.caches, eager.caches), (way, number)
            if sampled:
                assert torch.equal(result.probs, expected.probs), (way, number)
        assert not eager.head.log[:, :n].isnan().any()
    for (lowering, _), drafter in drafters.items():
        launches = {"merged": 1, "step": k, "eager": 0}.get(lowering)
        if launches is not None:
            assert drafter.launches["propose"] == launches * drafter.num_proposes
        drafter.close()


def test_null_block_is_never_written(folders):
    platform = CpuPlatform()
    settings = {"num_speculative_tokens": 3, "max_num_requests": 4, "max_model_len": 32, "block_size": 4}
    drafter = make_drafter(folders, platform, "merged", "device", torch.float32, **settings)
    rounds = Rounds(drafter.config, drafter.head.aux_size, VOCAB, torch.float32, seed=0)
    with torch.inference_mode():
        for _ in range(20):
            drafter.propose(rounds.next())
    for cache in drafter.caches:
        assert not cache.key[0].any()
        assert not cache.value[0].any()
        assert cache.key.any()
