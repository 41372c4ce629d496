"""`specgraph explain`: the graphs of a configuration, their cost, and why other lowerings were not chosen.

It captures all graphs, and generates no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specgraph.device import Progress
from specgraph_run.cli.load import choose_folders
from specgraph_run.cli.options import (
    RANKS,
    DraftOption,
    JsonOption,
    PlatformOption,
    TargetOption,
    with_generator_options,
)
from specgraph_run.cli.output import check_output, print_summary, text_output, write_json
from specgraph_run.cli.waiting import waiting
from specgraph_run.options import GeneratorOptions

if TYPE_CHECKING:
    from specgraph_run.text.load import LoadedPair

_Rows = Iterator[tuple[str, str]]
_COLUMNS = ("model", "phase", "requests", "rows_per_request", "rows", "k", "step", "graphs")


@with_generator_options(without=("check_inputs", "debug", "synthetic_acceptance", *RANKS), max_num_requests=8)
def explain(
    target: TargetOption = None,
    draft: DraftOption = None,
    options: Any = None,
    platform: PlatformOption = None,
    json: JsonOption = None,
) -> None:
    """Show captured sizes by phase and model, graphs, memory, the lowering, and why each other one was refused."""
    check_output("--json", json)
    target, draft = choose_folders(target, draft)
    with waiting() as captured:
        report = _report(target, draft, options, platform, captured)
    write_json(report, json)
    _show(Console(file=text_output(json)), report)


def _report(
    target: Path | None, draft: Path | None, options: GeneratorOptions, platform: str | None, captured: Progress
) -> dict[str, Any]:
    """Load the models as `load_generator` does, capture them, and return the report.

    If `target` is given and `draft` is None, the target is captured without a drafter.
    """
    import torch
    from specgraph_models.checkpoints.tokens import read_tokenizer, shown_stops, stop_token_ids

    from specgraph.device import open_platform
    from specgraph_run.cli.captured import describe, k_by_acceptance
    from specgraph_run.decoder import SpeculativeDecoder
    from specgraph_run.text.load import drafter_name, load_models, pair_folders

    opened = open_platform(platform)
    if target is None or draft is not None:
        target, draft = pair_folders(target, draft)
    with torch.inference_mode():
        pair = load_models(target, draft, opened, options)
        chosen = pair.config, pair.options
        decoder = SpeculativeDecoder(pair.target, pair.head, opened, *chosen, attention=pair.attention.backend)
        drafter = "none: decodes without drafts" if draft is None else f"{draft}: {drafter_name(draft, options)}"
        stops = stop_token_ids(target, pair.target.vocab_size)
        models = {"target": f"{target}", "drafter": drafter, "KV": f"{pair.cache}"}
        models["text"] = shown_stops(read_tokenizer(target), stops)
        report = {"decode": options.decode, "models": models, "draft_vocab": _cut(pair), "stop_token_ids": stops}
        report |= describe(decoder, captured)
        times = decoder.time_rounds()
    decoder.close()
    return report | {
        "attention_refusals": pair.attention.reason,
        "round_times": times,
        "k_by_acceptance": None if times is None else k_by_acceptance(times),
    }


def _cut(pair: LoadedPair) -> dict[str, Any] | None:
    """Return the report's entry about the draft vocabulary that the options name. None if they name none."""
    if pair.draft_vocab is None or pair.head is None:
        return None
    lm_head = pair.head.weights()["lm_head"]
    return {
        "file": pair.draft_vocab.name,
        "tokens": pair.head.draft_vocab_size,
        "of": pair.target.vocab_size,
        "covers": pair.draft_vocab.covers,
        "lm_head_bytes": lm_head.nbytes,
    }


def _show(console: Console, report: Mapping[str, Any]) -> None:
    drafts, lowerings, costs = _draft_rows(report), _lowering_rows(report), _cost_rows(report)
    print_summary(console, [*_model_rows(report), *drafts, *lowerings, *costs])
    table = Table(*(column.replace("_", " ") for column in _COLUMNS))
    for row in report["captured"]:
        prompt, numbered = row["phase"] == "prefill", row["phase"] == "step"
        shown = {**row, "k": "" if prompt else row["k"], "step": row["step"] or "any" if numbered else ""}
        shown["k"] = f"tree, {row['k']}" if row["tree"] else shown["k"]
        table.add_row(*(str(shown[column]) for column in _COLUMNS))
    if report["captured"]:
        console.print(table)
    if report["policy"]:
        policy = Table("policy", "decision", "reason", "seen in", show_lines=True)
        for rule in report["policy"]:
            policy.add_row(*(escape(rule[column]) for column in ("name", "decision", "reason", "source")))
        console.print(policy)


def _model_rows(report: Mapping[str, Any]) -> _Rows:
    yield "platform", f"{report['platform']} ({report['device']})"
    yield from report["models"].items()
    hosts = ", ".join(report["host_parameters"])
    used = report["attention"] + (f", {hosts} from the host" if hosts else "")
    refused = f"; {report['attention_refusals']}" if report["attention_refusals"] else ""
    yield "attention", f"{used}, KV blocks of {report['block_size']} tokens{refused}"
    yield "batches", f"up to {report['max_num_requests']} requests of {report['max_model_len']} tokens"


def _draft_rows(report: Mapping[str, Any]) -> _Rows:
    by_size, times, tree = report["num_speculative_tokens"], report["round_times"], report["tree"]
    if times is not None:
        yield "draft tokens K", f"by acceptance, of {', '.join(map(str, next(iter(times.values()))))}"
        for size, row in times.items():
            took = ", ".join(f"{time:.0f} us for K {k}" for k, time in row.items())
            chosen = ", ".join(f"K {k} at {rate}" for rate, k in report["k_by_acceptance"][size].items())
            yield f"rounds of {size} request{'s' * (size > 1)}", f"{took}: {chosen} acceptance per token"
    elif len(set(by_size.values())) == 1:
        yield "draft tokens K", f"{next(iter(by_size.values()))}"
    else:
        yield "draft tokens K", "by requests: " + ", ".join(f"{size}: {k}" for size, k in by_size.items())
    if (cut := report["draft_vocab"]) is not None:
        covers = "" if cut["covers"] is None else f", {cut['covers']:.1%} of the text that it was counted from"
        copy = f"a copy of their rows of lm_head takes {cut['lm_head_bytes'] / 2**20:.1f} MiB"
        yield "draft vocabulary", f"{cut['file']}: {cut['tokens']} of {cut['of']} tokens{covers}; {copy}"
    if tree is not None:
        sizes = report["tree_sizes"]
        where = "" if len(sizes) == len(by_size) else f", for batches padded to {', '.join(map(str, sizes))}"
        shape = "{num_steps} steps, top-k {top_k}, {num_draft_tokens} rows per request in a verify".format(**tree)
        yield "draft trees", shape + where
    if report["program"] is not None:
        yield "draft program", report["program"]


def _lowering_rows(report: Mapping[str, Any]) -> _Rows:
    why = "the strongest" + (" that is not refused" if report["refusals"] else "; nothing refuses it")
    yield "lowering", f"{report['lowering']}: {'asked for' if report['decode'] != 'auto' else why}"
    yield "prefill", report["prefill"]
    if proposes := report["launches_per_propose"]:
        yield "launches per propose", ", ".join(f"{n} for K {k}" for k, n in proposes.items())
    for kind, outcomes in (("", report["lowerings"]), ("prefill ", report["prefills"])):
        for name, outcome in outcomes.items():
            if outcome != "yes":
                yield f"{kind}{name}: refused", outcome
    for name, reason in report["refusals"].items():
        if report["lowerings"][name] == "yes":
            yield f"{name}: not chosen", reason
    for line in report["eager"]:
        yield "eager", line


def _cost_rows(report: Mapping[str, Any]) -> _Rows:
    limit = report["max_live_graphs"]
    yield "graphs", f"{report['graph_count']}" + (f" of at most {limit} a model" if limit else "")
    yield "captured in", f"{report['capture_seconds']:.2f} s, of which kernels {report['compile_seconds']:.2f} s"
    for model, sizes in report["memory_bytes"].items():
        yield f"{model} memory", ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in sizes.items())
