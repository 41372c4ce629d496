"""Write prompts.jsonl: how functions, methods and classes of the held-out files begin."""

import argparse
import hashlib
import json
from pathlib import Path

import corpus
from tokenizers import Tokenizer

MIN_TOKENS, MAX_TOKENS = 40, 200


def cut(encoder: Tokenizer, text: str, start: int, wanted: int) -> str | None:
    """Whole lines from `start` until they hold `wanted` tokens, without the last newline; None if they don't fit."""
    end = start
    while (end := text.find("\n", end + 1)) != -1:
        prompt = text[start:end].rstrip()
        tokens = len(encoder.encode(prompt).ids)
        if tokens >= wanted:
            return prompt if MIN_TOKENS <= tokens <= MAX_TOKENS else None
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--stdlib", type=Path, default=corpus.default_stdlib())
    parser.add_argument("--out", type=Path, default=Path("prompts.jsonl"))
    parser.add_argument("--count", type=int, default=64)
    arguments = parser.parse_args()

    encoder = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    _, held_out = corpus.split(corpus.read_sources(arguments.stdlib))
    found: list[tuple[int, str, corpus.Source, str]] = []
    for source in held_out:
        candidates: list[tuple[str, str]] = []
        for start in corpus.definition_starts(source.text):
            order = hashlib.sha256(f"{source.path}:{start}".encode()).hexdigest()
            wanted = MIN_TOKENS + int(order[:8], 16) % 120
            if (prompt := cut(encoder, source.text, start, wanted)) is not None:
                candidates.append((order, prompt))
        # One prompt of every file comes before the second of any file.
        found += [(turn, order, source, prompt) for turn, (order, prompt) in enumerate(sorted(candidates))]
    found.sort(key=lambda item: (item[0], item[1]))
    if len(found) < arguments.count:
        raise SystemExit(f"asked for {arguments.count} prompts, the held-out files give {len(found)}")
    with arguments.out.open("w", encoding="utf-8") as file:
        for index, (_, _, source, prompt) in enumerate(found[: arguments.count]):
            file.write(json.dumps({"id": f"{index:03d}", "text": prompt, "source": source.path}) + "\n")
    print(f"{arguments.count} prompts in {arguments.out}")


if __name__ == "__main__":
    main()
