"""A call that cannot be served exactly is refused in one line, before the model or the drafter runs."""

from __future__ import annotations

import pytest
import tiny_checkpoints
import torch
import transformers
from changed_folders import change_config
from specgraph_models.errors import CheckpointError
from specgraph_transformers import speculative
from specgraph_transformers.target import TransformersTarget
from tiny_targets import VOCAB, make_prompts, make_target
from transformers import DynamicCache, GenerationConfig

from specgraph.draft import DraftTree
from specgraph.errors import ConfigError, UnsupportedError


@pytest.fixture(scope="module")
def model():
    return make_target("Llama")


REFUSED = {
    "processor": ({"typical_p": 0.5, "do_sample": True}, "TypicalLogitsWarper is not supported"),
    "beams": ({"num_beams": 2}, "generation mode 'beam_search'"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
    "static": ({"cache_implementation": "static"}, "StaticCache"),
    "offloaded": ({"cache_implementation": "offloaded"}, "an offloaded cache"),
    "no cache": ({"use_cache": False}, "use_cache=True"),
    "chunks": ({"prefill_chunk_size": 2}, "prefill_chunk_size=2"),
    "ranks": ({"synced_gpus": True}, "synced_gpus beside custom_generate"),
    "an assistant itself": ({"is_assistant": True}, "is_assistant=True"),
    "lookup": ({"prompt_lookup_num_tokens": 2}, "generation mode 'assisted_generation'"),
    "inputs": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options(name, model, eagle3, monkeypatch):
    options, message = REFUSED[name]
    ids, _ = make_prompts(5)
    draft = speculative(eagle3, 2)
    monkeypatch.setattr(model, "forward", never(model.forward))
    with pytest.raises(UnsupportedError) as refused:
        model.generate(ids, max_new_tokens=4, custom_generate=draft, **options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert draft.drafter is None


def test_an_assistant_model(model, eagle3):
    """`generate` drops it where there is a `custom_generate`."""
    with pytest.raises(UnsupportedError, match="assistant_model beside custom_generate is not supported"):
        model.generate(make_prompts(5)[0], max_new_tokens=4, custom_generate=speculative(eagle3), assistant_model=model)


def never(forward):
    """A forward with the signature of the model's own that fails when it is called."""
    from functools import wraps

    @wraps(forward)
    def fail(*args, **kwargs):
        raise AssertionError("the model ran")

    return fail


def test_prompts(model, eagle3):
    ids, mask = make_prompts(5, 3)
    draft = speculative(eagle3, 2)
    with pytest.raises(ConfigError, match="padding_side='left'"):
        model.generate(ids, attention_mask=mask.flip(-1), max_new_tokens=4, custom_generate=draft)
    with pytest.raises(ConfigError, match="position_ids do not count"):
        model.generate(ids, position_ids=torch.full_like(ids, 3), max_new_tokens=4, custom_generate=draft)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(UnsupportedError, match="model input 'inputs_embeds'"):
        model.generate(inputs_embeds=embeds, max_new_tokens=4, custom_generate=draft)


def test_a_cache_that_holds_tokens(model, eagle3):
    ids, _ = make_prompts(5)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(UnsupportedError, match="holds 5 tokens already"):
        model.generate(torch.cat([ids, ids], dim=1), cache=cache, max_new_tokens=4, custom_generate=speculative(eagle3))


def test_recurrent_states(eagle3):
    config = transformers.Qwen3NextConfig(
        vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3NextForCausalLM(config).eval()
    ids, _ = make_prompts(5)
    with pytest.raises(UnsupportedError, match="LinearAttentionLayer of the cache cannot take"):
        model.generate(ids, max_new_tokens=4, custom_generate=speculative(eagle3))


def test_encoders(eagle3):
    sizes = {"vocab_size": 12, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        model.generate(make_prompts(5)[0], max_new_tokens=4, custom_generate=speculative(eagle3))


def test_a_drafter_for_another_target(eagle3):
    model = make_target("Llama", vocab_size=13)
    with pytest.raises(CheckpointError, match="vocabulary 12, the target has 13"):
        model.generate(make_prompts(5)[0], max_new_tokens=4, custom_generate=speculative(eagle3))


def test_a_drafter_of_the_last_layers_output(model, tmp_path):
    """Behind the final norm it is handed out, before it is not."""
    folder = tiny_checkpoints.write_eagle3(tmp_path, vocab=VOCAB, draft_vocab=VOCAB - 3)
    change_config(folder, "eagle_config", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    ids, _ = make_prompts(5)
    with pytest.raises(UnsupportedError, match=r"before the final norm \(layer 4 of \[1, 2, 4\]\)"):
        model.generate(ids, max_new_tokens=4, custom_generate=speculative(folder))
    target = TransformersTarget(model, DynamicCache(config=model.config), [5], 128, (3, 5))
    with torch.no_grad():
        states = target.prefill(ids, None, torch.arange(5)[None])[1].chunk(2, dim=-1)
        behind = model.model(ids).last_hidden_state
    assert torch.equal(states[1], behind)
    assert not torch.equal(states[0], behind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_modles": 1}, "unknown option num_modles; did you mean num_modules"),
        ({"tree": DraftTree(num_steps=2, top_k=2, num_draft_tokens=4)}, "unknown option tree"),
        ({"draft_schedule": {1: 3, 4: 1}}, "unknown option draft_schedule"),
        ({"k_candidates": [1, 3]}, "unknown option k_candidates"),
        ({"num_speculative_tokens": "auto"}, "num_speculative_tokens must be an integer, got 'auto'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({"num_speculative_tokens": 10**30}, "num_speculative_tokens must be at most 63"),
        ({"max_model_len": 64, "block_size": 0}, "block_size must be at least 1"),
        ({"draft": 3}, "draft must be a Path or a string, got 3"),
    ],
)
def test_options_of_the_drafter(eagle3, options, message):
    with pytest.raises(ConfigError, match=message):
        speculative(**({"draft": eagle3} | options))


def test_no_length(model, eagle3):
    config = GenerationConfig(max_length=None, do_sample=False)
    config.max_length = None
    draft = speculative(eagle3)
    from transformers.generation.stopping_criteria import StoppingCriteriaList

    ids, _ = make_prompts(5)
    cache = DynamicCache(config=model.config)
    config.return_dict_in_generate = False
    with pytest.raises(ConfigError, match="no maximum length"):
        draft(model, ids, [], StoppingCriteriaList(), config, cache=cache, use_cache=True)
