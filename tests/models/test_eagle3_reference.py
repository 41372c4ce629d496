"""The EAGLE-3 head against a float64 reference, written here from the paper and the authors' tensor names.

The reference reads the safetensors itself and shares no code with the product.
"""

import json
import math

import pytest
import tiny_checkpoints
import torch
from changed_folders import change_config, change_tensors
from safetensors.torch import load_file
from tiny_checkpoints import HEADS, HIDDEN, KV_HEADS, VOCAB

from specgraph.checkpoints import load_drafter, load_target

DIM = 12
"""Elements of a head: not hidden size / heads."""


class Reference:
    """One sequence, float64, no cache: it recomputes attention over all rows seen so far."""

    def __init__(self, folder, embedding):
        self.w = {
            name: t.double() for name, t in load_file(folder / "model.safetensors").items() if t.is_floating_point()
        }
        self.config = json.loads((folder / "config.json").read_text())
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.keys, self.values = [], []

    def norm(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.w[name]

    def rotate(self, vector, position):
        out = vector.clone()
        for head in range(vector.shape[0]):
            for i in range(DIM // 2):
                angle = position * self.config["rope_theta"] ** (-2 * i / DIM)
                a, b = vector[head, i], vector[head, i + DIM // 2]
                out[head, i] = a * math.cos(angle) - b * math.sin(angle)
                out[head, i + DIM // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def combine(self, aux):
        aux = aux.double()
        if self.config.get("norm_before_fc"):
            aux = self.norm(aux, "input_norm.weight")
        if self.config.get("fc_norm"):
            aux = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(aux.chunk(3, -1))], -1)
        return aux @ self.w["fc.weight"].T if "fc.weight" in self.w else aux

    def row(self, token, hidden, position):
        """One row: logits [DRAFT_V] and the hidden state that the next step takes."""
        w = {name.removeprefix("midlayer."): tensor for name, tensor in self.w.items()}
        normed = self.norm(hidden, "midlayer.hidden_norm.weight")
        x = torch.cat([self.norm(self.embedding[token], "midlayer.input_layernorm.weight"), normed])
        query = self.rotate((w["self_attn.q_proj.weight"] @ x).view(HEADS, DIM), position)
        self.keys.append(self.rotate((w["self_attn.k_proj.weight"] @ x).view(KV_HEADS, DIM), position))
        self.values.append((w["self_attn.v_proj.weight"] @ x).view(KV_HEADS, DIM))
        heads = []
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = torch.stack([query[head] @ key[kv] for key in self.keys]) / math.sqrt(DIM)
            heads.append(sum(p * value[kv] for p, value in zip(scores.softmax(0), self.values, strict=True)))
        residual = normed if self.config.get("norm_before_residual") else hidden
        residual = residual + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        y = self.norm(residual, "midlayer.post_attention_layernorm.weight")
        gate = w["mlp.gate_proj.weight"] @ y
        residual = residual + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (w["mlp.up_proj.weight"] @ y))
        normed = self.norm(residual, "norm.weight")
        return self.w["lm_head.weight"] @ normed, normed if self.config.get("norm_output") else residual


G = torch.Generator().manual_seed(8)
NORM_BEFORE_FC = {"input_norm.weight": 1 + torch.randn(3 * HIDDEN, generator=G) * 0.2}
FC_NORM = {f"fc_norm.{i}.weight": 1 + torch.randn(HIDDEN, generator=G) * 0.2 for i in range(3)}
OWN = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=G) * 0.2}
NARROW = {"embed_tokens.weight": torch.randn(VOCAB, 20, generator=G), "fc.weight": torch.randn(20, 96, generator=G) / 5}
ALONE = {"fc.weight": None}
AUX = "eagle_aux_hidden_state_layer_ids"
VARIANTS = {
    "plain": ({}, {}),
    "norm before residual": ({"norm_before_residual": True}, {}),
    "norm before fc": ({"norm_before_fc": True}, NORM_BEFORE_FC),
    "norm of each aux state": ({"fc_norm": True}, FC_NORM),
    "normed output carried": ({"norm_output": True}, {}),
    "own embedding": ({}, OWN),
    "narrower than the target": ({"norm_before_fc": True}, NORM_BEFORE_FC | NARROW),
    "the final hidden state alone": ({"eagle_config": {"use_aux_hidden_state": False}}, ALONE),
    "named aux layers": ({"eagle_config": {AUX: [0, 3, 4]}}, {}),
}
"""Changes of config.json, and tensors that are added or dropped."""


def put(tensors, name, tensor):
    tensors.pop(name, None)
    tensors |= {} if tensor is None else {name: tensor}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tiny_checkpoints.write_target(tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_chain_of_drafts_agrees_with_the_reference(variant, target, tmp_path, monkeypatch, dense_attend):
    """A prompt's rows at once, then four steps of one row, each feeding the carried hidden state."""
    config, changed = VARIANTS[variant]
    with monkeypatch.context() as context:
        context.setattr(tiny_checkpoints, "HIDDEN", 20 if "narrower" in variant else HIDDEN)
        context.setattr(tiny_checkpoints, "HEAD_DIM", DIM)
        folder = tiny_checkpoints.write_eagle3(tmp_path)
    given = {"eagle_config": {}, "target_hidden_size": HIDDEN, "rope_theta": 1000.0, "rms_norm_eps": 1e-3}
    change_config(folder, **given | config)
    change_tensors(folder, lambda tensors: [put(tensors, *each) for each in changed.items()])
    head = load_drafter(folder, target)
    tokens = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(5))
    eagle = config.get("eagle_config", {AUX: [2, 2, 1]})  # of 4: 2, 4 // 2, 4 - 3
    assert list(head.aux_layers) == eagle.get(AUX, [])

    rows = tokens[:10]
    aux = target.forward(rows, dense_attend(target.attention_layers, torch.arange(10)), head.aux_layers).aux_hidden
    assert aux.shape == (10, head.aux_size)
    reference = Reference(folder, target.embed_tokens)
    expected = [reference.row(int(tokens[i + 1]), h, i) for i, h in enumerate(reference.combine(aux))]

    caches = {}
    out = head.forward(tokens[1:11], head.combine(aux), dense_attend(head.attention_layers, torch.arange(10), caches))
    logits = head.logits(out.hidden).double()
    torch.testing.assert_close(logits, torch.stack([e[0] for e in expected]), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.carry.double(), torch.stack([e[1] for e in expected]), rtol=0, atol=1e-4)

    carry, expected_carry = out.carry[-1:], expected[-1][1]
    for position in range(10, 14):
        attend = dense_attend(head.attention_layers, torch.tensor([position]), caches)
        out = head.forward(tokens[position : position + 1], carry, attend)
        expected_logits, expected_carry = reference.row(int(tokens[position]), expected_carry, position)
        torch.testing.assert_close(head.logits(out.hidden)[0].double(), expected_logits, rtol=0, atol=1e-4)
        carry = out.carry


def test_embedding_is_shared_unless_it_differs(target, tmp_path):
    folder = tiny_checkpoints.write_eagle3(tmp_path)
    shared = target.embed_tokens.data_ptr()
    assert load_drafter(folder, target).weights()["embed_tokens"].data_ptr() == shared
    change_tensors(folder, lambda tensors: put(tensors, "embed_tokens.weight", target.embed_tokens.clone()))
    assert load_drafter(folder, target).weights()["embed_tokens"].data_ptr() == shared
    change_tensors(folder, lambda tensors: tensors.update(OWN))
    assert load_drafter(folder, target).weights()["embed_tokens"].data_ptr() != shared
