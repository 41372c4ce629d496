"""Have SmolLM2 answer prompts, and train an EAGLE-3, DFlash or DSpark head on the answers.

    python examples/smollm2/train.py MODEL.gguf --prompts PROMPTS.pt --out OUT [--kind dflash|dspark]

OUT/answers.pt holds what the target wrote; a folder that has it writes nothing again. OUT/KIND is the head, of kind
eagle3 by default, saved every minute. The same command continues from OUT/KIND.pt what was broken off; `--begin FOLDER`
begins from another head.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "training"))  # where the heads and their training are
from lesson import Texts, teach, training_arguments
from target import STOP, Answers, Prompt, Target

LONGEST = 544
"""Tokens of a prompt and its answer."""
MOST_NEW = 160
"""Tokens of an answer. A model of this size repeats itself in longer ones, which are then drafted right nearly always:
a head that learned from 384 tokens spent most of its training on that, and its acceptance there said little."""
MASK = 4
"""The token <file_sep>, which no prompt and no answer has: the masks of a block."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a GGUF file or folder")
    parser.add_argument("--prompts", type=Path, required=True, help="written by prompts.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--generate-seconds", type=float, default=90, help="no prompt is begun after that time")
    parser.add_argument("--rows", type=int, default=1024, help="prompts that are answered at once")
    parser.add_argument("--draft-vocab", type=int, default=12288, help="tokens that the head can draft")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    arguments = training_arguments(parser, seconds=300)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each of many shapes anew
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    target = Target(arguments.target, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    arguments.out.mkdir(parents=True, exist_ok=True)
    train, held_out = written(target, arguments)
    keys = {"mask_token_id": MASK, "bos_token_id": 1, "eos_token_id": STOP}
    teach(target, train, held_out, arguments.draft_vocab, arguments, **keys)


def written(target: Target, arguments: argparse.Namespace) -> tuple[Texts, Texts]:
    """Return the texts to train on, and those that are held out; the target answers the prompts where none are there.

    The file of prompts holds lists of token ids, "train" and "held_out". Of the first, every prompt is answered
    greedily, and again at temperature 0.7; held-out ones greedily.
    """
    path = arguments.out / "answers.pt"
    if not path.exists():
        prompts = torch.load(arguments.prompts)
        rows = min(arguments.rows, 64) if target.device.type == "cpu" else arguments.rows
        answers = Answers(target, rows, LONGEST, top_p=0.95)
        parts: dict[str, Texts] = {}
        for name in ("held_out", "train"):
            lists = prompts[name][: arguments.limit]
            asked = [Prompt(each, 0.0) for each in lists]
            if name == "train":
                asked += [Prompt(each, 0.7) for each in lists]
                asked = [asked[i] for i in torch.randperm(len(asked)).tolist()]
            start = time.perf_counter()
            texts = answers.answer(asked, MOST_NEW, arguments.generate_seconds)
            took = time.perf_counter() - start
            lengths = torch.tensor([0, *(len(text) for _, text in texts)])
            tokens = torch.tensor([token for _, text in texts for token in text], dtype=torch.int32)
            sizes = torch.tensor([len(asked[index].tokens) for index, _ in texts])
            parts[name] = Texts(tokens.to(torch.uint16), lengths.cumsum(0), sizes)
            new = tokens.numel() - int(sizes.sum())
            print(f"{name}: {len(texts)} of {len(asked)} answers, {new} tokens in {took:.1f} s", flush=True)
        del answers
        torch.save({name: tuple(part) for name, part in parts.items()}, path)
    parts = {name: Texts(part[0].to(torch.int32), *part[1:]) for name, part in torch.load(path).items()}
    return parts["train"], parts["held_out"]


if __name__ == "__main__":
    main()
