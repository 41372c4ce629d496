"""Lets a target answer prompts, and writes its hidden states in the format that `speculators train` reads.

    python examples/training/hidden_states.py TARGET --prompts PROMPTS.jsonl --out DATA

TARGET is the folder of a model with any architecture that specgraph runs. PROMPTS.jsonl holds {"prompt": TEXT} per
line. DATA becomes a dataset of speculators 0.9: token ids, the mask of the answers' tokens, and counts of these tokens.
DATA/hidden_states has a file per text with the states of four layers. The script needs the package `datasets`.
docs/training.md has the next steps.
"""

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from lesson import default_layers
from safetensors.torch import save_file
from target_pass import TargetPass, Text, answer, asked_of, asking, read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking(parser, max_tokens=256, max_model_len=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layers", type=int, nargs=3, help="that the drafter reads; default: 2, the middle, last - 3")
    arguments = parser.parse_args()
    if find_spec("datasets") is None:
        parser.error("what it writes is a dataset: pip install datasets")
    asked = asked_of(arguments)
    texts = answer(asked, [read_prompts(arguments.prompts)], [arguments.temperature])[0]
    target = TargetPass(asked.target, asked.platform, asked.dtype)
    write_dataset(texts, target.model.vocab_size, arguments.out)
    folder = arguments.out / "hidden_states"
    folder.mkdir(exist_ok=True)
    for number, states in enumerate(hidden_states(target, texts, arguments.layers)):
        held = {"hidden_states": states, "token_ids": torch.tensor(texts[number].tokens)}
        save_file(held, folder / f"hs_{number}.safetensors")
    new = sum(len(text.tokens) - text.prompt for text in texts)
    print(f"{arguments.out}: {len(texts)} texts, {new} tokens of answers")


def write_dataset(texts: Sequence[Text], vocab_size: int, out: Path) -> None:
    """Write token ids, the mask of the answers, and the count of each token in the answers."""
    import datasets

    counts, rows = torch.zeros(vocab_size, dtype=torch.int64), list[dict[str, object]]()
    for tokens, prompt in texts:
        mask = [0] * prompt + [1] * (len(tokens) - prompt)
        rows.append({"input_ids": tokens, "loss_mask": mask, "seq_len": len(tokens)})
        counts += torch.bincount(torch.tensor(tokens[prompt:], dtype=torch.int64), minlength=vocab_size)
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(out)
    torch.save({token: count for token, count in enumerate(counts.tolist()) if count}, out / "token_freq.pt")


def hidden_states(target: TargetPass, texts: Sequence[Text], chosen: Sequence[int] | None) -> Iterator[torch.Tensor]:
    """Yield the states of each text, [T, 4, hidden_size]: the inputs of three layers, and the last layer's output.

    The last one is not normalised: `speculators` applies the final norm itself.
    """
    layers = [*(chosen or default_layers(target.sizes.num_layers)), target.sizes.num_layers]
    for text in texts:
        states = target.forward(torch.tensor([text.tokens], device=target.device), layers)[1]
        yield torch.cat(states).transpose(0, 1).cpu().contiguous()


if __name__ == "__main__":
    main()
