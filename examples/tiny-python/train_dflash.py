"""Train the DFlash head on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import distillation
import figures
import torch
from decoder import LayerSizes
from dflash_head import DFlashConfig, DFlashHead
from distillation import Batch, Outcome

LAYERS, INTERMEDIATE_SIZE = 3, 320
MASK_TOKEN_ID = 0  # <|endoftext|>: no block begins with it, because it ends the text
TOKENS_PER_ANCHOR = 7


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


def main() -> None:
    parser = distillation.parser(__doc__)
    parser.add_argument("--block-size", type=int, default=8, help="rows of a block: the last token and the masks")
    parser.add_argument("--target-layer-ids", type=int, nargs="+", default=[1, 4, 6], help="whose outputs it reads")
    arguments = parser.parse_args()
    material = distillation.gather(arguments)
    model, embedding = material.model, material.model.get_input_embeddings().weight
    head = DFlashHead(
        DFlashConfig(
            layer=LayerSizes.of_target(model.config, INTERMEDIATE_SIZE),
            layers=LAYERS,
            vocab_size=model.config.vocab_size,
            max_positions=model.config.max_position_embeddings,
            target_layer_ids=tuple(arguments.target_layer_ids),
            block_size=arguments.block_size,
            mask_token_id=MASK_TOKEN_ID,
        ),
        embedding,
    ).to(material.device)
    most, aux_layers = arguments.block_size - 1, head.config.aux_layers

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

    measured = distillation.fit(head, lesson, material, aux_layers, arguments, held_out_lesson)
    del measured["last_train_loss_per_draft_token"]  # later drafts are not in every batch
    head.save(arguments.out)
    head = DFlashHead.load(arguments.out, embedding).to(material.device)  # report the head that is shipped
    measured |= {
        "target_layer_ids": list(head.config.target_layer_ids),
        "block_size": arguments.block_size,
        "teacher_forced_held_out_acceptance_per_position": distillation.teacher_forced_acceptance(
            held_out_lesson, model, material.continuations.held_out, aux_layers
        ),
    }
    figures.record(arguments.figures, "dflash", measured, material.device)
    print(measured, flush=True)


if __name__ == "__main__":
    main()
