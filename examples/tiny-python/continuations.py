"""Text that the target writes by itself: beginnings of classes, functions and methods, continued.

All drafters learn from it. As a script it writes the text once, for several trainings to read.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import corpus
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

MAX_GENERATION_ROWS = 8192


class Bucket(NamedTuple):
    """Sequences of one shape: a prompt of `prompt` tokens, continued by the target to `total` tokens."""

    prompt: int
    total: int
    share: float  # of all generated tokens
    temperature: float = 0.0


# Mostly what is measured (short prompts, greedy); a little sampling and long contexts, so that neither is foreign.
BUCKETS = [
    *(Bucket(prompt, prompt + 160, 0.08) for prompt in range(40, 200, 16)),
    Bucket(64, 224, 0.06, temperature=1.0),
    Bucket(128, 288, 0.06, temperature=0.7),
    Bucket(400, 1000, 0.08),
]
HELD_OUT_BUCKETS = [BUCKETS[2], BUCKETS[7]]


class Generated(NamedTuple):
    """Sequences [N, total] of one bucket."""

    bucket: Bucket
    tokens: torch.Tensor


class Continuations(NamedTuple):
    """What the target writes after beginnings from the train files, and after some from the held-out files."""

    train: list[Generated]
    held_out: list[Generated]

    @property
    def sequences(self) -> int:
        """Of the train part."""
        return sum(part.tokens.shape[0] for part in self.train)


def prompt_windows(encoder: Tokenizer, sources: list[corpus.Source], limit: int, device: torch.device) -> torch.Tensor:
    """Windows [N, limit] that begin where a class, a function or a method begins; short files give none."""
    rows: list[list[int]] = []
    indentation = encoder.encode("   ").ids
    for source in sources:
        encoding = encoder.encode(source.text)
        begins = {start: index for index, (start, _) in enumerate(encoding.offsets)}
        for offset in corpus.definition_starts(source.text):
            # A method's indentation shares its token with the newline before it, and its last space goes with "def".
            prefix, index = ([], begins[offset]) if offset in begins else (indentation, begins.get(offset + 3))
            if index is not None and index + limit <= len(encoding.ids):
                rows.append((prefix + encoding.ids[index : index + limit])[:limit])
    return torch.tensor(rows, device=device)


@torch.no_grad()
def generate(model: LlamaForCausalLM, prompts: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Continue prompts [N, prompt] to [N, total], greedily or at the bucket's temperature."""
    tokens, current, cache = [prompts], prompts, None
    for _ in range(bucket.total - bucket.prompt):
        output = model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        if bucket.temperature:
            current = torch.multinomial((logits / bucket.temperature).softmax(-1), 1)
        else:
            current = logits.argmax(-1, keepdim=True)
        tokens.append(current)
    return torch.cat(tokens, dim=1)


def generate_all(
    model: LlamaForCausalLM, windows: torch.Tensor, buckets: list[Bucket], total_tokens: int
) -> list[Generated]:
    """Fill every bucket from random windows [N, 400]: a bucket of share s gets s * total_tokens new tokens."""
    result: list[Generated] = []
    for bucket in buckets:
        start = time.perf_counter()
        count = max(1, int(total_tokens * bucket.share / (bucket.total - bucket.prompt)))
        rows = torch.randint(0, windows.shape[0], (count,), device=windows.device)
        parts = [generate(model, windows[part, : bucket.prompt], bucket) for part in rows.split(MAX_GENERATION_ROWS)]
        result.append(Generated(bucket, torch.cat(parts)))
        print(f"{count} continuations of {bucket} in {time.perf_counter() - start:.1f} s", flush=True)
    return result


def write_continuations(
    model: LlamaForCausalLM,
    encoder: Tokenizer,
    train_files: list[corpus.Source],
    held_out_files: list[corpus.Source],
    total_tokens: int,
) -> Continuations:
    """Let the target write `total_tokens` for training, and a sixteenth as many from held-out beginnings."""
    longest = max(bucket.prompt for bucket in BUCKETS)
    windows = prompt_windows(encoder, train_files, longest, model.device)
    train = generate_all(model, windows, BUCKETS, total_tokens)
    held_out_windows = prompt_windows(encoder, held_out_files, longest, model.device)
    return Continuations(train, generate_all(model, held_out_windows, HELD_OUT_BUCKETS, total_tokens // 16))


def save(continuations: Continuations, file: Path) -> None:
    """Write token ids as int16, part by part in the order of the buckets."""
    parts = {
        f"{name}.{index}": part.tokens.to(torch.int16).cpu()
        for name, parts in continuations._asdict().items()
        for index, part in enumerate(parts)
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(parts, file)


def load(file: Path, device: torch.device) -> Continuations:
    """Read what save wrote."""
    parts = {name: tokens.long().to(device) for name, tokens in load_file(file).items()}
    return Continuations(
        [Generated(bucket, parts[f"train.{index}"]) for index, bucket in enumerate(BUCKETS)],
        [Generated(bucket, parts[f"held_out.{index}"]) for index, bucket in enumerate(HELD_OUT_BUCKETS)],
    )


def load_target(folder: Path) -> LlamaForCausalLM:
    """The target, frozen, on the accelerator (bfloat16) or, without one, on the CPU (float32)."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--stdlib", type=Path, default=corpus.default_stdlib())
    parser.add_argument("--out", type=Path, required=True, help="a safetensors file")
    parser.add_argument("--generate", type=int, default=6_000_000, help="tokens that the target writes for training")
    parser.add_argument("--max-files", type=int, help="use only so many files (to try the script out)")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    model = load_target(arguments.target)
    encoder = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    train_files, held_out_files = corpus.split(corpus.read_sources(arguments.stdlib)[: arguments.max_files])
    written = write_continuations(model, encoder, train_files, held_out_files, arguments.generate)
    save(written, arguments.out)
    print(f"{written.sequences} sequences in {arguments.out}")


if __name__ == "__main__":
    main()
