"""Train the EAGLE-1 head on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import distillation
import figures
from decoder import LayerSizes
from distillation import Batch, Outcome
from eagle1_head import Eagle1Config, Eagle1Head

INTERMEDIATE_SIZE = 1024


def main() -> None:
    parser = distillation.parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="draft steps to unroll in training")
    arguments = parser.parse_args()
    material = distillation.gather(arguments)
    model, lm_head = material.model, material.model.get_output_embeddings().weight
    head = Eagle1Head(
        Eagle1Config(
            layer=LayerSizes.of_target(model.config, INTERMEDIATE_SIZE),
            vocab_size=model.config.vocab_size,
            max_positions=model.config.max_position_embeddings,
        ),
        lm_head,
    ).to(material.device)

    def lesson(batch: Batch) -> Outcome:
        return distillation.chain_outcome(head.unroll(batch.embeds, batch.aux, arguments.steps), batch)

    measured = distillation.fit(head, lesson, material, (), arguments)
    head.save(arguments.out)
    head = Eagle1Head.load(arguments.out, lm_head).to(material.device)  # report the head that is shipped
    measured |= {
        "unrolled_draft_steps": arguments.steps,
        "teacher_forced_held_out_acceptance_per_position": distillation.teacher_forced_acceptance(
            lesson, model, material.continuations.held_out, ()
        ),
    }
    figures.record(arguments.figures, "eagle1", measured, material.device)
    print(measured, flush=True)


if __name__ == "__main__":
    main()
