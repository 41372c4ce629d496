"""The plugin registers an algorithm, refuses options while SGLang reads its arguments, and asks for slots."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_objects import StockDraftWorker, server_args
from specgraph_sglang import plugin
from specgraph_sglang.config import unsupported_arguments
from specgraph_sglang.names import (
    BATCH,
    DRAFT_INPUT,
    RESERVE,
    ROW_HEADROOM,
    SCHEDULER,
    SIZING_MODULE,
    WORKER_MODULE,
    differences,
)
from specgraph_sglang.plugin import answering_as, more_slots

from specgraph.errors import UnsupportedError


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative_draft_model_path": None}, "no --speculative-draft-model-path"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4; chains"),
        ({"speculative_eagle_topk": None}, "--speculative-eagle-topk None; chains"),
        ({"dp_size": 2}, "--dp-size 2; one GPU is served, or several with --tp-size"),
        ({"model_path": "d", "moe_a2a_backend": "deepep"}, "--moe-a2a-backend deepep with MTP; its experts are split"),
        ({"model_path": "d", "tp_size": 4, "ep_size": 2}, "--ep-size 2 with MTP; its experts are split by, or"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2; the KV cache has the model's dtype, or fp8_e4m3"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
        ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
        ({"disable_cuda_graph": True}, "--disable-cuda-graph"),
        ({"enable_lora": True}, "--enable-lora"),
    ],
)
def test_what_is_not_served_is_named(changes, reason) -> None:
    said = unsupported_arguments(server_args(**changes))
    assert said is not None
    assert said.startswith(reason)
    assert "\n" not in said


def build_eagle_verify_input(batch, draft_input, parent_list, top_scores_index, draft_tokens, draft_probs, *, topk):
    """Its parameters."""


def release(**changes):
    """The module of SGLang's worker, as far as the check of names looks at it."""
    fields = {"ScheduleBatch": BATCH, "EagleDraftInput": DRAFT_INPUT}
    classes = {name: type(name, (), {"__annotations__": dict.fromkeys(of)}) for name, of in fields.items()}
    found = {
        "EagleDraftWorker": StockDraftWorker, "EAGLEWorkerV2": object, "get_batch_sizes_to_capture": len,
        "_eagle_prefill_tail_tokens": len, "build_eagle_verify_input": build_eagle_verify_input,
    } | classes | changes  # fmt: skip
    return SimpleNamespace(__name__="worker", **{name: value for name, value in found.items() if value is not None})


class OtherDraftWorker(StockDraftWorker):
    def draft(self, input_batch):
        """Another parameter."""


class OtherBatch:
    input_ids: list


SIZING = SimpleNamespace(__name__="sizing", **{RESERVE: lambda: 0, ROW_HEADROOM: lambda server_args: 0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"EagleDraftWorker": OtherDraftWorker}, ["OtherDraftWorker.draft takes (input_batch), expected (batch, ...)"]),
        ({"get_batch_sizes_to_capture": None}, ["eagle_worker_v2.get_batch_sizes_to_capture is missing"]),
        ({"ScheduleBatch": OtherBatch}, ["OtherBatch.extend_lens is missing", "OtherBatch.prefix_lens is missing"]),
    ],
)
def test_a_release_with_other_names_is_refused_by_these_names(changes, words, monkeypatch) -> None:
    assert differences(release(), SIZING) == []
    modules = {WORKER_MODULE: release(**changes), SIZING_MODULE: SIZING}
    monkeypatch.setattr(plugin, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    with pytest.raises(UnsupportedError, match="this release of SGLang is not served") as error:
        plugin.make_worker_class(server_args())
    assert all(each in str(error.value) for each in words)
    assert "\n" not in str(error.value)


def test_a_server_says_who_drafts_and_is_switched_while_it_runs(monkeypatch) -> None:
    hooks, applied = {}, []
    registry = SimpleNamespace(
        register=lambda target, hook, kind: hooks.update({target: (kind, hook)}),
        apply_hooks=lambda: applied.append(len(hooks)),
    )
    modules = {
        WORKER_MODULE: release(), SIZING_MODULE: SIZING,
        "sglang.srt.plugins.hook_registry": SimpleNamespace(
            HookRegistry=registry, HookType=SimpleNamespace(AFTER="after", AROUND="around")
        ),
    }  # fmt: skip
    monkeypatch.setattr(plugin, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    plugin.make_worker_class(server_args())
    assert applied == [2]
    rounds = SimpleNamespace(use_sglang=False, counts=SimpleNamespace(by_reason={"specgraph": 3}))
    scheduler = SimpleNamespace(draft_worker=SimpleNamespace(_draft_worker=SimpleNamespace(specgraph=rounds)))
    kind, after = hooks[f"{SCHEDULER}.get_internal_state"]
    answer = SimpleNamespace(internal_state={"avg_spec_accept_length": 2.5})
    assert (kind, after(answer, scheduler, None)) == ("after", answer)
    assert answer.internal_state == {"avg_spec_accept_length": 2.5, "specgraph": {"specgraph": 3}}
    kind, around = hooks[f"{SCHEDULER}.set_internal_state"]
    for asked, switched_off in ({"specgraph": 0, "other": 2}, True), ({"other": 2}, True), ({"specgraph": 1}, False):
        left = {name: value for name, value in asked.items() if name == "other"}
        request = SimpleNamespace(server_args=asked)
        assert around(lambda _, given: given.server_args, scheduler, request) == left
        assert (kind, rounds.use_sglang) == ("around", switched_off)


class Algorithm(enum.Enum):
    """A copy of SGLang's: questions, and two class methods."""

    EAGLE = enum.auto()
    EAGLE3 = enum.auto()

    @classmethod
    def from_string(cls, name):
        return cls[name]

    def is_eagle3(self):
        return self is Algorithm.EAGLE3

    def only_the_enumeration_has_this(self, x):
        return self.name, x

    def create_worker(self, server_args):
        return "SGLang's worker"


class Custom:
    """A copy of SGLang's `CustomSpecAlgo`: says no, and makes the worker by a factory."""

    def is_eagle3(self):
        return False

    def create_worker(self, server_args):
        return "the factory's"


@pytest.mark.parametrize("own", ["EAGLE3", "EAGLE"])
def test_an_algorithm_answers_as_sglangs_own_but_makes_its_own_worker(own) -> None:
    made = answering_as(Custom, Algorithm, own)()
    assert made.is_eagle3() is (own == "EAGLE3")
    assert made.only_the_enumeration_has_this(3) == (own, 3)
    assert made.create_worker(None) == "the factory's"
    assert not hasattr(made, "from_string")


@given(st.integers(1, 8), st.sampled_from([1, 16, 64]), st.integers(1, 200), st.lists(st.integers(0, 8), max_size=12))
def test_every_slot_that_a_propose_reaches_is_reserved(k, page, prompt, accepted) -> None:
    """SGLang's overlapped schedule: slots are reserved while the host knows the lengths before the last round."""
    args = server_args(speculative_num_steps=k)
    reserve = more_slots(lambda: args)(lambda: 2 * (k + 1))
    known = length = prompt
    given_to_it = 0
    for count in accepted:
        given_to_it = max(given_to_it, -(-(known + reserve) // page) * page)
        start = length
        sampled = min(count, k) + 1
        # K + 1 rows from the start, then rows of the draft tokens 1 .. K - 1 after the last sampled one.
        last_written = max(start + k, start + sampled + k - 2)
        assert last_written < given_to_it
        known, length = start, start + sampled


def test_both_algorithms_are_known_and_the_reserve_is_hooked(monkeypatch) -> None:
    known, hooks = [], []
    algorithm = SimpleNamespace(register=lambda name, **_: lambda factory: known.append(name))
    modules = {
        "sglang.srt.speculative.spec_info": SimpleNamespace(SpeculativeAlgorithm=algorithm),
        "sglang.srt.speculative.spec_registry": SimpleNamespace(CustomSpecAlgo=Custom),
        "sglang.srt.runtime_context": SimpleNamespace(get_spec=server_args),
        "sglang.srt.plugins.hook_registry": SimpleNamespace(
            HookRegistry=SimpleNamespace(register=lambda target, hook, kind: hooks.append(target)),
            HookType=SimpleNamespace(AROUND="around"),
        ),
    }
    monkeypatch.setattr(plugin, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    plugin.register()
    assert known == ["SPECGRAPH", "SPECGRAPH_EAGLE"]
    assert hooks == [f"{SIZING_MODULE}.{RESERVE}", f"{SIZING_MODULE}.{ROW_HEADROOM}"]


def test_other_algorithms_keep_sglangs_reserve() -> None:
    args = server_args(speculative_algorithm="EAGLE3")
    assert more_slots(lambda: args)(lambda: 12) == 12
    assert more_slots(lambda: None)(lambda _: 12, server_args(speculative_num_steps=5)) == 17
    assert more_slots(lambda: server_args(speculative_num_steps=3))(lambda: 12) == 15
