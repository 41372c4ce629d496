"""Text from folders: the shipped pair, and folders that are not what they should be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import tokenizers
import torch
from specgraph_models.checkpoints.tokenizer import Tokenizer
from specgraph_models.errors import CheckpointError
from specgraph_run.text.load import load_generator, shipped_pair
from specgraph_run.text.stream import text_of
from tiny_checkpoints import write_eagle3, write_target
from tokenizers import decoders
from tokenizers.models import WordLevel

from specgraph.errors import CapacityError, ConfigError

PROMPT = "class TestCase(unittest.TestCase):\n    def setUp(self):\n"


@pytest.fixture(autouse=True)
def _inference():
    """Replace the fixture of this name: these tests run in the caller's grad mode."""


@pytest.fixture(scope="module")
def generator():
    generator = load_generator(platform="cpu", decode="eager", max_num_requests=2, max_model_len=128)
    yield generator
    generator.close()


def test_text_is_the_decoded_tokens_and_streams_alike(generator):
    request = generator.request(PROMPT, max_tokens=24)
    [result] = generator.generate([request])
    streamed = [token for chunk in generator.stream([request]) for token in chunk.token_ids]
    assert streamed == result.token_ids
    assert 0 < len(streamed) <= 24
    assert generator.text([PROMPT], max_tokens=24) == [generator.tokenizer.decode(streamed)]
    assert generator.decoder.metrics.mean_acceptance_length > 1.5


def test_a_stream_leaves_the_callers_grad_mode_alone(generator):
    for _ in generator.stream([generator.request(PROMPT, max_tokens=4)]):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_the_end_of_text_token_stops(generator):
    assert generator.stop_token_ids == (0,)
    assert generator.request("x").stop_token_ids == (0,)


def test_an_empty_prompt_is_refused(generator):
    with pytest.raises(ConfigError, match="no tokens"):
        generator.request("")


def test_without_drafting_the_text_is_the_same(generator):
    alone = load_generator(platform="cpu", decode="eager", speculate=False, max_model_len=128)
    assert alone.decoder.drafter is None
    assert alone.text([PROMPT], max_tokens=24) == generator.text([PROMPT], max_tokens=24)
    alone.close()


@pytest.fixture
def folders(tmp_path):
    """A random pair that borrows the shipped tokenizer."""
    target = write_target(tmp_path / "target", vocab=2048)
    draft = write_eagle3(tmp_path / "draft", vocab=2048)
    shutil.copy(shipped_pair()[0] / "tokenizer.json", target)
    return target, draft


def test_any_folders(folders):
    generator = load_generator(*folders, platform="cpu", decode="merged", num_speculative_tokens=2)
    assert len(generator.generate([generator.request("import os", max_tokens=5)])[0].token_ids) <= 5
    assert "merged" in generator.description
    generator.close()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda target: (target / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda target: (target / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda target: (target / "generation_config.json").write_text("{"), "generation_config.json"),
        (lambda target: (target / "generation_config.json").write_text('{"eos_token_id": "end"}'), "eos_token_id"),
        (lambda target: (target / "model.safetensors").unlink(), "safetensors"),
    ],
)
def test_a_spoilt_folder_is_one_clear_error(folders, spoil, says):
    spoil(folders[0])
    with pytest.raises(CheckpointError, match=says):
        load_generator(*folders, platform="cpu")


def test_one_folder_without_the_other_is_refused(folders):
    for kwargs in ({"target": folders[0]}, {"draft": folders[1]}):
        with pytest.raises(CheckpointError, match="both"):
            load_generator(**kwargs, platform="cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_schedule": {2: 3}}, "draft_schedule ends at 2 requests"),
        ({"k_candidates": [3, 1], "num_speculative_tokens": "auto"}, "give ascending K"),
        ({"k_candidates": [1, 3]}, "k_candidates are for num_speculative_tokens='auto'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
    ],
)
def test_wrong_options_are_told_before_weights_are_read(options, words, monkeypatch):
    monkeypatch.setattr("specgraph_run.text.load.load_target", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=words):
        load_generator(platform="cpu", max_num_requests=4, **options)


@pytest.mark.parametrize(("ids", "wanted"), [(5, (5,)), ([5, 7], (5, 7)), (None, (0,))])
def test_stop_tokens_come_from_the_generation_config_else_from_the_config(folders, ids, wanted):
    (folders[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    generator = load_generator(*folders, platform="cpu", decode="eager")
    assert generator.stop_token_ids == wanted
    generator.close()


def test_streamed_text_is_the_text(generator):
    with generator.stream_text(PROMPT, max_tokens=24) as stream:
        pieces = list(stream)
    assert [stream.text] == generator.text([PROMPT], max_tokens=24) == generator.text(PROMPT, max_tokens=24)
    assert "".join(piece.text for piece in pieces) == stream.text
    assert {piece.is_accepted for piece in pieces} == {True, False}
    assert (len(stream.token_ids), stream.finish_reason) == (24, "length")
    assert 1 + sum(stream.accepted) + len(stream.accepted) >= 24  # the last round may be cut


def test_text_starts_with_its_space_and_has_no_stop_token(generator):
    """A decoder of words drops the space before the first; the oracle decodes the prompt with the tokens."""
    words = tokenizers.Tokenizer(
        WordLevel({f"\u2581w{i}": i for i in range(generator.tokenizer.get_vocab_size())}, "\u2581w0")
    )
    words.decoder = decoders.Metaspace()
    words = Tokenizer(words, generator.folder)
    request = generator.request(PROMPT, max_tokens=24)
    [plain] = generator.generate([request])
    stop = plain.token_ids[9]
    shown = plain.token_ids[: plain.token_ids.index(stop)]
    wanted = words.decode([*request.prompt_token_ids, *shown])[len(words.decode(list(request.prompt_token_ids))) :]
    assert wanted.startswith(" w")
    worded = replace(generator, tokenizer=words, stop_token_ids=(stop,))
    request = replace(request, stop_token_ids=(stop,))
    [result] = worded.generate([request])
    assert (result.token_ids, result.finish_reason) == ([*shown, stop], "stop")
    assert text_of(words, request, result) == wanted
    with worded.stream_text(request) as stream:
        assert "".join(piece.text for piece in stream) == wanted


def test_a_stop_string_ends_the_request_and_frees_its_blocks(generator):
    free = generator.decoder.allocator.num_free
    stream = generator.stream_text(PROMPT, max_tokens=24, stop="\n")
    for _ in stream:
        pass
    [whole] = generator.text(PROMPT, max_tokens=24)
    assert stream.text == whole.partition("\n")[0]
    assert stream.finish_reason == "stop"
    assert generator.decoder.allocator.num_free == free


def test_a_prompt_beyond_the_context_is_the_same_error_for_text_and_stream_text(generator):
    for use in (generator.text, generator.stream_text, lambda prompt: generator.text(["x", prompt])):
        with pytest.raises(CapacityError, match=r"the prompt has \d+ tokens; with max_model_len 128 it may have 127"):
            use(PROMPT * 20)


def test_more_prompts_than_run_together_are_told(generator):
    with pytest.warns(UserWarning, match=r"3 prompts are generated 2 at a time; load_generator\(max_num_requests=3\)"):
        assert len(generator.text([PROMPT, "import os", "def f():"], max_tokens=2)) == 3


@pytest.mark.parametrize("lowering", ["eager", "merged"])
def test_a_closed_generator_says_so(lowering):
    settings = {"decode": lowering, "max_model_len": 32, "prefill_sizes": [8]}
    with load_generator(platform="cpu", **settings) as generator:
        request = generator.request("x", max_tokens=2)
        generator.generate([request])
        drafter = generator.decoder.drafter
        batch = drafter.inputs(1)
    generator.close()
    for use in (
        lambda: generator.text("x"),
        lambda: generator.stream_text("x"),
        lambda: generator.generate([request]),
        lambda: generator.add(request),
        lambda: generator.step(),
        lambda: generator.decoder.capture(),
        lambda: drafter.inputs(1),
        lambda: drafter.propose(batch),
        lambda: drafter.prefill([1, 2], range(2), [1]),
        lambda: drafter.capture(),
    ):
        with pytest.raises(ConfigError, match=r"this (generator|Drafter) is closed"):
            use()
    generator.close()


def test_a_greedy_generator_refuses_a_temperature_at_once(generator):
    with pytest.raises(ConfigError, match="sampled=True"):
        generator.request(PROMPT, temperature=0.5)


def test_variables_of_the_chat_template(generator, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("def {{ messages[0].content }}({{ tools[0].name }})")
    there = replace(generator, folder=tmp_path)
    request = there.request([{"role": "user", "content": "run"}], chat_template_kwargs={"tools": [{"name": "tool"}]})
    assert generator.tokenizer.decode(request.prompt_token_ids) == "def run(tool)"
    with pytest.raises(ConfigError, match="give messages"):
        there.request("run", chat_template_kwargs={"tools": []})
