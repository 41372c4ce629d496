"""A drafter whose tokenizer has other tokens under the target's ids: said at loading, since nothing else would show it.

Its drafts are verified as ids, so the text is right and acceptance falls.
"""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from specgraph_run.text.load import load_generator, shipped_pair
from tiny_checkpoints import write_eagle3, write_target

TOKENIZER = shipped_pair()[0] / "tokenizer.json"


@pytest.fixture
def warnings(tmp_path, caplog):
    """Loads a random pair whose drafter's tokenizer.json is as given; the warnings about tokenizers."""

    def load(spoil, **options):
        target = write_target(tmp_path / "target", vocab=2048)
        draft = write_eagle3(tmp_path / "draft", vocab=2048)
        shutil.copy(TOKENIZER, target)
        spoil(draft / "tokenizer.json")
        with caplog.at_level(logging.WARNING, "specgraph"):
            load_generator(target, draft, platform="cpu", decode="eager", max_model_len=32, **options).close()
        return [text for text in caplog.messages if "tokenizer" in text]

    return load


def edited(change):
    """Writes the shipped tokenizer with another vocabulary: token -> id, and with other merges."""

    def write(path: Path):
        content = json.loads(TOKENIZER.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return write


def exchanged(content):
    vocabulary = content["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    vocabulary[tokens[1000]], vocabulary[tokens[1001]] = 1001, 1000


def shorter(content):
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    del content["model"]["vocab"][last]
    content["model"]["merges"] = [
        merge
        for merge in content["model"]["merges"]
        if "".join(merge if isinstance(merge, list) else merge.split(" ")) != last
    ]


def test_exchanged_ids_are_counted_and_the_first_one_shown(warnings):
    tokens = {index: token for token, index in json.loads(TOKENIZER.read_text())["model"]["vocab"].items()}
    [text] = warnings(edited(exchanged))
    assert "2 of 2048 token ids" in text
    assert f"id 1000: {tokens[1001]!r}, the target's is {tokens[1000]!r}" in text
    assert len(text) <= 400 + 2 * len(str(shipped_pair()[0].parents[3]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: None,
        lambda path: shutil.copy(TOKENIZER, path),
        edited(lambda content: content.update(truncation=None)),  # the same tokens in other bytes
        edited(shorter),
    ],
    ids=["none", "the same file", "the same tokens", "without the last token"],
)
def test_nothing_is_said_of_the_same_tokens(warnings, spoil):
    assert warnings(spoil) == []


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_text("{"), lambda path: path.symlink_to("gone"), lambda path: os.mkfifo(path)]
)
def test_a_broken_one_is_named_and_not_needed(warnings, spoil):
    [text] = warnings(spoil)
    assert "not compared" in text
    assert "tokenizer.json" in text


def test_without_a_drafter_its_folder_is_not_read(warnings):
    assert warnings(edited(exchanged), speculate=False) == []
