"""``megabit bench``: measure this machine."""

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from megabit.cli.arguments import ServingSettings, Settings
from megabit.cli.evaluation_results import check_new
from megabit.cli.signals import on_signals
from megabit.config import load_config
from megabit.errors import UserError

app = typer.Typer(no_args_is_help=True)

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the results to this new file.")
]
Out = Annotated[Path, typer.Option(help="The folder for results; earlier ones are replaced.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny shapes: shows that it runs, and no speed.")
]

ENGINE_MODEL = (
    "model.vocab_size=32000",
    "model.hidden_size=1024",
    "model.intermediate_size=2816",
    "model.num_hidden_layers=20",
    "model.num_attention_heads=16",
    "model.num_key_value_heads=4",
)
"""What ``megabit bench engine`` measures with, unless it is told otherwise: the head has the share
of all parameters that it has in BitNet-2B4T, about one in seven."""


@app.callback()
def bench() -> None:
    """Measure this machine, beside what others use on it.

    Example: megabit bench kernels --quick

    Example: megabit bench train examples/model/tiny.yaml --steps 4
    """


@app.command("all")
def all_(
    out: Out = Path("runs/bench"),
    only: Annotated[
        list[str] | None,
        typer.Option(help="A benchmark of the suite, by name; may be repeated. Default: all."),
    ] = None,
    quick: Quick = False,
    examples: Annotated[
        Path, typer.Option(help="The folder with the settings of benchmarks.")
    ] = Path("examples/benchmarks"),
) -> None:
    """Run kernels, train, pipeline, checkpoint, engine and serve, one after another, and write
    results.json and benchmarks.md.

    About 12 minutes on two cores that do nothing else. Exits with 1 if one of them failed; what the
    others found is there all the same. Runs on this host's CPU.

    Example: megabit bench all --only kernels --only engine
    """
    from megabit.benchmark.suite import NAMES, PAGE, RESULTS, run_suite

    # Ended by a signal, it still ends what it has started.
    with on_signals((signal.SIGTERM,), lambda number: sys.exit(128 + number)):
        document = run_suite(
            out, examples, only or NAMES, quick, lambda line: print(line, flush=True)
        )
    print(f"wrote {out / RESULTS} and {out / PAGE}")
    sys.exit(1 if document.failed else 0)


@app.command("render")
def render_(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="JSON files of benchmarks.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write, or to replace.")] = Path(
        "benchmarks.md"
    ),
) -> None:
    """Write what benchmarks found as one Markdown page.

    RESULTS are files of --json (but that of serve), of megabit bench all and of megabit bench gpu.

    Example: megabit bench render runs/bench/results.json --out runs/bench/benchmarks.md
    """
    from megabit.benchmark.document import Document
    from megabit.benchmark.render import render
    from megabit.files import write_text

    page = render([Document.read(path) for path in results])
    if not out.parent.is_dir():
        raise UserError(f"--out: {out.parent} is not a folder")
    write_text(out, page)


# The kernels can be measured where megabit is not installed, so their package has the options.
@app.command(
    "kernels",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def kernels(context: typer.Context) -> None:
    """Time ternary products beside torch's fp32, bf16, int8 and fake-quantized ones."""
    from megabit_kernels.benchmark.command import main

    sys.exit(main(context.args, "megabit bench kernels"))


@app.command(
    "gpu",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def gpu(context: typer.Context) -> None:
    """Measure kernels, a training step and decoding on one CUDA device, in eight minutes."""
    from megabit.benchmark.gpu import main

    sys.exit(main(context.args, "megabit bench gpu"))


@app.command("train")
def train(
    settings: Settings = None,
    nproc: Annotated[
        int, typer.Option(help="Ranks on this host, one thread each; they talk over gloo.", min=1)
    ] = 1,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps to time, after two that do not count.", min=1)
    ] = 8,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Profile one more step of everyone: where it goes.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Time training steps of a configuration beside the same model in plain torch.

    Takes the SETTINGS that megabit train takes, and random tokens instead of data. Baselines are
    one process each: dense layers, and fake-quantized ones as Hugging Face's AutoBitLinear has
    them, in fp32 and in bf16. They take turns step by step, with the configuration too if it is one
    process. Runs on this host's CPU.

    Example: megabit bench train examples/model/tiny.yaml parallel.tp=2 --nproc 2
    """
    config = load_config(settings or [], nproc)
    if config.run.device == "cuda":
        raise UserError("run.device: megabit bench train measures on the CPU; use cpu or auto")
    if json is not None:
        check_new(json)
    # Read when torch is imported: its profiler is not to tell on stderr when it begins and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")

    from megabit.benchmark.console import run_and_report

    run_and_report(config, nproc, steps, breakdown, json)


@app.command("pipeline")
def pipeline(
    settings: Settings = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="A schedule, or file.py:function; may be repeated. Default: all."),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps to time, after two that do not count.", min=1)
    ] = 6,
    json: JsonFile = None,
) -> None:
    """Train with each pipeline schedule: its speed against one process, and its bubble against what
    the simulator says.

    Takes the SETTINGS that megabit train takes, with parallel.pp of 2 or more, and random tokens
    instead of data. Runs tp · pp ranks on this host's CPU, one thread each.

    Example: megabit bench pipeline examples/benchmarks/pipeline.yaml --schedule zb-h1
    """
    config = load_config(settings or [])
    if config.parallel.pp < 2:
        raise UserError("parallel.pp: a pipeline has 2 or more ranks; set it to 2 or more")
    if config.run.device == "cuda":
        raise UserError("run.device: megabit bench pipeline measures on the CPU; use cpu or auto")
    if json is not None:
        check_new(json)

    from megabit.benchmark.pipeline_report import run_and_report

    run_and_report(config, schedule, steps, json)


@app.command("checkpoint")
def checkpoint(
    settings: Settings = None,
    nproc: Annotated[
        int, typer.Option(help="Ranks on this host, one thread each; they talk over gloo.", min=1)
    ] = 1,
    repeats: Annotated[int, typer.Option(help="Saves of each kind.", min=1)] = 3,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to save, for the disk to be measured. Default: here."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Show how long training waits for a save, beside torch's distributed checkpoint.

    Takes the SETTINGS that megabit train takes, and random tokens instead of data. What is written
    is removed again. Runs on this host's CPU.

    Example: megabit bench checkpoint examples/benchmarks/checkpoint.yaml
    """
    config = load_config(settings or [], nproc)
    folder = folder or Path()
    if not folder.is_dir():
        raise UserError(f"--dir: {folder} is not a folder")
    if json is not None:
        check_new(json)

    from megabit.benchmark.checkpoint_report import run_and_report

    run_and_report(config, nproc, repeats, folder, json)


@app.command("engine")
def engine(
    settings: Settings = None,
    requests: Annotated[
        int, typer.Option(help="Side by side, in the second of two measurements.", min=2)
    ] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Of each request.", min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(help="Generated for each request.", min=2)] = 64,
    turns: Annotated[
        int, typer.Option(help="Of each contestant, after one that does not count.", min=1)
    ] = 3,
    threads: Annotated[
        int | None, typer.Option(help="Of each contestant; default: all cores.", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of activations: bfloat16 or float32.")] = "bfloat16",
    json: JsonFile = None,
) -> None:
    """Time the engine beside transformers' generate on one random ternary model, and beside itself
    with one request at a time.

    SETTINGS may change the model (model.*), which has 20 layers of 1024 otherwise. Both contestants
    run in this process, on the CPU, with the same prompts, in turns. Needs transformers and
    accelerate.

    Example: megabit bench engine model.num_hidden_layers=4 --turns 1
    """
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype: must be bfloat16 or float32, not {dtype}")
    if json is not None:
        check_new(json)
    model = load_config([*ENGINE_MODEL, *(settings or [])]).model

    from megabit.benchmark.engine import Load
    from megabit.benchmark.engine_report import run_and_report

    load = Load((1, requests), prompt_tokens, new_tokens, turns)
    run_and_report(model, load, threads, dtype, json)  # type: ignore[arg-type]  # checked above


@app.command("serve")
def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|CKPT",
            help="A server, such as http://127.0.0.1:8000, or a model to serve meanwhile.",
            show_default=False,
        ),
    ],
    settings: ServingSettings = None,
    clients: Annotated[
        int | None,
        typer.Option(help="Closed loop: so many ask again when answered. Default: 8.", min=1),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Poisson load instead: requests a second.", min=0.001)
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests at most. Default: 64, with --duration no limit.", min=1),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds, after which no request begins.", min=0.1)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Random ones, of each request.", min=1)] = 64,
    shared_tokens: Annotated[int, typer.Option(help="Those that are the same.", min=0)] = 0,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file, each line a prompt, to ask in turn instead.")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Of every answer.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0)] = 0.0,
    warmup: Annotated[int, typer.Option(help="Requests that do not count.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of prompts and of arrivals.")] = 0,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Goodput: limit of the time to the first token.", min=0.1)
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Goodput: limit for each later token.", min=0.1)
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Of the server.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write all times to this new file.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also draw them into this new file.")
    ] = None,
) -> None:
    """Put load on a server of the OpenAI API: times to the first token, between tokens and in all,
    as percentiles, and throughput.

    Exits with 1 if a request failed. SETTINGS are those of megabit serve, where CKPT is given.

    Example: megabit bench serve runs/default --clients 16 parallel.tp=2 --png load.png
    """
    from megabit.benchmark.serve import Limits, Load
    from megabit.benchmark.serve_report import run_and_report
    from megabit.benchmark.server_process import served

    if clients is not None and rate is not None:
        raise UserError("--rate: is another kind of load than --clients; give one of them")
    for out in (json, png):
        if out is not None:
            check_new(out, "--json" if out is json else "--png")
    load = Load(
        clients=None if rate is not None else clients or 8,
        rate=rate,
        requests=64 if requests is None and duration is None else requests,
        seconds=duration,
        prompt_tokens=prompt_tokens,
        shared_tokens=shared_tokens,
        answer_tokens=answer_tokens,
        prompts=() if prompts is None else _lines(prompts),
        temperature=temperature,
        warmup=warmup,
        seed=seed,
    )
    limits = Limits(*(None if ms is None else ms / 1e3 for ms in (ttft_ms, tpot_ms)))
    is_url = target.startswith(("http://", "https://"))
    if is_url and settings:
        raise UserError(f"{settings[0]}: settings are for a model that is served here")
    with nullcontext(target) if is_url else served(Path(target), settings or []) as url:
        is_whole = run_and_report(url, load, limits, api_key, json, png)
    sys.exit(0 if is_whole else 1)


def _lines(path: Path) -> tuple[str, ...]:
    try:
        found = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line)
    except OSError as error:
        raise UserError(f"--prompts: cannot read {path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts: {path} is not UTF-8") from error
    if not found:
        raise UserError(f"--prompts: {path} has no line that is not empty")
    return found


@app.command("overlap")
def overlap(
    share: Annotated[
        float,
        typer.Option(
            help="Of a microbatch's backward pass that reducing the gradients alone is to take.",
            min=0.05,
            max=1.0,
        ),
    ] = 0.7,
    steps: Annotated[int, typer.Option(help="Steps to time, after two warm-up ones.", min=1)] = 7,
) -> None:
    """Show how much of the gradients' reduction is hidden behind backward, on a slow link.

    Two data-parallel ranks in network namespaces of this host, joined by a link of limited
    bandwidth. Needs Linux, root, ip and tc; says so where they are missing.

    Example: megabit bench overlap --share 0.5
    """
    from megabit.benchmark.overlap import report

    # Ended by a signal, it still takes the namespaces away.
    with on_signals((signal.SIGTERM,), lambda number: sys.exit(128 + number)):
        report(share, steps)
