"""``megabit plan``: which layout, on which machine, for how long."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabit.cli.arguments import Settings
from megabit.cli.evaluation_results import check_new
from megabit.config import Config, load_config
from megabit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from megabit.plan.machine import Machine
    from megabit.plan.serving import Load

UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
FILE_WIDTH = 180
"""Columns of tables that do not go to a terminal."""


def plan(
    settings: Settings = None,
    gpus: Annotated[
        int | None, typer.Option(help="Ranks in all, one a GPU.", min=1, show_default=False)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="h100, h200, a100, b200, or cpu.", show_default=False),
    ] = None,
    nodes_of: Annotated[
        int | None, typer.Option(help="Ranks on a node. Default: 8.", min=1, show_default=False)
    ] = None,
    interconnect: Annotated[
        str | None,
        typer.Option(
            help="Between nodes, for each GPU: ib400, ib200, roce400, efa, eth100, eth25 … "
            "Default: ib400.",
            show_default=False,
        ),
    ] = None,
    machine_file: Annotated[
        Path | None,
        typer.Option(
            "--machine",
            metavar="FILE",
            help="What --calibrate has written, instead of --gpu, --nodes-of and --interconnect.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Leave this setting as it is in SETTINGS, such as parallel.tp; may be given "
            "several times. Everything else that makes a layout is chosen.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Of the run, such as 300B or 4T; default: as SETTINGS say.", show_default=False
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="Layouts to show.", min=1)] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the best layout to this new YAML file, for megabit train.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Also write all figures to this new file.", show_default=False),
    ] = None,
    serving: Annotated[
        bool, typer.Option("--serving", help="Plan to serve the model, not to train it.")
    ] = False,
    prompt_tokens: Annotated[int, typer.Option(help="With --serving: of a request.", min=1)] = 512,
    answer_tokens: Annotated[int, typer.Option(help="With --serving: of its answer.", min=1)] = 256,
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            help="With --serving: limit of the time to the first token.",
            min=0.001,
            show_default=False,
        ),
    ] = None,
    tpot_ms: Annotated[
        float | None,
        typer.Option(
            help="With --serving: limit for each later token.", min=0.001, show_default=False
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure this machine (a few minutes) and write its constants to this new file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Search for the fastest layout of a model on a cluster that need not exist: step time, memory
    and bubble of each by part, days and GPU-hours, and why others do not fit.

    SETTINGS are a model and its recipe. TP, PP, DP, schedule, ZeRO stage, microbatch and
    recomputation are chosen. With --serving, TP, PP and replicas are, by tokens a second.

    Example: megabit plan examples/recipe/2b4t.yaml --gpus 64 --gpu h100 --out layout.yaml

    Example: megabit plan examples/recipe/2b4t.yaml --gpus 8 --gpu h100 --serving

    Example: megabit plan --calibrate here.json

    Example: megabit plan examples/model/tiny.yaml --gpus 4 --machine here.json
    """
    for option, path in (("--out", out), ("--json", json), ("--calibrate", calibrate)):
        if path is not None:
            check_new(path, option)
    given = {
        "--gpus": gpus,
        "--gpu": gpu,
        "--nodes-of": nodes_of,
        "--interconnect": interconnect,
        "--machine": machine_file,
        "--keep": keep or None,
        "--tokens": tokens,
        "--out": out,
        "--json": json,
        "--ttft-ms": ttft_ms,
        "--tpot-ms": tpot_ms,
    }
    has = {option for option, value in given.items() if value is not None}
    if calibrate is not None:
        if settings or has or serving:
            raise UserError("--calibrate: measures this machine and nothing else; give it alone")
        _calibrate(calibrate)
        return
    _check_effect(has, serving, gpu)
    if out is not None and json is not None and out.absolute() == json.absolute():
        raise UserError(f"--json: {json} is the file of --out as well; name another one")
    if gpus is None:
        raise UserError("--gpus: is missing; say how many ranks there are, such as --gpus 64")
    if not settings:
        raise UserError("SETTINGS: are missing; name a model, such as examples/recipe/2b4t.yaml")
    config = load_config(settings)

    from megabit.plan.catalog import known_machine
    from megabit.plan.machine import Machine
    from megabit.plan.step import tokens_of

    budget = _tokens(tokens) if tokens is not None else float(tokens_of(config))

    if machine_file is not None:
        machine = Machine.read(machine_file)
    elif gpu is None:
        raise UserError("--gpu: is missing; name one, such as --gpu h100, or give --machine")
    else:
        machine = known_machine(gpu, nodes_of or 8, interconnect or "ib400")
    if serving:
        from megabit.plan.serving import Load

        ttft_s, tpot_s = (None if ms is None else ms / 1e3 for ms in (ttft_ms, tpot_ms))
        load = Load(prompt_tokens, answer_tokens, ttft_s, tpot_s)
        _search_serving(config, gpus, machine, load, top, out, json)
        return
    _search(config, gpus, machine, frozenset(keep or ()), budget, top, out, json)


def _check_effect(has: set[str], serving: bool, gpu: str | None) -> None:
    """Refuse options that would change nothing."""
    has = has | ({"--serving"} if serving else set())
    replaced = {
        "--machine": ("--gpu", "--nodes-of", "--interconnect"),
        "--serving": ("--keep", "--tokens"),
    }
    for option in replaced.keys() & has:
        for other in replaced[option]:
            if other in has:
                raise UserError(f"{other}: has no effect with {option}; leave it out")
    for option in ("--ttft-ms", "--tpot-ms"):
        if option in has and not serving:
            raise UserError(f"{option}: has no effect without --serving")
    if gpu == "cpu" and "--interconnect" in has:
        raise UserError("--interconnect: has no effect with --gpu cpu, whose ranks share a host")


def _search(
    config: Config,
    world_size: int,
    machine: "Machine",
    keep: frozenset[str],
    tokens: float,
    top: int,
    out: Path | None,
    json: Path | None,
) -> None:
    from megabit.cli.progress import bar
    from megabit.plan.report import print_plan, rejections
    from megabit.plan.search import Search
    from megabit.plan.write import write_json, write_layout

    batch = (
        f"Batch: {config.train.global_batch_size} × {config.data.seq_length} tokens, computed in "
        f"{config.precision.compute}"
    )
    console = _introduced(config, machine, world_size, batch)
    search = Search(config, world_size, machine, keep, top)
    with bar() as report:
        found = search.run(lambda share: report("layouts", share))
    if not found.candidates:
        raise UserError(f"--gpus: no layout on {world_size} ranks works", *rejections(found))
    print_plan(found, machine, tokens, top, console)
    if json is not None:
        write_json(json, found, machine, top)
    if out is not None:
        write_layout(out, found.candidates[0], machine)
        console.print(f"Wrote {out}: megabit train SETTINGS {out}", soft_wrap=True)


def _search_serving(
    config: Config,
    world_size: int,
    machine: "Machine",
    load: "Load",
    top: int,
    out: Path | None,
    json: Path | None,
) -> None:
    from megabit.plan.serving import Engine, plan_serving, reasons
    from megabit.plan.serving_report import print_serving
    from megabit.plan.write import write_serving, write_serving_json

    console = _introduced(config, machine, world_size)
    found = plan_serving(config.model, Engine(config.precision.compute), world_size, machine, load)
    if not found.candidates:
        raise UserError(f"--gpus: no engine on {world_size} ranks works", *reasons(found))
    print_serving(found, machine, load, top, console)
    if json is not None:
        write_serving_json(json, found, machine, top)
    if out is not None:
        write_serving(out, found.candidates[0], machine)
        console.print(f"Wrote {out}: megabit serve MODEL {out}", soft_wrap=True)


def _introduced(config: Config, machine: "Machine", world_size: int, *more: str) -> "Console":
    """Say what is planned, and where; the console that the rest is printed on."""
    from megabit.model.words import model_text
    from megabit.plan.report import describe_machine

    console = _console()
    model, place = f"Model: {model_text(config.model)}", describe_machine(machine, world_size)
    for line in (model, *more, place):
        console.print(line, soft_wrap=True)
    return console


def _console() -> "Console":
    """The terminal, or something wide enough for the tables."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(markup=False, highlight=False, emoji=False, width=FILE_WIDTH)


def _calibrate(path: Path) -> None:
    import torch

    from megabit.cli.progress import bar
    from megabit.files import write_text
    from megabit.plan.calibrate import calibrate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with bar() as report:
        machine = calibrate(lambda share: report("this machine", share), device)
    write_text(path, machine.to_json())
    print(f"Wrote {path}: megabit plan SETTINGS --gpus N --machine {path}")


def _tokens(text: str) -> float:
    number, unit = text.strip(), 1.0
    if number and number[-1].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1].upper()]
    try:
        value = float(number) * unit
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise UserError(f"--tokens: must be a number such as 300B or 4T, not {text!r}")
    return value
