"""A drafter refuses: one clear error, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import RandomBatches, make_drafter
from specgraph_run.decoder import SamplingBuffers, allocate_sampling
from specgraph_run.text.load import load_generator

from specgraph.attention import KVCache
from specgraph.capture import resolve
from specgraph.cpu import CpuPlatform
from specgraph.cpu.platform import CAPABILITIES
from specgraph.device import no
from specgraph.draft import DraftConfig, Drafter
from specgraph.errors import CapacityError, CaptureError, ConfigError, UnsupportedError

LIMITS = {"max_num_requests": 2, "max_model_len": 48, "capture_sizes": [2]}


@pytest.mark.parametrize(
    ("kind", "message"), [("mtp-modules", "has 8 modules, one per draft token"), ("dflash", "trained to fill 8 masked")]
)
def test_more_tokens_than_the_head_can_draft(kind, message):
    with pytest.raises(ConfigError, match=message):
        make_drafter(make_head(kind, make_target()), "merged", "device", num_speculative_tokens=9, **LIMITS)


def test_rounds_of_a_length_that_no_k_makes():
    schedule = {1: 4, 2: 2}
    head = make_head("eagle", make_target())
    drafter = make_drafter(head, "merged", "device", num_speculative_tokens=4, draft_schedule=schedule, **LIMITS)
    before = drafter.buffers.shared.num_sampled.clone()
    batch = RandomBatches(
        DraftConfig(num_speculative_tokens=3, **LIMITS), head.aux_size, VOCAB, head.dtype, seed=0
    ).next(2)
    with pytest.raises(ConfigError, match=r"a batch of 4 rows per request; with this drafter's K they are 3, 5"):
        drafter.propose(batch)
    assert torch.equal(drafter.buffers.shared.num_sampled, before)
    assert drafter.num_proposes == 0


def test_a_platforms_name_and_caches_elsewhere():
    head = make_head("eagle", make_target())
    drafter = make_drafter(head, "merged", "device", num_speculative_tokens=4, **LIMITS)
    with pytest.raises(ConfigError, match="platform must be a Platform, got 'cpu'"):
        Drafter(head, drafter.caches, "cpu", drafter.config)  # type: ignore[arg-type]
    elsewhere = [KVCache(cache.key.to("meta"), cache.value.to("meta")) for cache in drafter.caches]
    of_halves = [KVCache(cache.key.half(), cache.value.half()) for cache in drafter.caches]
    alike = [KVCache(cache.key, cache.key) for cache in drafter.caches]
    without_blocks = [KVCache(cache.key[:1], cache.value[:1]) for cache in drafter.caches]
    for caches, message in (
        (elsewhere, "key cache is on meta; allocate it on the platform's device, cpu"),
        (of_halves, "key cache is torch.float16; .* attention 'paged' it is torch.float32 or"),
        (alike, "give two tensors"),
        (without_blocks, "have 1 blocks .* beside block 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Drafter(head, caches, drafter.platform, drafter.config)


@pytest.mark.parametrize(
    ("row", "hidden_rows", "message"),
    [
        (1, 1, "row 1 of a batch of 1 requests"),
        (-1, 1, "row -1 of a batch"),
        (0, 0, "has no hidden state"),
        (0, 2, r"the hidden state is \[2, \d+\] torch.float32 on cpu, expected \[\d+\] floats"),
    ],
)
def test_a_join_that_would_draft_from_something_else(row, hidden_rows, message):
    """Without its hidden state a request would enter with zeros, and only be drafted worse."""
    head = make_head("eagle", make_target())
    batch = make_drafter(head, "merged", "device", num_speculative_tokens=4, **LIMITS).inputs(1)
    batch.aux_hidden.fill_(7)
    with pytest.raises(ConfigError, match=message):
        batch.join(row, torch.tensor(3), [None, torch.ones(head.aux_size), torch.ones(2, head.aux_size)][hidden_rows])
    assert torch.equal(batch.aux_hidden, torch.full_like(batch.aux_hidden, 7))


def test_a_join_takes_a_number_or_a_tensor():
    head = make_head("eagle", make_target())
    batch = make_drafter(head, "merged", "device", num_speculative_tokens=2, **LIMITS).inputs(2)
    for row, token in enumerate((3, torch.tensor(4))):
        batch.join(row, token, torch.ones(head.aux_size))
    assert batch.sampled_token_ids[:, 0].tolist() == [3, 4]


def test_several_modules_without_attention():
    head = make_head("mtp-modules", make_target())
    head.attention_layers = ()
    with pytest.raises(ConfigError, match="an attention layer for each, and this one has none"):
        make_drafter(head, "merged", "device", num_speculative_tokens=2, **LIMITS)


def test_a_prompt_pass_longer_than_the_largest_size():
    drafter = make_drafter(
        make_head("eagle", make_target()), "merged", "device", num_speculative_tokens=2, prefill_sizes=[8], **LIMITS
    )
    with pytest.raises(CapacityError, match="9 rows: passes have 1 to 8; cut the prompt into chunks"):
        drafter.prefill(list(range(20)), range(9), [1, 2, 3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_schedule": {1: 2}}, "ends at 1 requests"),
        ({"draft_schedule": {2: 0}}, "drafts no token at any size: decode without a drafter"),
        ({"draft_schedule": {2: 4}}, "K is 0 to num_speculative_tokens = 3"),
        ({"draft_schedule": {2: -5}}, r"draft_schedule\[2\] must be at least 0, got -5"),
        ({"prefill_sizes": []}, "prefill sizes: the list is empty"),
        ({"prefill_sizes": [64]}, r"\[64\] are outside 1..48"),
        ({"decode": "fully"}, "decode must be one of 'auto', 'eager', 'piecewise', 'step', .*, got 'fully'"),
        ({"decode": "round"}, "decode 'round' is gone, and must be one of .*: .* no faster than .*; give 'merged'"),
        ({"prefill": "FULL"}, "prefill must be one of 'auto', 'eager', .*, got 'FULL'"),
        ({"draft_sampling": "drawn"}, "draft_sampling must be one of 'sampled', 'greedy', got 'drawn'"),
        ({"num_speculative_tokens": "4"}, r"num_speculative_tokens must be an integer, got '4' \(str\)"),
        ({"max_model_len": 48.0}, r"max_model_len must be an integer, got 48.0 \(float\)"),
        ({"num_speculative_tokens": True}, r"num_speculative_tokens must be an integer, got True \(bool\)"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_num_requests": 9, "capture_sizes": [1, 4]}, "the largest capture size is 4, batches go up to .* = 9"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        DraftConfig(**{"num_speculative_tokens": 3, **LIMITS, **settings})


@pytest.mark.parametrize("name", ["temperature", "seeds"])
def test_a_sampled_drafter_needs_temperatures_and_seeds_and_a_greedy_one_refuses_them(name):
    head = make_head("eagle", make_target())
    settings = {"num_speculative_tokens": 2, **LIMITS}
    greedy, sampled = (make_drafter(head, "eager", "device", sampled=sampled, **settings) for sampled in (False, True))
    batch = RandomBatches(sampled.config, head.aux_size, VOCAB, head.dtype, seed=2).next(2)
    with pytest.raises(ConfigError, match=f"a sampled drafter needs {name} with every batch"):
        sampled.propose(replace(batch, **{name: None}))
    given = replace(batch, temperature=None, seeds=None)
    greedy.propose(given)
    with pytest.raises(
        ConfigError, match=f"propose: {name} given to a drafter that is greedy: make it with DraftConfig"
    ):
        greedy.propose(replace(given, **{name: getattr(batch, name)}))
    make = make_drafter(head, "eager", "device", sampled=True, draft_sampling="greedy", **settings)
    make.propose(batch)  # the target's tokens are drawn by temperature, the drafts are not
    inputs = greedy.inputs(2)
    assert inputs.temperature is None is inputs.seeds, "nothing is there to be written and passed over"
    unbound = Drafter(head, greedy.caches, greedy.platform, greedy.config)
    with pytest.raises(ConfigError, match=f"bind: {name} given to a drafter that is greedy"):
        unbound.bind(replace(unbound.inputs(2), **{name: getattr(batch, name)}))


def test_sampling_of_other_sizes():
    head, settings = make_head("eagle", make_target()), {"num_speculative_tokens": 2, "sampled": True, **LIMITS}
    drafter = make_drafter(head, "eager", "device", **settings)
    batch = RandomBatches(drafter.config, head.aux_size, VOCAB, head.dtype, seed=2).next(2)
    for name in ("temperature", "seeds"):
        with pytest.raises(ConfigError, match=rf"{name} is \[1\], expected \[2\]"):
            drafter.propose(replace(batch, **{name: getattr(batch, name)[:1]}))
    for requests, vocab in ((1, VOCAB), (2, VOCAB + 1)):
        sampling = allocate_sampling(requests, vocab, torch.device("cpu"))
        with pytest.raises(ConfigError, match=f"sampling is for {requests} requests and {vocab} tokens, the drafter's"):
            Drafter(head, drafter.caches, drafter.platform, drafter.config, sampling=sampling)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(2)}, r"bias is \[2\] torch.float32 on cpu, expected float32 \[R, vocab\] on cpu, R = 2"),
        ({"bias": torch.zeros(3, VOCAB)}, r"bias is \[3, \d+\] .* R = 2"),
        ({"output_counts": torch.zeros(2, VOCAB).long()}, r"output_counts is .* torch.int64 .*, expected int32"),
        ({"in_prompt": torch.zeros(2, VOCAB + 1).bool()}, f"in_prompt is .* vocab = {VOCAB}"),
        ({"min_p": torch.zeros(2, device="meta")}, r"min_p is .* on meta, expected float32 \[R\] on cpu"),
        ({"top_k": [0, 0]}, r"top_k must be a tensor, int64 \[R\], got a list"),
        ({"top_p": torch.ones(1).expand(2)}, r"top_p has strides \(0,\), by which several of its elements share"),
        ({"top_q": torch.ones(2)}, "it takes top_k, top_p, .*; .* unexpected keyword argument 'top_q'"),
    ],
)
def test_sampling_buffers_made_by_hand(change, message):
    own = allocate_sampling(2, VOCAB, torch.device("cpu"))._asdict()
    with pytest.raises(ConfigError, match=f"SamplingBuffers: .*{message}"):
        SamplingBuffers(**own | change)


@pytest.mark.hazard("lowering-refused-wrongly")
def test_passes_that_the_platform_can_t_run():
    capabilities = replace(CAPABILITIES, task_update=no("no such call here"))
    with pytest.raises(UnsupportedError, match=r"decode 'merged' is not possible here.*no such call here"):
        resolve("merged", capabilities, ("seq_lens",))
    with pytest.raises(UnsupportedError, match=r"prefill 'full' is not possible here.*no such call here"):
        resolve("auto", capabilities, ("seq_lens",), "full")
    without = replace(CAPABILITIES, graphs=no("capture fails"))
    for prefill in ("piecewise", "full"):
        with pytest.raises(UnsupportedError, match=f"prefill '{prefill}' is not possible here.*capture fails"):
            resolve("auto", without, (), prefill)


def test_an_option_that_there_is_not():
    made = DraftConfig(num_speculative_tokens=3, **LIMITS)
    for make in (
        lambda: DraftConfig(num_speculative_tokens=3, **LIMITS, lowering="merged"),
        lambda: replace(made, lowering="merged"),
        lambda: load_generator(platform="cpu", lowering="merged"),
    ):
        with pytest.raises(ConfigError, match=r"'lowering'; it takes .*decode"):
            make()


@pytest.mark.parametrize(("limit", "enough"), [(3, True), (2, False)])
def test_prompt_and_propose_graphs_count_against_one_limit(limit, enough, monkeypatch):
    """One prompt size with one attention layer is two graphs, one propose is the third."""
    monkeypatch.setattr(CpuPlatform, "capabilities", replace(CAPABILITIES, max_live_graphs=limit))
    settings = {"num_speculative_tokens": 2, "prefill_sizes": [8], "prefill": "piecewise", **LIMITS}
    if enough:
        drafter = make_drafter(make_head("eagle", make_target()), "merged", "device", **settings)
        assert drafter.graphs.graph_count == limit
        with torch.inference_mode():
            drafter.prefill([0, 1, 2], range(2), [1], torch.zeros(2, drafter.head.aux_size))
        assert drafter.launches["prefill"] == 2, "what was captured for prompts must serve them"
        assert drafter.prefill_buffers.sliced(8).metadata.query_start_loc.tolist() == [0, 8]
    else:
        with pytest.raises(CaptureError, match="holds at most 2 graphs"):
            make_drafter(make_head("eagle", make_target()), "merged", "device", **settings)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((range(8), [1]), CapacityError, "up to position 6 needs 2 KV blocks of 4 tokens, got 1"),
        ((range(8, 16), [1, 2, 3]), CapacityError, "up to position 14 needs 4 KV blocks of 4 tokens, got 3"),
        ((range(3, 9), [1, 2, 3]), ConfigError, r"of range\(3, 9\): give consecutive positions of its 8 tokens"),
        ((range(-2, 4), [1, 2]), ConfigError, r"prefill of range\(-2, 4\): give consecutive positions"),
        ((range(0, 8, 2), [1, 2]), ConfigError, r"prefill of range\(0, 8, 2\): give consecutive positions"),
        ((range(8), [1, 2], (7, 16)), ConfigError, r"aux_hidden of a prefill is \[7, 16\] .*, expected \[8, "),
        ((range(8), [1, 2], (8, 3)), ConfigError, r"aux_hidden of a prefill is \[8, 3\] .*, expected \[8, "),
    ],
)
def test_a_prompt_pass_that_does_not_fit_its_inputs(arguments, kind, message):
    """Keys without a block would go to the null block: the drafts would be worse, and nothing would say so."""
    positions, blocks, *shape = arguments
    settings = {"num_speculative_tokens": 2, "prefill_sizes": [8], **LIMITS}
    drafter = make_drafter(make_head("eagle", make_target()), "eager", "device", **settings)
    prompt = list(range(16 if positions.start == 8 else 8))
    aux = torch.zeros(shape[0]) if shape else torch.zeros(len(positions), drafter.head.aux_size)
    with pytest.raises(kind, match=message):
        drafter.prefill(prompt, positions, blocks, aux)


def test_a_prompt_pass_takes_as_many_blocks_as_a_round_has():
    """K = 15 goes further past max_model_len than a pass of 4 rows does."""
    settings = {"num_speculative_tokens": 15, "prefill_sizes": [4], **LIMITS}
    drafter = make_drafter(make_head("eagle", make_target()), "merged", "device", **settings)
    aux, written = torch.ones(4, drafter.head.aux_size), []
    for blocks in ([1], range(1, drafter.config.max_blocks + 1)):
        drafter.prefill([5, 6, 7, 8, 9], range(4), blocks, aux)
        written.append(drafter.caches[0].key[1].clone())
        drafter.caches[0].key.zero_()
    assert torch.equal(*written)
    assert written[0].any()


def test_debug_refuses_other_dtypes_and_options_of_other_types():
    settings = {"num_speculative_tokens": 2, "debug": True, **LIMITS}
    drafter = make_drafter(make_head("eagle", make_target()), "eager", "device", **settings)
    batch = RandomBatches(drafter.config, drafter.head.aux_size, VOCAB, drafter.head.dtype, seed=2).next(1)
    with pytest.raises(ConfigError, match=r"num_sampled is \[1\] torch.int64, expected \[1\] torch.int32"):
        drafter.propose(replace(batch, num_sampled=batch.num_sampled.long()))
    with pytest.raises(ConfigError, match="copy must be True or False, got 2"):
        drafter.propose(batch, copy=2)
    with pytest.raises(ConfigError, match=r"host_start_positions must be a list .*, got 3"):
        drafter.propose(batch, host_start_positions=3)


def test_counts_may_be_integers_of_numpy_and_torch():
    sizes = torch.zeros(2, 48).shape
    config = DraftConfig(
        num_speculative_tokens=np.int64(2), max_num_requests=sizes[0], max_model_len=np.int32(sizes[1])
    )
    assert (config.num_speculative_tokens, config.max_num_requests, config.max_model_len) == (2, 2, 48)


def test_arguments_of_other_types():
    drafter = make_drafter(make_head("eagle", make_target()), "eager", "device", num_speculative_tokens=2, **LIMITS)
    ids = torch.arange(4)
    for arguments, message in (
        ((ids, range(4), [1]), "prompt must be a list, got a Tensor"),
        ((ids.tolist(), range(4), torch.tensor([1])), r"blocks must be a list \(each item an integer\), got a Tensor"),
        ((ids.tolist(), [0, 1], [1]), "positions must be a range, got a list"),
        ((ids.tolist(), range(4), [1], [[0.0]]), "aux_hidden must be a Tensor or None, got a list"),
        ((["a"] * 4, range(4), [1]), r"prompt\[0\] must be an integer, got 'a'"),
        (([0.5] * 4, range(4), [1]), r"prompt\[0\] must be an integer, got 0.5"),
        (([0] * 4, range(4), None), "blocks must be a list .*, got None"),
        (([0] * 4, range(4), ["1"]), r"blocks\[0\] must be an integer, got '1'"),
    ):
        with pytest.raises(ConfigError, match=message):
            drafter.prefill(*arguments)
    with pytest.raises(ConfigError, match=r"head must be .*, got the class EagleHead: give an object of it"):
        Drafter(type(drafter.head), drafter.caches, drafter.platform, drafter.config)
    with pytest.raises(ConfigError, match=r"caches\[0\] must be a KVCache, got a Tensor"):
        Drafter(drafter.head, [drafter.caches[0].key], drafter.platform, drafter.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampled_token_ids": [[1, 2, 3]]}, "propose: sampled_token_ids is a list: give a tensor on cpu"),
        ({"block_table": [[1]]}, "propose: block_table is a list"),
        ({"block_table": torch.ones(1, 0, dtype=torch.int32)}, r"block_table is \[1, 0\], expected \[1, 1\]"),
        ({"num_sampled": torch.ones(1, dtype=torch.int32, device="meta")}, "propose: num_sampled is on meta"),
        ({"num_sampled": torch.ones(1)}, "propose: num_sampled is torch.float32: give integers"),
        ({"num_sampled": torch.ones(1, dtype=torch.bool)}, "propose: num_sampled is torch.bool: give integers"),
        ({"aux_hidden": torch.ones(3, 8, dtype=torch.int64)}, "propose: aux_hidden is torch.int64: give floats"),
        ({"block_table": torch.ones(1, 4).int().to_sparse()}, "propose: block_table is torch.sparse_coo: give a plain"),
        ({"num_sampled": torch.tensor(1, dtype=torch.int32)}, r"num_sampled is \[\], expected \[requests\]"),
        (
            {"sampled_token_ids": torch.zeros(3, dtype=torch.int64)},
            r"sampled_token_ids is \[3\], expected \[requests, K",
        ),
    ],
)
def test_a_batch_of_something_else(change, message):
    drafter = make_drafter(make_head("eagle", make_target()), "eager", "device", num_speculative_tokens=2, **LIMITS)
    batch = drafter.inputs(1)
    with pytest.raises(ConfigError, match=message):
        drafter.propose(replace(batch, **change))
    with pytest.raises(ConfigError, match="propose takes a ProposeBatch, got a dict"):
        drafter.propose({"num_sampled": 1})
    assert drafter.num_proposes == 0
    with pytest.raises(ConfigError, match="bind takes a ProposeBatch, got a NoneType"):
        drafter.bind(None)
    with pytest.raises(ConfigError, match="bind: num_sampled is a list: give a tensor on cpu"):
        drafter.bind(replace(drafter.inputs(2), num_sampled=[1, 1]))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(("token", "chunk"), [(VOCAB, 0), (-1, 1)])
def test_a_prompt_token_outside_of_the_vocabulary(kind, token, chunk):
    """EAGLE-3 drafts from a smaller vocabulary than the target's."""
    settings = {"num_speculative_tokens": 2, "prefill_sizes": [8], **LIMITS}
    drafter = make_drafter(make_head(kind, make_target()), "merged", "device", **settings)
    prompt, aux = [VOCAB - 1] * 16, torch.ones(8, drafter.head.aux_size)
    prompt[9 * chunk + 4] = token
    before = drafter.prefill_buffers.aux_hidden.clone()
    with pytest.raises(ConfigError, match=f"token {token} in the prompt of a prefill: ids are 0 to {VOCAB - 1}"):
        drafter.prefill(prompt, range(8 * chunk, 8 * chunk + 8), [1, 2, 3, 4], aux)
    assert torch.equal(drafter.prefill_buffers.aux_hidden, before)


@pytest.mark.parametrize("lowering", ["eager", "merged"])
def test_parameters_put_no_history_into_the_memory_of_the_drafter(lowering):
    """An engine may hand over its torch modules' parameters and hidden states, and call from any grad mode."""
    head = make_head("eagle", make_target())
    parameters = [tensor for tensor in head.weights().values() if tensor.is_floating_point()]
    for tensor in parameters:
        tensor.requires_grad_()
    limits = {**LIMITS, "capture_sizes": None}
    with torch.enable_grad():
        drafter = make_drafter(head, lowering, "device", num_speculative_tokens=2, prefill_sizes=[8], **limits)
        drafter.prefill(list(range(8)), range(8), [1, 2], torch.zeros(8, head.aux_size, requires_grad=True))
        config = DraftConfig(num_speculative_tokens=2, **limits)
        batch = RandomBatches(config, head.aux_size, VOCAB, head.dtype, seed=0).next(2)
        drafter.propose(replace(batch, aux_hidden=batch.aux_hidden.requires_grad_()))
    assert len(parameters) > 3
    own = [drafter.prefill_buffers.aux_hidden, drafter.shared.aux_hidden]
    assert not any(tensor.requires_grad for tensor in (*own, *(each for cache in drafter.caches for each in cache)))
