"""``megabit parity``: does the layout change the model?"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from megabit.config import load_config
from megabit.errors import UserError

if TYPE_CHECKING:
    from megabit.training.parity import Difference, Tolerance


def parity(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTINGS",
            help="YAML files and key=value pairs; after --layouts, layouts such as tp=2,pp=2 "
            "(dp=2 for data parallel, sp for sequence parallel, pp=2,zb-v for a schedule).",
            show_default=False,
        ),
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            help="A layout to compare with one process; more may follow it.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.", min=1)] = 3,
) -> None:
    """Run a configuration at several layouts and at one process, and print how they differ.

    Uses the corpus in data.dir, or random tokens if there is none, with uneven loss masks. Exits
    with 1 if a difference exceeds the tolerance of the configured precision. Runs on this host's
    CPU.

    With parallel.exact=full nothing may differ: after all steps every master weight, moment and
    code is compared bit by bit.

    Example: megabit parity examples/model/tiny.yaml --layouts tp=2 pp=2 dp=2 tp=2,pp=2
    """
    from megabit.training.parity import Layout, Tolerance, compare_layouts

    # An option of Click takes one value; the layouts after the first arrive among the settings,
    # whose keys all have a dot.
    settings = [word for word in arguments or [] if not _is_layout(word)]
    words = [*(layouts or []), *(word for word in arguments or [] if _is_layout(word))]
    if not words:
        raise UserError("--layouts: name at least one, such as --layouts tp=2 pp=2 dp=2 tp=2,pp=2")
    config = load_config(settings)
    if Layout.of(config) != Layout():
        raise UserError(
            f"parallel: the settings have the layout {Layout.of(config)}; leave it out of them and "
            "name it after --layouts"
        )
    chosen = [Layout.parse(word) for word in words]
    for layout in chosen:
        layout.apply(config)
    tolerance = Tolerance.of(config)
    failed: list[Layout] = []

    def report(difference: "Difference") -> None:
        if not tolerance.allows(difference):
            failed.append(difference.layout)
        good = "identical" if difference.is_identical else "ok"
        print(_row(difference, good if tolerance.allows(difference) else "EXCEEDS"), flush=True)

    print(
        f"Each layout against one process, {config.precision.compute}, {config.model.linear}; "
        f"relative differences of the first step, then after {steps} steps"
    )
    print(HEADER, flush=True)
    compare_layouts(config, chosen, steps, report)
    if tolerance.is_identical:
        print(
            "Tolerance: none. identical: all losses and gradient norms, the first gradients, and "
            "after the last step all master weights, moments and codes are bit-equal"
        )
    else:
        _print_tolerance(tolerance)
    if failed:
        print("Exceeded at: " + "; ".join(map(str, failed)))
        sys.exit(1)


def _print_tolerance(tolerance: "Tolerance") -> None:
    print(
        f"Tolerance: first loss {tolerance.loss:.0e}, gradients and norm {tolerance.gradient:.0e}, "
        f"later loss {tolerance.last_loss:.0e}, weights {tolerance.weight:.0e}, "
        f"codes changed {tolerance.codes:.1%}"
        + (", forward bit-equal" if tolerance.forward_is_bit_equal else "")
    )


HEADER = (
    f"{'layout':<16} {'forward':<10} {'loss':>8} {'gradient':>8} {'norm':>8} "
    f"{'later loss':>10} {'weights':>8} {'codes changed':>16}  {'worst gradient':<36}"
)


def _row(difference: "Difference", verdict: str) -> str:
    forward = "bit-equal" if difference.forward_is_bit_equal else f"{difference.logits:.1e}"
    codes = f"{difference.codes_changed}/{difference.num_codes}"
    name = difference.gradient_name.removeprefix("model.").removesuffix(".weight")
    return (
        f"{difference.layout!s:<16} {forward:<10} {difference.loss:>8.1e} "
        f"{difference.gradient:>8.1e} {difference.grad_norm:>8.1e} {difference.last_loss:>10.1e} "
        f"{difference.weight:>8.1e} {codes:>16}  {name:<36} {verdict}"
    )


def _is_layout(word: str) -> bool:
    return (
        word == "sp" or word.split("=")[0] in ("tp", "pp", "dp", "layers") or word.startswith("sp,")
    )
