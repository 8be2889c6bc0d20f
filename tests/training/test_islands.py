"""Islands in the training loop: what they agree on, and how such a run goes on."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megabit.checkpoint.verify import verify
from megabit.data.corpus import CorpusInfo
from megabit.errors import UserError
from megabit.launch import RankError
from megabit.telemetry.metrics import read_metrics
from tests.training.runs import AtStep, checkpoint, config_of, rows, train
from tests.training.tiny import tiny, tiny_corpus

DILOCO = ("outer.method=diloco", "outer.islands=2", "outer.inner_steps=4")
STEPS = ("train.steps=10", "checkpoint.save_interval=3", "checkpoint.asynchronous=false")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ((), 2),
        (("outer.wire=int8", "outer.fragments=2"), 2),
        (("precision.gradients=topk", "communication.topk_ratio=0.3"), 4),
        (("outer.method=gossip", "parallel.tp=2"), 4),
    ],
    ids=str,
)
def test_a_run_goes_on_in_the_middle_of_a_round(
    corpus: CorpusInfo, settings: Sequence[str], world_size: int, tmp_path: Path
) -> None:
    """From step 6, with rounds of 4: every island has its own weights then."""
    chosen = (*DILOCO, *STEPS, *settings)
    straight, cut = (config_of(corpus, tmp_path / name, *chosen) for name in ("straight", "cut"))
    train(straight, world_size)
    with pytest.raises(RankError):
        train(cut, world_size, lambda: AtStep(7, signal.SIGKILL))
    assert newest(tmp_path / "cut").name == "step_00000006"
    assert len([*verify(newest(tmp_path / "cut"))]) == world_size + 1  # and the tokenizer
    half = checkpoint(tmp_path / "cut", 6)
    names = [name for name in half if name.startswith("master/")]
    assert not all(torch.equal(half[name], half[f"island1.{name}"]) for name in names)
    train(cut, world_size)
    one, other = (checkpoint(tmp_path / each, 10) for each in ("straight", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(one[name], one[f"island1.{name}"]) for name in names)
    assert rows(tmp_path / "straight") == rows(tmp_path / "cut")


@pytest.mark.slow
def test_a_run_goes_on_with_other_islands(corpus: CorpusInfo, tmp_path: Path) -> None:
    """With one world instead, and with more islands than before; what is left of rounds of other
    methods is left behind."""
    train(config_of(corpus, tmp_path / "run", *DILOCO, *STEPS, "train.steps=6"), 2)
    for number, (settings, world_size) in enumerate(
        [(STEPS, 2), ((*DILOCO, *STEPS, "outer.islands=4"), 4), ((*DILOCO, *STEPS), 4)]
    ):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "run", folder)
        finished, text = train(config_of(corpus, folder, *settings), world_size)
        assert finished
        assert "step     10  held-out loss" in text


@pytest.mark.slow
def test_a_stop_is_agreed_on_at_a_meeting(corpus: CorpusInfo, tmp_path: Path) -> None:
    """A signal to the main rank after step 5: the islands meet after 8."""
    config = config_of(corpus, tmp_path / "run", *DILOCO, "train.steps=12")
    finished, text = train(config, 2, lambda: AtStep(5, signal.SIGTERM))
    assert not finished
    assert "Stopped after step 8" in text
    assert newest(tmp_path / "run").name == "step_00000008"


@pytest.mark.slow
def test_one_islands_guard_ends_the_run_of_all(corpus: CorpusInfo, tmp_path: Path) -> None:
    """From step 5 on, island 1 has gradients that are no numbers, and may skip two such steps."""
    rules = "guard.rules=[{watch: nonfinite, action: skip, times: 2, calm_steps: 1, then: stop}]"
    drills = ", ".join(f"{{fault: nan, rank: 1, step: {step}}}" for step in range(5, 12))
    settings = (*DILOCO, "train.steps=12", rules, f"faults.drills=[{drills}]")
    # Which rank is heard first is a matter of time.
    with pytest.raises(RankError, match=r"another island has ended the run|nonfinite: loss"):
        train(config_of(corpus, tmp_path / "run", *settings), 2)
    assert newest(tmp_path / "run").name == "step_00000008"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "rank", "step", "settings"),
    [
        # What int8 has lost is dropped with a step that one island skips; the next step is saved.
        (4, 2, 4, ("precision.gradients=int8",)),
        (4, 0, 4, ("precision.gradients=int8", "communication.dp_intra=2")),
        (2, 1, 0, ()),  # an island that has never updated anything has no moments
        (2, 0, 0, ()),
    ],
)
def test_islands_that_skip_other_steps_are_saved_whole(
    corpus: CorpusInfo,
    tmp_path: Path,
    world_size: int,
    rank: int,
    step: int,
    settings: Sequence[str],
) -> None:
    saves = (f"checkpoint.save_interval={step + 1}", "checkpoint.asynchronous=false")
    drills = f"faults.drills=[{{fault: nan, rank: {rank}, step: {step}}}]"
    if "communication.dp_intra=2" in settings:
        world_size = 8
    config = config_of(
        corpus, tmp_path, *DILOCO, *saves, *settings, "train.micro_batch_size=1", drills
    )
    train(config, world_size)
    saved = tmp_path / "checkpoints" / f"step_{step + 1:08d}"
    assert [*verify(saved)]
    for newer in (tmp_path / "checkpoints").glob("step_*"):
        if newer > saved:
            shutil.rmtree(newer)
    (tmp_path / "checkpoints" / "latest").write_text(f"{saved.name}\n")
    before = checkpoint(tmp_path, step + 1)
    assert any(name.startswith("island1.") for name in before)
    finished, text = train(config, world_size)
    assert finished
    assert f"Resuming after step {step + 1}" in text


@pytest.mark.slow
def test_metrics_are_those_of_all_islands(corpus: CorpusInfo, tmp_path: Path) -> None:
    """Before the first meeting at a tiny rate, islands of one rank each have the loss that DP ranks
    have, and all samples are seen."""
    optim = ("optim.lr=[1e-9]", "optim.schedule=constant", "optim.weight_decay=[0]")
    settings = ("train.steps=2", *optim)
    train(config_of(corpus, tmp_path / "world", *settings), 2)
    train(config_of(corpus, tmp_path / "islands", *DILOCO, *settings), 2)
    for one, other in zip(
        read_metrics(tmp_path / "world" / "metrics.jsonl"),
        read_metrics(tmp_path / "islands" / "metrics.jsonl"),
        strict=False,
    ):
        if "loss" in one:
            # Means of means: fp64 rounding, and fp32 weights that moved by 1e-9.
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert other["batch_size"] == one["batch_size"]
            assert other["consumed_tokens"] == one["consumed_tokens"]


def test_what_islands_cannot_do() -> None:
    with pytest.raises(UserError, match=r"guard.rules: rollback would be one island's only"):
        tiny(*DILOCO, "guard.rules=[{watch: loss_spike, above: 3, action: rollback}]")
