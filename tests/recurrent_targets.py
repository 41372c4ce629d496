"""Random models with gated delta nets, written by transformers, and drafts that are right up to a random place."""

import torch

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


def oracle_drafts(decoder, known, rng):
    """Let the drafter of a decoder draft the known texts, wrong from a random place on in each round.

    known: prompt -> the prompt and its greedy continuation.
    """
    drafter, vocab = decoder.drafter, decoder.target.model.vocab_size
    propose = drafter.propose

    def scripted(batch, **options):
        propose(batch, **options)
        k = options["num_speculative_tokens"]
        k = decoder.config.num_speculative_tokens if k is None else k
        memory = drafter.shared
        drafts = drafter.draft_programs[False].buffers.draft_token_ids
        for row, state in enumerate(decoder.rounds.rows):
            if state is None or not int(memory.num_sampled[row]):
                continue
            text = known[tuple(state.request.prompt_token_ids)]
            first = int(memory.start_positions[row] + memory.num_sampled[row]) + 1
            right = text[first : first + k]
            right += [0] * (k - len(right))
            place = rng.randint(0, k)
            wrong = [
                token if i < place else (token + 1 + rng.randrange(vocab - 1)) % vocab for i, token in enumerate(right)
            ]
            drafts[row, :k] = torch.tensor(wrong, dtype=drafts.dtype)

    drafter.propose = scripted
