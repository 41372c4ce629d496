"""The command `specgraph conformance`, which runs the suite on a backend."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from specgraph.errors import ConfigError, SpecgraphError
from specgraph_run.cli.names import check_platform
from specgraph_run.cli.options import JsonOption
from specgraph_run.cli.waiting import announce


def conformance(
    platform: Annotated[
        str,
        typer.Argument(help="NAME or NAME:INDEX; see `specgraph platforms`. Or `verify`, `vectors`, `verify-vectors`."),
    ],
    reports: Annotated[
        list[Path] | None,
        typer.Argument(help="`verify`: reports of --json. `vectors`: a folder. `verify-vectors`: it, and results."),
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; repeatable.")] = None,
    group: Annotated[list[str] | None, typer.Option(help="Only this group; repeatable.")] = None,
    hazard: Annotated[list[str] | None, typer.Option(help="Only cases against this hazard; repeatable.")] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help="Test an attention backend of yours too: NAME=MODULE:FUNCTION.")
    ] = None,
    keyword: Annotated[str, typer.Option("-k", help="Only cases that match this pytest expression.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A selection that takes less than half a minute.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of all generated inputs.")] = 0,
    examples: Annotated[int, typer.Option(min=1, help="Random cases try this many times as much: for a night.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Limit of every case, in seconds; default: its own.")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes that run cases; default: 1, on the host one per core. 0: this one.")
    ] = None,
    xfails: Annotated[Path | None, typer.Option(help="Instead of the backend's own xfails.toml.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Exit status 0 only if it conforms to: graphs, task-update, drafting, parallel.")
    ] = None,
    json: JsonOption = None,
    markdown: Annotated[Path | None, typer.Option(help="Write what the terminal shows as Markdown.")] = None,
) -> None:
    """Test a backend: exit status 0 only if nothing undeclared failed.

    `specgraph conformance verify REPORT...` checks reports of others, without their devices: exit status 0 only if
    nothing is wrong with them.

    `specgraph conformance vectors FOLDER` writes inputs and expected outputs of draft ops and whole proposes as
    safetensors, for engines in another language; --case selects. `verify-vectors FOLDER RESULTS` judges the outputs
    that another program wrote: exit status 0 only if there are some and all are right.
    """
    try:
        metadata.version("specgraph-conformance")  # pytest finds its plugin by the distribution
    except metadata.PackageNotFoundError:
        raise SpecgraphError(
            "the conformance suite is here but not installed: pip install --no-deps -e ./conformance"
        ) from None
    others = {"verify": "reading the reports", **dict.fromkeys(("vectors", "verify-vectors"), "loading torch")}
    announce(others.get(platform, "loading torch and collecting the cases"))
    from specgraph_conformance import command as suite  # loads pytest

    if platform in ("vectors", "verify-vectors"):
        wanted = 1 if platform == "vectors" else 2
        if len(reports or ()) != wanted:
            words = "vectors FOLDER" if platform == "vectors" else "verify-vectors FOLDER RESULTS"
            raise ConfigError(f"name the folder{'' if wanted == 1 else 's'}: specgraph conformance {words}")
        from specgraph_conformance import vectors

        if not vectors.command(reports or (), cases=case or (), seed=seed):
            sys.exit(1)
        return
    if platform == "verify":
        if not reports:
            raise ConfigError("name the reports to verify: specgraph conformance verify REPORT...")
        sys.exit(not suite.verify_command(reports, profile=profile, checkout=Path.cwd()))
    if reports:
        raise ConfigError(f"one platform at a time: what is {', '.join(map(str, reports))}?")
    check_platform(platform)
    green = suite.run_command(
        platform,
        suite.Selection(
            cases=case or (),
            groups=group or (),
            hazards=hazard or (),
            attention=attention or (),
            keyword=keyword,
            quick=quick,
            seed=seed,
            examples=examples,
            xfails=xfails,
            timeout=timeout,
        ),
        jobs=jobs,
        profile=profile,
        json=json,
        markdown=markdown,
    )
    if not green:
        sys.exit(1)
