"""Training a drafter against its target: what it learns from, the loss of a draft token, and the training loop."""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import corpus
import torch
from continuations import Continuations, load, load_target, write_continuations
from tokenizers import Tokenizer
from torch import nn
from train_target import learning_rate, optimizer_for, pack, sample
from transformers import LlamaForCausalLM

STEP_WEIGHT = 0.8  # loss weight of draft token k is STEP_WEIGHT ** k


class Material(NamedTuple):
    """The target, the text that it wrote, and the tokens of the corpus in a row."""

    model: LlamaForCausalLM
    continuations: Continuations
    text: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        return self.text.device

    def draw(self, corpus_share: float, batch_tokens: int) -> tuple[torch.Tensor, int]:
        """Tokens [B, T] of about `batch_tokens` in all, from one bucket or from the corpus, and the prompt's length."""
        if torch.rand(()) < corpus_share:
            return sample(self.text, max(1, batch_tokens // 512), 512), 0
        shares = torch.tensor([part.bucket.share for part in self.continuations.train])
        bucket, pool = self.continuations.train[int(torch.multinomial(shares, 1))]
        count = max(1, batch_tokens // bucket.total)
        return pool[torch.randint(0, pool.shape[0], (count,), device=self.device)], bucket.prompt


class Batch(NamedTuple):
    """What a drafter learns from.

    tokens [B, T], whose first `prompt` the target did not write; embeds [B, T, H]; aux, hidden states of the target
    [B, T, n * H]; its logits [B, T, V]; weight [B, T], 0 where the next token lies inside the prompt.
    """

    tokens: torch.Tensor
    prompt: int
    embeds: torch.Tensor
    aux: torch.Tensor
    logits: torch.Tensor
    weight: torch.Tensor


class Outcome(NamedTuple):
    """Losses [K] of the draft tokens, and hits [K, B, R]: drafts equal to the target's greedy tokens, for R drafts that
    begin in the text that the target wrote."""

    losses: torch.Tensor
    hits: torch.Tensor


class Vocabulary(NamedTuple):
    """A draft vocabulary: ascending target ids [draft vocab], and a mask of them [vocab]."""

    target_ids: torch.Tensor
    mask: torch.Tensor


Lesson = Callable[[Batch], Outcome]


class Course(NamedTuple):
    """A drafter, and how it learns.

    `aux_layers`: of the target, whose inputs it reads; none: what follows the last norm. `held_out_lesson`: what
    acceptance is reported by, where that is not the lesson itself. `notes`: what its figures say besides.
    """

    drafter: nn.Module
    lesson: Lesson
    aux_layers: tuple[int, ...] = ()
    held_out_lesson: Lesson | None = None
    notes: Mapping[str, Any] = MappingProxyType({})


@torch.no_grad()
def observe(model: LlamaForCausalLM, tokens: torch.Tensor, prompt: int, aux_layers: tuple[int, ...]) -> Batch:
    """Run the target over tokens [B, T]. Aux state k enters layer k; none named: after the last norm."""
    output = model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    states = output.hidden_states  # the last one has gone through the final norm
    aux = torch.cat([states[layer] for layer in aux_layers or (-1,)], dim=-1)
    weight = torch.ones_like(tokens, dtype=torch.float32)
    weight[:, : max(prompt - 1, 0)] = 0
    return Batch(tokens, prompt, states[0].float(), aux.float(), output.logits, weight)


def token_loss(
    logits: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss, hits [...]) of draft logits [..., draft vocab] against the target's [..., V].

    Half a cross entropy against the target's distribution, restricted to the draft vocabulary and normalised, and half
    one against its greedy token; a row whose greedy token cannot be drafted has no loss.
    """
    greedy = draft_id = wanted.argmax(-1)
    drafted = logits.argmax(-1)
    if vocabulary is not None:
        ids = vocabulary.target_ids
        weight, wanted, drafted = weight * vocabulary.mask[greedy], wanted[..., ids], ids[drafted]
        draft_id = torch.searchsorted(ids, greedy).clamp_(max=ids.numel() - 1)
    log_q = logits.float().log_softmax(-1)
    soft = -(wanted.float().softmax(-1) * log_q).sum(-1)
    hard = -log_q.gather(-1, draft_id[..., None]).squeeze(-1)
    return ((soft + hard) / 2 * weight).sum() / weight.sum().clamp(min=1), drafted == greedy


def chain_outcome(unrolled: Iterable[torch.Tensor], batch: Batch, vocabulary: Vocabulary | None = None) -> Outcome:
    """Of draft logits [B, R, draft vocab] for each step k: row t of step k drafts the token at t + 2 + k."""
    losses: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []
    for step, logits in enumerate(unrolled):
        rows = slice(1 + step, 1 + step + logits.shape[1])
        loss, hit = token_loss(logits, batch.logits[:, rows], batch.weight[:, rows], vocabulary)
        losses.append(loss)
        hits.append(hit[:, max(batch.prompt - 1, 0) :])
    return Outcome(torch.stack(losses), torch.stack(hits))


@torch.no_grad()
def held_out_acceptance(course: Course, material: Material) -> list[float]:
    """Acceptance per position when a draft starts at every row of greedy continuations of held-out prompts."""
    lesson = course.held_out_lesson or course.lesson
    accepted: torch.Tensor | float = 0.0
    total = 0
    for bucket, tokens in material.continuations.held_out:
        for part in tokens[:256].split(64):
            batch = observe(material.model, part, bucket.prompt, course.aux_layers)
            chains = lesson(batch).hits.int().cumprod(0)
            accepted = accepted + chains.sum((1, 2))
            total += chains[0].numel()
    assert isinstance(accepted, torch.Tensor), "no held-out continuations"
    return [round(value, 4) for value in (accepted / total).tolist()]


def gather(arguments: argparse.Namespace) -> Material:
    """Load the target, and read or write what the drafter learns from."""
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = load_target(arguments.target)
    encoder = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    train_files, held_out_files = corpus.split(corpus.read_sources(arguments.stdlib)[: arguments.max_files])
    if arguments.continuations:
        written = load(arguments.continuations, model.device)
    else:
        written = write_continuations(model, encoder, train_files, held_out_files, arguments.generate)
    print(f"{written.sequences} sequences written by the target", flush=True)
    return Material(model, written, pack(encoder, train_files, model.device))


def fit(course: Course, material: Material, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train until the time is over; returns what there is to say about the training."""
    device, drafter = material.device, course.drafter
    optimizer = optimizer_for(drafter, weight_decay=0.05)
    start, step, next_report, progress = time.perf_counter(), 0, 0.0, 0.0
    recent = torch.zeros((), device=device)
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.learning_rate)
        tokens, prompt = material.draw(arguments.corpus_share, arguments.batch_tokens)
        batch = observe(material.model, tokens, prompt, course.aux_layers)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu"):
            losses = course.lesson(batch).losses
        (losses * STEP_WEIGHT ** torch.arange(losses.numel(), device=device)).sum().backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        recent = losses.detach() if step == 1 else recent.lerp(losses.detach(), 0.02)
        if step % 10 == 0:
            recent[0].item()  # waits for the device: the clock must not run ahead of the queue
        progress = (time.perf_counter() - start) / arguments.seconds
        if progress >= next_report:
            acceptance = held_out_acceptance(course, material)
            per_token = " ".join(f"{loss:.3f}" for loss in recent.tolist())
            print(f"{progress:4.0%} step {step} loss {per_token} held-out acceptance {acceptance}", flush=True)
            next_report += 0.1
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "training_steps": step,
        "seconds": round(time.perf_counter() - start, 1),
        "generated_sequences": material.continuations.sequences,
        "last_train_loss_per_draft_token": [round(loss, 4) for loss in recent.tolist()],
    }
