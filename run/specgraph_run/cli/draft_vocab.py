"""`specgraph draft-vocab`: the tokens that a drafter may draft, counted from a user's own text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specgraph.errors import ConfigError
from specgraph_run.cli.load import choose_folders
from specgraph_run.cli.options import JsonOption, ModelOption, TargetOption
from specgraph_run.cli.output import check_output, print_summary, text_output, write_json
from specgraph_run.cli.waiting import announce

_SIZES = (8192, 16384, 32768, 65536)


def draft_vocab(
    texts: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Text, JSON or JSON lines: prompts, chats, or a log of what the target wrote; - for standard input."
        ),
    ] = None,
    model: ModelOption = None,
    target: TargetOption = None,
    size: Annotated[int, typer.Option(min=1, help="Tokens to keep, special tokens among them.")] = 32768,
    token_map: Annotated[
        Path | None,
        typer.Option(help="Take the tokens of this file instead of counting: SGLang's map, .npy or JSON."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write: .json, .npy, or .pt for SGLang's map.")] = None,
    json: JsonOption = None,
) -> None:
    """Count the tokens of your own text, and write the most frequent ones for --draft-vocab."""
    check_output("--json", json)
    check_output("--out", out)
    if not texts and token_map is None:
        raise ConfigError("give files of text to count, or --token-map")
    folder, _ = choose_folders(target, None, model)
    announce("loading torch, then counting tokens" if texts else "loading torch")
    report = _report(texts or [], folder, size, token_map, out)
    write_json(report, json)
    print_summary(Console(file=text_output(json)), _rows(report))


def _report(texts: list[Path], target: Path | None, size: int, token_map: Path | None, out: Path | None) -> Any:
    """Choose the tokens, write them to `out`, and return the report that --json writes."""
    from dataclasses import replace

    import torch
    from specgraph_models.checkpoints.draft_vocab import (
        check_suffix,
        read_draft_vocab,
        tokenizer_digest,
        write_draft_vocab,
    )
    from specgraph_models.checkpoints.tokens import read_tokenizer, stop_token_ids
    from specgraph_models.draft_vocab import DraftVocabulary

    from specgraph_run.text.load import shipped_pair
    from specgraph_run.text.token_counts import count_tokens, covered

    if out is not None:
        check_suffix(out)
    folder = target or shipped_pair()[0]
    tokenizer = read_tokenizer(folder)
    ids = set(tokenizer.get_vocab().values())
    special = ids & {*tokenizer.get_added_tokens_decoder(), *stop_token_ids(folder, max(ids) + 1)}
    counts = count_tokens(texts, tokenizer) if texts else None
    if token_map is not None:
        found = replace(read_draft_vocab(token_map, folder), covers=None)
        if (largest := int(found.token_ids.max())) > max(ids):
            raise ConfigError(f"{token_map} has the token id {largest}, the ids of {folder} end at {max(ids)}")
    else:
        assert counts is not None
        if size < len(special):
            raise ConfigError(f"--size {size}: the tokenizer has {len(special)} special tokens, which are all kept")
        found = DraftVocabulary("the counted text", torch.tensor(counts.most_frequent(size, special, ids)))
    kept = found.token_ids.tolist()
    if counts is not None:
        found = replace(found, covers=covered(kept, counts.whole))
    if out is not None:
        write_draft_vocab(out, replace(found, tokenizer=tokenizer_digest(tokenizer)))
    sizes = [each for each in _SIZES if len(special) <= each < len(ids)] if counts else []
    shares = counts.shares(sizes, special, ids) if counts else []
    return {
        "target": str(folder),
        "files": [str(each) for each in texts],
        "counted_tokens": counts.whole.total() if counts else 0,
        "different_tokens": len(counts.whole) if counts else 0,
        "special_tokens": len(special),
        "without_special_tokens": len(special - set(kept)),
        "vocabulary": len(ids),
        "tokens": len(kept),
        "covers": found.covers,
        "covers_by_size": {
            number: {"text": text, "held_out": held_out} for number, (text, held_out) in zip(sizes, shares, strict=True)
        },
        "out": None if out is None else str(out),
    }


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("tokens", f"{report['tokens']} of {report['vocabulary']}")]
    if report["counted_tokens"]:
        counted = f"{report['counted_tokens']} tokens, {report['different_tokens']} different ones"
        rows += [("counted", counted), ("they cover", f"{report['covers']:.2%} of that text")]
    for size, share in report["covers_by_size"].items():
        parts = f"{share['text']:.2%}; of every tenth part, counted from the others: {share['held_out']:.2%}"
        rows.append((f"{size} would cover", parts))
    if missing := report["without_special_tokens"]:
        rows.append(("special tokens", f"{missing} of {report['special_tokens']} are not in the file"))
    rows.append(("written to", report["out"] or "no file (--out names one)"))
    return rows
