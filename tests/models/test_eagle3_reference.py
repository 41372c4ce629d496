"""The EAGLE-3 head against a float64 reference, written here from the paper and the authors' tensor names.

The reference reads the safetensors itself and shares no code with the product.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgraph.checkpoints import drafter_format, load_drafter, load_target

V, DRAFT_V, HEADS, KV_HEADS, DIM = 120, 48, 4, 2, 12


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


VARIANTS = {
    "plain": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each aux state": {"fc_norm": True},
    "normed output carried": {"norm_output": True},
    "own embedding": {"own_embedding": True},
    "narrower than the target": {"hidden_size": 20, "own_embedding": True, "norm_before_fc": True},
    "the final hidden state alone": {"eagle_config": {"use_aux_hidden_state": False}, "drop": ["fc.weight"]},
    "named aux layers": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_chain_of_drafts_agrees_with_the_reference(variant, tmp_path, random_model, dense_attend, write_eagle3):
    """A prompt's rows at once, then four steps of one row, each feeding the carried hidden state."""
    random_model("Llama", tmp_path / "target")
    write_eagle3(tmp_path / "head", **variant)
    target = load_target(tmp_path / "target")
    head = load_drafter(tmp_path / "head", target)
    tokens = torch.randint(0, V, (14,), generator=torch.Generator().manual_seed(5))
    eagle = variant.get("eagle_config", {"eagle_aux_hidden_state_layer_ids": [2, 2, 2]})  # of 5: 2, 5 // 2, 5 - 3
    assert list(head.aux_layers) == eagle.get("eagle_aux_hidden_state_layer_ids", [])

    rows = tokens[:10]
    aux = target.forward(rows, dense_attend(target.attention_layers, torch.arange(10)), head.aux_layers).aux_hidden
    assert aux.shape == (10, head.aux_size)
    reference = Reference(tmp_path / "head", target.embed_tokens)
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


def test_vocabulary_offsets_lead_to_the_chosen_target_tokens(tmp_path, random_model, write_eagle3):
    random_model("Llama", tmp_path / "target")
    chosen = write_eagle3(tmp_path / "head")
    head = load_drafter(tmp_path / "head", load_target(tmp_path / "target"))
    assert head.draft_vocab_size == DRAFT_V
    assert head.draft_to_target is not None
    assert head.draft_to_target.dtype == torch.int64
    assert torch.equal(torch.arange(DRAFT_V) + head.draft_to_target, chosen)


def test_embedding_is_shared_unless_it_differs(tmp_path, random_model, write_eagle3):
    random_model("Llama", tmp_path / "target")
    target = load_target(tmp_path / "target")
    write_eagle3(tmp_path / "without")
    write_eagle3(tmp_path / "own", own_embedding=True)
    write_eagle3(tmp_path / "copy")
    tensors = load_file(tmp_path / "copy/model.safetensors")
    save_file({**tensors, "embed_tokens.weight": target.embed_tokens.clone()}, tmp_path / "copy/model.safetensors")

    def embedding(name):
        return load_drafter(tmp_path / name, target).weights()["embed_tokens"]

    assert embedding("without").data_ptr() == target.embed_tokens.data_ptr()
    assert embedding("copy").data_ptr() == target.embed_tokens.data_ptr()
    assert embedding("own").data_ptr() != target.embed_tokens.data_ptr()


def test_format_says_what_it_found(tmp_path, write_eagle3):
    write_eagle3(tmp_path)
    assert str(drafter_format(tmp_path)) == "eagle3, authors layout (architecture LlamaForCausalLMEagle3)"
