"""Settings, refusals and the wrapping of vllm-ascend's `get_spec_decode_method`, without its wheels."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest
import torch
from ascend_objects import StockProposer, config, runner, scheduled
from specgraph_models import load_target
from specgraph_models.errors import CheckpointError
from specgraph_plugin.when_imported import when_imported
from specgraph_vllm_ascend import plugin
from specgraph_vllm_ascend.host_batch import host_batch, next_prompt_tokens, num_sampled
from specgraph_vllm_ascend.proposer import verify_output
from vllm_objects import MiMoMTP, mimo_folder

from specgraph.errors import ConfigError, UnsupportedError

CPU = torch.device("cpu")


def stock(method, vllm_config, device, runner):
    return StockProposer(vllm_config, device, runner)


def made(vllm_config, make=stock, of=None):
    return plugin.wrapped(make)("eagle3", vllm_config, CPU, runner() if of is None else of)


def test_without_the_key_nothing_changes() -> None:
    for settings in ({}, None, {"ascend_compilation_config": {}}):
        assert type(made(config(additional_config=settings, speculative_config__method="ngram"))) is StockProposer


@pytest.mark.parametrize("eager", [False, True])
def test_vllm_ascends_proposer_becomes_specgraphs_and_its_runner_captures_both(eager) -> None:
    """Also if vllm-ascend's own drafter runs eagerly."""
    of = runner()
    found = made(config(speculative_config__enforce_eager=eager), of=of)
    assert isinstance(found, StockProposer)
    assert type(found).__name__ == "SpecgraphStockProposer"
    assert of.capture_model() == 7  # there is no head, so specgraph captures nothing
    given = dict.fromkeys(("target_token_ids", "target_positions", "target_hidden_states", "token_indices_to_sample"))
    drafts = found._propose(**given, next_token_ids=torch.zeros(2), common_attn_metadata=None)
    assert drafts.tolist() == [[0, 0, 0]] * 2
    assert found.counts.by_reason == {"no captured graphs": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_config__method": "dflash"}, "method 'dflash'; specgraph drafts for eagle3, eagle, mtp"),
        ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size 2; one NPU is served"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size 2"),
        ({"speculative_config__disable_padded_drafter_batch": True}, "disable_padded_drafter_batch"),
        ({"model_config__enforce_eager": True}, "enforce_eager, or a mode of graphs NONE"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
    ],
)
def test_what_is_not_served_is_one_line_or_left_to_vllm_ascend(changes, words, caplog) -> None:
    with pytest.raises(UnsupportedError, match=words) as error:
        made(config(**changes))
    assert "\n" not in str(error.value)
    left = made(config(**changes, additional_config={"specgraph": {"when_unsupported": "vllm"}}))
    assert type(left) is StockProposer
    assert words in caplog.text


def test_a_release_with_other_names_is_refused_by_these_names() -> None:
    class OtherNames(StockProposer):
        def _propose(self, next_token_ids, scheduler_output=None):
            """Never called."""

    def make(method, vllm_config, device):
        return OtherNames(vllm_config, device, runner())

    with pytest.raises(UnsupportedError) as error:
        plugin.wrapped(lambda *given: make(*given[:3]))("eagle3", config(), CPU, runner())
    for words in (
        "OtherNames._propose takes (next_token_ids, scheduler_output), expected (target_token_ids, ",
        "OtherNames._propose takes no mm_embed_inputs",
        "get_spec_decode_method takes (given), expected (method, vllm_config, device, runner)",
    ):
        assert words in str(error.value)
    of = runner()
    del of.optimistic_seq_lens_cpu
    with pytest.raises(UnsupportedError, match=r"SimpleNamespace\.optimistic_seq_lens_cpu is missing"):
        made(config(), of=of).load_model(None)
    with pytest.raises(ConfigError, match="'when_unsuported'"):
        made(config(additional_config={"specgraph": {"when_unsuported": "vllm"}}))


def test_a_module_is_wrapped_when_the_engine_imports_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "later_module.py").write_text(
        textwrap.dedent("""
        def get_spec_decode_method(method, vllm_config, device, runner): ...
        kept = get_spec_decode_method
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    for _ in range(2):
        when_imported("later_module", plugin.wrap)
    import later_module

    assert sys.meta_path == finders
    assert later_module.get_spec_decode_method.without_specgraph is later_module.kept
    once = later_module.get_spec_decode_method
    when_imported("later_module", plugin.wrap)
    assert later_module.get_spec_decode_method is once
    monkeypatch.delitem(sys.modules, "later_module")


def test_a_cut_vocabulary(tmp_path) -> None:
    path, folder = tmp_path / "tokens.npy", mimo_folder(tmp_path / "mimo")
    np.save(path, np.array([9, 3, 40]))
    target = load_target(folder)
    module = MiMoMTP(folder, json.loads((folder / "config.json").read_text()), target, torch.float16)
    found = made(config(additional_config={"specgraph": {"draft_vocab": str(path)}}))
    found.load_model(module)
    assert (found.specgraph.head.draft_to_target + torch.arange(3)).tolist() == [3, 9, 40]
    assert torch.equal(found.specgraph.head.lm_head, target.lm_head[[3, 9, 40]])
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokens\.npy"):
        found.load_model(module)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_numbers_of_a_batch(asynchronous) -> None:
    """Request a: tokens 0 to 19 are known, rows 19 to 22 were verified, and 2 tokens were sampled. Of b's prompt, rows
    14 to 29 were run."""
    waits = []

    class Event:
        def synchronize(self):
            waits.append("counts")

    of = runner(use_async_scheduling=asynchronous, valid_sampled_token_count_event=Event())
    batch = host_batch(of, scheduled())
    assert batch == ([19, 14], [4, 16], [3, 0], {1})
    assert not batch.is_uniform(4)
    assert batch.start_positions() == [19, 29]
    assert batch.chunks() == [(4, 16, 14, 1, 1)]
    assert next_prompt_tokens(of, batch) == [0, 30]
    counts = num_sampled(of, batch)
    assert (counts() if callable(counts) else counts) == [2, 0]
    assert waits == ["counts"] * asynchronous


def test_the_rows_at_which_the_target_samples() -> None:
    of = runner()
    positions = torch.tensor([19, 20, 21, 22, *range(14, 30)])
    given = {
        "target_positions": positions, "token_indices_to_sample": torch.tensor([1, 19]),
        "target_token_ids": torch.arange(20), "target_hidden_states": torch.zeros(20, 8),
        "next_token_ids": torch.tensor([9, 9]),
        "common_attn_metadata": type("M", (), {"block_table_tensor": torch.zeros(4, 2, dtype=torch.int32)}),
    }  # fmt: skip
    end = verify_output(host_batch(of, scheduled()), 4, torch.tensor([2, 0]), given)
    assert end.first_rows is not None
    assert end.first_rows.tolist() == [0, 19]
    assert end.starts.tolist() == [19, 29]
    assert end.table.shape == (2, 2)
