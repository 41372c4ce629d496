"""Targets with gated delta nets: random models that transformers writes, and whole rounds on any platform."""

import torch
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_conformance.tiny_models import make_head, make_target
from specgraph_run.decoder import Request, SpeculativeDecoder

FAMILIES = {
    "qwen3_next": ("Qwen3Next", "Qwen3NextConfig"),
    "qwen3_5_text": ("Qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_5_moe_text": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig"),
}
"""`model_type` -> the names of transformers' classes."""

SIZES = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
MIXTURE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12,
}  # fmt: skip


def write_hybrid(family, folder, seed=0, **changes):
    """A transformers model with random weights, saved to the folder."""
    import transformers

    torch.manual_seed(seed)
    name, config = FAMILIES[family]
    mixture = {} if family == "qwen3_5_text" else MIXTURE
    settings = getattr(transformers, config)(**{**SIZES, **mixture, **changes})
    settings._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(settings).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if not parameter_name.endswith("A_log"):
                parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder)
    return model


def random_sizes(family, rng):
    """Sizes that differ from those of `SIZES`: heads and their groups, the kernel, the places of attention."""
    keys, layers = rng.choice([1, 2, 3]), rng.choice([2, 3, 4])
    sizes = {
        "num_hidden_layers": layers,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([4, 8, 10]),
        "linear_value_head_dim": rng.choice([4, 6, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4, 5]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": rng.random() < 0.3,
    }
    if rng.random() < 0.5:
        kinds = [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
        kinds[rng.randrange(layers)] = "full_attention"
        sizes["layer_types"] = kinds
    if family == "qwen3_next" and rng.random() < 0.5:
        sizes |= {"mlp_only_layers": [0], "norm_topk_prob": True}
    return sizes


def with_cancels(platform, kind, lowering, attention=None):
    """Decode requests that join, end and are cancelled over a target with a recurrent layer, twice.

    All states hold NaN at first, as a slot's last owner may leave them. The second time must give what the first gave.

    Returns:
        Tokens and log-probabilities of each request. Those of the second one end where it is cancelled.
    """
    device = platform.device
    target, head = make_target(3, device, recurrent=True), None if kind is None else make_head(kind, 3, device)
    config, options = decoder_settings(
        num_speculative_tokens=3, max_num_requests=2, max_model_len=48, block_size=4, capture_sizes=[2],
        prefill_sizes=[8], decode=lowering, logprobs=True,
    )  # fmt: skip
    made = SpeculativeDecoder(target, head, platform, config, options, attention=attention, query_len=config.query_len)
    g = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, target.vocab_size, (n,), generator=g).tolist() for n in (4, 9, 1, 14)]
    texts = []
    with torch.inference_mode():
        made.capture()
        assert made.target.resolution.lowering == lowering
        states = made.target.states
        for tensor in states.layers[0]:
            tensor.fill_(float("nan"))
        for _ in range(2):
            ids = [made.add(Request(prompt_token_ids=p, max_tokens=7 + 3 * i)) for i, p in enumerate(prompts)]
            seen = {each: ([], []) for each in ids}
            while made.num_unfinished:
                if len(seen[ids[1]][0]) > 2:
                    made.cancel(ids[1])
                for chunk in made.step():
                    seen[chunk.request][0].extend(chunk.token_ids)
                    seen[chunk.request][1].extend(chunk.logprobs)
                slots = [state.slot for state in made.rounds.running]
                assert sorted(slots) == sorted({*slots} & {1, 2})
            texts.append(list(seen.values()))
        assert texts[0] == texts[1], "a state of its slot's last owner"
        assert all(bool(tensor[0].isnan().all()) for tensor in states.layers[0]), "the null slot was written"
        assert kind is None or made.metrics.num_drafts
    made.close()
    return texts[0]
