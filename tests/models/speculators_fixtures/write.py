"""Write the folders beside this file with the `speculators` package, and what its own models compute from them.

    python write.py eagle3 peagle mtp dflash dflash-llama dflash2 dspark    # speculators 0.9.0
    python write.py eagle                                    # speculators 0.2.0, the last line that has EAGLE-1

Run it only to make them again; the tests read what is committed. Everything is float32, random and tiny.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

HERE = Path(__file__).parent
TARGET = HERE / "target"
VOCAB, DRAFT_VOCAB, HIDDEN, ROWS, STEPS = 64, 24, 32, 9, 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}
OWNERS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Random weights everywhere; vectors around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)


def write_target() -> LlamaForCausalLM:
    """The model that all of them draft for, made once."""
    if TARGET.exists():
        return LlamaForCausalLM.from_pretrained(TARGET).float().eval()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **OWNERS, num_hidden_layers=4)).float().eval()
    randomise(model, 1)
    model.save_pretrained(TARGET)
    return model


def record(module: torch.nn.Module) -> list[torch.Tensor]:
    """Collects what enters the module."""
    seen: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].clone()))
    return seen


def save(name: str, model, expected: dict[str, torch.Tensor]) -> None:
    """The folder as the package writes it, and the expectations beside."""
    shutil.rmtree(HERE / name, ignore_errors=True)
    model.save_pretrained(HERE / name)
    for source in (HERE / name).glob("*.py"):  # the package puts its own source beside
        source.unlink()
    save_file({key: tensor.contiguous() for key, tensor in expected.items()}, HERE / f"{name}.expected.safetensors")
    print(name, sorted(p.name for p in (HERE / name).iterdir()))


def inputs(columns: int, seed: int) -> dict[str, torch.Tensor]:
    """Tokens [ROWS] and target hidden states [ROWS, columns]."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "token_ids": torch.randint(0, VOCAB, (ROWS,), generator=generator),
        "aux_hidden": torch.randn(ROWS, columns, generator=generator),
    }


def speculators_config(algorithm: str, tokens: int):
    """Return the settings of a speculator that every folder embeds."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def write_eagle3() -> None:
    """A Llama head with its own vocabulary, and a Qwen3 one with two layers and the newer norms."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    cases = {
        "eagle3-llama": (LlamaConfig, 1, {"draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True}),
        "eagle3-qwen3": (Qwen3Config, 2, {"draft_vocab_size": VOCAB, "fc_norm": True, "norm_output": True}),
    }
    for seed, (name, (layer_config, num_layers, options)) in enumerate(cases.items()):
        layers = layer_config(**SIZES, **OWNERS, num_hidden_layers=num_layers)
        layers._attn_implementation = "eager"
        model = (
            Eagle3DraftModel(
                Eagle3SpeculatorConfig(
                    transformer_layer_config=layers,
                    eagle_aux_hidden_state_layer_ids=[1, 2, 4],
                    speculators_config=speculators_config("eagle3", STEPS),
                    **options,
                )
            )
            .float()
            .eval()
        )
        randomise(model, 10 + seed)
        if model.use_draft_vocab:
            chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB].sort().values
            model.d2t.copy_(chosen - torch.arange(DRAFT_VOCAB))
            model.t2d.zero_()[chosen] = True
        given = inputs(3 * HIDDEN, 20 + seed)
        hidden = record(model.lm_head)
        with torch.no_grad():
            model(
                given["aux_hidden"][None],
                given["token_ids"][None],
                torch.zeros(1, ROWS, dtype=torch.long),
                ttt_steps=STEPS,
            )
            logits = [model.lm_head(h) for h in list(hidden)]
        save(name, model, {**given, **{f"logits.{i}": t for i, t in enumerate(logits)}})


def write_peagle() -> None:
    """Two layers, trained-style: from (almost) every place of one sequence, rows of up to STEPS masks."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

    layers = LlamaConfig(**SIZES, **OWNERS, num_hidden_layers=2)
    layers._attn_implementation = "eager"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=False,
        norm_before_fc=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        mask_token_id=VOCAB - 1,
        speculators_config=speculators_config("peagle", STEPS + 1),
    )
    model = PEagleDraftModel(config).float().eval()
    randomise(model, 60)
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB].sort().values
    model.d2t.copy_(chosen - torch.arange(DRAFT_VOCAB))
    model.t2d.zero_()[chosen] = True
    given, taken, drawn = inputs(3 * HIDDEN, 61), core.generate_cod_sample_indices, []

    def kept(**settings):
        drawn.extend(taken(**settings))
        return tuple(drawn)

    core.generate_cod_sample_indices = kept
    hidden = record(model.lm_head)
    with torch.no_grad():
        model(
            given["aux_hidden"][None],
            given["token_ids"][None],
            torch.zeros(1, ROWS, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, ROWS, HIDDEN),
            num_depths=STEPS + 1,
            down_sample_ratio=1.0,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        logits = model.lm_head(hidden[0])
    save("peagle", model, {**given, "anchors": drawn[0], "depths": drawn[1], "logits": logits})


def write_mtp(target: LlamaForCausalLM) -> None:
    """A Qwen3 layer behind the two norms and the projection; embedding and head come from the target."""
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    layers = Qwen3Config(**SIZES, **OWNERS, num_hidden_layers=1)
    layers._attn_implementation = "eager"
    config = MTPSpeculatorConfig(transformer_layer_config=layers, speculators_config=speculators_config("mtp", STEPS))
    model = MTPDraftModel(config).float().eval()
    randomise(model, 30)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        model.lm_head.weight.copy_(target.lm_head.weight)
    given = inputs(HIDDEN, 31)
    with torch.no_grad():
        logits, _, _ = model(given["token_ids"][None], given["aux_hidden"][None])
    save("mtp", model, {**given, **{f"logits.{i}": t[0] for i, t in enumerate(logits)}})


def write_dflash(target: LlamaForCausalLM, name: str = "dflash", layer_config: type = Qwen3Config) -> None:
    """Two layers over blocks of five: an anchor and four masks. Its attention is Qwen3's whatever the configuration."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    layers = layer_config(**SIZES, **OWNERS, num_hidden_layers=2)
    layers._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=VOCAB,
        block_size=5,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=VOCAB - 1,
        speculators_config=speculators_config("dflash", 4),
    )
    model = DFlashDraftModel(config).float().eval()
    randomise(model, 40)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        model.lm_head.weight.copy_(target.lm_head.weight)
    given = inputs(2 * HIDDEN, 41)
    with torch.no_grad():
        _, logits, _, _, rows = model._backbone_forward(
            given["aux_hidden"][None],
            given["token_ids"][None],
            torch.ones(1, ROWS),
            torch.zeros(1, ROWS, HIDDEN),
            torch.zeros(1, ROWS, dtype=torch.long),
            max_anchors=3,
        )
    save(name, model, {**given, "logits": logits[0], "rows": rows})


def dspark(target: LlamaForCausalLM, seed: int, hidden_layers: int = 2, **options):
    """A random DSpark model, and (rows, logits, confidence) of blocks at three places of one sequence, each row after
    the sequence's own token."""
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, core

    layers = Qwen3Config(**SIZES, **OWNERS, num_hidden_layers=hidden_layers)
    layers._attn_implementation = "eager"
    tokens = options["block_size"] - (not options["sample_from_anchor"])
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layers,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=VOCAB - 1,
        speculators_config=speculators_config("dspark", tokens),
        **options,
    )
    model = DSparkDraftModel(config).float().eval()
    randomise(model, seed)
    if model.use_draft_vocab:
        chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB].sort().values
        model.d2t.copy_(chosen - torch.arange(DRAFT_VOCAB))
        model.t2d.zero_()[chosen] = True
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        if not model.use_draft_vocab:
            model.lm_head.weight.copy_(target.lm_head.weight)
    given, seen, backbone = inputs(2 * HIDDEN, seed + 1), [], model._backbone_forward

    def forward(*arguments, **settings):
        seen.append(backbone(*arguments, **settings))
        return seen[0]

    def metrics(logits, _, confidence, *rest, **settings):
        seen.append((logits[0], confidence))
        return torch.zeros(()), {}

    model._backbone_forward, core.compute_metrics = forward, metrics
    with torch.no_grad():
        model(
            given["aux_hidden"][None],
            given["token_ids"][None],
            torch.ones(1, ROWS),
            torch.zeros(1, ROWS, HIDDEN),
            torch.zeros(1, ROWS, dtype=torch.long),
            max_anchors=3,
        )
    del model._backbone_forward
    logits, confidence = seen[1]
    more = {} if confidence is None else {"confidence": confidence[0].sigmoid()}
    return model, {**given, "rows": seen[0][4], "logits": logits, **more}


def write_dspark(target: LlamaForCausalLM) -> None:
    """One head of each kind between a token and the next; one block begins with a token that predicts nothing."""
    cases = {
        "dspark": {"markov_head_type": "vanilla", "draft_vocab_size": DRAFT_VOCAB, "sample_from_anchor": True},
        "dspark-gated": {"markov_head_type": "gated", "draft_vocab_size": VOCAB, "sample_from_anchor": False},
        "dspark-rnn": {
            "markov_head_type": "rnn",
            "draft_vocab_size": DRAFT_VOCAB,
            "sample_from_anchor": True,
            "confidence_head_with_markov": False,
        },
    }
    for seed, (name, options) in enumerate(cases.items()):
        save(name, *dspark(target, 70 + 2 * seed, block_size=4, markov_rank=6, **options))


def dflash2(target: LlamaForCausalLM, seed: int, hidden_layers: int = 2, **options):
    """A random DFlash2 model, and (rows, ids and scores of candidates) of blocks at three places of one sequence, each
    row after the sequence's own token."""
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    layers = Qwen3Config(**SIZES, **OWNERS, num_hidden_layers=hidden_layers)
    layers._attn_implementation = "eager"
    tokens = options["block_size"] - (not options["sample_from_anchor"])
    config = DFlash2SpeculatorConfig(
        transformer_layer_config=layers,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=VOCAB - 1,
        draft_vocab_size=VOCAB,
        speculators_config=speculators_config("dflash2", tokens),
        **options,
    )
    model = DFlash2DraftModel(config).float().eval()
    randomise(model, seed)
    given = inputs(2 * HIDDEN, seed + 1)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        model.lm_head.weight.copy_(target.lm_head.weight)
        hidden, logits, _, _, rows = model._backbone_forward(
            given["aux_hidden"][None],
            given["token_ids"][None],
            torch.ones(1, ROWS),
            torch.zeros(1, ROWS, HIDDEN),
            torch.zeros(1, ROWS, dtype=torch.long),
            max_anchors=3,
        )
        before = model._predecessor_ids(given["token_ids"][None], rows).reshape(1, -1)
        candidates, scores = model.candidate_selector.select(logits, hidden, before)
    return model, {**given, "rows": rows, "candidates": candidates[0], "scores": scores[0]}


def write_dflash2(target: LlamaForCausalLM) -> None:
    """Three taps over blocks of four, groups of eight channels, five candidates."""
    options = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    save("dflash2", *dflash2(target, 90, block_size=4, sample_from_anchor=False, **options))


def write_eagle(target: LlamaForCausalLM) -> None:
    """EAGLE-1, two passes: the second takes the first one's output as its hidden state."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle import EagleSpeculator, EagleSpeculatorConfig
    from speculators.proposals import GreedyTokenProposalConfig

    layers = LlamaConfig(**SIZES, **OWNERS, num_hidden_layers=1)
    layers._attn_implementation = "eager"
    config = EagleSpeculatorConfig(
        transformer_layer_config=layers,
        fusion_bias=True,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = EagleSpeculator(config, verifier=None).float().eval()
    randomise(model, 50)
    model.embed_tokens, model.lm_head = target.model.embed_tokens, target.lm_head
    model.rotary_emb = target.model.rotary_emb
    given = inputs(HIDDEN, 51)
    hidden = record(model.lm_head)
    mask = torch.full((1, 1, ROWS, ROWS), float("-inf")).triu(1)
    with torch.no_grad():
        first = model(given["token_ids"][None], given["aux_hidden"][None], mask, return_dict=False)[0]
        second = model(given["token_ids"][None], hidden[0][None], mask, return_dict=False)[0]
    model.embed_tokens = model.lm_head = model.rotary_emb = None
    save("eagle", model, {**given, "logits.0": first, "logits.1": second})


def main() -> None:
    target = write_target()
    writers = {
        "eagle3": write_eagle3,
        "peagle": write_peagle,
        "mtp": lambda: write_mtp(target),
        "dflash": lambda: write_dflash(target),
        "dflash-llama": lambda: write_dflash(target, "dflash-llama", LlamaConfig),
        "dflash2": lambda: write_dflash2(target),
        "dspark": lambda: write_dspark(target),
        "eagle": lambda: write_eagle(target),
    }
    for name in sys.argv[1:] or ["eagle3", "peagle", "mtp", "dflash", "dflash-llama", "dflash2", "dspark"]:
        writers[name]()


if __name__ == "__main__":
    main()
