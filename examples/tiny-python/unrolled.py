"""Training of a head that takes the target's final hidden state and is unrolled over its draft steps (EAGLE-1, MTP)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import distillation
import figures
import torch
from distillation import Batch, Outcome
from transformers import LlamaConfig


class UnrolledHead(Protocol):
    """A torch module with these two; see `Eagle1Head`."""

    def unroll(self, embeds: torch.Tensor, hidden: torch.Tensor, steps: int) -> Iterator[torch.Tensor]: ...
    def save(self, folder: Path) -> None: ...


def train(
    description: str | None,
    name: str,
    make: Callable[[LlamaConfig, torch.Tensor], UnrolledHead],
    load: Callable[[Path, torch.Tensor], UnrolledHead],
) -> None:
    """The whole script of such a head: reads the command line, writes the folder and its figures.

    Args:
        name: of its figures.
        make: an untrained head, from the target's configuration and lm_head.
        load: the head in a folder; also takes the target's lm_head.
    """
    parser = distillation.parser(description)
    parser.add_argument("--steps", type=int, default=6, help="draft steps to unroll in training")
    arguments = parser.parse_args()
    material = distillation.gather(arguments)
    model, lm_head = material.model, material.model.get_output_embeddings().weight
    head = make(model.config, lm_head).to(material.device)

    def lesson(batch: Batch) -> Outcome:
        return distillation.chain_outcome(head.unroll(batch.embeds, batch.aux, arguments.steps), batch)

    measured = distillation.fit(head, lesson, material, (), arguments)
    head.save(arguments.out)
    head = load(arguments.out, lm_head).to(material.device)  # report the head that is shipped
    measured |= {
        "unrolled_draft_steps": arguments.steps,
        "teacher_forced_held_out_acceptance_per_position": distillation.teacher_forced_acceptance(
            lesson, model, material.continuations.held_out, ()
        ),
    }
    figures.record(arguments.figures, name, measured, material.device)
    print(measured, flush=True)
