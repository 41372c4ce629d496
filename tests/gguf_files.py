"""Writes models of transformers as GGUF files, as llama.cpp's converter does, with the writer of the package gguf."""

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
"""Places of the float16 scales in a block of the kinds that gguf cannot make: their blocks are random otherwise."""
SPECIAL = ("<|end|>", "<|user|>", "<think>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}{{ eos_token }}"


def write_gguf(path: Path, model, kind="F32", tokenizer=None, rotation=None, change=None) -> Path:
    """Write a transformers model.

    Args:
        kind: of all matrices.
        tokenizer: keys of `tokenizer.ggml` with their values; `byte_level()` by default.
        rotation: what frequencies are divided by.
        change: called with the writer, before tensors are added.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, value in (byte_level() if tokenizer is None else tokenizer).items():
        getattr(writer, f"add_{key}")(value)
    writer.add_chat_template(TEMPLATE)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    if rotation is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rotation, dtype=np.float32))
    for name, weight in stacked(model.state_dict(), config).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, suffix = name.rsplit(".", 1)
        if config.model_type == "llama" and base.endswith(("q_proj", "k_proj")):
            weight = pairs_together(weight, config, base)
        whole = suffix == "bias" or weight.ndim == 1
        add(writer, f"{names.get_name(base)}.{suffix}", weight, "F32" if whole else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(tensors, config):
    """The tensors as numpy arrays; gate and up of stacked experts apart, as in GGUF."""
    found = {}
    for name, tensor in tensors.items():
        weight = tensor.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(weight, 2, axis=1), strict=True):
                found[name.replace("gate_up", part) + ".weight"] = half
        else:
            found[name if name.endswith((".weight", ".bias")) else f"{name}.weight"] = weight
    return found


def pairs_together(weight, config, name):
    """llama.cpp's order of a Llama's query and key rows: the two elements of each rotated pair side by side."""
    heads = config.num_attention_heads if name.endswith("q_proj") else config.num_key_value_heads
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add(writer, name, weight, kind):
    number = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        writer.add_tensor(name, gguf.quantize(weight, number), raw_dtype=number)
        return
    block, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 256, (weight.size // block, size), dtype=np.uint8)
    for place in SCALES[kind]:
        scales = rng.uniform(1e-5, 1e-4, len(raw)).astype(np.float16)
        raw[:, place : place + 2] = scales[:, None].view(np.uint8)
    rows = (*weight.shape[:-1], weight.shape[-1] // block * size)
    writer.add_tensor(name, raw.reshape(rows), raw_dtype=number)


def byte_level(pre="qwen2", size=400, **more):
    """A byte-level tokenizer with merges learned from this repository's own pages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    pages = [page.read_text() for page in sorted((Path(__file__).parents[1]).glob("*.md"))]
    tokenizer.train_from_iterator(pages, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(trained["vocab"], key=trained["vocab"].get), *SPECIAL]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": tokens,
        "token_types": [1] * (len(tokens) - 3) + [3, 3, 4],
        "token_merges": [" ".join(merge) for merge in trained["merges"]],
        "eos_token_id": len(tokens) - 3,
        "bos_token_id": len(tokens) - 2,
        **more,
    }


def sentencepiece(size=400, **more):
    """A SentencePiece vocabulary with byte tokens, scored by the order of learned merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    pages = [page.read_text() for page in sorted((Path(__file__).parents[1]).glob("*.md"))]
    trainer = trainers.BpeTrainer(vocab_size=size - 259, show_progress=False)
    tokenizer.train_from_iterator(pages, trainer)
    learned = json.loads(tokenizer.to_str())["model"]["vocab"]
    ordered = sorted(learned, key=learned.get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *ordered]
    return {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_list": tokens,
        "token_scores": [0.0] * 259 + [-float(i) for i in range(len(ordered))],
        "token_types": [2, 3, 3] + [6] * 256 + [1] * len(ordered),
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
