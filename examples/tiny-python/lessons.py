"""The lessons of the drafters: text that the target wrote, the loss of a draft token, and each drafter's own course."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from chain_heads import Eagle1Head, Eagle3Head, MtpModule
from dflash_head import DFlashHead
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

EXAMPLE = Path(__file__).parent
PAIR = EXAMPLE.parents[1] / "specgraph" / "pairs" / "tiny-python"
"""The shipped models, whose sizes the trained ones take."""
UNROLLED = 6
"""Draft steps of a chain in training."""
TOKENS_PER_BLOCK = 7


class Bucket(NamedTuple):
    """Texts of one shape: a prompt of `prompt` tokens, continued by the target to `total` tokens."""

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


class Generated(NamedTuple):
    """Texts [N, total] of one bucket."""

    bucket: Bucket
    tokens: torch.Tensor


class Material(NamedTuple):
    """The target, what it wrote after beginnings from the train files and from held-out files, and the corpus."""

    model: LlamaForCausalLM
    written: list[Generated]
    held_out: list[Generated]
    text: torch.Tensor


class Batch(NamedTuple):
    """The tensors that a drafter learns from.

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


class Course(NamedTuple):
    """A drafter, and how it learns.

    `aux_layers`: of the target, whose inputs it reads; none: what follows the last norm. `held_out_lesson`: what
    acceptance is reported by, where that is not the lesson itself.
    """

    drafter: nn.Module
    save: Callable[[Path], None]
    lesson: Callable[[Batch], Outcome]
    aux_layers: tuple[int, ...] = ()
    held_out_lesson: Callable[[Batch], Outcome] | None = None


def untrained_llama(folder: Path) -> LlamaForCausalLM:
    """Return a Llama of the sizes that a folder has, with random weights."""
    return LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).float()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (float16; the tied lm_head is not stored)."""
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, do_sample=False)
    model.to(torch.float16).save_pretrained(folder)


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
    logits: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor, draft_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (mean loss, hits [...]) of draft logits [..., draft vocab] against the target's [..., V].

    Half a cross entropy against the target's distribution, restricted to the draft vocabulary `draft_ids` (ascending
    target ids) and normalised, and half one against its greedy token; a row whose greedy token cannot be drafted has no
    loss.
    """
    greedy = draft_id = wanted.argmax(-1)
    drafted = logits.argmax(-1)
    if draft_ids is not None:
        draft_id = torch.searchsorted(draft_ids, greedy).clamp_(max=draft_ids.numel() - 1)
        weight, wanted, drafted = weight * (draft_ids[draft_id] == greedy), wanted[..., draft_ids], draft_ids[drafted]
    log_q = logits.float().log_softmax(-1)
    soft = -(wanted.float().softmax(-1) * log_q).sum(-1)
    hard = -log_q.gather(-1, draft_id[..., None]).squeeze(-1)
    return ((soft + hard) / 2 * weight).sum() / weight.sum().clamp(min=1), drafted == greedy


def chain_outcome(unrolled: Iterable[torch.Tensor], batch: Batch, draft_ids: torch.Tensor | None = None) -> Outcome:
    """Return the outcome of draft logits [B, R, draft vocab] for each step k: row t drafts the token at t + 2 + k."""
    losses: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []
    for step, logits in enumerate(unrolled):
        rows = slice(1 + step, 1 + step + logits.shape[1])
        loss, hit = token_loss(logits, batch.logits[:, rows], batch.weight[:, rows], draft_ids)
        losses.append(loss)
        hits.append(hit[:, max(batch.prompt - 1, 0) :])
    return Outcome(torch.stack(losses), torch.stack(hits))


@torch.no_grad()
def held_out_acceptance(course: Course, material: Material) -> list[float]:
    """Return the acceptance per position when a draft starts at every row of greedy texts after held-out prompts."""
    lesson = course.held_out_lesson or course.lesson
    chains: list[torch.Tensor] = []
    for bucket, tokens in material.held_out:
        for part in tokens[:256].split(64):
            batch = observe(material.model, part, bucket.prompt, course.aux_layers)
            chains.append(lesson(batch).hits.int().cumprod(0).flatten(1))
    return [round(share, 4) for share in torch.cat(chains, dim=1).float().mean(1).tolist()]


def final_state_head(head_type: type[Eagle1Head] | type[MtpModule], name: str, material: Material) -> Course:
    """Return the course of a head that takes the target's final hidden state."""
    model = material.model
    head = head_type.untrained(EXAMPLE / "drafters" / name, model.get_output_embeddings().weight).to(model.device)

    def lesson(batch: Batch) -> Outcome:
        return chain_outcome(head.unroll(batch.embeds, batch.aux, UNROLLED), batch)

    return Course(head, head.save, lesson)


def eagle3(material: Material) -> Course:
    """Return the course of the EAGLE-3 head, which drafts the tokens that the target writes most."""
    vocab_size = material.model.config.vocab_size
    head = Eagle3Head.untrained(PAIR / "eagle3").to(material.model.device)
    counts = torch.bincount(material.text, minlength=vocab_size) / material.text.numel() * 0.1  # for ties
    for bucket, tokens in material.written:
        written = tokens[:, bucket.prompt :].flatten()
        counts += torch.bincount(written, minlength=vocab_size) * (bucket.share / written.numel())
    head.set_draft_vocabulary(counts.topk(head.d2t.numel()).indices.sort().values)

    def lesson(batch: Batch) -> Outcome:
        return chain_outcome(head.unroll(batch.embeds, batch.aux, UNROLLED), batch, head.target_ids())

    return Course(head, head.save, lesson, head.aux_layers)


def dflash(material: Material) -> Course:
    """Return the course of the DFlash head, on blocks at random places."""
    embedding = material.model.get_input_embeddings().weight
    head = DFlashHead.untrained(EXAMPLE / "drafters/dflash", embedding).to(embedding.device)
    most = head.config["block_size"] - 1

    def lesson(batch: Batch) -> Outcome:
        """Every second batch has fewer masks, because a smaller K must work too."""
        places = torch.arange(max(batch.prompt, 1), batch.tokens.shape[1] - most, device=batch.tokens.device)
        count = max(1, batch.tokens.shape[1] // TOKENS_PER_BLOCK)
        anchors = places[torch.randperm(places.numel(), device=places.device)[:count]].sort().values
        drafts = most if torch.rand(()) < 0.5 else int(torch.randint(1, most + 1, ()))
        outcome = blocks_outcome(head, batch, anchors, drafts)
        return Outcome(torch.cat([outcome.losses, outcome.losses.new_zeros(most - drafts)]), outcome.hits)

    def held_out_lesson(batch: Batch) -> Outcome:
        """A block begins after every token that the target wrote."""
        anchors = torch.arange(batch.prompt, batch.tokens.shape[1] - most, device=batch.tokens.device)
        return blocks_outcome(head, batch, anchors, most)

    return Course(head, head.save, lesson, head.aux_layers, held_out_lesson)


def blocks_outcome(head: DFlashHead, batch: Batch, anchors: torch.Tensor, drafts: int) -> Outcome:
    """Return losses and hits of blocks of `drafts` masks after the anchors [A].

    Draft i counts only where the text up to it is what the target would write greedily: only then is its place reached.
    """
    logits = head(batch.tokens, batch.aux, anchors, drafts)
    before = anchors[:, None] + torch.arange(drafts, device=anchors.device)  # the token before each draft
    wanted = batch.logits[:, before]
    greedy = wanted.argmax(-1) == batch.tokens[:, before + 1]
    reached = torch.cat([torch.ones_like(greedy[..., :1]), greedy[..., :-1]], dim=-1).int().cumprod(-1)
    weight = batch.weight[:, before] * reached
    pairs = [token_loss(logits[:, :, i], wanted[:, :, i], weight[:, :, i]) for i in range(drafts)]
    return Outcome(torch.stack([loss for loss, _ in pairs]), torch.stack([hit for _, hit in pairs]))


def draft_model(material: Material) -> Course:
    """Return the course of a Llama of about 0.94 million parameters with the target's vocabulary and positions."""
    drafter = untrained_llama(EXAMPLE / "drafters/draft-model").to(material.model.device)

    def lesson(batch: Batch) -> Outcome:
        """Texts come without their first token, as other drafters' rows begin; in drafting the model sees it too."""
        logits = drafter(input_ids=batch.tokens[:, 1:], use_cache=False).logits
        loss, hits = token_loss(logits, batch.logits[:, 1:], batch.weight[:, 1:])
        rows, begin = hits.shape[1] - UNROLLED + 1, max(batch.prompt - 1, 0)
        return Outcome(loss[None], torch.stack([hits[:, k : k + rows][:, begin:] for k in range(UNROLLED)]))

    return Course(drafter, lambda folder: save(drafter, folder), lesson)


COURSES: dict[str, Callable[[Material], Course]] = {
    "eagle3": eagle3,
    "eagle1": partial(final_state_head, Eagle1Head, "eagle1"),
    "mtp": partial(final_state_head, MtpModule, "mtp"),
    "dflash": dflash,
    "draft-model": draft_model,
}
