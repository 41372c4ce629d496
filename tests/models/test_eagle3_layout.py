"""EAGLE-3 heads in their authors' layout that no folder of speculators has.

The logits of the others are compared in test_speculators_parity and test_training_parity.
"""

import pytest
import tiny_checkpoints
import torch
from changed_folders import change_config, change_tensors, refused
from specgraph_models.checkpoints import load_drafter, load_target
from tiny_checkpoints import HIDDEN, VOCAB

AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tiny_checkpoints.write_target(tmp_path_factory.mktemp("target")))


@torch.no_grad()
def test_the_final_hidden_state_alone_is_taken_unchanged(target, tmp_path, dense_attend):
    """The states are those of a head that takes one aux layer through an `fc` that is the identity; a head that says
    that it is a Mistral's has no window."""
    tokens, states, outputs = torch.arange(6), torch.randn(6, HIDDEN), []
    identity = {"fc.weight": torch.eye(HIDDEN)}
    for kind, aux, fc, keys in (
        ("llama", [], {}, {"use_aux_hidden_state": False}),
        ("mistral", [4], identity, {AUX: [4]}),
    ):
        folder = tiny_checkpoints.write_eagle3(tmp_path / kind)
        change_config(folder, eagle_config=keys, model_type=kind, sliding_window=2)
        change_tensors(folder, lambda tensors, fc=fc: (tensors.pop("fc.weight"), tensors.update(fc)))
        head = load_drafter(folder, target)
        assert (list(head.aux_layers), head.aux_size) == (aux, HIDDEN)
        attend = dense_attend(head.attention_layers, torch.arange(6))
        outputs.append(head.logits(head.forward(tokens, head.combine(states), attend).hidden))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_head_narrower_than_its_target(target, tmp_path, monkeypatch, dense_attend):
    monkeypatch.setattr(tiny_checkpoints, "HIDDEN", 20)
    folder = tiny_checkpoints.write_eagle3(tmp_path)
    own = {
        "embed_tokens.weight": torch.randn(VOCAB, 20),
        "fc.weight": torch.randn(20, 3 * HIDDEN) / 5,
        "input_norm.weight": 1 + torch.randn(3 * HIDDEN) * 0.2,
    }
    change_config(folder, eagle_config={}, target_hidden_size=HIDDEN, norm_before_fc=True, rms_norm_eps=1e-3)
    change_tensors(folder, lambda tensors: tensors.update(own))
    head = load_drafter(folder, target)
    assert (list(head.aux_layers), head.aux_size) == ([2, 2, 1], 3 * HIDDEN)  # of 4: 2, 4 // 2, 4 - 3
    states = torch.randn(6, 3 * HIDDEN)
    normed = states / (states.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * own["input_norm.weight"]
    torch.testing.assert_close(head.combine(states), normed @ own["fc.weight"].T, rtol=0, atol=1e-5)
    out = head.forward(torch.arange(6), head.combine(states), dense_attend(head.attention_layers, torch.arange(6)))
    assert head.logits(out.hidden).shape == (6, tiny_checkpoints.DRAFT_VOCAB)


def test_embedding_is_shared_unless_it_differs(target, tmp_path):
    folder, shared = tiny_checkpoints.write_eagle3(tmp_path), target.embed_tokens
    assert load_drafter(folder, target).embed_tokens is shared
    for own in (shared.clone(), shared + 1):
        change_tensors(folder, lambda tensors, own=own: tensors.update({"embed_tokens.weight": own}))
        assert (load_drafter(folder, target).embed_tokens is shared) == torch.equal(own, shared)
    change_config(folder, tie_word_embeddings=True, draft_vocab_size=VOCAB)  # to which of the two embeddings?
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in ("lm_head.weight", "d2t", "t2d")])
    with refused("'tie_word_embeddings' is true", "no lm_head"):
        load_drafter(folder, target)
    change_tensors(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert load_drafter(folder, target).projection.weight is target.lm_head
