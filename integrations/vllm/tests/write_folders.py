# ruff: noqa
"""Small folders for vLLM: Qwen3-Next and DeepSeek-V3 (random, with an MTP module), DSpark (the shipped target's DFlash
drafter and a random Markov head) and LoRA (a random adapter of the shipped target).

    python vfolders.py OUT NAME...        NAME: glm, qwen, deepseek, dspark, lora
"""

import importlib, json, shutil, sys
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file, save_file
from specgraph import shipped_pair

VOCAB, HIDDEN, LAYERS, EXPERTS, INNER = 2048, 256, 4, 8, 128
SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=256,
    moe_intermediate_size=INNER,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
)
KINDS = {
    "glm": (
        "Glm4Moe",
        dict(
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            first_k_dense_replace=1,
            use_qk_norm=True,
        ),
    ),
    "qwen": (
        "Qwen3Next",
        dict(
            num_experts=EXPERTS,
            shared_expert_intermediate_size=INNER,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
        ),
    ),
    "deepseek": (
        "DeepseekV3",
        dict(
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            first_k_dense_replace=1,
            num_key_value_heads=8,
            q_lora_rank=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=128,
            head_dim=64,
            rope_interleave=True,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
}


def split(tensors):
    for name in [n for n in tensors if n.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))]:
        block, kind = name.rsplit(".", 1)
        parts = kind.removesuffix("_proj").split("_")
        for e, matrix in enumerate(tensors.pop(name)):
            for part, piece in zip(parts, matrix.chunk(len(parts))):
                tensors[f"{block}.{e}.{part}_proj.weight"] = piece
    return tensors


def make(out, kind, gain, mtp_gain):
    named, more = KINDS[kind]
    config = getattr(transformers, f"{named}Config")(**SHARED | more)
    torch.manual_seed(5)
    model = getattr(transformers, f"{named}ForCausalLM")(config).eval()
    modeling = importlib.import_module(type(model).__module__)
    one = dict(num_hidden_layers=1, first_k_dense_replace=0)
    if kind == "qwen":
        one["layer_types"] = ["full_attention"]
    alone = type(config)(**{**config.to_dict(), **one, "mlp_layer_types": None})
    block = getattr(modeling, f"{named}DecoderLayer")(alone, 0)

    def fill(module, gain):
        for name, p in module.named_parameters():
            if p.dim() >= 2 and "conv1d" not in name:
                p.normal_(0, p.shape[-1] ** -0.5)
                if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "down_proj")):
                    p.mul_(gain)

    with torch.no_grad():
        fill(model, gain)
        fill(block, mtp_gain)
        embed = torch.randn(VOCAB, HIDDEN)
        model.model.embed_tokens.weight.copy_(embed)
        g = torch.Generator().manual_seed(9)
        model.lm_head.weight[torch.randperm(VOCAB, generator=g)] = embed / 8
        for name, buffer in [*model.named_buffers(), *block.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
        eye = torch.eye(HIDDEN)
        fc = torch.cat((eye, 0.3 * torch.randn(HIDDEN, HIDDEN) * HIDDEN**-0.5), 1)
    one = torch.zeros(HIDDEN) if kind == "qwen" else torch.ones(HIDDEN)
    tensors = {n: t.detach().clone() for n, t in model.state_dict().items()}
    if kind == "qwen":
        layer, names = (
            "mtp.layers.0",
            ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
        )
    else:
        layer = f"model.layers.{LAYERS}"
        names = tuple(f"{layer}.{n}.weight" for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    tensors |= {f"{layer}.{n}": t.detach().clone() for n, t in block.state_dict().items()}
    tensors |= {names[0]: fc, **{n: one.clone() for n in names[1:]}}
    tensors = split(tensors)
    out.mkdir(parents=True, exist_ok=True)

    def stored(name, t):
        return t.float().contiguous() if name.endswith("e_score_correction_bias") else t.half().contiguous()

    save_file({n: stored(n, t) for n, t in tensors.items()}, out / "model.safetensors")
    written = config.to_dict() | {
        "architectures": [f"{named}ForCausalLM"],
        "num_nextn_predict_layers": 1,
        **({"topk_method": "noaux_tc", "scoring_func": "sigmoid"} if kind == "deepseek" else {}),
        "dtype": "float16",
        "torch_dtype": "float16",
    }
    (out / "config.json").write_text(json.dumps(written, default=str))
    shutil.copy(shipped_pair()[0] / "tokenizer.json", out)
    return model, block


@torch.no_grad()
def check(out, model, kind):
    """How often the target leaves the permutation, and how often the first draft is the target's token."""
    from specgraph.checkpoints import load_drafter, target_shape
    import torch.nn.functional as F

    ids = torch.randint(2, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    for _ in range(60):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    hidden = model.model(ids).last_hidden_state[0]
    answers = model.lm_head(hidden).argmax(-1)
    head = load_drafter(out, target_shape(out, max_model_len=128, dtype="float32"))

    def attend(index, q, k, v):
        layer = head.attention_layers[index]
        n = q.shape[0]
        d = layer.rotary.shape[1]
        cos, sin = layer.rotary[1 : n + 1][:, None].chunk(2, -1)

        def turn(x):
            a, b, rest = x.tensor_split((d // 2, d), -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

        q, k = turn(q), turn(k)
        g = layer.num_heads // layer.num_kv_heads
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
        s = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        s = s.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", s.softmax(-1), v)

    o = head.forward(ids[0, 1:], hidden[:-1], attend)
    drafts = head.logits(o.hidden).argmax(-1)
    g = torch.Generator().manual_seed(9)
    perm = torch.randperm(VOCAB, generator=g)
    print(
        kind,
        "leaves the permutation",
        float((answers != perm[ids[0]]).float().mean()),
        "distinct",
        len(set(ids[0].tolist())),
        "first draft accepted",
        float((drafts[23:] == answers[24:]).float().mean()),
        flush=True,
    )


def dspark(out):
    shutil.copytree(Path("examples/tiny-python/drafters/dflash"), out)
    config = json.loads((out / "config.json").read_text()) | {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "sample_from_anchor": False,
        "enable_confidence_head": False,
    }
    (out / "config.json").write_text(json.dumps(config))
    g, tensors = torch.Generator().manual_seed(11), load_file(out / "model.safetensors")
    for name, scale in (("markov_w1", 1.0), ("markov_w2", 0.1)):
        tensors[f"markov_head.{name}.weight"] = (torch.randn(VOCAB, 16, generator=g) * scale).half()
    save_file(tensors, out / "model.safetensors")


def lora(out):
    config = json.loads((shipped_pair()[0] / "config.json").read_text())
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    out.mkdir(parents=True)
    (out / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": 8,
                "lora_alpha": 16,
                "bias": "none",
                "target_modules": ["q_proj", "v_proj", "o_proj"],
                "base_model_name_or_path": str(shipped_pair()[0]),
            }
        )
    )
    g, tensors = torch.Generator().manual_seed(13), {}
    for i in range(config["num_hidden_layers"]):
        for name, columns, rows in (
            ("q_proj", hidden, heads * dim),
            ("v_proj", hidden, kv * dim),
            ("o_proj", heads * dim, hidden),
        ):
            prefix = f"base_model.model.model.layers.{i}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(8, columns, generator=g) * columns**-0.5).half()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(rows, 8, generator=g) * 0.1).half()
    save_file(tensors, out / "adapter_model.safetensors")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    for kind in [k for k in sys.argv[2:] if k != "--check"]:
        if (root / kind).exists():
            continue
        part = root / f".{kind}"
        shutil.rmtree(part, ignore_errors=True)
        if kind in ("dspark", "lora"):
            globals()[kind](part)
        else:
            model, _ = make(part, kind, *{"glm": (2.6, 2.0), "qwen": (3.6, 2.0), "deepseek": (2.6, 2.0)}[kind])
            if "--check" in sys.argv:
                check(part, model, kind)
        part.rename(root / kind)
