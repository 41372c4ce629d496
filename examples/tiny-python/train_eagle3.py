"""Train the EAGLE-3 head on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import distillation
import figures
import torch
from continuations import Generated
from decoder import LayerSizes
from distillation import Batch, Outcome, Vocabulary
from eagle3_head import Eagle3Head, HeadConfig

DRAFT_VOCAB_SIZE = 1024


def frequent_tokens(generated: list[Generated], text: torch.Tensor, vocab_size: int, count: int) -> torch.Tensor:
    """The `count` tokens that the target writes most (with the corpus as a tie-break), in ascending order."""
    counts = torch.bincount(text, minlength=vocab_size) / text.numel() * 0.1
    for bucket, tokens in generated:
        written = tokens[:, bucket.prompt :].flatten()
        counts += torch.bincount(written, minlength=vocab_size) * (bucket.share / written.numel())
    return counts.topk(count).indices.sort().values


def main() -> None:
    parser = distillation.parser(__doc__, seconds=170)
    parser.add_argument("--steps", type=int, default=6, help="draft steps to unroll in training")
    parser.add_argument("--aux-layers", type=int, nargs=3, help="default: 2, n // 2 and n - 3")
    arguments = parser.parse_args()
    material = distillation.gather(arguments)
    model, layers = material.model, material.model.config.num_hidden_layers
    head = Eagle3Head(
        HeadConfig(
            layer=LayerSizes.of_target(model.config),
            vocab_size=model.config.vocab_size,
            draft_vocab_size=DRAFT_VOCAB_SIZE,
            aux_layers=tuple(arguments.aux_layers or (2, layers // 2, layers - 3)),
            max_positions=model.config.max_position_embeddings,
        )
    ).to(material.device)
    aux_layers = head.config.aux_layers
    head.set_draft_vocabulary(
        frequent_tokens(material.continuations.train, material.text, model.config.vocab_size, DRAFT_VOCAB_SIZE)
    )

    def lesson(batch: Batch) -> Outcome:
        unrolled = head.unroll(batch.embeds, batch.aux, arguments.steps)
        return distillation.chain_outcome(unrolled, batch, Vocabulary(head.target_ids(), head.t2d))

    measured = distillation.fit(head, lesson, material, aux_layers, arguments)
    head.save(arguments.out)
    head = Eagle3Head.load(arguments.out).to(material.device)  # report the head that is shipped
    measured |= {
        "aux_layers": list(aux_layers),
        "unrolled_draft_steps": arguments.steps,
        "teacher_forced_held_out_acceptance_per_position": distillation.teacher_forced_acceptance(
            lesson, model, material.continuations.held_out, aux_layers
        ),
    }
    figures.record(arguments.figures, "eagle3", measured, material.device)
    print(measured, flush=True)


if __name__ == "__main__":
    main()
