"""Have a target answer prompts, and train an EAGLE-3 head on the answers.

    python examples/training/train.py TARGET --prompts PROMPTS.jsonl --chat --out OUT
    specgraph generate --target TARGET --draft OUT/eagle3 --chat --prompt "Hello"

TARGET is any target that specgraph loads; its platform runs it. OUT/answers.pt holds what it wrote; a folder that has
it writes nothing again. OUT/eagle3 is the head, in the format of the algorithm's authors, saved every minute. The same
command continues from OUT/training.pt what was broken off; `--begin FOLDER` begins from another head.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lesson import MEASURED, Batch, Eagle3Head, Lesson, acceptance, batches
from target import TargetPass, Text, answer, asked_of, asking, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking(parser, max_tokens=160, max_model_len=544)
    parser.add_argument("--held-out", type=Path, help="prompts to measure with; default: every 20th of --prompts")
    parser.add_argument("--temperature", type=float, default=0.7, help="of a second answer to each prompt; 0: none")
    parser.add_argument("--generate-seconds", type=float, default=120, help="no prompts are begun after that time")
    parser.add_argument("--begin", type=Path, help="the folder of a head to begin from")
    parser.add_argument("--seconds", type=float, default=400, help="of training")
    parser.add_argument("--batch", type=int, default=8192, help="tokens of a step of training")
    parser.add_argument("--steps", type=int, default=6, help="draft steps of the training-time test")
    parser.add_argument("--later", type=float, default=0.85, help="of step k counts this share, to the power of k")
    parser.add_argument("--draft-vocab-size", type=int, help="tokens that the head can draft; default: a quarter")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of training")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    asked = asked_of(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "answers.pt"
    if not path.exists():
        prompts = read_prompts(arguments.prompts)
        if arguments.held_out is None:
            held_out, prompts = prompts[::20], [each for i, each in enumerate(prompts) if i % 20]
        else:
            held_out = read_prompts(arguments.held_out)
        lists, temperatures = [held_out, prompts], [0.0, 0.0]
        if arguments.temperature > 0:
            lists, temperatures = [*lists, prompts], [*temperatures, arguments.temperature]
        parts = answer(asked, lists, temperatures, arguments.generate_seconds)
        torch.save([[tuple(text) for text in part] for part in parts], path)
    held_out, *parts = [[Text(*text) for text in part] for part in torch.load(path)]
    train = [text for part in parts for text in part]
    if not held_out or not train:
        path.unlink()
        parser.error(f"{len(train)} answers to train on, {len(held_out)} to measure with: give more or shorter prompts")
    target = TargetPass(asked.target, asked.platform, asked.dtype)
    head = untrained(target, train, arguments)
    if arguments.begin is not None:
        head.load(arguments.begin)
    fit(Lesson(target, head, arguments.steps), train, held_out, arguments)


def untrained(target: TargetPass, train: Sequence[Text], arguments: argparse.Namespace) -> Eagle3Head:
    """Return a head that drafts the most frequent tokens of the answers."""
    model = target.model
    drafted = arguments.draft_vocab_size or min(32000, -(-model.vocab_size // 4))
    answers = torch.tensor([token for text in train for token in text.tokens[text.prompt :]])
    counts = torch.bincount(answers, minlength=model.vocab_size)
    chosen = counts.topk(drafted).indices.sort().values
    head = Eagle3Head(head_config(target, drafted)).to(target.device)
    sample = next(batches(train, 8192, target.device))
    inside = torch.arange(sample.tokens.shape[1], device=target.device) < sample.lengths[:, None]
    inside[:, 0] = False  # the states of a first token are a thousand times larger than others
    aux = target(sample.tokens, head.aux_layers).aux_hidden
    head.begin(chosen.to(target.device), model.lm_head, model.norm, aux[inside])
    print(f"{counts[chosen].sum() / counts.sum():.4f} of the answers' tokens can be drafted", flush=True)
    return head


def head_config(target: TargetPass, drafted: int) -> dict[str, Any]:
    """Return config.json of a head for the target: one layer of the sizes of its own."""
    sizes = target.model.config
    heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    if sizes.latent is not None:  # which the head has not: keys and values of their own
        heads, kv_heads, head_dim = max(1, sizes.hidden_size // 128), max(1, sizes.hidden_size // 512), 128
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": sizes.vocab_size,
        "draft_vocab_size": drafted, "hidden_size": sizes.hidden_size, "target_hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "max_position_embeddings": sizes.max_position_embeddings,
        "rope_theta": sizes.rotary.theta, "rms_norm_eps": sizes.rms_norm_eps, "norm_before_residual": False,
        "eagle_config": {
            "use_aux_hidden_state": True, "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": target.drafter_layers(),
        },
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def fit(lesson: Lesson, train: Sequence[Text], held_out: Sequence[Text], arguments: argparse.Namespace) -> None:
    """Train until the time is over: AdamW, a short linear warm-up, then a cosine to 1 % of the learning rate."""
    head, path, device = lesson.head, arguments.out / "training.pt", lesson.target.device
    matrices = [p for p in head.parameters() if p.dim() == 2]
    vectors = [p for p in head.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    step, before, epoch, seen, warmup = 0, 0.0, 0, 0, 0.02
    if path.exists():
        state = torch.load(path, map_location=device)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        step, before, epoch, seen = state["at"]
    start, saved = time.perf_counter(), time.perf_counter()
    later = arguments.later ** torch.arange(arguments.steps, device=device)
    recent = torch.zeros(arguments.steps, device=device)
    queue: Iterator[Batch] = iter(())

    def report() -> None:
        rates, length = acceptance(lesson, held_out, arguments.batch)
        head.save(arguments.out / "eagle3")
        at = step, time.perf_counter() - start + before, epoch, seen
        torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "at": at}, path)
        print(
            f"{at[1]:.0f} s, step {step}, epoch {epoch}, {seen / 1e6:.1f}M tokens, loss "
            f"{' '.join(f'{x:.3f}' for x in recent.tolist())}; held out: {' '.join(f'{x:.3f}' for x in rates)}, "
            f"length at {MEASURED}: {length:.3f}", flush=True,
        )  # fmt: skip

    report()
    while (progress := (time.perf_counter() - start + before) / arguments.seconds) < 1:
        batch = next(queue, None)
        if batch is None:
            epoch, queue = epoch + 1, batches(train, arguments.batch, device)
            continue
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * (cosine if progress >= warmup else max(progress, warmup / 50) / warmup)
        losses = lesson(batch)[0]
        (losses * later).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = recent.lerp(losses.detach(), max(1 / (step + 1), 0.02))
        step, seen = step + 1, seen + int(batch.lengths.sum())  # waits for the device, as the clock must
        if time.perf_counter() - saved > 60:
            report()
            saved = time.perf_counter()
    report()


if __name__ == "__main__":
    main()
