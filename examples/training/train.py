"""Lets a target answer prompts, and trains an EAGLE-3, DFlash or DSpark head on the answers.

    python examples/training/train.py TARGET --prompts PROMPTS.jsonl --chat --out OUT
    specgraph generate --target TARGET --draft OUT/eagle3 --chat --prompt "Hello"

TARGET is any target that specgraph loads, on any of its platforms. OUT/answers.pt holds the answers; if it exists, no
answers are generated. OUT/KIND is the head (OUT/eagle3 by default), saved every minute. If the training is interrupted,
the same command continues from OUT/KIND.pt. `--begin FOLDER` begins with the weights of another head.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from lesson import Texts, teach, training_arguments
from specgraph_models.checkpoints import target_shape
from target_pass import TargetPass, Text, answer, asked_of, asking, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking(parser, max_tokens=160, max_model_len=544)
    parser.add_argument("--held-out", type=Path, help="prompts to measure with; default: every 20th of --prompts")
    parser.add_argument("--temperature", type=float, default=0.7, help="of a second answer to each prompt; 0: none")
    parser.add_argument("--generate-seconds", type=float, default=120, help="no prompts are begun after that time")
    parser.add_argument("--draft-vocab-size", type=int, help="tokens that the head can draft; default: a quarter")
    arguments = training_arguments(parser, seconds=400)
    asked = asked_of(arguments)
    vocab_size = target_shape(asked.target).vocab_size
    given = arguments.draft_vocab_size
    drafted = min(32000, -(-vocab_size // 4)) if given is None else given
    if not 1 <= drafted <= vocab_size:
        parser.error(f"--draft-vocab-size {drafted}: the target has {vocab_size} tokens")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "answers.pt"
    if not path.exists():
        prompts = read_prompts(arguments.prompts)
        if arguments.held_out is None:
            held_out, prompts = prompts[::20], [each for i, each in enumerate(prompts) if i % 20]
        else:
            held_out = read_prompts(arguments.held_out)
        lists, temperatures = [held_out, prompts], [0.0, 0.0]
        if arguments.temperature > 0:
            lists, temperatures = [*lists, prompts], [*temperatures, arguments.temperature]
        parts = answer(asked, lists, temperatures, arguments.generate_seconds)
        torch.save([[tuple(text) for text in part] for part in parts], path)
    held_out, *parts = [[Text(*text) for text in part] for part in torch.load(path)]
    train = [text for part in parts for text in part]
    if not held_out or not train:
        path.unlink()
        parser.error(f"{len(train)} answers to train on, {len(held_out)} to measure with: give more or shorter prompts")
    target = TargetPass(asked.target, asked.platform, asked.dtype)
    teach(target, joined(train), joined(held_out), drafted, arguments)


def joined(texts: Sequence[Text]) -> Texts:
    """Return the texts concatenated."""
    tokens = torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32)
    begins = torch.tensor([0, *(len(text.tokens) for text in texts)]).cumsum(0)
    return Texts(tokens, begins, torch.tensor([text.prompt for text in texts]))


if __name__ == "__main__":
    main()
