"""Draft vocabularies: their files, heads whose vocabulary is cut, and what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import numpy
import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from specgraph_models import DraftVocabulary, cut_vocabulary
from specgraph_models.checkpoints import load_drafter, load_target, read_draft_vocab
from specgraph_models.checkpoints.draft_vocab import SUFFIXES, tokenizer_digest, write_draft_vocab
from specgraph_models.checkpoints.tokens import read_tokenizer
from specgraph_models.errors import CheckpointError

from specgraph.errors import ConfigError

FIXTURES = Path(__file__).parent / "speculators_fixtures"
PAIR = Path(__file__).parents[2] / "run/specgraph_run/pairs/tiny-python"
CHAINS = ("eagle", "eagle3", "mtp", "mtp-modules", "dflash", "peagle", "draft-model")
BLOCKS = ("dspark", "domino", "dflash2")


def vocabulary(*ids: int) -> DraftVocabulary:
    return DraftVocabulary("the list", torch.tensor(ids, dtype=torch.int64))


def both(kind: str, ids: torch.Tensor):
    """Return a head, its copy that is cut to `ids`, and the draft ids of the whole head that the copy keeps."""
    whole = make_head(kind, make_target())
    cut = deepcopy(whole)
    cut_vocabulary(cut, DraftVocabulary("the list", ids))
    offsets = whole.draft_to_target
    targets = torch.arange(whole.draft_vocab_size) + (0 if offsets is None else offsets)
    return whole, cut, torch.isin(targets, ids).nonzero()[:, 0]


@pytest.mark.parametrize("kind", [*CHAINS, *BLOCKS])
def test_a_cut_head_has_the_logits_of_the_kept_tokens(kind):
    """Its map leads each one to the target's token, in the order of the whole head, whatever the order of the list."""
    ids = torch.tensor([41, 3, 7, 30, 29, 12, 0, 11, 47, 22, 9, 16, 35, 2])
    whole, cut, kept = both(kind, ids)
    assert 3 <= len(kept) == cut.draft_vocab_size == len(cut.draft_to_target) < whole.draft_vocab_size
    offsets = 0 if whole.draft_to_target is None else whole.draft_to_target[kept]
    assert torch.equal(torch.arange(len(kept)) + cut.draft_to_target, kept + offsets)
    hidden = torch.randn(5, whole.hidden_size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(cut.logits(hidden), whole.logits(hidden)[:, kept])
    named = cut.weights()
    assert torch.equal(named["draft_to_target"], cut.draft_to_target)
    assert named["lm_head"].shape[0] == len(kept)


@pytest.mark.hazard("draft-vocabulary-map")
@pytest.mark.parametrize("kind", BLOCKS)
def test_corrections_of_a_cut_head_are_those_of_the_kept_tokens(kind):
    """The candidates of DFlash2 are the best ones among the kept tokens, as in a head of these rows alone."""
    ids = torch.tensor([41, 3, 7, 30, 29, 12, 0, 11])
    whole, cut, kept = both(kind, ids)
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 5, whole.hidden_size, generator=g)
    tokens = [torch.randint(0, VOCAB, (3,), generator=g) for _ in range(4)]
    if kind == "dflash2":  # the whole head with no chance for the others
        left_out = torch.ones(VOCAB, dtype=torch.bool)
        left_out[kept] = False
        plain = whole.logits
        whole.logits = lambda hidden: plain(hidden).masked_fill(left_out, -1e4)
    ours, wanted = cut.in_order(hidden), whole.in_order(hidden)
    for row, before in enumerate(tokens):
        torch.testing.assert_close(ours(row, before).tensor(), wanted(row, before).tensor()[:, kept])


def test_a_list_smaller_than_the_candidates_of_dflash2_leaves_fewer():
    _, cut, _ = both("dflash2", torch.tensor([5, 9, 1]))
    assert cut.selector.top_k == 3
    cut.in_order(torch.randn(1, 3, cut.hidden_size))(0, torch.tensor([47]))


def test_a_list_of_all_tokens_changes_nothing():
    whole, cut, _ = both("mtp", torch.arange(VOCAB).flip(0))
    assert cut.draft_to_target is None
    assert cut.lm_head.data_ptr() == cut.weights()["lm_head"].data_ptr()
    assert torch.equal(cut.lm_head, whole.lm_head)


def test_a_loaded_drafter_shares_the_rest_with_its_target(tmp_path):
    """The rows are a copy, and the lm_head of an EAGLE-3 head that is its own is not kept beside it."""
    path = tmp_path / "list.npy"
    numpy.save(path, numpy.array([60, 5, 7], dtype=numpy.uint16))
    target = load_target(FIXTURES / "target")
    head = load_drafter(FIXTURES / "mtp", target, draft_vocab=path)
    assert torch.equal(head.lm_head, target.lm_head[[5, 7, 60]])
    assert (head.embed_tokens.data_ptr(), head.lm_head.shape[0]) == (target.embed_tokens.data_ptr(), 3)
    assert target.lm_head.shape[0] == target.vocab_size == head.vocab_size


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_are_read_as_they_were_written(suffix, tmp_path):
    """A name without the suffix is read too: the first bytes tell the format. Only JSON has more than the ids."""
    tokenizer = read_tokenizer(PAIR / "target")
    found = DraftVocabulary("x", torch.tensor([9, 2, 70]), tokenizer_digest(tokenizer), 0.75)
    path = tmp_path / f"list{suffix}"
    write_draft_vocab(path, found)
    other = path.rename(tmp_path / "renamed")
    read = read_draft_vocab(other)
    assert read.token_ids.tolist() == [9, 2, 70]
    assert (read.tokenizer, read.covers) == ((found.tokenizer, 0.75) if suffix == ".json" else (None, None))
    assert read_draft_vocab(other, PAIR / "target").name == str(other)


def test_maps_of_sglang_are_read(tmp_path):
    """They are lists or tensors that `torch.load` reads, and SGLang reads ours in the same way."""
    path = tmp_path / "freq.pt"
    for stored in ([3, 1, 2], torch.tensor([3, 1, 2], dtype=torch.int32)):
        for zipped in (True, False):
            torch.save(stored, path, _use_new_zipfile_serialization=zipped)
            assert read_draft_vocab(path).token_ids.tolist() == [3, 1, 2]
    write_draft_vocab(path, vocabulary(8, 4))
    assert torch.tensor(torch.load(path, weights_only=True).tolist()).tolist() == [8, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"token_ids": [1, 5, 1]}, r"has the token id 1 twice"),
        ({"token_ids": []}, r"has no token ids"),
        ({"token_ids": [3, -1]}, r"has the token id -1"),
        ({"token_ids": [1.5]}, r"holds \[1.5\], not token ids"),
        ({"token_ids": [True]}, r"holds \[True\], not token ids"),
        ({"ids": [1]}, r"holds None, not token ids"),
        ({"token_ids": [1], "tokenizer": 7}, r"'tokenizer' should be a string"),
        ([1, 2], r"should hold a JSON object"),
        (torch.zeros(2, 2, dtype=torch.int64), r"holds torch.int64 \[2, 2\], not token ids"),
        (torch.zeros(2), r"holds torch.float32 \[2\], not token ids"),
        ({"w": torch.zeros(2)}, r"holds \{'w'.*, not token ids"),
        (b"PK\x03\x04 broken", r"cannot be read as token ids"),
        (b"\x93NUMPY broken", r"cannot be read as token ids"),
        (b"plain text", r"cannot be read as JSON"),
    ],
)
def test_other_files_are_refused_in_one_line(content, message, tmp_path):
    path = tmp_path / "list"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, torch.Tensor) or (isinstance(content, dict) and "w" in content):
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as refused:
        read_draft_vocab(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_no_pickle_is_run(tmp_path):
    path = tmp_path / "list.pt"
    torch.save(Path("/"), path)
    with pytest.raises(CheckpointError, match="cannot be read as token ids"):
        read_draft_vocab(path)
    numpy.save(path.with_suffix(".npy"), numpy.array([Path("/")]), allow_pickle=True)
    with pytest.raises(CheckpointError, match="cannot be read as token ids"):
        read_draft_vocab(path.with_suffix(".npy"))
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read_draft_vocab(tmp_path / "absent")


def test_ids_of_another_vocabulary_are_refused():
    head = make_head("eagle3", make_target())
    with pytest.raises(
        CheckpointError, match=f"the list has the token id {VOCAB}, the target's vocabulary has {VOCAB}"
    ):
        cut_vocabulary(head, vocabulary(2, VOCAB))
    drafted = {int(each) for each in torch.arange(head.draft_vocab_size) + head.draft_to_target}
    absent = sorted(set(range(VOCAB)) - drafted)
    with pytest.raises(CheckpointError, match=r"the drafter can draft none of its 2 tokens"):
        cut_vocabulary(head, vocabulary(*absent[:2]))
    assert head.draft_vocab_size == VOCAB // 2


def test_a_list_of_another_tokenizer_is_refused(tmp_path):
    other = DraftVocabulary("the list", torch.tensor([1]), "0" * 16)
    write_draft_vocab(tmp_path / "list.json", other)
    with pytest.raises(CheckpointError, match=r"list\.json was made for another tokenizer than that of"):
        read_draft_vocab(tmp_path / "list.json", PAIR / "target")
    assert read_draft_vocab(tmp_path / "list.json", FIXTURES / "target").token_ids.tolist() == [1]  # it has none
    with pytest.raises(ConfigError, match=r"a draft vocabulary is written as .json, .npy, .pt"):
        write_draft_vocab(tmp_path / "list.txt", other)
