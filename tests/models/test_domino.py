"""Domino heads, against torch's own GRU; by hand also against SGLang's rollout (`domino_greedy_rollout`, 0.5.23)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from changed_folders import change_tensors, refused
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target

from specgraph.draft import BlockKind

FIXTURES = Path(__file__).parent / "speculators_fixtures"
HIDDEN, STATE, INNER, VOCAB, BLOCK = 32, 6, 5, 64, 5


@pytest.fixture(scope="module")
def target():
    return load_target(FIXTURES / "target")


@pytest.fixture
def modules():
    """The modules of the authors: a GRU over the block's tokens, and the projection to logits."""
    torch.manual_seed(3)
    gru = torch.nn.GRU(HIDDEN, STATE, batch_first=True, bias=False)
    linears = torch.nn.Linear(HIDDEN + STATE, INNER, bias=False), torch.nn.Linear(INNER, VOCAB, bias=False)
    return gru, torch.nn.Sequential(linears[0], torch.nn.SiLU(), linears[1])


@pytest.fixture
def folder(copied, modules):
    """`folder(shift_label)`: a DFlash fixture with these modules, in the authors' layout."""

    def make(shift_label: bool) -> Path:
        folder, (gru, projection) = copied("dflash"), modules
        added = {f"prefix_gru.{name}": tensor.detach().clone() for name, tensor in gru.named_parameters()}
        added |= {f"embed_proj.{name}": tensor.detach().clone() for name, tensor in projection.named_parameters()}
        change_tensors(folder, lambda tensors: tensors.update(added))
        section = {"projector_type": "domino", "gru_hidden_dim": STATE, "emb_dim": INNER, "pure_draft_prefix_len": 1}
        section |= {"shift_label": shift_label, "target_layer_ids": [0, 2], "mask_token_id": 63}
        config = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
        (folder / "config.json").write_text(json.dumps({**config, "block_size": BLOCK, "dflash_config": section}))
        return folder

    return make


@pytest.mark.parametrize("shift_label", [True, False])
@torch.no_grad()
def test_logits_are_those_of_the_modules(shift_label, folder, modules, target, block_rows):
    path, (gru, projection) = folder(shift_label), modules
    head = load_drafter(path, target)
    tokens = BLOCK if shift_label else BLOCK - 1
    found = drafter_format(path)
    assert (found.algorithm, found.layout, found.num_speculative_tokens) == ("domino", "authors", tokens)
    assert (head.kind, head.max_speculative_tokens, head.has_confidence) == (BlockKind(), tokens, False)
    plain, states = load_drafter(FIXTURES / "dflash", target), torch.randn(9, 2 * HIDDEN)
    before = torch.tensor([5, 9, 2, 41, 7])[:tokens]
    block = block_rows(head, 5, states, 6, BLOCK - 1)
    rows = block if shift_label else block[1:]
    base = plain.logits(block_rows(plain, 5, states, 6, BLOCK - 1))[-tokens:]
    after, _ = gru(head.embed_tokens[before][None])
    want = base + projection(torch.cat((rows, after[0]), dim=-1))
    want[0] = base[0]  # the pure prefix
    following = head.in_order(block[None])
    for row, token in enumerate(before):
        torch.testing.assert_close(following(row, token[None]).tensor()[0], want[row], rtol=0, atol=1e-4)


@torch.inference_mode()
def test_a_folder_drafts(folder, target, decoded):
    prompts, head = [[5, 9, 2], [5, 9, 3]], load_drafter(folder(True), target)
    tokens = decoded(target, None, prompts, 12, decode="merged")[0]
    for decode in ("eager", "step", "merged"):
        assert decoded(target, head, prompts, 12, decode=decode)[0] == tokens


def test_what_is_refused(folder, target):
    path = folder(True)
    change_tensors(path, lambda tensors: tensors.pop("prefix_gru.weight_hh_l0"))
    with refused("prefix_gru.weight_hh_l0"):
        load_drafter(path, target)
    shutil.rmtree(path)
    path = folder(True)
    change_tensors(path, lambda tensors: tensors.update({"embed_proj.0.bias": torch.ones(INNER)}))
    with refused("embed_proj.0.bias", "does not use"):
        load_drafter(path, target)
