"""Train the target, the EAGLE-3 head and the four other drafters, all by one command, into Hugging Face folders.

    python examples/tiny-python/train.py --out OUT
    python examples/tiny-python/train.py --out OUT --share 0.01    # to try it out

OUT then holds a folder of each model in float16, and figures.json, which says what was measured.
Schedules span seconds, not steps, so another machine gives other models.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import lessons
import torch
from lessons import Bucket, Course, Generated, Material
from torch.nn import functional as F
from transformers import LlamaForCausalLM

SECONDS = {"target": 40, "eagle3": 170, "eagle1": 30, "mtp": 30, "dflash": 30, "draft-model": 30}
"""Time of each training."""
GENERATED = 6_000_000
"""Tokens that the target writes for its drafters to learn from."""
MOST_ROWS = 8192
"""Texts that the target writes at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=list(lessons.COURSES), help="all by default")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="the corpus")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--share", type=float, default=1.0, help="of the time, the corpus and the text to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    folder, figures = arguments.out / "target", dict[str, Any]()
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = (part[: math.ceil(arguments.share * len(part))] for part in corpus.read_sources(arguments.stdlib))
    encoder = corpus.train_tokenizer((source.text for source in train), folder)
    text = corpus.pack(encoder, train, device)
    kept = corpus.pack(encoder, held_out, device)
    model, figures["target"] = train_target(text, kept, SECONDS["target"] * arguments.share)
    lessons.save(model, folder)
    model = model.to(torch.float32 if device.type == "cpu" else torch.bfloat16).eval().requires_grad_(False)
    tokens, longest = int(GENERATED * arguments.share), max(bucket.prompt for bucket in lessons.BUCKETS)
    starts, kept_starts = (corpus.windows(encoder, part, longest, device) for part in (train, held_out))
    written = [continued(model, starts, bucket, tokens) for bucket in lessons.BUCKETS]
    held_out_texts = [continued(model, kept_starts, lessons.BUCKETS[i], tokens // 16) for i in (2, 7)]
    material = Material(model, written, held_out_texts, text)
    for name in arguments.drafters:
        course = lessons.COURSES[name](material)
        figures[name] = train_drafter(course, material, SECONDS[name] * arguments.share)
        course.save(arguments.out / name)
        print(name, figures[name], flush=True)
    figures["versions"] = {"torch": torch.__version__, "device": str(device)}
    (arguments.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")


def train_target(
    text: torch.Tensor, held_out: torch.Tensor, seconds: float, batch: int = 64, length: int = corpus.MAX_POSITIONS
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train a Llama of 3.5 million parameters on token ids [tokens]; return it and what was measured."""
    model = lessons.untrained_llama(lessons.PAIR / "target").to(text.device)
    if text.device.type != "cpu":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    length = min(length, text.numel() // 2, held_out.numel() - 1)

    def loss() -> torch.Tensor:
        return next_token_loss(model, sample(text, batch, length + 1))[None]

    loss().sum().backward()  # compiles before the clock starts
    model.zero_grad()
    steps, recent = fit(model, loss, seconds, rate=3e-3, weight_decay=0.3)
    model = model.half().float()  # what is measured is the model that is saved
    with torch.no_grad():
        rows = held_out[: held_out.numel() // length * length].view(-1, length)
        losses = [next_token_loss(model, part) * part.shape[0] for part in rows.split(batch)]
    final = (torch.stack(losses).sum() / rows.shape[0]).item()
    figures = {"parameters": sum(p.numel() for p in model.parameters()), "train_tokens": text.numel()}
    figures |= {"epochs": round(steps * batch * length / text.numel(), 1), "last_train_loss": round(recent[0], 4)}
    return model, figures | {"held_out_loss": round(final, 4), "held_out_perplexity": round(math.exp(final), 3)}


def sample(tokens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Return windows [batch, length] at random offsets: no two epochs cut the text at the same places."""
    starts = torch.randint(0, tokens.numel() - length, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)]


def next_token_loss(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token cross entropy (nats per token) of windows [batch, length]."""
    with torch.autocast(window.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def fit(
    model: torch.nn.Module,
    losses: Callable[[], torch.Tensor],
    seconds: float,
    *,
    rate: float,
    weight_decay: float,
    later: float = 1.0,
) -> tuple[int, list[float]]:
    """Train until the time is over: AdamW, a short linear warm-up, then a cosine to 1 % of the learning rate `rate`.

    Args:
        losses: called for each step, returns the losses [n] of n draft tokens; of token k, `later` ** k counts.

    Returns:
        The number of steps, and the losses of the last ones (a running mean).
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    start, step, progress, warmup = time.perf_counter(), 0, 0.0, 0.02
    recent = torch.zeros(1)
    while progress < 1:
        for group in optimizer.param_groups:
            cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
            group["lr"] = rate * (cosine if progress >= warmup else max(progress, warmup / 50) / warmup)
        each = losses()
        (each * later ** torch.arange(each.numel(), device=each.device)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = each.detach() if step == 0 else recent.lerp(each.detach(), 0.02)
        step += 1
        if step % 10 == 0:  # waits for the device: the clock must not run ahead of the queue
            print(f"{progress:4.0%} step {step} loss {recent.sum().item():.3f}", end="\r", flush=True)
        progress = (time.perf_counter() - start) / seconds
    return step, recent.tolist()


@torch.no_grad()
def continued(model: LlamaForCausalLM, windows: torch.Tensor, bucket: Bucket, tokens: int) -> Generated:
    """Let the target write the bucket's share of `tokens`, after beginnings of random windows [N, longest]."""
    count = max(1, int(tokens * bucket.share / (bucket.total - bucket.prompt)))
    parts: list[torch.Tensor] = []
    for rows in torch.randint(0, windows.shape[0], (count,), device=windows.device).split(MOST_ROWS):
        current, cache = windows[rows, : bucket.prompt], None
        parts.append(current)
        for _ in range(bucket.total - bucket.prompt):
            output = model(input_ids=current, cache=cache, use_cache=True, logits_to_keep=1)
            cache, logits = output.cache, output.logits[:, -1].float()
            if bucket.temperature:
                current = torch.multinomial((logits / bucket.temperature).softmax(-1), 1)
            else:
                current = logits.argmax(-1, keepdim=True)
            parts[-1] = torch.cat((parts[-1], current), dim=1)
    return Generated(bucket, torch.cat(parts))


def train_drafter(course: Course, material: Material, seconds: float) -> dict[str, Any]:
    """Train a drafter on what the target wrote; return what was measured."""
    device, drafter = material.text.device, course.drafter

    def losses() -> torch.Tensor:
        batch = lessons.observe(material.model, *draw(material), course.aux_layers)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu"):
            return course.lesson(batch).losses

    steps, recent = fit(drafter, losses, seconds, rate=2e-3, weight_decay=0.05, later=0.8)
    drafter.half().float()  # what is measured is the drafter that is saved
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "steps": steps,
        "seconds": seconds,
        "last_train_loss_per_draft_token": [round(loss, 4) for loss in recent],
        "teacher_forced_held_out_acceptance_per_position": lessons.held_out_acceptance(course, material),
    }


def draw(material: Material, batch_tokens: int = 40_000) -> tuple[torch.Tensor, int]:
    """Return tokens [B, T] of one bucket, in a tenth of all cases of the corpus, and the prompt's length."""
    if torch.rand(()) < 0.1:
        return sample(material.text, max(1, batch_tokens // 512), 512), 0
    shares = torch.tensor([part.bucket.share for part in material.written])
    bucket, pool = material.written[int(torch.multinomial(shares, 1))]
    rows = torch.randint(0, pool.shape[0], (max(1, batch_tokens // bucket.total),), device=pool.device)
    return pool[rows], bucket.prompt


if __name__ == "__main__":
    main()
