"""`specgraph audit`: compares each lowering of a drafter with eager, and names the first tensor that differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgraph.errors import ConfigError
from specgraph_run.cli.load import choose_folders
from specgraph_run.cli.options import JsonOption, PlatformOption, TargetOption, with_generator_options
from specgraph_run.cli.output import check_output, text_output, write_json
from specgraph_run.cli.waiting import waiting
from specgraph_run.options import DrafterShape

if TYPE_CHECKING:
    import torch


@with_generator_options(only=("num_modules",))
def audit(
    drafter: Annotated[
        str | None,
        typer.Argument(help="Folder of a drafter, or MODULE:FACTORY, which takes a device and returns a draft head."),
    ] = None,
    target: TargetOption = None,
    shape: Annotated[
        DrafterShape | None,
        typer.Option(metavar="<name>", help="Audit random weights of this shape of `specgraph bench`."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(min=2, help="Tokens of the target, for MODULE:FACTORY.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Random rounds.")] = 200,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the largest batch.")] = 8,
    k: Annotated[int, typer.Option("-k", min=1, max=63, help="Draft tokens per propose.")] = 5,
    max_model_len: Annotated[int, typer.Option(min=32, help="Tokens of the longest request.")] = 256,
    attention: Annotated[str, typer.Option(help="device, host, or a backend's own attention by name.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the rounds.")] = 0,
    options: Any = None,
    platform: PlatformOption = None,
    json: JsonOption = None,
) -> None:
    """Compare step and merged with eager, bit for bit, over random rounds; name the first tensor that differs.

    Run it if acceptance dropped for no known reason. The exit status is 1 if anything differs.
    """
    check_output("--json", json)
    factory = drafter is not None and ":" in drafter and not Path(drafter).exists()
    if shape is not None and (drafter is not None or target is not None):
        raise ConfigError(f"--shape {shape} has random weights: give no folders with it")
    if drafter is not None and factory and not all(drafter.partition(":")):
        raise ConfigError(f"{drafter}: give MODULE:FACTORY, such as my_drafter:make_head")
    if factory and vocab_size is None:
        raise ConfigError(f"{drafter}: give the target's --vocab-size, so that no token is beyond it")
    if options.num_modules is not None and (shape is not None or factory):
        raise ConfigError("--num-modules is for folders of MTP drafters: leave it out")
    if target is not None and drafter is None:
        raise ConfigError(f"--target {target}: name its drafter too: specgraph audit DRAFTER --target {target}")
    if drafter is not None and not factory:
        if target is None:
            raise ConfigError(f"{drafter}: give the drafter's --target too")
        choose_folders(target, Path(drafter))
    with waiting() as progress:
        import torch
        from specgraph_models.checkpoints import load_drafter, load_target

        from specgraph.attention import choose_attention
        from specgraph.device import open_platform
        from specgraph_run.text.load import shipped_pair
        from specgraph_run.tools.audit import AuditCase, as_text
        from specgraph_run.tools.audit import audit as compare
        from specgraph_run.tools.shapes import SHAPES, random_head

        opened = open_platform(platform)
        dtype = torch.float32 if opened.device.type == "cpu" else None
        if shape is not None:
            size = SHAPES[shape].vocab_size
            head = random_head(SHAPES[shape], opened.device, dtype or torch.bfloat16, max_model_len)
        elif factory and drafter is not None and vocab_size is not None:
            head, size = _made_head(drafter, opened.device), vocab_size
        else:
            folders = (target, drafter) if drafter is not None and target is not None else shipped_pair()
            model = load_target(folders[0], opened.device, dtype, max_model_len)
            head, size = load_drafter(folders[1], model, num_modules=options.num_modules), model.vocab_size
        case = AuditCase(
            rounds=rounds, max_num_requests=requests, num_speculative_tokens=k, max_model_len=max_model_len,
            vocab_size=size, seed=seed,
        )  # fmt: skip
        chosen = choose_attention(attention, opened, head.attention_layers, head.dtype, block_size=16)
        report = compare(opened, head, case, chosen.backend, progress)
    write_json(report, json)
    print(as_text(report, case.lowerings), file=text_output(json))
    if not report["equal"]:
        raise typer.Exit(1)


def _made_head(place: str, device: torch.device) -> Any:
    """Return the head that MODULE:FACTORY makes.

    Raises ConfigError if the factory raises, or if it does not return a draft head.
    """
    from specgraph.attention import PagedAttention
    from specgraph.draft.head_checks import check_members
    from specgraph.user_code import users_code
    from specgraph_run.cli.names import import_named

    with users_code(f"{place} failed", ConfigError):
        head = import_named(place)(device)
    check_members(PagedAttention(), head)
    return head
