"""Train a small Llama to draft for the target, on text that the target continues by itself. Writes it in float16."""

import distillation
import figures
import torch
from distillation import Batch, Outcome
from train_target import save
from transformers import LlamaConfig, LlamaForCausalLM


def config(target: LlamaConfig) -> LlamaConfig:
    """About 0.94 million parameters, with the target's vocabulary and positions."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=160,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def main() -> None:
    parser = distillation.parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="draft tokens for which acceptance is reported")
    arguments = parser.parse_args()
    material = distillation.gather(arguments)
    drafter = LlamaForCausalLM(config(material.model.config)).to(material.device)

    def lesson(batch: Batch) -> Outcome:
        """Texts without their first token, as other drafters' rows begin; in drafting the model sees that one too."""
        logits = drafter(input_ids=batch.tokens[:, 1:], use_cache=False).logits
        loss, hits = distillation.token_loss(logits, batch.logits[:, 1:], batch.weight[:, 1:])
        rows = hits.shape[1] - arguments.steps + 1
        starts = range(arguments.steps)
        begin = max(batch.prompt - 1, 0)
        return Outcome(loss[None], torch.stack([hits[:, k : k + rows][:, begin:] for k in starts]))

    measured = distillation.fit(drafter, lesson, material, (), arguments)
    save(drafter, arguments.out)
    drafter = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32).to(material.device).eval()
    measured["teacher_forced_held_out_acceptance_per_position"] = distillation.teacher_forced_acceptance(
        lesson, material.model, material.continuations.held_out, ()
    )
    figures.record(arguments.figures, "draft-model", measured, material.device)
    print(measured, flush=True)


if __name__ == "__main__":
    main()
