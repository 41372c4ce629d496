"""Tokens that tokenizer_config.json adds or makes special, against transformers' tokenizer of the same folder."""

import json
import shutil

import pytest

from specgraph.checkpoints.tokens import read_tokenizer
from specgraph.engine.load import shipped_pair
from specgraph.errors import CheckpointError

NEXT = 2048
"""Tokens of the shipped tokenizer."""
TEXTS = ("hello", "<|a|> hello <|b|>", "a <|a|>b", "x <|b|> y", "<|endoftext|><|a|>", " <|a|> ")


def added(content, **flags):
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


@pytest.fixture
def write(tmp_path):
    def make(in_tokenizer, config):
        content = json.loads((shipped_pair()[0] / "tokenizer.json").read_text())
        content["added_tokens"] += [{"id": NEXT + i, **token} for i, token in enumerate(in_tokenizer)]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("in_tokenizer", "config"),
    [
        ([added("<|a|>", special=True), added("<|b|>")], {}),
        ([], {"added_tokens_decoder": {str(NEXT): added("<|a|>", special=True), str(NEXT + 1): added("<|b|>")}}),
        ([], {"added_tokens_decoder": {str(NEXT): added("<|a|>", special=True, lstrip=True, rstrip=True)}}),
        ([added("<|a|>")], {"added_tokens_decoder": {str(NEXT): added("<|a|>", special=True)}}),
        ([added("<|a|>"), added("<|b|>")], {"eos_token": "<|b|>", "bos_token": "<|a|>"}),
    ],
    ids=["in tokenizer.json", "in the other only", "that take the spaces", "special in the other", "named"],
)
def test_as_transformers_reads_the_folder(in_tokenizer, config, write):
    transformers = pytest.importorskip("transformers")
    folder = write(in_tokenizer, config)
    ours, theirs = read_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({str(NEXT + 3): added("<|a|>")}, r"'<\|a\|>' the id 2051, and the next free one in tokenizer.json is 2048"),
        ({"x": added("<|a|>")}, "not a token"),
        ({"2048": 3}, "not a token"),
        ([1], "should be a mapping"),
    ],
)
def test_what_cannot_be_added_is_refused(listed, words, write):
    with pytest.raises(CheckpointError, match=words):
        read_tokenizer(write([], {"added_tokens_decoder": listed}))


def test_the_shipped_tokenizer_stays_as_it_is(tmp_path):
    shutil.copy(shipped_pair()[0] / "tokenizer.json", tmp_path)
    assert read_tokenizer(shipped_pair()[0]).to_str() == read_tokenizer(tmp_path).to_str()
