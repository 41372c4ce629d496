"""A head, an attention backend or a batch that is not what its protocol says: one message that names it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from decoder.pair_decoder import make_pair_decoder
from draft.pairs import DRAFTERS, make_head, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_conformance.tiny_models import KINDS
from specgraph_run import load_generator

from specgraph import (
    AttentionLayer,
    DraftConfig,
    Drafter,
    DraftOutput,
    DraftTree,
    KVCache,
    PagedAttention,
    allocate_caches,
)
from specgraph.cpu import CpuPlatform
from specgraph.draft import BlockKind, ChainKind, NgramHead, ProposeBatch
from specgraph.draft.cache_checks import overlap, repeats
from specgraph.errors import CaptureError, ConfigError

CONFIG = DraftConfig(num_speculative_tokens=3, max_num_requests=2, max_model_len=48, decode="eager", prefill_sizes=[8])


class Changed:
    """A head or attention whose members are replaced, or missing where the replacement is None."""

    def __init__(self, inner, **members):
        self.inner, self.members = inner, members

    def __getattr__(self, name):
        if name in self.members:
            if self.members[name] is None:
                raise AttributeError(name)
            return self.members[name]
        return getattr(self.inner, name)


def make(head, attention=None, **changes):
    platform = CpuPlatform()
    caches = allocate_caches(head.attention_layers, 9, CONFIG.block_size, head.dtype, platform.device)
    drafter = Drafter(head, caches, platform, replace(CONFIG, **changes), attention=attention)
    drafter.capture()
    return drafter


def test_prefill_passes_are_by_default_as_long_as_the_platform_says(monkeypatch):
    short = replace(CpuPlatform().capabilities, longest_prefill=20)
    monkeypatch.setattr(CpuPlatform, "capabilities", short)
    assert make(make_head("eagle", make_target()), prefill_sizes=None).config.prefill_rows == (16, 20)
    decoder = make_pair_decoder("eagle", max_num_requests=1, max_model_len=48, prefill_sizes=None)
    assert decoder.config.prefill_rows == decoder.drafter.config.prefill_rows == (16, 20)
    assert make(make_head("eagle", make_target())).config.prefill_rows == (8,)


@pytest.mark.parametrize(
    ("kind", "missing", "protocol"),
    [("eagle", "combine", "DraftHead"), ("dflash", "mask_token_id", "ParallelHead"),
     ("peagle", "mask_token_id", "MaskedHead"), ("peagle", "mask_hidden", "MaskedHead"),
     ("mtp-modules", "forward_step", "ModulesHead")],
)  # fmt: skip
def test_a_member_that_is_missing(kind, missing, protocol):
    head = Changed(make_head(kind, make_target()), **{missing: None})
    with pytest.raises(ConfigError, match=rf"the head Changed lacks {missing}: .* specgraph\.{protocol}"):
        make(head)


def test_attention_without_a_member():
    with pytest.raises(ConfigError, match=r"attention backend Changed lacks named_tensors.*AttentionBackend"):
        make(make_head("eagle", make_target()), Changed(PagedAttention(), named_tensors=None))
    with pytest.raises(CaptureError, match=rf"failed \(at {re.escape(__file__)}:\d+\): ZeroDivisionError: division"):
        make(
            make_head("eagle", make_target()), Changed(PagedAttention(), forward=lambda *given: 1 / 0), decode="merged"
        )


HEAD = make_head("eagle", make_target())


def test_attention_that_returns_something_else():
    class Wide(PagedAttention):
        def forward(self, *arguments):
            return super().forward(*arguments).double()

    with pytest.raises(ConfigError, match=r"attention 'paged' returned .*float64 for layer 0; expected the query's"):
        make(HEAD, Wide(), decode="merged")
    with pytest.raises(ConfigError, match=r"'paged'\.named_tensors\(\)\['mask'\] is of type int"):
        make(HEAD, Changed(PagedAttention(), named_tensors=lambda: {"mask": 1}))


def test_key_and_value_caches_of_different_lengths():
    (cache,) = allocate_caches(HEAD.attention_layers, 9, CONFIG.block_size, HEAD.dtype, torch.device("cpu"))
    with pytest.raises(ConfigError, match="the drafter's key cache has 9 blocks, its value cache 4"):
        Drafter(HEAD, [KVCache(cache.key, cache.value[:4])], CpuPlatform(), CONFIG)


def attends_flat(token_ids, hidden, attend, rows=None):
    def flat(index, query, key, value):
        return attend(index, query.flatten(1), key, value)

    return HEAD.forward(token_ids, hidden, flat, rows)


def attends_elsewhere(token_ids, hidden, attend, rows=None):
    return HEAD.forward(token_ids, hidden, lambda index, *rest: attend(7, *rest), rows)


def attends_twice(token_ids, hidden, attend, rows=None):
    HEAD.forward(token_ids, hidden, attend)
    return HEAD.forward(token_ids, hidden, attend, rows)


def reads_a_missing_key(token_ids, hidden, attend, rows=None):
    return {}["hidden"]


def ignores_rows(token_ids, hidden, attend, rows=None):
    return HEAD.forward(token_ids, hidden, attend)


def no_carry(token_ids, hidden, attend, rows=None):
    return DraftOutput(HEAD.forward(token_ids, hidden, attend, rows).hidden, None)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"logits": lambda hidden: torch.cat([HEAD.logits(hidden)] * 2, -1)},
         r"Changed\.logits\(hidden\) is \[4, 96\].*expected \[4, 48\]"),
        ({"combine": lambda aux: aux[:, :5]}, r"combine\(aux_hidden\) is \[4, 5\]"),
        ({"combine": lambda aux: aux.double()}, r"combine\(aux_hidden\) is .*float64; expected .*float32"),
        ({"forward": attends_flat}, r"forward's query of layer 0 is \[4, \d+\].*expected \[4, \d+, \d+\]"),
        ({"forward": attends_elsewhere}, r"attends as layer 7; it has 1 attention layer"),
        ({"forward": attends_twice}, r"forward calls attend for layers \[0, 0\]: call it once for each of its 1"),
        ({"forward": reads_a_missing_key}, rf"forward failed on .* \(at {re.escape(__file__)}:\d+\): KeyError: 'hid"),
        ({"forward": lambda *given: tuple(HEAD.forward(*given))}, r"forward\(\.\.\.\) is a tuple: return DraftOutput"),
        ({"forward": ignores_rows}, r"forward\(\.\.\., rows\) of one row\.hidden is \[4,"),
        ({"forward": no_carry}, r"forward\(\.\.\.\)\.carry is a NoneType"),
        ({"forward": lambda ids, hidden: None}, r"forward failed on tensors \[4\], .*TypeError"),
        ({"combine": lambda aux: 1 / 0}, r"combine failed on tensors \[4, \d+\] \(at .*ZeroDivisionError"),
        ({"kind": "tree"}, "Changed.kind must be a Kind, got 'tree'"),
        ({"logits": lambda hidden: HEAD.logits(hidden).flip(-1)},
         r"Changed\.logits\(hidden\) is not the linear in Changed\.projection.*set projection = None"),
        ({"logits": lambda hidden: HEAD.logits(hidden).long()}, r"logits\(hidden\) is torch.int64: return floats"),
        ({"projection": 3}, r"Changed\.projection must be an OutputProjection or None, got 3"),
        ({"hidden_size": "16"}, r"Changed\.hidden_size must be an integer, got '16'"),
        ({"attention_layers": ()}, r"Changed attends as layer 0; it has 0 attention layer\(s\)"),
        ({"weights": 3}, "the head Changed lacks weights"),
        ({"draft_to_target": torch.zeros(3, dtype=torch.int64)}, r"draft_to_target is \[3\].*expected \[48\]"),
        ({"weights": lambda: [torch.zeros(2)]}, r"weights\(\) is of type list: return a dict of tensors"),
        ({"weights": lambda: {"w": 2.0}}, r"weights\(\)\['w'\] is of type float"),
        ({"weights": lambda: {"w": torch.zeros(2, device="meta")}}, r"weights\(\)\['w'\] is on meta"),
    ],
)  # fmt: skip
def test_a_shape_that_is_wrong(members, message):
    assert HEAD.draft_vocab_size == 48
    with pytest.raises(ConfigError, match=message):
        make(Changed(HEAD, **members))


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if KINDS[kind] != BlockKind()])  # it has `in_order`
def test_logits_that_a_subclass_overrides_are_refused_or_used(kind):
    head = make_head(kind, make_target())

    class Reversed(type(head)):
        def logits(self, hidden):
            return super().logits(hidden).flip(-1)

    class Said(Reversed):
        projection = None

    def drafts(own):
        drafter = make(own)
        torch.manual_seed(1)
        with torch.inference_mode():
            return drafter.propose(batch(own, aux_hidden=torch.randn(8, own.aux_size))).token_ids

    plain = drafts(head)
    if head.projection is not None:
        head.__class__ = Reversed
        with pytest.raises(ConfigError, match=r"Reversed\.logits\(hidden\) is not the linear"):
            make(head)
    head.__class__ = Said
    assert not torch.equal(drafts(head), plain)


def test_a_mask_of_another_shape():
    head = make_head("peagle", make_target())
    with pytest.raises(ConfigError, match=r"Changed\.mask_hidden is \[7\].*expected \[32\]"):
        make(Changed(head, mask_hidden=torch.zeros(7)))


def prefilled(*lengths, blocks=((1, 2), (3, 4))):
    """A drafter with `debug` that was given prompts of these lengths in these blocks."""
    drafter = make(HEAD, debug=True)
    for of_one, length in zip(blocks, lengths, strict=True):
        for begin in range(0, length, 8):
            positions = range(begin, min(begin + 8, length))
            drafter.prefill([1] * length, positions, of_one, torch.zeros(len(positions), HEAD.aux_size))
    return drafter


def batch(head, **changes):
    values = {
        "sampled_token_ids": torch.tensor([[1, 2, 3, 4], [5, 47, 999, 999]]),
        "num_sampled": torch.tensor([4, 2], dtype=torch.int32),
        "start_positions": torch.tensor([10, 20]),
        "aux_hidden": torch.randn(8, head.aux_size),
        "block_table": torch.tensor([[1, 2, 0, 0], [3, 4, 0, 0]], dtype=torch.int32),
    }
    return ProposeBatch(**values | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sampled": torch.tensor([4, 5], dtype=torch.int32)}, "num_sampled of request 1 is 5: .*0 .* to 4"),
        ({"num_sampled": torch.tensor([-1, 2], dtype=torch.int32)}, "num_sampled of request 0 is -1"),
        ({"start_positions": torch.tensor([10, 48])}, "start_positions of request 1 is 48: it is 0 to 47"),
        ({"start_positions": torch.tensor([-2, 20])}, "start_positions of request 0 is -2"),
        ({"sampled_token_ids": torch.tensor([[1, 2, 48, 4], [5, 6, 0, 0]])},
         "sampled_token_ids of request 0 is 48: token ids are 0 to 47"),
        ({"block_table": torch.tensor([[1, 2], [3, 9]], dtype=torch.int32)},
         "block_table of request 1 is 9: blocks are 0 to 8"),
        ({"block_table": torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)},
         "block_table of request 1 is 0: block 0 is the null block"),
        ({"aux_hidden": torch.full((8, HEAD.aux_size), float("nan"))}, "aux_hidden of request 0 .*finite"),
    ],
)  # fmt: skip
def test_values_that_no_round_can_have(changes, message):
    with torch.inference_mode():
        drafter = prefilled(11, 21)
        drafter.propose(batch(HEAD))
        with pytest.raises(ConfigError, match=message):
            drafter.propose(batch(HEAD, **changes))


def test_a_round_that_accepts_past_the_last_position_is_sound():
    """A request whose last token is at position 47 of 48 may have had more drafts accepted than there is room for."""
    with torch.inference_mode():
        drafter = prefilled(46, 48, blocks=((1, 2, 3), (4, 5, 6)))
        table = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 0]], dtype=torch.int32)
        drafter.propose(batch(HEAD, start_positions=torch.tensor([45, 47]), block_table=table))


def test_what_an_inert_request_holds_does_not_matter():
    inert = {
        "num_sampled": torch.tensor([0, 2], dtype=torch.int32),
        "sampled_token_ids": torch.tensor([[-7, 999, 999, 4], [5, 6, 0, 0]]),
        "start_positions": torch.tensor([-9, 20]),
        "block_table": torch.tensor([[0, 99], [3, 4]], dtype=torch.int32),
        "aux_hidden": torch.cat([torch.full((4, HEAD.aux_size), float("inf")), torch.randn(4, HEAD.aux_size)]),
    }
    with torch.inference_mode():
        prefilled(11, 21).propose(batch(HEAD, **inert))


@pytest.mark.parametrize("trees", [False, True])
def test_the_decoder_s_rounds_are_sound(trees):
    tree = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    options = {"platform": "cpu", "decode": "eager", "max_model_len": 64, "max_num_requests": 2}
    options |= tree if trees else {}
    with load_generator(**options, debug=True) as checked, load_generator(**options) as plain:
        prompts = ["import os\n", "class A:\n"]
        assert checked.text(prompts, max_tokens=40) == plain.text(prompts, max_tokens=40)


@pytest.mark.parametrize(
    ("rotary", "no_rotary", "lines"),
    [(None, False, 1), (None, True, 0), (torch.ones(48, 8), False, 0)],
)
def test_a_head_without_rotation_is_one_line_of_the_log(rotary, no_rotary, lines, caplog):
    layers = [replace(layer, rotary=rotary, no_rotary=no_rotary) for layer in HEAD.attention_layers]
    weights = HEAD.weights() | ({} if rotary is None else {"rotary": rotary})
    make(Changed(HEAD, attention_layers=layers, weights=lambda: weights))
    said = [record.getMessage() for record in caplog.records if record.name == "specgraph"]
    assert len(said) == lines
    assert all("attention layers [0] of the head Changed have no rotary table" in line for line in said)


def test_the_examples_have_rotation(caplog):
    make(HEAD)
    make(NgramHead(48))
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rotary": torch.ones(48)},
            r"rotary is \[48\] torch.float32 on cpu, expected floats \[max_positions, rotary_dim",
        ),
        ({"rotary": torch.ones(48, 8).long()}, r"rotary is \[48, 8\] torch.int64"),
        ({"rotary": torch.ones(48, 7)}, "rotary has 7 columns: give an even number, at most head_dim"),
        ({"rotary": torch.ones(48, 990)}, "rotary has 990 columns"),
        ({"rotary": torch.ones(48, 8), "no_rotary": True}, "rotary is given, and no_rotary says that there is none"),
        ({"sinks": torch.ones(3)}, r"sinks is \[3\] .* expected floats \[4\] or None"),
    ],
)
def test_an_attention_layer_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=f"AttentionLayer: {message}"):
        AttentionLayer(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 1.0} | change)


def test_query_heads_that_cannot_share_kv_heads():
    (layer,) = HEAD.attention_layers
    odd = replace(layer, num_kv_heads=layer.num_heads + 1)
    with pytest.raises(
        ConfigError, match=rf"{layer.num_heads} query heads, which cannot share {odd.num_kv_heads} KV heads"
    ):
        make(Changed(HEAD, attention_layers=[odd]))


def cache(blocks, layers, make_cache):
    """Caches of a head with so many layers like those of HEAD."""
    (layer,) = HEAD.attention_layers
    shape = (blocks, CONFIG.block_size, layer.num_kv_heads, layer.head_dim)
    return Changed(HEAD, attention_layers=[layer] * layers), make_cache(shape)


def one_cache_twice(shape):
    return [KVCache(torch.zeros(shape), torch.zeros(shape))] * 2


def one_key_in_two_layers(shape):
    key, *values = torch.zeros(3, *shape)
    return [KVCache(key, value) for value in values]


def expanded_blocks(shape):
    return [KVCache(*(torch.zeros(1, *shape[1:]).expand(shape) for _ in range(2)))]


def overlapping_blocks(shape):
    block = shape[1] * shape[2] * shape[3]
    strides = (block - 1, *torch.zeros(shape).stride()[1:])
    return [KVCache(torch.zeros(shape), torch.zeros(block * shape[0]).as_strided(shape, strides))]


def value_begins_in_the_key(shape):
    memory, size = torch.zeros(2 * shape[0] * shape[1], *shape[2:]), shape[0] * shape[1]
    return [KVCache(memory[:size].view(shape), memory[size - 1 : -1].view(shape))]


def other_blocks_in_layer_1(shape):
    return [KVCache(torch.zeros(n, *shape[1:]), torch.zeros(n, *shape[1:])) for n in (9, 8)]


@pytest.mark.parametrize(
    ("layers", "make_cache", "message"),
    [
        (2, one_cache_twice, "key cache of layer 0 and key cache of layer 1 share memory"),
        (2, one_key_in_two_layers, "key cache of layer 0 and key cache of layer 1 share memory"),
        (1, expanded_blocks, r"key cache has strides \(0, .* share memory"),
        (1, overlapping_blocks, r"value cache has strides .* share memory"),
        (1, value_begins_in_the_key, "key cache of layer 0 and value cache of layer 0 share memory"),
        (2, other_blocks_in_layer_1, "caches of layer 1 have 8 blocks, those of layer 0 9"),
    ],
)
def test_caches_that_share_memory(layers, make_cache, message):
    head, caches = cache(9, layers, make_cache)
    with pytest.raises(ConfigError, match=message):
        Drafter(head, caches, CpuPlatform(), CONFIG)


@pytest.mark.parametrize("dim", range(5))
def test_caches_that_lie_between_each_other_in_one_memory(dim):
    """Engines keep keys beside values, in a block, in a token or in a head, and all layers in one memory."""

    def between(shape):
        parts = torch.zeros(*shape[:dim], 4, *shape[dim:]).unbind(dim)
        return [KVCache(*parts[:2]), KVCache(*parts[2:])]

    head, caches = cache(9, 2, between)
    Drafter(head, caches, CpuPlatform(), CONFIG)


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_memory_that_tensors_share_is_found_exactly(data):
    """The oracle counts the elements of each one by one."""
    memory, views = torch.zeros(400), []
    for _ in range(2):
        shape = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
        strides = data.draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
        views.append(memory.as_strided(shape, strides, data.draw(st.integers(0, 60))))
    held = [torch.arange(400).as_strided(view.shape, view.stride(), view.storage_offset()).flatten() for view in views]
    assert overlap(*views) == bool(torch.isin(*held).any())
    assert repeats(views[0]) or len(held[0].unique()) == len(held[0]), "no element is in one place with another"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"attention_layers": 3}, r"Changed\.attention_layers must be a list .*, got 3"),
        ({"attention_layers": [3]}, r"Changed\.attention_layers\[0\] must be an AttentionLayer, got 3"),
        ({"kind": ["chain"]}, r"Changed\.kind must be a Kind, got a list"),
        ({"kind": ChainKind}, r"Changed\.kind must be a Kind, got the class ChainKind: give an object of it"),
        ({"dtype": "float32"}, r"Changed\.dtype must be a dtype, got 'float32'"),
        ({"aux_layers": 2}, r"Changed\.aux_layers must be a list"),
        ({"pair_input": 2}, r"Changed\.pair_input must be a PairInput or None"),
        ({"draft_to_target": [0] * 48}, r"Changed\.draft_to_target must be a Tensor or None, got a list"),
        ({"hidden_size": 10**9}, r"Changed\.hidden_size must be at most 16777216"),
    ],
)  # fmt: skip
def test_a_member_of_a_head_that_is_something_else(members, message):
    platform = CpuPlatform()
    caches = allocate_caches(HEAD.attention_layers, 9, CONFIG.block_size, HEAD.dtype, platform.device)
    with pytest.raises(ConfigError, match=message):
        Drafter(Changed(HEAD, **members), caches, platform, CONFIG)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"name": 3}, r"Changed\.name must be a string"),
        ({"host_parameters": 3}, r"Changed\.host_parameters must be a list"),
        ({"host_parameters": (3,)}, r"Changed\.host_parameters\[0\] must be a string"),
        ({"after_advance": 3}, r"Changed\.after_advance must be a function or None, got 3"),
        ({"after_advance": len}, r"attention 'paged'\.after_advance failed: TypeError"),
        ({"cache_dtypes": 3}, r"Changed\.cache_dtypes must be a list"),
        ({"cache_dtypes": ("fp8",)}, r"Changed\.cache_dtypes\[0\] must be a dtype"),
        ({"preferred_block_size": "16"}, r"Changed\.preferred_block_size must be an integer"),
    ],
)  # fmt: skip
def test_a_member_of_attention_that_is_something_else(members, message):
    with pytest.raises(ConfigError, match=message):
        make(HEAD, Changed(PagedAttention(), **members), decode="merged")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"supports_trees": None, "cache_dtypes": None},
            "attention backend Changed lacks supports_trees, cache_dtypes",
        ),
        ({"supports_trees": lambda *given: True}, r"paged\.supports_trees must be a Support, got True"),
        ({"supports": lambda *given: None}, r"paged\.supports must be a Support, got None"),
    ],
)
def test_attention_of_trees_that_does_not_answer(members, message):
    tree = DraftTree(num_steps=3, top_k=2, num_draft_tokens=5)
    with pytest.raises(ConfigError, match=message):
        make(HEAD, Changed(PagedAttention(), **members), tree=tree)


class Later:
    """A head that returns something else from a call of one method on."""

    def __init__(self, inner, method, number, returned):
        self.inner, self.method, self.left, self.returned = inner, method, number, returned

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if name != self.method:
            return found

        def call(*arguments):
            self.left -= 1
            return found(*arguments) if self.left >= 0 else self.returned

        return call


@pytest.mark.parametrize("decode", ["eager", "merged"])
@pytest.mark.parametrize(
    ("method", "returned"), [("forward", [1, 2]), ("logits", None), ("logits", torch.ones(1, 2, 3)), ("weights", [1])]
)
def test_a_head_that_returns_something_else_later(decode, method, returned):
    drafts = Later(Changed(HEAD, projection=None) if method == "logits" else HEAD, method, 4, returned)
    with pytest.raises((CaptureError, ConfigError), match=r"Later|capture of") as raised:  # noqa: PT012
        drafter = make(drafts, decode=decode)
        for _ in range(4):
            drafter.propose(drafter.inputs(1))
            drafter.read_set()
    assert "\n" not in str(raised.value)
