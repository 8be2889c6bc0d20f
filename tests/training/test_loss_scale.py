"""fp16 with a loss scale: all ranks know of an overflow, and nothing is left of the scale."""

import json
from pathlib import Path

import pytest

from megabit.data.corpus import CorpusInfo
from megabit.launch import run_ranks
from megabit.training.step import TrainingState, train_step
from tests.training.runs import config_of, train
from tests.training.tiny import make_mesh, own_batch, tiny, tiny_corpus

# Gradients of activations then are several times what fp16 holds.
TOO_LARGE = 2**22
FP16 = ("precision.compute=float16", f"precision.loss_scale={TOO_LARGE}")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        pytest.param((), 1, id="one"),
        pytest.param((), 2, id="dp2"),
        pytest.param(("parallel.tp=2",), 2, id="tp2"),
        pytest.param(("parallel.pp=2",), 2, id="pp2"),
    ],
)
def test_all_ranks_skip_and_halve_until_it_fits(settings: tuple[str, ...], world_size: int) -> None:
    config = tiny(*FP16, *settings)

    def run() -> list[tuple[float, bool, bool, float]]:
        state = TrainingState.create(config, make_mesh(config))
        reports = [train_step(state, own_batch(config, state.mesh, s), s) for s in range(8)]
        return [(r.loss_scale, r.overflowed, r.is_updated, r.grad_norm) for r in reports]

    ranks = run_ranks(run, world_size)
    assert all(steps == ranks[0] for steps in ranks)
    overflowed = [step[1] for step in ranks[0]]
    count = sum(overflowed)
    assert 2 <= count <= 6
    assert overflowed == [True] * count + [False] * (8 - count)
    assert [scale for scale, *_ in ranks[0][: count + 1]] == [
        TOO_LARGE / 2**halved for halved in range(count + 1)
    ]
    assert all(updated != bad for _, bad, updated, _ in ranks[0])


def test_the_scale_is_no_part_of_the_gradient() -> None:
    """fp16 rounds activations to 2^-11; the norm of all gradients is known to about that."""

    def norm(*settings: str) -> float:
        config = tiny(*settings)
        state = TrainingState.create(config, make_mesh(config))
        return train_step(state, own_batch(config, state.mesh, 0), 0).grad_norm

    expected = norm()
    for scale in (256, 4096):
        found = norm("precision.compute=float16", f"precision.loss_scale={scale}")
        assert found == pytest.approx(expected, rel=2e-2)


def test_a_run_says_so_and_goes_on_where_it_was(corpus: CorpusInfo, tmp_path: Path) -> None:
    settings = (*FP16, "train.steps=8", "checkpoint.save_interval=5")
    straight = config_of(corpus, tmp_path / "straight", *settings)
    finished, said = train(straight, 1)
    assert finished
    assert "skipped: fp16 overflow, loss scale now" in said
    assert "nonfinite" not in said  # the guard has nothing to do with it
    manifest = json.loads(
        (tmp_path / "straight/checkpoints/step_00000005/manifest.json").read_text()
    )
    assert manifest["run"]["state"]["loss_scale"] < TOO_LARGE
