"""Folders written by the `speculators` package, against what its own models computed (see speculators_fixtures)."""

from pathlib import Path

import pytest
import torch
from changed_folders import change_config
from safetensors.torch import load_file
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target

from specgraph.draft import BlockKind, ChainKind, MaskedKind, ParallelKind

FIXTURES = Path(__file__).parent / "speculators_fixtures"
TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def target():
    return load_target(FIXTURES / "target")


def expected(name):
    return load_file(FIXTURES / f"{name}.expected.safetensors")


@pytest.mark.parametrize(
    ("name", "algorithm", "version"),
    [
        ("eagle", "eagle", "0.2.0"),
        ("eagle3-llama", "eagle3", "0.9.0"),
        ("eagle3-qwen3", "eagle3", "0.9.0"),
        ("peagle", "peagle", "0.9.0"),
        ("mtp", "mtp", "0.9.0"),
        ("dflash", "dflash", "0.9.0"),
        ("dflash2", "dflash2", "0.9.0"),
        ("dspark", "dspark", "0.9.0"),
    ],
)
def test_format_is_found(name, algorithm, version):
    assert f'"speculators_version": "{version}"' in (FIXTURES / name / "config.json").read_text()
    found = drafter_format(FIXTURES / name)
    tokens = 4 if name in ("dflash", "dspark", "peagle") else 3
    assert (found.algorithm, found.layout, found.num_speculative_tokens) == (algorithm, "speculators", tokens)


@pytest.mark.parametrize("name", ["eagle3-llama", "eagle3-qwen3"])
@torch.no_grad()
def test_eagle3_chain(name, target, copied, chain_logits):
    """The package unrolls a chain from every row: row i of pass k sees rows 0..i of pass 0, then its own passes.

    The next token of a pass is the given one, shifted left; zeros beyond the end.
    """
    want, folder = expected(name), copied(name)
    if name == "eagle3-qwen3":  # what the package takes for the keys that are left out
        change_config(folder, norm_before_residual=None)
        change_config(folder, "transformer_layer_config", model_type=None)
    head = load_drafter(folder, target)
    assert list(head.aux_layers) == [1, 2, 4]
    for row in range(len(want["token_ids"])):
        for step, logits in enumerate(chain_logits(head, want["token_ids"], want["aux_hidden"], row, 3)):
            torch.testing.assert_close(logits, want[f"logits.{step}"][row], **TOLERANCE)


@torch.no_grad()
def test_peagle(target, copied, dense_attend):
    """The package trains on rollouts from many places at once: rows up to an anchor, then masked rows behind it."""
    want, folder = expected("peagle"), copied("peagle")
    change_config(folder, norm_before_residual=None)  # false where it is left out
    head = load_drafter(folder, target)
    assert head.kind == MaskedKind()
    assert (head.mask_token_id, list(head.aux_layers), len(head.attention_layers)) == (63, [1, 2, 4], 2)
    tokens, combined, compared = want["token_ids"], head.combine(want["aux_hidden"]), 0
    for anchor, depth, logits in zip(want["anchors"].tolist(), want["depths"].tolist(), want["logits"], strict=True):
        if anchor < 0:  # a rollout that the package begins before the first token
            continue
        ids = torch.cat([tokens[: anchor + 1], torch.full((depth,), head.mask_token_id)])
        hidden = torch.cat([combined[: anchor + 1], head.mask_hidden.expand(depth, -1)])
        out = head.forward(ids, hidden, dense_attend(head.attention_layers, torch.arange(len(ids))))
        torch.testing.assert_close(head.logits(out.hidden)[-1], logits, **TOLERANCE)
        compared += depth > 0
    assert compared > 12


def test_eagle3_vocabulary(target):
    head = load_drafter(FIXTURES / "eagle3-llama", target)
    mask = load_file(FIXTURES / "eagle3-llama" / "model.safetensors")["t2d"]
    assert head.draft_to_target is not None
    assert torch.equal(torch.arange(24) + head.draft_to_target, mask.nonzero().flatten())


@torch.no_grad()
def test_eagle(target, dense_attend):
    """Two passes over all rows; the second takes the first one's output as hidden state."""
    want = expected("eagle")
    head = load_drafter(FIXTURES / "eagle", target)
    assert list(head.aux_layers) == []
    assert head.aux_size == 32
    hidden = head.combine(want["aux_hidden"])
    for step in range(2):
        attend = dense_attend(head.attention_layers, torch.arange(len(hidden)))
        out = head.forward(want["token_ids"], hidden, attend)
        torch.testing.assert_close(head.logits(out.hidden), want[f"logits.{step}"], **TOLERANCE)
        hidden = out.carry


def test_eagle_shares_embedding_and_head_with_the_target(target):
    weights = load_drafter(FIXTURES / "eagle", target).weights()
    assert weights["embed_tokens"].data_ptr() == target.embed_tokens.data_ptr()
    assert weights["lm_head"].data_ptr() == target.lm_head.data_ptr()


@torch.no_grad()
def test_mtp(target, dense_attend):
    """The package runs each step over all rows afresh: token i + step + 1 and the last step's output enter row i."""
    want = expected("mtp")
    head = load_drafter(FIXTURES / "mtp", target)
    assert (head.kind, head.num_modules) == (ChainKind(), 1)
    hidden, rows = want["aux_hidden"], want["logits.0"].shape[0]
    hidden = head.combine(hidden)[:rows]
    for step in range(3):
        attend = dense_attend(head.attention_layers, torch.arange(rows))
        out = head.forward(want["token_ids"][step + 1 : step + 1 + rows], hidden, attend)
        torch.testing.assert_close(head.logits(out.hidden), want[f"logits.{step}"], **TOLERANCE)
        hidden = out.carry


@pytest.mark.parametrize("name", ["dflash", "dflash-llama"])
@torch.no_grad()
def test_dflash(name, target, block_logits):
    """Blocks at several places of one sequence; each sees the context before it, and itself in both directions.

    The second folder's decoder configuration is Llama's; the package's attention normalises heads all the same.
    """
    want = expected(name)
    head = load_drafter(FIXTURES / name, target)
    assert head.kind == ParallelKind()
    assert (head.max_speculative_tokens, head.mask_token_id, list(head.aux_layers)) == (4, 63, [1, 3])
    assert not any(layer.causal for layer in head.attention_layers)
    for rows, logits in zip(want["rows"].split(5), want["logits"].split(5), strict=True):
        anchor = int(rows[0])
        got = block_logits(head, int(want["token_ids"][anchor]), want["aux_hidden"], anchor, 4)
        torch.testing.assert_close(got, logits, **TOLERANCE)


@torch.no_grad()
def test_dflash2(target, block_rows):
    """Blocks at several places of one sequence: the candidates of each row, scored after the sequence's own token."""
    want, head = expected("dflash2"), load_drafter(FIXTURES / "dflash2", target)
    assert (head.kind, head.max_speculative_tokens, head.has_confidence) == (BlockKind(), 3, False)
    parts = (want[name].split(4) for name in ("rows", "candidates", "scores"))
    for rows, candidates, scores in zip(*parts, strict=True):
        tokens = want["token_ids"][rows]
        block = block_rows(head, int(tokens[0]), want["aux_hidden"], int(rows[0]), 3)[None]
        following = head.in_order(block)
        for row in range(3):
            logits = following(row, tokens[row : row + 1]).tensor()[0]
            torch.testing.assert_close(logits[candidates[row + 1]], scores[row + 1], **TOLERANCE)
            assert (logits > -1e29).sum() == 5


@pytest.mark.parametrize(("name", "anchor_predicts"), [("dspark", 1), ("dspark-gated", 0), ("dspark-rnn", 1)])
@torch.no_grad()
def test_dspark(name, anchor_predicts, target, block_rows):
    """Blocks at several places of one sequence; each row comes after the sequence's own token, not after a draft."""
    want = expected(name)
    head = load_drafter(FIXTURES / name, target)
    assert (head.kind, head.max_speculative_tokens, head.mask_token_id) == (BlockKind(), 3 + anchor_predicts, 63)
    places = zip(want["rows"].split(4), want["logits"].split(4), want["confidence"].split(4), strict=True)
    for rows, logits, confidence in places:
        tokens = want["token_ids"][rows]
        block = block_rows(head, int(tokens[0]), want["aux_hidden"], int(rows[0]), 3)[None]
        got, following = block[:, 1 - anchor_predicts :], head.in_order(block)
        before = tokens[: got.shape[1]][None]
        for row, wanted in enumerate(logits[1 - anchor_predicts :]):
            torch.testing.assert_close(following(row, before[:, row]).tensor()[0], wanted, **TOLERANCE)
        assert head.has_confidence
        torch.testing.assert_close(head.confidence(got, before)[0], confidence[1 - anchor_predicts :], **TOLERANCE)


@pytest.mark.parametrize(
    "name", ["eagle", "eagle3-llama", "eagle3-qwen3", "peagle", "mtp", "dflash", "dflash-llama", "dflash2", "dspark"]
)
@torch.inference_mode()
def test_a_saved_folder_drafts(name, target, decoded):
    """Through graphs, for two requests: every output is the target's alone."""
    prompts = [[5, 9, 2], [5, 9, 3]]
    tokens, decoder = decoded(target, load_drafter(FIXTURES / name, target), prompts, 12, decode="merged")
    assert tokens == decoded(target, None, prompts, 12, decode="merged")[0]
    assert decoder.drafter.launches["propose"] == decoder.drafter.num_proposes > 0
