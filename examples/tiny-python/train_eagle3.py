"""Train the EAGLE-3 head on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import corpus
import figures
import torch
from eagle3_head import Eagle3Head, HeadConfig
from tokenizers import Tokenizer
from train_target import learning_rate, optimizer_for, pack, sample
from transformers import LlamaForCausalLM

DRAFT_VOCAB_SIZE = 1024
MAX_GENERATION_ROWS = 8192
STEP_WEIGHT = 0.8  # loss weight of draft step k is STEP_WEIGHT ** k


class Bucket(NamedTuple):
    """Sequences of one shape: a prompt of `prompt` tokens, continued by the target to `total` tokens."""

    prompt: int
    total: int
    share: float  # of all generated tokens
    temperature: float = 0.0


# Mostly what is measured (short prompts, greedy); a little sampling and long contexts, so that neither is foreign.
BUCKETS = [
    *(Bucket(prompt, prompt + 160, 0.08) for prompt in range(40, 200, 16)),
    Bucket(64, 224, 0.06, temperature=1.0),
    Bucket(128, 288, 0.06, temperature=0.7),
    Bucket(400, 1000, 0.08),
]
HELD_OUT_BUCKETS = [BUCKETS[2], BUCKETS[7]]


class Generated(NamedTuple):
    """Sequences [N, total] of one bucket."""

    bucket: Bucket
    tokens: torch.Tensor


def prompt_windows(encoder: Tokenizer, sources: list[corpus.Source], limit: int, device: torch.device) -> torch.Tensor:
    """Windows [N, limit] that begin where a class, a function or a method begins; short files give none."""
    rows: list[list[int]] = []
    indentation = encoder.encode("   ").ids
    for source in sources:
        encoding = encoder.encode(source.text)
        begins = {start: index for index, (start, _) in enumerate(encoding.offsets)}
        for offset in corpus.definition_starts(source.text):
            # A method's indentation shares its token with the newline before it, and its last space goes with "def".
            prefix, index = ([], begins[offset]) if offset in begins else (indentation, begins.get(offset + 3))
            if index is not None and index + limit <= len(encoding.ids):
                rows.append((prefix + encoding.ids[index : index + limit])[:limit])
    return torch.tensor(rows, device=device)


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompts: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Continue prompts [N, prompt] to [N, total], greedily or at the bucket's temperature."""
    tokens, current, cache = [prompts], prompts, None
    for _ in range(bucket.total - bucket.prompt):
        output = model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        if bucket.temperature:
            current = torch.multinomial((logits / bucket.temperature).softmax(-1), 1)
        else:
            current = logits.argmax(-1, keepdim=True)
        tokens.append(current)
    return torch.cat(tokens, dim=1)


def generate_all(
    model: LlamaForCausalLM, windows: torch.Tensor, buckets: list[Bucket], total_tokens: int
) -> list[Generated]:
    """Fill every bucket from random windows [N, 400]: a bucket of share s gets s * total_tokens new tokens."""
    result: list[Generated] = []
    for bucket in buckets:
        start = time.perf_counter()
        count = max(1, int(total_tokens * bucket.share / (bucket.total - bucket.prompt)))
        rows = torch.randint(0, windows.shape[0], (count,), device=windows.device)
        parts = [generate(model, windows[part, : bucket.prompt], bucket) for part in rows.split(MAX_GENERATION_ROWS)]
        result.append(Generated(bucket, torch.cat(parts)))
        print(f"{count} continuations of {bucket} in {time.perf_counter() - start:.1f} s", flush=True)
    return result


class Batch(NamedTuple):
    """What the head learns from: embeds [B, T, H], aux [B, T, 3H], the target's logits [B, T, V], weight [B, T]."""

    embeds: torch.Tensor
    aux: torch.Tensor
    logits: torch.Tensor
    weight: torch.Tensor


@torch.no_grad()
def observe(model: LlamaForCausalLM, tokens: torch.Tensor, prompt: int, aux_layers: tuple[int, int, int]) -> Batch:
    """Run the target over tokens [B, T]; rows whose next token lies inside the prompt get no weight."""
    output = model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    aux = torch.cat([output.hidden_states[layer] for layer in aux_layers], dim=-1)
    weight = torch.ones_like(tokens, dtype=torch.float32)
    weight[:, : max(prompt - 1, 0)] = 0
    return Batch(output.hidden_states[0].float(), aux.float(), output.logits, weight)


def step_losses(head: Eagle3Head, batch: Batch, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses [steps], hits [steps, B, R]): a hit is a draft equal to the target's greedy token.

    The loss is half a cross entropy against the target's distribution, restricted to the draft vocabulary and
    normalised, and half one against its greedy token; a row whose greedy token cannot be drafted has no loss.
    """
    target_ids = head.target_ids()
    rows = batch.embeds.shape[1] - steps
    losses: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []
    for step, logits in enumerate(head.unroll(batch.embeds, batch.aux, steps)):
        wanted = batch.logits[:, 1 + step : 1 + step + rows]
        greedy = wanted.argmax(-1)
        weight = batch.weight[:, 1 + step : 1 + step + rows] * head.t2d[greedy]
        log_q = logits.float().log_softmax(-1)
        soft = -(wanted[..., target_ids].float().softmax(-1) * log_q).sum(-1)
        draft_id = torch.searchsorted(target_ids, greedy).clamp_(max=target_ids.numel() - 1)
        hard = -log_q.gather(-1, draft_id[..., None]).squeeze(-1)
        losses.append(((soft + hard) / 2 * weight).sum() / weight.sum().clamp(min=1))
        hits.append(target_ids[logits.argmax(-1)] == greedy)
    return torch.stack(losses), torch.stack(hits)


@torch.no_grad()
def teacher_forced_acceptance(
    head: Eagle3Head, model: LlamaForCausalLM, held_out: list[Generated], steps: int
) -> list[float]:
    """Acceptance per position when a draft starts at every row of greedy continuations of held-out prompts."""
    accepted, total = torch.zeros(steps, device=head.d2t.device), 0.0
    for bucket, tokens in held_out:
        for part in tokens[:256].split(64):
            batch = observe(model, part, bucket.prompt, head.config.aux_layers)
            _, hits = step_losses(head, batch, steps)
            chains = hits.int().cumprod(0)[:, :, bucket.prompt - 1 :]
            accepted += chains.sum((1, 2))
            total += chains[0].numel()
    return [round(value, 4) for value in (accepted / total).tolist()]


def frequent_tokens(generated: list[Generated], text: torch.Tensor, vocab_size: int, count: int) -> torch.Tensor:
    """The `count` tokens that the target writes most (with the corpus as a tie-break), in ascending order."""
    counts = torch.bincount(text, minlength=vocab_size) / text.numel() * 0.1
    for bucket, tokens in generated:
        written = tokens[:, bucket.prompt :].flatten()
        counts += torch.bincount(written, minlength=vocab_size) * (bucket.share / written.numel())
    return counts.topk(count).indices.sort().values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--stdlib", type=Path, default=corpus.default_stdlib())
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--figures", type=Path, default=Path("figures.json"))
    parser.add_argument("--seconds", type=float, default=170, help="training time; the schedule spans it")
    parser.add_argument("--steps", type=int, default=6, help="draft steps to unroll in training")
    parser.add_argument("--generate", type=int, default=6_000_000, help="tokens that the target writes for training")
    parser.add_argument("--batch-tokens", type=int, default=40_000, help="tokens of a training batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--corpus-share", type=float, default=0.1, help="share of batches taken from the corpus")
    parser.add_argument("--aux-layers", type=int, nargs=3, help="default: 2, n // 2 and n - 3")
    parser.add_argument("--max-files", type=int, help="use only so many files (to try the script out)")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = LlamaForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(device).eval().requires_grad_(False)
    encoder = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    layers = model.config.num_hidden_layers
    train_files, held_out_files = corpus.split(corpus.read_sources(arguments.stdlib)[: arguments.max_files])
    text = pack(encoder, train_files, device)

    start = time.perf_counter()
    longest = max(bucket.prompt for bucket in BUCKETS)
    windows = prompt_windows(encoder, train_files, longest, device)
    generated = generate_all(model, windows, BUCKETS, arguments.generate)
    held_out_windows = prompt_windows(encoder, held_out_files, longest, device)
    held_out = generate_all(model, held_out_windows, HELD_OUT_BUCKETS, arguments.generate // 16)
    rows = sum(part.tokens.shape[0] for part in generated)
    print(f"{windows.shape[0]} prompts, {rows} sequences generated in {time.perf_counter() - start:.0f} s", flush=True)

    head = Eagle3Head(
        HeadConfig(
            vocab_size=model.config.vocab_size,
            draft_vocab_size=DRAFT_VOCAB_SIZE,
            hidden_size=model.config.hidden_size,
            intermediate_size=model.config.intermediate_size,
            heads=model.config.num_attention_heads,
            kv_heads=model.config.num_key_value_heads,
            head_dim=model.config.head_dim,
            aux_layers=tuple(arguments.aux_layers or (2, layers // 2, layers - 3)),
            max_positions=model.config.max_position_embeddings,
        )
    ).to(device)
    head.set_draft_vocabulary(frequent_tokens(generated, text, model.config.vocab_size, DRAFT_VOCAB_SIZE))
    optimizer = optimizer_for(head, weight_decay=0.05)
    step_weights = STEP_WEIGHT ** torch.arange(arguments.steps, device=device)

    shares = torch.tensor([part.bucket.share for part in generated])
    start, step, next_report, progress = time.perf_counter(), 0, 0.0, 0.0
    recent = torch.zeros(arguments.steps, device=device)
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.learning_rate)
        if torch.rand(()) < arguments.corpus_share:
            prompt, tokens = 0, sample(text, max(1, arguments.batch_tokens // 512), 512)
        else:
            bucket, pool = generated[int(torch.multinomial(shares, 1))]
            count = max(1, arguments.batch_tokens // bucket.total)
            prompt, tokens = bucket.prompt, pool[torch.randint(0, pool.shape[0], (count,), device=device)]
        batch = observe(model, tokens, prompt, head.config.aux_layers)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu"):
            losses, _ = step_losses(head, batch, arguments.steps)
        (losses * step_weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent = losses.detach() if step == 1 else recent.lerp(losses.detach(), 0.02)
        if step % 10 == 0:
            recent[0].item()  # waits for the device: the clock must not run ahead of the queue
        progress = (time.perf_counter() - start) / arguments.seconds
        if progress >= next_report:
            acceptance = teacher_forced_acceptance(head, model, held_out, arguments.steps)
            per_step = " ".join(f"{loss:.3f}" for loss in recent.tolist())
            print(f"{progress:4.0%} step {step} loss {per_step} held-out acceptance {acceptance}", flush=True)
            next_report += 0.1

    head.save(arguments.out)
    head = Eagle3Head.load(arguments.out).to(device)  # report the head that is shipped
    measured = {
        "parameters": sum(p.numel() for p in head.parameters()),
        "aux_layers": list(head.config.aux_layers),
        "training_steps": step,
        "unrolled_draft_steps": arguments.steps,
        "seconds": round(time.perf_counter() - start, 1),
        "generated_sequences": rows,
        "last_train_loss_per_draft_step": [round(loss, 4) for loss in recent.tolist()],
        "teacher_forced_held_out_acceptance_per_position": teacher_forced_acceptance(
            head, model, held_out, arguments.steps
        ),
    }
    figures.record(arguments.figures, "eagle3", measured, device)
    print(measured, flush=True)


if __name__ == "__main__":
    main()
