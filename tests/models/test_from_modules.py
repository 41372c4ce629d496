"""Heads over an engine's loaded modules are the heads that the modules' tensors came from, without copies."""

from types import SimpleNamespace

import pytest
import torch
from draft.pairs import CONFIG, HIDDEN, VOCAB, make_head, make_target
from specgraph_models import eagle3_head_from_module, eagle_head_from_module

from specgraph.errors import UnsupportedError

PADDING = 16
"""Rows of a vocabulary that an engine adds."""


class RotaryEmbedding(SimpleNamespace):
    pass


class Fp8LinearMethod:
    pass


def linear(weight, bias=None):
    return SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False), bias=bias)


def padded(weight):
    """An embedding or an lm_head with rows behind `weight` that are no tokens."""
    return linear(torch.cat([weight, torch.full((PADDING, weight.shape[1]), float("nan"))]))


def layer_module(layer, rotary):
    attention = SimpleNamespace(
        qkv_proj=linear(layer.qkv.matrix),
        o_proj=linear(layer.output.matrix),
        rotary_emb=RotaryEmbedding(cos_sin_cache=rotary, is_neox_style=True),
        attn=SimpleNamespace(sliding_window=None, logit_cap=0.0),
        num_heads=CONFIG.num_heads,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        scaling=CONFIG.head_dim**-0.5,
    )
    made = SimpleNamespace(
        self_attn=attention,
        mlp=SimpleNamespace(gate_up_proj=linear(layer.gate_up.matrix), down_proj=linear(layer.down.matrix)),
        post_attention_layernorm=SimpleNamespace(weight=layer.post_norm, variance_epsilon=CONFIG.rms_norm_eps),
    )
    if layer.input_norm is not None:
        made.input_layernorm = linear(layer.input_norm)
    return made


def loaded(kind):
    """A head, and the module of an engine that holds its tensors."""
    head = make_head(kind, make_target())
    layers = [
        layer_module(layer, shape.rotary) for layer, shape in zip(head.layers, head.attention_layers, strict=True)
    ]
    config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, hidden_act="silu", draft_vocab_size=VOCAB // 2)
    lm_head = padded(head.lm_head)
    embed = padded(head.embed_tokens)
    fc = head.fc if kind == "eagle" else head.tensors.fc
    inner = SimpleNamespace(embed_tokens=embed, fc=linear(fc.matrix), layers=layers)
    if kind == "eagle3":
        layers[0].hidden_norm = linear(head.tensors.hidden_norm)
        inner.norm = linear(head.tensors.norm)
        inner.input_norm = inner.fc_norm = None
        inner.norm_output, inner.num_aux_hidden_states = False, 3
    return head, SimpleNamespace(config=config, lm_head=lm_head, model=inner)


def made_from(kind, head, module):
    if kind == "eagle":
        return eagle_head_from_module(module)
    return eagle3_head_from_module(module, draft_to_target=head.draft_to_target)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_tensor_is_the_head_s_and_is_no_copy(kind):
    head, module = loaded(kind)
    made = made_from(kind, head, module)
    wanted, got = head.weights(), made.weights()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
    memory = {each.untyped_storage().data_ptr() for each in wanted.values()}
    memory |= {each.weight.untyped_storage().data_ptr() for each in (module.lm_head, module.model.embed_tokens)}
    assert {each.untyped_storage().data_ptr() for each in got.values()} <= memory
    assert (made.aux_size, made.hidden_size, made.draft_vocab_size) == (
        head.aux_size, head.hidden_size, head.draft_vocab_size
    )  # fmt: skip
    for layer, of in zip(made.attention_layers, head.attention_layers, strict=True):
        assert torch.equal(layer.rotary, of.rotary)
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale) == (
            of.num_heads, of.num_kv_heads, of.head_dim, of.scale
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.config, "hidden_act", "gelu"), "hidden_act 'gelu'"),
        (lambda m: setattr(m.lm_head, "quant_method", Fp8LinearMethod()), r"of the drafter \(Fp8LinearMethod\)"),
        (lambda m: setattr(m.lm_head, "weight", m.lm_head.weight[:5]), "has 5 rows for a vocabulary of"),
        (lambda m: setattr(m.model.embed_tokens, "weight", m.lm_head.weight[:5]), "has 5 rows for a vocabulary of 48"),
        (lambda m: setattr(m.model.fc, "weight", m.model.fc.weight.T), "no plain weight"),
        (lambda m: setattr(m.model.layers[0].self_attn.attn, "sliding_window", 128), "a sliding window of 128 keys"),
        (lambda m: setattr(m.model.layers[0].self_attn.attn, "sliding_window_size", 64), "a sliding window of 64 keys"),
        (lambda m: setattr(m.model.layers[0].self_attn.attn, "logit_cap", 30.0), "logit_cap 30.0"),
        (lambda m: setattr(m.model.layers[0].self_attn, "do_llama_4_scaling", True), "llama_4_scaling"),
        (lambda m: setattr(m.model.layers[0].self_attn.rotary_emb, "is_neox_style", False), "neox style False"),
        (lambda m: setattr(m.model.layers[0].self_attn, "rotary_emb", SimpleNamespace()), "SimpleNamespace"),
    ],
)
def test_what_a_head_does_not_have_is_refused(kind, change, message):
    head, module = loaded(kind)
    change(module)
    with pytest.raises(UnsupportedError, match=message) as error:
        made_from(kind, head, module)
    assert "\n" not in str(error.value)
