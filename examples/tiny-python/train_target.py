"""Train the target: a small Llama on the standard library's source. Writes a Hugging Face folder in float16."""

import argparse
import math
import time
from pathlib import Path

import corpus
import figures
import tokenizer as bpe
import torch
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 2048
MAX_POSITIONS = 1024


def config(**sizes: int) -> LlamaConfig:
    """About 3.5 million parameters, but for `sizes`. Deep and narrow: what a drafter saves grows with the depth."""
    own = {"vocab_size": VOCAB_SIZE, "hidden_size": 192, "num_hidden_layers": 8}
    own |= {"num_attention_heads": 6, "num_key_value_heads": 2}
    return LlamaConfig(
        **{**own, **sizes},
        intermediate_size=512,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def pack(encoder: bpe.Tokenizer, sources: list[corpus.Source], device: torch.device) -> torch.Tensor:
    """Every file, each behind `<|endoftext|>`, as one row of token ids [tokens]."""
    ids: list[int] = []
    for encoding in encoder.encode_batch([source.text for source in sources]):
        ids.append(0)
        ids.extend(encoding.ids)
    return torch.tensor(ids, device=device)


def sample(tokens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Windows [batch, length] at random offsets: no two epochs cut the text at the same places."""
    starts = torch.randint(0, tokens.numel() - length, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)]


def loss_of(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross entropy (nats a token) of windows [batch, length]."""
    with torch.autocast(window.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor, length: int, batch: int, windows: int) -> float:
    """Cross entropy over consecutive windows of the held-out files, nats a token."""
    rows = tokens[: tokens.numel() // length * length].view(-1, length)[:windows]
    losses = [loss_of(model, part) * part.shape[0] for part in rows.split(batch)]
    return (torch.stack(losses).sum() / rows.shape[0]).item()


def learning_rate(progress: float, peak: float, warmup: float = 0.02) -> float:
    """Linear warm-up, then a cosine to 1 % of the peak; `progress` runs from 0 to 1."""
    if progress < warmup:
        return peak * max(progress, warmup / 50) / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))))


def optimizer_for(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, default=corpus.default_stdlib())
    parser.add_argument("--out", type=Path, required=True, help="folder for the target")
    parser.add_argument("--seconds", type=float, default=40, help="training time; the schedule spans it")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=MAX_POSITIONS)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--figures", type=Path, default=Path("figures.json"))
    parser.add_argument("--max-files", type=int, help="use only so many files (to try the script out)")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    arguments.out.mkdir(parents=True, exist_ok=True)

    train_files, held_out_files = corpus.split(corpus.read_sources(arguments.stdlib)[: arguments.max_files])
    encoder = bpe.train((source.text for source in train_files), VOCAB_SIZE)
    bpe.save(encoder, arguments.out, MAX_POSITIONS)
    train_tokens, held_out_tokens = pack(encoder, train_files, device), pack(encoder, held_out_files, device)
    characters = sum(len(source.text) for source in held_out_files)
    print(f"train: {len(train_files)} files, {train_tokens.numel():,} tokens")
    print(f"held out: {len(held_out_files)} files, {held_out_tokens.numel():,} tokens", flush=True)

    model = LlamaForCausalLM(config()).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    if arguments.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = optimizer_for(model, arguments.weight_decay)
    length, batch = arguments.sequence_length, arguments.batch_size
    loss_of(model, sample(train_tokens, batch, length + 1)).backward()  # compile before the clock starts
    model.zero_grad()
    print(f"{parameters:,} parameters on {device}", flush=True)

    start, step, next_report, progress = time.perf_counter(), 0, 0.0, 0.0
    recent = torch.zeros((), device=device)
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.learning_rate)
        loss = loss_of(model, sample(train_tokens, batch, length + 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent = loss.detach() if step == 1 else recent.lerp(loss.detach(), 0.02)
        if step % 20 == 0:
            recent.item()  # waits for the device: the clock must not run ahead of the queue
        progress = (time.perf_counter() - start) / arguments.seconds
        if progress >= next_report:
            held_out = held_out_loss(model, held_out_tokens, length, batch, windows=128)
            print(f"{progress:4.0%} step {step} train {recent.item():.3f} held out {held_out:.3f}", flush=True)
            next_report += 0.1

    model = model.to(torch.float16).float()  # report the model that is shipped
    final = held_out_loss(model, held_out_tokens, length, batch, held_out_tokens.numel())
    measured = {
        "parameters": parameters,
        "train_files": len(train_files),
        "train_tokens": train_tokens.numel(),
        "held_out_files": len(held_out_files),
        "held_out_tokens": held_out_tokens.numel(),
        "steps": step,
        "epochs": round(step * batch * length / train_tokens.numel(), 1),
        "seconds": round(time.perf_counter() - start, 1),
        "last_train_loss": round(recent.item(), 4),
        "held_out_loss": round(final, 4),
        "held_out_perplexity": round(math.exp(final), 3),
        "held_out_bits_per_character": round(final / math.log(2) * held_out_tokens.numel() / characters, 4),
    }
    save(model, arguments.out)
    figures.record(arguments.figures, "target", measured, device)
    print(measured, flush=True)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (float16; the tied lm_head is not stored)."""
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, do_sample=False)
    model.to(torch.float16).save_pretrained(folder)


if __name__ == "__main__":
    main()
