"""Answers of gpt-oss: channels told apart as the text comes, and given to the chat template as it takes them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from specgraph_models.errors import CheckpointError
from specgraph_run.decoder.request import Chunk, Request
from specgraph_run.text.chat_template import render_chat
from specgraph_run.text.harmony import Channels, HarmonyStream, is_harmony
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = Path(__file__).parent / "chat_templates" / "gpt_oss.jinja"
MARKERS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
ANSWER = (
    "<|channel|>analysis<|message|>2 < 3, so <b>.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    "<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>It is\n<|b|>."
)
SHOWN = "analysis: 2 < 3, so <b>.\n\ncommentary: {}\n\nIt is\n<|b|>."


def harmony_tokenizer() -> Tokenizer:
    """One token per byte, and the markers of harmony."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    assert not is_harmony(tokenizer)
    tokenizer.add_special_tokens(MARKERS)
    return tokenizer


TOKENIZER = harmony_tokenizer()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 999])
def test_channels_are_shown_apart_in_whatever_pieces(size):
    assert is_harmony(TOKENIZER)
    ids = TOKENIZER.encode(ANSWER).ids
    stream = HarmonyStream(TOKENIZER, Request(prompt_token_ids=[1], max_tokens=999))
    chunks = [Chunk(0, ids[at : at + size], size - 1) for at in range(0, len(ids), size)]
    chunks[-1].finish_reason = "length"
    assert "".join(piece.text for chunk in chunks for piece in stream.push(chunk)) == SHOWN
    assert stream.text == ANSWER
    assert stream.channels.message() == {"role": "assistant", "content": "It is\n<|b|>.", "thinking": "2 < 3, so <b>."}


@pytest.mark.parametrize(
    ("text", "shown", "message"),
    [
        ("no channel at all", "no channel at all", {"content": "no channel at all"}),
        ("<|channel|>final<|message|>yes", "yes", {"content": "yes"}),
        ("<|channel|>analysis<|message|>hm", "analysis: hm", {"content": "", "thinking": "hm"}),  # Ctrl-C came then
        ("<|channel|>analysis", "", {"content": ""}),
        ("a <", "a <", {"content": "a <"}),
    ],
)
def test_answers_without_all_channels(text, shown, message):
    channels = Channels()
    assert channels.push(text, final=True) == shown
    assert channels.message() == {"role": "assistant"} | message


def test_the_template_takes_the_message_and_not_the_text(tmp_path):
    """It refuses markers in a message, and drops the reasoning of answers before others."""
    shutil.copy(TEMPLATE, tmp_path / "chat_template.jinja")
    channels = Channels()
    channels.push(ANSWER, final=True)
    question = {"role": "user", "content": "And now?"}
    answer = channels.message()
    prompt = render_chat(tmp_path, [question, answer, question, answer, question])
    assert prompt.count("<|channel|>finalIt is\n<|b|>.<|end|>") == prompt.count("<|channel|>final") == 2
    assert prompt.count("<|channel|>analysis2 < 3, so <b>.") == prompt.count("<|channel|>analysis") == 1
    with pytest.raises(CheckpointError, match="a channel"):
        render_chat(tmp_path, [question, {"role": "assistant", "content": "", "thinking": ANSWER}, question])
