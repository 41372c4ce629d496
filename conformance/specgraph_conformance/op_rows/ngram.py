"""Rows of n-gram drafts, against Python's own search in strings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specgraph import ops
from specgraph.attention import NULL_BLOCK, NULL_SLOT

from specgraph_conformance.op_table import Run, Table
from specgraph_conformance.rig import expect_equal

TABLE = Table()


def drafts_by_ngram(text: Sequence[int | None], k: int, shortest: int, longest: int) -> list[int]:
    """Return the tokens that `ops.ngram_propose` drafts after a text. None in the text is an unknown token."""
    # One character per token. The character of an unknown token differs from all others.
    characters = "".join(chr(0x20000 + i) if token is None else chr(1 + token) for i, token in enumerate(text))
    end, begin = len(text), len(text) - 1
    for length in range(min(longest, end), shortest - 1, -1):
        found = characters.rfind(characters[end - length :], 0, end - 1)
        if found >= 0:
            begin = found + length
            break
    following = [token or 0 for token in text[begin:]]
    return [following[i % len(following)] for i in range(k)] if text else [0] * k


def expect_drafts(
    run: Run, g: torch.Generator, lengths: Sequence[int], limit: int, block: int, vocab: int, lookup: tuple[int, int],
    k: int,
) -> None:  # fmt: skip
    """Run the op on random texts of these lengths, some with a null block, and compare with `drafts_by_ngram`.

    Args:
        limit: max_model_len.
        lookup: the tokens of the shortest and of the longest n-gram.
    """
    n, columns = len(lengths), -(-limit // block) + 1
    table = (torch.randperm(n * columns, generator=g) + 1).view(n, columns).int()
    table[::3, columns // 3] = NULL_BLOCK
    history = torch.randint(0, vocab, (n * columns + 1, block), generator=g).int()
    wide = torch.full((n, k + 2), -77)  # a part of a wider tensor
    out = wide[:, :k]
    wanted: list[list[int]] = []
    for length, blocks in zip(lengths, table.tolist(), strict=True):
        known = [None if each == NULL_BLOCK else token for each in blocks for token in history[each].tolist()]
        wanted.append(drafts_by_ngram(known[: min(length, limit)], k, *lookup))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    run(ops.ngram_propose, history, table, seq_lens, *lookup, limit, out, written=[out])
    expect_equal(out, torch.tensor(wanted), "drafts")


@TABLE.row(
    "ngram-propose",
    "Drafts are the tokens behind the last place of the longest n-gram that ends the text, repeated where they are too "
    "few; the last token without a match; of the request's own text alone.",
    hazard="ngram-match",
    cause="ngram_propose: another place of equal length, a match that is the end itself, a position in the null block "
    "or past the end of the text, or past max_model_len",
    quick=True,
    lookup={"1-to-5": (1, 5), "2-to-3": (2, 3), "only-4": (4, 4)},
    vocab=[1, 3],
)
def ngram_propose(run: Run, g: torch.Generator, lookup: tuple[int, int], vocab: int) -> None:
    lengths = [0, 1, 2, 3, *torch.randint(4, 60, (6,), generator=g).tolist(), 60, 63]
    expect_drafts(run, g, lengths, 60, 16, vocab, lookup, 5)
    expect_drafts(run, g, lengths, 60, 1, vocab, lookup, 1)
    expect_drafts(run, g, range(4), 3, 1, vocab, (1, 9), 5)  # n-grams longer than any text


@TABLE.row(
    "ngrams-of-long-texts",
    "Texts of up to 5,000 tokens are looked through from their first token to their last.",
    hazard="ngram-match",
    cause="ngram_propose: places past a tile, or a better match in another tile",
)
def long_texts(run: Run, g: torch.Generator) -> None:
    expect_drafts(run, g, [1025, 2049, 5000], 5000, 16, 4, (1, 12), 8)
    expect_drafts(run, g, [1026, 5000], 5000, 128, 3000, (1, 3), 3)


@TABLE.row(
    "keep-tokens",
    "The token of each row is in its slot, those of rows without a slot are in none, and no other slot changes.",
    hazard="ngram-history",
    cause="keep_tokens: a rejected or padded row that is written, or rows past a tile that are not",
    quick=True,
    rows=[1, 37, 600],
)
def keep_tokens(run: Run, g: torch.Generator, rows: int) -> None:
    history = torch.randint(0, 90, (101, 16), generator=g).int()
    history[NULL_BLOCK] = 0
    slots = torch.randperm(1600, generator=g)[:rows] + 16
    slots[::5] = NULL_SLOT
    tokens, wanted = torch.randint(100, 1 << 20, (rows,), generator=g), history.clone()
    for token, slot in zip(tokens.tolist(), slots.tolist(), strict=True):
        if slot != NULL_SLOT:
            wanted[slot // 16, slot % 16] = token
    run(ops.keep_tokens, tokens, slots, history, written=[history])
    expect_equal(history[1:], wanted[1:], "tokens of the blocks")
