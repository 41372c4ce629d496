"""The corpus: Python source of the standard library in a train part and a held-out part, and its tokenizer."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE, MAX_POSITIONS, END_OF_TEXT = 2048, 1024, "<|endoftext|>"
HELD_OUT_PERCENT = 6
SKIPPED_FOLDERS = {"site-packages", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
MAX_LINE_LENGTH = 300  # longer lines mark data tables, not code that a person writes
MAX_FILE_BYTES = 400_000
DEFINITION = re.compile(r"^(?: {4})?(?:async def|def|class) \w", re.MULTILINE)

# Names with their underscores stay whole, digits go in groups of three, and a newline with the indentation after it
# is one piece (less one space, which goes with the word), so that a line of code costs one token for its layout.
PIECES = r" ?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


class Source(NamedTuple):
    """One file: its path relative to the standard library's folder, and its text."""

    path: str
    text: str


def read_sources(stdlib: Path) -> tuple[list[Source], list[Source]]:
    """Read every module worth learning from, sorted by path: (train, held out)."""
    parts: tuple[list[Source], list[Source]] = [], []
    for file in sorted(stdlib.rglob("*.py")):
        path = file.relative_to(stdlib)
        if SKIPPED_FOLDERS & set(path.parts) or file.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the standard library tests other encodings with a few files of its own
        # Generated tables, in which digits outweigh letters, teach a language model nothing.
        is_table = sum(c.isdigit() for c in text) * 2 > sum(c.isalpha() for c in text)
        if text.strip() and max(map(len, text.splitlines())) <= MAX_LINE_LENGTH and not is_table:
            # By a hash of the path, so that a file keeps its part when other files come or go.
            share = int.from_bytes(hashlib.sha256(path.as_posix().encode()).digest()[:4], "big") % 100
            source = Source(path.as_posix(), text.replace("\r\n", "\n").replace("\f", ""))
            parts[share < HELD_OUT_PERCENT].append(source)
    if not all(parts):
        raise SystemExit(f"too little Python source under {stdlib}; give --stdlib a folder such as lib/python3.11")
    return parts


def train_tokenizer(texts: Iterable[str], folder: Path) -> Tokenizer:
    """Train a byte-level BPE and save it; `<|endoftext|>` is token 0 and is never added by encode()."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


def pack(encoder: Tokenizer, sources: list[Source], device: torch.device) -> torch.Tensor:
    """Return every file, each behind `<|endoftext|>`, as one row of token ids [tokens]."""
    encodings = encoder.encode_batch([source.text for source in sources])
    return torch.tensor([token for encoding in encodings for token in (0, *encoding.ids)], device=device)


def windows(encoder: Tokenizer, sources: list[Source], length: int, device: torch.device) -> torch.Tensor:
    """Return windows [N, length] that begin where a class, a function or a method begins; short files give none."""
    rows: list[list[int]] = []
    indentation = encoder.encode("   ").ids
    for source in sources:
        encoding = encoder.encode(source.text)
        begins = {start: index for index, (start, _) in enumerate(encoding.offsets)}
        for offset in (match.start() for match in DEFINITION.finditer(source.text)):
            # A method's indentation shares its token with the newline before it, and its last space goes with "def".
            prefix, index = ([], begins[offset]) if offset in begins else (indentation, begins.get(offset + 3))
            if index is not None and index + length <= len(encoding.ids):
                rows.append((prefix + encoding.ids[index : index + length])[:length])
    return torch.tensor(rows, device=device)
