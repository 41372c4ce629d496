"""`specgraph draft-vocab`: what it counts, writes and refuses."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import tokenizers
import torch
from specgraph_models.checkpoints import read_draft_vocab
from specgraph_run import shipped_pair
from specgraph_run.cli import app
from typer.testing import CliRunner

from specgraph.errors import ConfigError


def run(*arguments: object) -> dict:
    result = CliRunner().invoke(app, ["draft-vocab", *map(str, arguments), "--json", "-"])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


@pytest.fixture
def texts(tmp_path):
    """The same text as a file, and as chats, prompts and a log with token ids."""
    plain, lines = tmp_path / "a.py", tmp_path / "b.jsonl"
    plain.write_text("def main(self):\n    return self.name\n" * 30)
    tokenizer = tokenizers.Tokenizer.from_file(str(shipped_pair()[0] / "tokenizer.json"))
    ids = tokenizer.encode("import os\n", add_special_tokens=False).ids
    rows = [
        {"messages": [{"role": "user", "content": "for i in range(3):\n"}]},
        {"prompt": "class A:\n", "text": "not counted beside tokens", "tokens": ids},
        {"choices": [{"message": {"content": [{"type": "text", "text": "pass\n"}]}}], "model": "not text"},
    ]
    lines.write_text("\n".join(map(json.dumps, rows)))
    told = [plain.read_text(), "for i in range(3):\n", "class A:\n", "pass\n"]
    counts = Counter(token for text in told for token in tokenizer.encode(text, add_special_tokens=False).ids)
    return [plain, lines], counts + Counter(ids)


def test_the_most_frequent_tokens_are_written_and_their_share_is_right(texts, tmp_path):
    files, counts = texts
    path = tmp_path / "list.json"
    report = run(*files, "--size", 12, "--out", path)
    found = read_draft_vocab(path, shipped_pair()[0])
    ids = found.token_ids.tolist()
    assert (len(ids), report["counted_tokens"], report["different_tokens"]) == (12, counts.total(), len(counts))
    kept = [token for token in ids if token in counts]
    assert min(counts[token] for token in kept) >= max(counts[token] for token in counts.keys() - set(ids))
    assert found.covers == report["covers"] == sum(counts[token] for token in kept) / counts.total()
    other = tmp_path / "list.pt"
    again = run("--token-map", path, *files, "--out", other)
    assert again["covers"] == found.covers
    assert torch.load(other, weights_only=True).tolist() == ids


def test_a_size_beyond_the_text_is_filled_up_and_special_tokens_are_kept(texts, tmp_path):
    report = run(*texts[0], "--size", 1000, "--out", tmp_path / "list.npy")
    ids = read_draft_vocab(tmp_path / "list.npy").token_ids.tolist()
    assert (report["tokens"], len(set(ids)), ids[0]) == (1000, 1000, 0)  # 0 is <|endoftext|>


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (None, (), "give files of text to count, or --token-map"),
        ("x", ("--out", "list.txt"), "a draft vocabulary is written as .json, .npy, .pt"),
        ("", (), "there is no token to count in"),
        ('{"label": "positive"}', (), "line 1 holds no text"),
        ("{", (), "line 1 is not JSON"),
    ],
)
def test_what_can_not_be_counted_is_refused(content, more, words, tmp_path):
    path = tmp_path / "text.jsonl"
    if content is not None:
        path.write_text(content if content != "x" else '"x"')
    with pytest.raises(ConfigError, match=words) as refused:
        run(*([] if content is None else [path]), *more)
    assert "\n" not in str(refused.value)
