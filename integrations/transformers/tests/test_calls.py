"""Users give more to `generate` than a prompt: streamers, stopping criteria, end tokens, and later calls."""

from __future__ import annotations

import pytest
import torch
from specgraph_transformers import speculative
from tiny_targets import PAD, make_prompts, make_target
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

OPTIONS = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}


@pytest.fixture(scope="module")
def model():
    return make_target("GPTNeoX")


@pytest.fixture(scope="module")
def draft(eagle3):
    made = speculative(eagle3, 4, max_num_requests=4, max_model_len=64, capture_sizes=[1, 4], prefill_sizes=[16])
    yield made
    made.close()


class Recorder(StoppingCriteria):
    """A stopping criterion that notes what it sees; it ends request i after `lengths[i]` tokens."""

    def __init__(self, prompt: int, lengths: list[int]) -> None:
        self.seen, self.prompt, self.lengths = [], prompt, torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return self.lengths <= input_ids.shape[1] - self.prompt


class Tokens:
    """A streamer that notes what it gets."""

    def __init__(self) -> None:
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


def both(model, draft, ids, mask, **options):
    """The output and what each of `streamer` and `stopping_criteria` saw, without a drafter and with it."""
    results = []
    for way in ({}, {"custom_generate": draft}):
        streamer, recorder = Tokens(), Recorder(ids.shape[1], options.get("lengths", [20] * len(ids)))
        given = {key: value for key, value in options.items() if key != "lengths"}
        criteria = StoppingCriteriaList([recorder])
        out = model.generate(
            ids, attention_mask=mask, streamer=streamer, stopping_criteria=criteria, **{**OPTIONS, **given, **way}
        )
        results.append((out.tolist(), streamer.seen, recorder.seen))
    return results


@pytest.mark.parametrize("lengths", [[20, 20, 20, 20], [1, 9, 2, 6], [1, 1, 1, 1]])
@pytest.mark.parametrize("eos", [None, [3, 7]])
def test_streamers_and_criteria_see_what_they_see_without_drafts(model, draft, lengths, eos):
    """Every token in order, every prefix once, with the padding of requests that end earlier."""
    ids, mask = make_prompts(9, 2, 14, 5)
    plain, drafted = both(model, draft, ids, mask, lengths=lengths, eos_token_id=eos)
    assert drafted == plain
    assert plain[1][-1] == "end"


@pytest.mark.parametrize("length", [1, 2, 7])
def test_the_cache_that_is_returned_goes_on(model, draft, length):
    """It holds what `generate` leaves in it: every token but the last, also where a criterion cut drafts off."""
    ids, _ = make_prompts(8, seed=2)
    caches = []
    for way in ({}, {"custom_generate": draft}):
        out = model.generate(
            ids,
            stopping_criteria=StoppingCriteriaList([Recorder(8, [length])]),
            return_dict_in_generate=True,
            **OPTIONS,
            **way,
        )
        caches.append((out.sequences.tolist(), out.cache.get_seq_length()))
        last = model(out.sequences[:, -1:], cache=out.cache).logits[:, -1]
        torch.testing.assert_close(last, model(out.sequences).logits[:, -1])
    assert caches[0] == caches[1]


def test_a_text_streamer(draft, eagle3):
    """transformers' own streamer ends, so that a loop over it does."""
    model = make_target("GPTNeoX")

    class Letters:
        def decode(self, ids, **kwargs):
            return "".join(chr(97 + int(token)) + " " for token in ids)

    ids, _ = make_prompts(5)
    texts = []
    for way in ({}, {"custom_generate": draft}):
        streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
        model.generate(ids, streamer=streamer, **OPTIONS, **way)
        texts.append("".join(streamer))
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 20


def test_a_larger_batch_and_a_longer_text_capture_anew(model, eagle3):
    draft = speculative(eagle3, 2, capture_sizes=None, prefill_sizes=[8])
    for lengths, new in (((3,), 4), ((3, 2), 4), ((3, 2), 30), ((3,), 4)):
        ids, mask = make_prompts(*lengths)
        options = {**OPTIONS, "max_new_tokens": new, "attention_mask": mask}
        assert torch.equal(model.generate(ids, custom_generate=draft, **options), model.generate(ids, **options))
    config = draft.drafter.config
    assert (config.max_num_requests, config.max_model_len) == (2, 64)
    draft.close()
    assert draft.drafter is None


@pytest.mark.parametrize("architecture", ["GPT2", "Llama"])
def test_a_text_that_takes_every_position(architecture, eagle3):
    """The last drafts lie beyond the positions that the model has."""
    model = make_target(architecture, max_position_embeddings=32, n_positions=32)
    ids, mask = make_prompts(9, 4)
    options = {**OPTIONS, "attention_mask": mask, "max_new_tokens": 23}
    draft = speculative(eagle3, 4, decode="eager")
    assert torch.equal(model.generate(ids, custom_generate=draft, **options), model.generate(ids, **options))
    assert draft.drafter.config.max_model_len == 32


PREFIXES = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": [3, 7]},
    "min_length": {"min_length": 32, "eos_token_id": [3, 7]},
    "bad_words_ids": {"bad_words_ids": [[4], [2, 5]]},
    "sequence_bias": {"sequence_bias": [[[6], 2.0], [[1, 8], -3.0]]},
    "several": {"repetition_penalty": 1.2, "suppress_tokens": [5], "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("name", PREFIXES)
def test_processors_that_read_the_tokens_before(name, model, draft):
    """Each row of a verify has its own prefix: the padded prompt, the output, and the drafts before the row."""
    ids, mask = make_prompts(9, 2, 14, 5)
    options = {**OPTIONS, "attention_mask": mask, **PREFIXES[name]}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=draft, **options), expected)
    plain = {key: value for key, value in options.items() if key not in PREFIXES[name] or key == "eos_token_id"}
    assert not torch.equal(model.generate(ids, **plain), expected)  # the processor has an effect


def test_inside_and_outside_inference_mode(model, draft):
    ids, _ = make_prompts(6)
    expected = model.generate(ids, **OPTIONS)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, custom_generate=draft, **OPTIONS), expected)
    assert torch.equal(model.generate(ids, custom_generate=draft, **OPTIONS), expected)
