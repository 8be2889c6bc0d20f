"""What is about to be trained, for people: lines, and a table of the pipeline's stages."""

from rich.table import Table

from megabit.data.corpus import CorpusInfo
from megabit.model.words import short_model_text
from megabit.pipeline.layout import StageLayout
from megabit.pipeline.simulate import peak_activations, simulate
from megabit.training.step import TrainingState
from megabit_kernels import product_kernel


def describe(state: TrainingState, corpus: CorpusInfo, first_step: int) -> list[str]:
    """What is about to be trained, on what, at which layout."""
    config, mesh = state.config, state.mesh
    model, parallel = config.model, config.parallel
    lines = [
        f"Model: {short_model_text(model)}",
        f"Text: {corpus.train.tokens:,} tokens in {corpus.train.documents} documents to train on, "
        f"{corpus.held_out.tokens:,} in {corpus.held_out.documents} held out",
        f"Layout: TP {mesh.tp.size} × PP {mesh.pp.size} × DP {mesh.dp.size}"
        + (" with sequence parallelism" if parallel.sequence_parallel else "")
        + f", on {mesh.device.type} in {config.precision.compute}",
    ]
    outer = config.outer
    if outer.method != "none":
        lines.append(
            f"Islands: {outer.islands}, which meet every {outer.inner_steps} steps ({outer.method})"
            + ("" if outer.method == "stale" else "; a signal stops the run where they meet next")
        )
    if model.linear == "ternary":
        lines.append(f"Ternary products: {product_kernel(mesh.device)}")
    if first_step:
        lines.append(f"Resuming after step {first_step}")
    elif config.run.init_from is not None:
        lines.append(f"Beginning with the weights in {config.run.init_from}")
    return lines


def stage_table(state: TrainingState) -> Table | None:
    """What each stage has and what it takes, and what that makes of the schedule; None without a
    pipeline."""
    schedule, layouts = state.plan.schedule, state.plan.layouts
    if len(layouts) == 1:
        return None
    placement = schedule.placement
    costs = state.plan.costs
    total = sum(costs.of_stage(layout).total for layout in layouts)
    timeline = simulate(schedule, costs.by_stage(layouts))
    peak = max(peak_activations(schedule))
    table = Table(
        title=f"Pipeline: {state.config.parallel.schedule}, {schedule.microbatches} microbatches",
        caption=f"By {costs.source}: idle for {timeline.bubble:.1%} of the computing time; a rank "
        f"keeps the activations of at most {peak:g} microbatches",
    )
    for heading in ("rank", "stage", "layers", "beside them"):
        table.add_column(heading)
    table.add_column("cost", justify="right")
    table.add_column("cost of rank", justify="right")
    for rank in range(placement.ranks):
        own = sum(costs.of_stage(layout).total for layout in state.plan.of_rank(rank))
        for chunk, stage in enumerate(placement.stages[rank]):
            table.add_row(
                str(rank) if chunk == 0 else "",
                str(stage),
                _layers(layouts[stage]),
                _others(layouts[stage]),
                f"{costs.of_stage(layouts[stage]).total / total:.1%}",
                f"{own / total:.1%}" if chunk == 0 else "",
                end_section=chunk == placement.chunks - 1,
            )
    return table


def _layers(layout: StageLayout) -> str:
    layers = layout.layers
    match len(layers):
        case 0:
            return "none"
        case 1:
            return f"{layers[0]}"
    return f"{layers[0]}–{layers[-1]} ({len(layers)})"


def _others(layout: StageLayout) -> str:
    parts = ["embedding"] * layout.embedding + ["head, loss"] * layout.head
    return ", ".join(parts)
