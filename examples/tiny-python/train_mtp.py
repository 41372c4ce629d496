"""Train the MTP module on text that the target continues by itself. Writes a Hugging Face folder in float16."""

import distillation
import figures
from decoder import LayerSizes
from distillation import Batch, Outcome
from mtp_head import MtpConfig, MtpModule

INTERMEDIATE_SIZE = 1024


def main() -> None:
    parser = distillation.parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="draft steps to unroll in training")
    arguments = parser.parse_args()
    material = distillation.gather(arguments)
    model, lm_head = material.model, material.model.get_output_embeddings().weight
    module = MtpModule(
        MtpConfig(
            layer=LayerSizes.of_target(model.config, INTERMEDIATE_SIZE),
            vocab_size=model.config.vocab_size,
            max_positions=model.config.max_position_embeddings,
            target_layers=model.config.num_hidden_layers,
        ),
        lm_head,
    ).to(material.device)

    def lesson(batch: Batch) -> Outcome:
        return distillation.chain_outcome(module.unroll(batch.embeds, batch.aux, arguments.steps), batch)

    measured = distillation.fit(module, lesson, material, (), arguments)
    module.save(arguments.out)
    module = MtpModule.load(arguments.out, lm_head).to(material.device)  # report the module that is shipped
    measured |= {
        "unrolled_draft_steps": arguments.steps,
        "teacher_forced_held_out_acceptance_per_position": distillation.teacher_forced_acceptance(
            lesson, model, material.continuations.held_out, ()
        ),
    }
    figures.record(arguments.figures, "mtp", measured, material.device)
    print(measured, flush=True)


if __name__ == "__main__":
    main()
