"""What the parts of a model take: measured, laid on stages by it, and shown as a table."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megabit.config import Config
from megabit.data.corpus import CorpusInfo
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import CausalLMStages
from megabit.pipeline.balance import PartCost, PartCosts, balance
from megabit.pipeline.placement import Placement
from megabit.pipeline.plan import plan_stages
from megabit.tensor_parallel import TernaryLayer
from megabit.training import part_costs
from megabit.training.describe import stage_table
from megabit.training.part_costs import measure_part_costs
from megabit.training.step import TrainingState, train_step
from tests.training.runs import (
    AtStep,
    assert_same_tensors,
    checkpoint,
    config_of,
    rows,
    train,
)
from tests.training.tiny import logical, make_mesh, own_batch, owned, tiny, tiny_corpus

FOUR_LAYERS = "model.num_hidden_layers=4"
MEASURED = (FOUR_LAYERS, "parallel.pp=2", "parallel.balance=measured")
V = ("parallel.schedule=zb-v", "parallel.vpp=2")
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.vpp=2")

HEAD_IS_LARGE = PartCosts(PartCost(1, 1, 1), PartCost(), PartCost(2, 2, 2))
EMBEDDING_IS_LARGE = PartCosts(PartCost(1, 1, 1), PartCost(2, 2, 2), PartCost())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


# Measuring.


def test_costs_are_positive_and_the_same_on_all_ranks() -> None:
    """So are the layers that follow from them."""
    configs = [
        tiny(*MEASURED, "parallel.tp=2", *chosen)
        for chosen in (
            (),
            ("parallel.sequence_parallel=true", "parallel.exact=full", "train.hidden_dropout=0.1"),
            (*V, "train.recompute=full", "precision.compute=bfloat16"),
            (*INTERLEAVED, "model.linear=dense", "model.tie_word_embeddings=false"),
        )
    ]

    def run() -> list[tuple[PartCosts, Config]]:
        return [
            (measure_part_costs(config, mesh), TrainingState.create(config, mesh).config)
            for config in configs
            for mesh in [make_mesh(config)]
        ]

    first, *others = run_ranks(run, 4)
    for other in others:
        assert [costs for costs, _ in other] == [costs for costs, _ in first]
        assert [config for _, config in other] == [config for _, config in first]
    for config, (costs, measured) in zip(configs, first, strict=True):
        for part in (costs.layer, costs.embedding, costs.head):
            assert min(part.forward, part.input_gradient, part.weight_gradient) > 0
        counts = measured.parallel.layers_per_stage
        assert counts is not None
        assert len(counts) == config.parallel.pp * config.parallel.chunks
        assert sum(counts) == 4
        assert min(counts) >= 0
        assert measured == part_costs.with_layers(config, counts)


def test_nothing_is_measured_unless_asked_for() -> None:
    config = tiny()
    assert TrainingState.create(config, ParallelMesh()).config is config


def test_parts_are_measured_as_they_are_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense matrices in the dtype that is computed with, and what most layers recompute."""
    measured: list[CausalLMStages] = []

    def run_schedule(schedule: Any, stages: CausalLMStages, *given: Any, **more: Any) -> Any:
        measured.append(stages)
        return real(schedule, stages, *given, **more)

    real = part_costs.run_schedule
    monkeypatch.setattr(part_costs, "run_schedule", run_schedule)
    for linear, tied in (("ternary", "true"), ("dense", "false")):
        config = tiny(
            *(f"model.linear={linear}", f"model.tie_word_embeddings={tied}", FOUR_LAYERS),
            *("precision.compute=bfloat16", "train.recompute=full"),
            "train.recompute_layers=[1,2,3]",
        )
        measure_part_costs(config, ParallelMesh())
        state = TrainingState.create(config, ParallelMesh())
        dtypes = {name: p.dtype for name, p in state.stages.named_parameters()}
        stages = measured.pop()
        ternary = {
            f"{n}.weight"
            for n, module in stages.named_modules()
            if isinstance(module, TernaryLayer)
        }
        assert len(ternary) == (7 if linear == "ternary" else 0)
        for name, parameter in stages.named_parameters():
            if name not in ternary:  # of those training has codes
                assert parameter.dtype == dtypes[name], name
        if stages.head_use is not None:
            assert stages.head_use.dtype == torch.bfloat16
        assert [layer.recompute for layer in stages.model.layers.values()] == ["full"]


# Training by what was measured.


def fake(monkeypatch: pytest.MonkeyPatch, costs: PartCosts) -> None:
    """Ranks that are forked from now on measure ``costs``."""

    def measure(config: Config, mesh: ParallelMesh) -> PartCosts:
        return costs

    monkeypatch.setattr("megabit.training.step.measure_part_costs", measure)


def layers_in_yaml(folder: Path) -> str:
    (line,) = re.findall(r"layers_per_stage:((?:\n +- \d+)+)", (folder / "config.yaml").read_text())
    return "".join(re.findall(r"\d+", line))


def test_what_was_measured_decides_where_layers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for costs, expected in ((HEAD_IS_LARGE, [3, 1]), (EMBEDDING_IS_LARGE, [1, 3])):
        fake(monkeypatch, costs)
        assert balance(Placement.loop(2), 4, costs) == expected
        config = TrainingState.create(tiny(*MEASURED), ParallelMesh()).config
        assert config.parallel.layers_per_stage == expected


def test_a_run_trains_by_what_it_measures(corpus: CorpusInfo, tmp_path: Path) -> None:
    """To the bits of a run that was given the same layers."""
    measured, given = tmp_path / "measured", tmp_path / "given"
    finished, said = train(config_of(corpus, measured, *MEASURED), 2)
    assert finished
    counts = layers_in_yaml(measured)
    assert sum(map(int, counts)) == 4
    assert "Pipeline: 1f1b, 4 microbatches" in said
    layers = f"parallel.layers_per_stage=[{','.join(counts)}]"
    train(config_of(corpus, given, FOUR_LAYERS, "parallel.pp=2", layers), 2)
    assert rows(measured) == rows(given)
    assert_same_tensors(checkpoint(measured, 6), checkpoint(given, 6))


def test_a_resumed_run_measures_again(
    corpus: CorpusInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on another machine. Where layers are is not part of the run: its bits are those of
    one that kept them."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    config = config_of(corpus, run, *MEASURED)
    fake(monkeypatch, HEAD_IS_LARGE)
    finished, _ = train(config, 2, lambda: AtStep(3, signal.SIGTERM))
    assert not finished
    assert layers_in_yaml(run) == "31"

    fake(monkeypatch, EMBEDDING_IS_LARGE)
    finished, said = train(config, 2)
    assert finished
    assert "Resuming after step 3" in said
    assert layers_in_yaml(run) == "13"
    layers = "parallel.layers_per_stage=[3,1]"
    train(config_of(corpus, straight, FOUR_LAYERS, "parallel.pp=2", layers), 2)
    losses = [[row.get("loss") for row in rows(folder)] for folder in (run, straight)]
    assert losses[0] == losses[1]
    assert_same_tensors(checkpoint(run, 6), checkpoint(straight, 6))


def test_layers_may_be_anywhere_in_exact_training() -> None:
    """Every bit of masters and moments is that of one process."""
    exact = (FOUR_LAYERS, "parallel.exact=full", "train.hidden_dropout=0.1")
    layouts = [
        *(("parallel.pp=2", f"parallel.layers_per_stage={c}") for c in ("[1,3]", "[4,0]")),
        *(
            ("parallel.pp=2", *schedule, f"parallel.layers_per_stage={counts}")
            for schedule in (INTERLEAVED, V)
            for counts in ("[0,3,0,1]", "[1,0,2,1]")
        ),
    ]
    configs = [tiny(*exact, *layout) for layout in layouts]

    def steps(config: Config) -> list[list[tuple[str, Any, Tensor]]]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        for step in range(3):
            train_step(state, own_batch(config, mesh, step), step)
        return [owned(state.optimizer, kind) for kind in ("master", "exp_avg", "exp_avg_sq")]

    alone = steps(tiny(*exact))
    ranks = run_ranks(lambda: [steps(config) for config in configs], 2)
    for number, layout in enumerate(layouts):
        for kind in range(3):
            expected = logical([alone[kind]])
            found = logical(rank[number][kind] for rank in ranks)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), (layout, name)


# The table.


def table_of(*chosen: str) -> list[dict[str, str]] | None:
    """Its rows, as ``megabit train`` shows them before it begins."""
    config = tiny(*chosen)
    state = SimpleNamespace(config=config, plan=plan_stages(config, dp=1))
    table = stage_table(cast(TrainingState, state))
    if table is None:
        return None
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    headings = [str(column.header) for column in table.columns]
    return [dict(zip(headings, row, strict=True)) for row in zip(*cells, strict=True)]


@pytest.mark.parametrize(
    "chosen",
    [
        ("parallel.pp=2",),
        ("parallel.pp=4", "parallel.layers_per_stage=[0,3,1,0]", "parallel.schedule=gpipe"),
        ("parallel.pp=2", *INTERLEAVED),
        ("parallel.pp=2", *V),
    ],
)
def test_the_table_has_every_stage(chosen: tuple[str, ...]) -> None:
    found = table_of(FOUR_LAYERS, *chosen)
    assert found is not None
    plan = plan_stages(tiny(FOUR_LAYERS, *chosen), dp=1)
    placement = plan.schedule.placement
    assert [row["stage"] for row in found] == [str(s) for own in placement.stages for s in own]
    named = [row["rank"] for row in found if row["rank"]]
    assert named == [str(rank) for rank in range(placement.ranks)]
    for heading in ("cost", "cost of rank"):
        shares = [float(row[heading].rstrip("%")) for row in found if row[heading]]
        # Each is rounded to a tenth.
        assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares) + 1e-6)
    by_rank = [float(row["cost of rank"].rstrip("%")) for row in found if row["cost of rank"]]
    assert len(by_rank) == placement.ranks
    for row in found:
        layout = plan.layouts[int(row["stage"])]
        numbers = [*map(int, re.findall(r"\d+", row["layers"]))]
        match len(layout.layers):
            case 0:
                assert row["layers"] == "none"
            case 1:
                assert numbers == [layout.layers[0]]
            case count:
                assert numbers == [layout.layers[0], layout.layers[-1], count]
        others = {"embedding": layout.embedding, "head, loss": layout.head}
        assert row["beside them"] == ", ".join(name for name, has in others.items() if has)


def test_one_stage_has_no_table() -> None:
    assert table_of() is None
    assert table_of("parallel.exact=full") is None


def test_a_run_shows_the_table_if_it_has_a_pipeline(corpus: CorpusInfo, tmp_path: Path) -> None:
    once = ("train.steps=1", FOUR_LAYERS)
    _, said = train(config_of(corpus, tmp_path / "pp2", *once, "parallel.pp=2", *V), 2)
    assert "Pipeline: zb-v, 4 microbatches" in said
    assert "By estimate: idle for" in said
    assert "embedding" in said
    _, said = train(config_of(corpus, tmp_path / "pp1", *once), 1)
    assert "Pipeline: " not in said
