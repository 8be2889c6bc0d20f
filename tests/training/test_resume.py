"""Checkpoints: a run that was interrupted goes on to the same bits, or says why it cannot."""

import functools
import io
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from megabit.checkpoint import CheckpointStore
from megabit.config import Config
from megabit.data.corpus import CorpusInfo
from megabit.errors import RunError, UserError
from megabit.launch import RankError, run_ranks
from megabit.mesh import ParallelMesh
from megabit.training import trainer
from tests.training.runs import (
    AtStep,
    assert_same_tensors,
    checkpoint,
    config_of,
    refused,
    rows,
    train,
)
from tests.training.tiny import make_mesh, tiny_corpus

TP2_PP2 = ("parallel.tp=2", "parallel.pp=2")
ONE_PROCESS, FOUR_RANKS = ((), 1), (TP2_PP2, 4)
FOUR_LAYERS = ("model.num_hidden_layers=4", "parallel.pp=2")
TWO_CHUNKS = (*FOUR_LAYERS, "parallel.vpp=2", "parallel.layers_per_stage=[1,1,1,1]")
V = (*TWO_CHUNKS, "parallel.schedule=zb-v")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def assert_same_run(folder: Path, other: Path, world_size: int) -> None:
    assert rows(folder) == rows(other)
    assert len(rows(folder)) == 7  # of 6 steps and an evaluation
    ranks = checkpoint(folder, 6)
    assert len(ranks) == world_size
    assert_same_tensors(ranks, checkpoint(other, 6))


@pytest.mark.parametrize(("settings", "world_size"), [ONE_PROCESS, FOUR_RANKS, (V, 2)])
def test_an_interrupted_run_ends_in_the_same_bits(
    corpus: CorpusInfo, tmp_path: Path, settings: tuple[str, ...], world_size: int
) -> None:
    straight, stopped, killed = (tmp_path / name for name in ("straight", "stopped", "killed"))
    finished, said = train(config_of(corpus, straight, *settings), world_size)
    assert finished
    assert "Resuming" not in said

    config = config_of(corpus, stopped, *settings)
    finished, said = train(config, world_size, lambda: AtStep(3, signal.SIGTERM))
    assert not finished
    assert "Stopped after step 3, saved in" in said
    assert not (stopped / "summary.json").exists()
    finished, said = train(config, world_size)
    assert finished
    assert "Resuming after step 3" in said
    assert_same_run(stopped, straight, world_size)

    config = config_of(corpus, killed, *settings, "train.save_interval=2")
    with pytest.raises(RankError, match="rank 0 died"):
        train(config, world_size, lambda: AtStep(5, signal.SIGKILL))
    finished, said = train(config, world_size)
    assert "Resuming after step 4" in said
    assert_same_run(killed, straight, world_size)


@pytest.fixture(scope="module")
def used(corpus: CorpusInfo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four ranks; tests change copies of it."""
    folder = tmp_path_factory.mktemp("used")
    train(config_of(corpus, folder, *TP2_PP2), 4)
    return folder


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (("parallel.tp=2",), 2, "was saved at tp=2 × pp=2 × dp=1, this run is at tp=2 × pp=1"),
        ((), 4, "was saved at tp=2 × pp=2 × dp=1, this run is at tp=1 × pp=1 × dp=4"),
        ((*TP2_PP2, "train.seed=5"), 4, "train.seed: .* has 1234, not 5; resume with the same"),
        ((*TP2_PP2, "model.hidden_act=silu"), 4, "model.hidden_act: .* has 'relu2', not 'silu'"),
        ((*TP2_PP2, "train.global_batch_size=4"), 4, "train.global_batch_size: .* has 8, not 4"),
        ((*TP2_PP2, "run.resume=false"), 4, "run.dir: .* holds a run already"),
    ],
    ids=["layout", "dp", "seed", "model", "batch", "no-resume"],
)
def test_another_run_is_refused(
    corpus: CorpusInfo, used: Path, settings: tuple[str, ...], world_size: int, message: str
) -> None:
    before = {path: path.read_bytes() for path in used.rglob("*") if path.is_file()}
    assert re.search(message, refused(config_of(corpus, used, *settings), world_size))
    assert {path: path.read_bytes() for path in used.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(("1f1b", "zb-h1", "gpipe"), id="loop"),
        pytest.param(("v-min", "zb-v", "v-half"), id="v"),
    ],
)
def test_another_schedule_of_the_same_stages_changes_nothing(
    corpus: CorpusInfo, tmp_path: Path, schedules: tuple[str, ...]
) -> None:
    """Two steps by each of them end in the bits of six steps by the first one."""
    straight, changing = tmp_path / "straight", tmp_path / "changing"
    layout = TWO_CHUNKS if schedules[0] == "v-min" else FOUR_LAYERS
    train(config_of(corpus, straight, *layout, f"parallel.schedule={schedules[0]}"), 2)
    for name, last in zip(schedules, (2, 4, None), strict=True):
        config = config_of(corpus, changing, *layout, f"parallel.schedule={name}")
        file = io.StringIO if last is None else functools.partial(AtStep, last, signal.SIGTERM)
        finished, said = train(config, 2, file)
        assert finished == (last is None)
        assert f"Pipeline: {name}, " in said
    assert_same_run(changing, straight, 2)


def test_other_stages_are_refused(corpus: CorpusInfo, tmp_path: Path) -> None:
    """The layers, or which rank has which: ranks would read weights that others have."""
    train(config_of(corpus, tmp_path, *V, "train.steps=1"), 2)
    loop = config_of(corpus, tmp_path, *TWO_CHUNKS, "parallel.schedule=interleaved")
    assert re.search(
        r"parallel.schedule, stages of each rank: the run in .* has \[\[0, 3\], \[1, 2\]\], "
        r"not \[\[0, 2\], \[1, 3\]\]; resume with the same",
        refused(loop, 2),
    )
    layers = config_of(corpus, tmp_path, *V, "parallel.layers_per_stage=[1,1,2,0]")
    assert re.search(
        r"parallel.layers_per_stage: the run in .* has \[1, 1, 1, 1\], not \[1, 1, 2, 0\]",
        refused(layers, 2),
    )
    fewer = config_of(corpus, tmp_path, *FOUR_LAYERS)
    problems = all_refused(fewer, 2)
    assert [problem.split(":")[0] for problem in problems] == [
        "parallel.layers_per_stage",
        "parallel.schedule, stages of each rank",
    ]
    assert "has [[0, 3], [1, 2]], not [[0], [1]]" in problems[1]


def test_another_corpus_is_refused(used: Path, tmp_path: Path) -> None:
    other = tiny_corpus(tmp_path, seed=5)
    message = refused(config_of(other, used, *TP2_PP2), 4)
    assert re.search("data.dir: .* is not the corpus that .* was trained on", message)


def all_refused(config: Config, world_size: int) -> list[str]:
    """The lines with which all ranks refuse to start."""

    def run() -> list[str]:
        with pytest.raises(UserError) as caught:
            trainer.train(config, make_mesh(config), Console(quiet=True))
        return list(caught.value.problems)

    first, *others = run_ranks(run, world_size)
    assert others == [first] * len(others)
    return first


def test_all_differences_are_told_at_once(corpus: CorpusInfo, used: Path) -> None:
    config = config_of(corpus, used, *TP2_PP2, "train.seed=5", "model.hidden_act=silu")
    assert len(all_refused(config, 4)) == 2


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_last_bit(path: Path) -> None:
    """Changes one number and leaves the file well-formed."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rank_00000.safetensors", cut_short, "rank_00000.safetensors: cannot read it"),
        ("rank_00000.safetensors", garble, "rank_00000.safetensors: cannot read it"),
        ("rank_00002.safetensors", flip_last_bit, "rank_00002.safetensors: cannot read it"),
        ("rank_00000.safetensors", Path.unlink, "rank_00000.safetensors: cannot read it"),
        ("rank_00003.safetensors", cut_short, "rank_00003.safetensors: cannot read it"),
        ("about.json", cut_short, "about.json: cannot read it"),
        ("about.json", Path.unlink, "about.json: cannot read it"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    corpus: CorpusInfo,
    used: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(used, run)
    damage(run / "checkpoints" / "step_00000006" / name)
    assert message in refused(config_of(corpus, run, *TP2_PP2), 4)


def test_latest_names_what_is_not_there(corpus: CorpusInfo, used: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(used, run)
    (run / "checkpoints" / "latest").write_text("step_00000123\n")
    message = refused(config_of(corpus, run, *TP2_PP2), 4)
    assert "step_00000123" in message
    assert "put the name of a complete checkpoint into" in message


def store_in(folder: Path) -> CheckpointStore:
    mesh = ParallelMesh()
    if dist.is_initialized():
        mesh = ParallelMesh.create(tp=dist.get_world_size(), pp=1, device=mesh.device)
    return CheckpointStore(folder, mesh)


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path) -> None:
    def run() -> None:
        store = store_in(tmp_path)
        assert store.latest() is None
        for step in (1, 2, 2):  # a step may be saved again
            value = torch.tensor([step * 10.0 + dist.get_rank()])
            store.save(step, {"x": value, "view": torch.arange(6).view(2, 3).t()}, {"note": "ä"})
            latest = store.latest()
            assert latest is not None
            assert (latest.step, latest.about["note"]) == (step, "ä")
            loaded = store.load(latest)
            assert torch.equal(loaded["x"], value)
            assert torch.equal(loaded["view"], torch.arange(6).view(2, 3).t())

    run_ranks(run, 2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latest", "step_00000001", "step_00000002"}


def test_what_a_crash_left_is_no_checkpoint(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(1, {"x": torch.ones(1)}, {})
    draft = tmp_path / "step_00000002.tmp"
    draft.mkdir()
    (draft / "rank_00001.safetensors").write_bytes(b"half of")
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    store.save(2, {"x": torch.full((1,), 2.0)}, {})
    latest = store.latest()
    assert latest is not None
    assert latest.step == 2
    assert torch.equal(store.load(latest)["x"], torch.full((1,), 2.0))
    assert not draft.exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(failing: int, tmp_path: Path) -> None:
    def run() -> str:
        store = store_in(tmp_path)
        small, large = torch.ones(1), torch.ones(100_000)
        store.save(1, {"x": small}, {})
        pointer = (tmp_path / "latest").stat()
        if dist.get_rank() == failing:  # from here on a write beyond this size fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(RunError) as caught:
            store.save(2, {"x": large}, {})
        assert (tmp_path / "latest").stat() == pointer
        latest = store.latest()
        assert latest is not None
        assert latest.step == 1
        assert torch.equal(store.load(latest)["x"], small)
        return str(caught.value)

    messages = run_ranks(run, 2)
    assert all(f"rank_{failing:05d}.safetensors: cannot write it" in m for m in messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]


def test_fewer_steps_than_are_done_are_refused(corpus: CorpusInfo, used: Path) -> None:
    message = refused(config_of(corpus, used, *TP2_PP2, "train.steps=3"), 4)
    assert message.startswith("train.steps: 3 is less than the 6 steps that the run in")


def test_a_file_for_a_run_folder_is_refused(corpus: CorpusInfo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    message = refused(config_of(corpus, tmp_path / "file", "parallel.tp=2"), 2)
    assert message.startswith("run.dir: cannot write")
    assert (tmp_path / "file").read_text() == "mine"


def test_ranks_with_different_settings_are_refused(corpus: CorpusInfo, tmp_path: Path) -> None:
    def run() -> str:
        rate = 1e-3 * (1 + dist.get_rank())
        config = config_of(corpus, tmp_path / "run", f"optim.lr=[{rate},{rate}]")
        with pytest.raises(UserError) as caught:
            trainer.train(config, make_mesh(config), Console(quiet=True))
        return str(caught.value)

    assert all("give all hosts the same" in message for message in run_ranks(run, 2))
    assert not (tmp_path / "run").exists()
