"""Train a drafter on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import distillation
import figures
import torch
from chain_heads import Eagle1Head, Eagle3Head, MtpModule
from continuations import Generated
from dflash_head import DFlashHead
from distillation import Batch, Course, Material, Outcome, Vocabulary
from train_target import config as llama
from train_target import save
from transformers import LlamaForCausalLM

DRAFT_VOCAB_SIZE = 1024
TOKENS_PER_ANCHOR = 7


def unrolled(head_type: type[Eagle1Head] | type[MtpModule]) -> Callable[[Material, argparse.Namespace], Course]:
    """A head that takes the target's final hidden state, unrolled over its draft steps."""

    def make(material: Material, arguments: argparse.Namespace) -> Course:
        model = material.model
        head = head_type(head_type.config_for(model.config), model.get_output_embeddings().weight).to(material.device)

        def lesson(batch: Batch) -> Outcome:
            return distillation.chain_outcome(head.unroll(batch.embeds, batch.aux, arguments.steps), batch)

        return Course(head, lesson, notes={"unrolled_draft_steps": arguments.steps})

    return make


def eagle3(material: Material, arguments: argparse.Namespace) -> Course:
    """The EAGLE-3 head, unrolled over its draft steps."""
    target = material.model.config
    layers = target.num_hidden_layers
    aux_layers = arguments.aux_layers or [2, layers // 2, layers - 3]
    head = Eagle3Head(Eagle3Head.config_for(target, DRAFT_VOCAB_SIZE, aux_layers)).to(material.device)
    text, written = material.text, material.continuations.train
    head.set_draft_vocabulary(frequent_tokens(written, text, target.vocab_size, DRAFT_VOCAB_SIZE))

    def lesson(batch: Batch) -> Outcome:
        logits = head.unroll(batch.embeds, batch.aux, arguments.steps)
        return distillation.chain_outcome(logits, batch, Vocabulary(head.target_ids(), head.t2d))

    notes = {"aux_layers": aux_layers, "unrolled_draft_steps": arguments.steps}
    return Course(head, lesson, head.aux_layers, notes=notes)


def frequent_tokens(generated: list[Generated], text: torch.Tensor, vocab_size: int, count: int) -> torch.Tensor:
    """The `count` tokens that the target writes most (with the corpus as a tie-break), in ascending order."""
    counts = torch.bincount(text, minlength=vocab_size) / text.numel() * 0.1
    for bucket, tokens in generated:
        written = tokens[:, bucket.prompt :].flatten()
        counts += torch.bincount(written, minlength=vocab_size) * (bucket.share / written.numel())
    return counts.topk(count).indices.sort().values


def dflash(material: Material, arguments: argparse.Namespace) -> Course:
    """The DFlash head, on blocks at random places."""
    config = DFlashHead.config_for(material.model.config, arguments.target_layer_ids, arguments.block_size)
    head = DFlashHead(config, material.model.get_input_embeddings().weight).to(material.device)
    most = arguments.block_size - 1

    def lesson(batch: Batch) -> Outcome:
        """Blocks at random places; every second batch has fewer masks, because a smaller K must work too."""
        first = max(batch.prompt, 1)
        places = torch.arange(first, batch.tokens.shape[1] - most, device=batch.tokens.device)
        count = max(1, batch.tokens.shape[1] // TOKENS_PER_ANCHOR)
        anchors = places[torch.randperm(places.numel(), device=places.device)[:count]].sort().values
        drafts = most if torch.rand(()) < 0.5 else int(torch.randint(1, most + 1, ()))
        outcome = blocks_outcome(head, batch, anchors, drafts)
        losses = torch.cat([outcome.losses, outcome.losses.new_zeros(most - drafts)])
        return Outcome(losses, outcome.hits)

    def held_out_lesson(batch: Batch) -> Outcome:
        """A block after every token that the target wrote."""
        last = batch.tokens.shape[1] - most
        anchors = torch.arange(batch.prompt, last, device=batch.tokens.device)
        return blocks_outcome(head, batch, anchors, most)

    notes = {"target_layer_ids": arguments.target_layer_ids, "block_size": arguments.block_size}
    return Course(head, lesson, head.aux_layers, held_out_lesson, notes=notes)


def blocks_outcome(head: DFlashHead, batch: Batch, anchors: torch.Tensor, drafts: int) -> Outcome:
    """Losses and hits of blocks of `drafts` masks after the anchors [A].

    Draft i counts only where the text up to it is what the target would write greedily: only then is its place reached.
    """
    logits = head(batch.tokens, batch.aux, anchors, drafts)
    before = anchors[:, None] + torch.arange(drafts, device=anchors.device)  # the token before each draft
    wanted = batch.logits[:, before]
    greedy = wanted.argmax(-1) == batch.tokens[:, before + 1]
    reached = torch.cat([torch.ones_like(greedy[..., :1]), greedy[..., :-1]], dim=-1).int().cumprod(-1)
    weight = batch.weight[:, before] * reached
    pairs = [distillation.token_loss(logits[:, :, i], wanted[:, :, i], weight[:, :, i]) for i in range(drafts)]
    return Outcome(torch.stack([loss for loss, _ in pairs]), torch.stack([hit for _, hit in pairs]))


def draft_model(material: Material, arguments: argparse.Namespace) -> Course:
    """A Llama of about 0.94 million parameters with the target's vocabulary and positions."""
    sizes = {"hidden_size": 160, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1}
    drafter = LlamaForCausalLM(llama(vocab_size=material.model.config.vocab_size, **sizes)).to(material.device)

    def lesson(batch: Batch) -> Outcome:
        """Texts without their first token, as other drafters' rows begin; in drafting the model sees that one too."""
        logits = drafter(input_ids=batch.tokens[:, 1:], use_cache=False).logits
        loss, hits = distillation.token_loss(logits, batch.logits[:, 1:], batch.weight[:, 1:])
        rows = hits.shape[1] - arguments.steps + 1
        starts = range(arguments.steps)
        begin = max(batch.prompt - 1, 0)
        return Outcome(loss[None], torch.stack([hits[:, k : k + rows][:, begin:] for k in starts]))

    return Course(drafter, lesson)


COURSES: dict[str, Callable[[Material, argparse.Namespace], Course]] = {
    "eagle1": unrolled(Eagle1Head),
    "eagle3": eagle3,
    "mtp": unrolled(MtpModule),
    "dflash": dflash,
    "draft-model": draft_model,
}


def write(drafter: torch.nn.Module, folder: Path) -> None:
    """Write the folder, and take the values that it holds: the figures are those of the drafter that is shipped."""
    if isinstance(drafter, LlamaForCausalLM):
        save(drafter, folder)
        drafter.float()
    else:
        drafter.save(folder)
        drafter.read(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", choices=COURSES)
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--stdlib", type=Path, default=corpus.default_stdlib())
    parser.add_argument("--continuations", type=Path, help="what continuations.py wrote; otherwise it is written anew")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafter")
    parser.add_argument("--figures", type=Path, default=Path("figures.json"))
    parser.add_argument("--seconds", type=float, default=70, help="training time; the schedule spans it")
    parser.add_argument("--generate", type=int, default=6_000_000, help="tokens that the target writes for training")
    parser.add_argument("--batch-tokens", type=int, default=40_000, help="tokens of a training batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--corpus-share", type=float, default=0.1, help="share of batches taken from the corpus")
    parser.add_argument("--max-files", type=int, help="use only so many files (to try the script out)")
    parser.add_argument("--steps", type=int, default=6, help="draft steps to unroll, or to report acceptance for")
    parser.add_argument("--aux-layers", type=int, nargs=3, help="of eagle3; default: 2, n // 2 and n - 3")
    parser.add_argument("--block-size", type=int, default=8, help="of dflash: the last token and the masks")
    parser.add_argument("--target-layer-ids", type=int, nargs="+", default=[1, 4, 6], help="of dflash: whose outputs")
    arguments = parser.parse_args()
    material = distillation.gather(arguments)
    course = COURSES[arguments.drafter](material, arguments)
    measured: dict[str, Any] = distillation.fit(course, material, arguments)
    write(course.drafter, arguments.out)
    if course.held_out_lesson is not None:
        del measured["last_train_loss_per_draft_token"]  # of dflash: later drafts are not in every batch
    measured |= course.notes
    measured["teacher_forced_held_out_acceptance_per_position"] = distillation.held_out_acceptance(course, material)
    figures.record(arguments.figures, arguments.drafter, measured, material.device)
    print(measured, flush=True)


if __name__ == "__main__":
    main()
