"""Weights that differ between DP replicas are found, named and put right."""

import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megabit.checkpoint import CheckpointStore
from megabit.data.corpus import CorpusInfo
from megabit.errors import RunError
from megabit.faults import code_check
from megabit.faults.code_check import Difference, compare_replicas, content_hash, replicated_tensors
from megabit.faults.drills import flip_code
from megabit.launch import run_ranks
from megabit.telemetry import MetricsLog
from megabit.telemetry.metrics import read_metrics
from megabit.training.fault_checks import open_fault_checks
from megabit.training.run_files import RunFiles
from megabit.training.step import TrainingState, train_step
from tests.training.runs import assert_same_tensors, checkpoint, config_of, train
from tests.training.tiny import make_mesh, own_batch, tiny, tiny_corpus

FIRST = "codes of model.layers.0.self_attn.q_proj.weight"
CHECKED = ("faults.check_codes_interval=1", "checkpoint.save_interval=0")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusInfo:
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


# The hash.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("length", [1, 3, 8, 1000, 8 * code_check.CHUNK + 5])
def test_every_bit_counts(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (length * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    own, data = content_hash(x), x.view(torch.uint8)
    assert content_hash(x.clone()) == own
    for place in (0, len(data) // 2, len(data) - 1):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert content_hash(x) != own
            data[place] ^= 1 << bit
    assert content_hash(x) == own


def test_the_order_counts() -> None:
    """Of words, of chunks, and of two equal changes in two places."""
    x = torch.arange(3 * code_check.CHUNK)
    others = [x.flip(0), x.roll(code_check.CHUNK), torch.cat([x[1:2], x[:1], x[2:]])]
    for bit in (0, 31, 32, 62, 63):
        changed = x.clone()
        changed[[5, 9]] ^= 1 << bit if bit < 63 else -(2**63)
        others.append(changed)
    assert content_hash(x) not in [content_hash(other) for other in others]


def test_a_view_has_the_hash_of_a_copy() -> None:
    """Also where it does not begin at a multiple of 8 bytes, and of any strides."""
    x = torch.arange(64, dtype=torch.uint8)
    assert content_hash(x[3:43]) == content_hash(x[3:43].clone())
    square = torch.randn(8, 8)
    assert content_hash(square.t()) == content_hash(square.t().contiguous())
    assert content_hash(torch.tensor(1.5)) != content_hash(torch.tensor(-1.5))


# Who differs.


def differences(
    settings: tuple[str, ...], world_size: int, broken: dict[int, int]
) -> list[Difference]:
    """After so many flips on some ranks; the same on all."""
    config = tiny(*settings)

    def run() -> list[Difference]:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        train_step(state, own_batch(config, mesh, 0), 0)
        assert compare_replicas(state.stages, mesh) == []
        for _ in range(broken.get(mesh.world.rank, 0)):
            flip_code(state.stages)
        return compare_replicas(state.stages, mesh)

    ranks = run_ranks(run, world_size)
    assert all(other == ranks[0] for other in ranks)
    return ranks[0]


def test_the_majority_is_right() -> None:
    found = differences(("train.global_batch_size=6",), 3, {2: 1})
    assert found == [Difference((2,), (FIRST,), 1, has_majority=True)]
    text = found[0].text(["rank 0 on a", "rank 1 on a", "rank 2 on b"])
    assert text == f"rank 2 on b has other weights than its replicas: {FIRST}"


def test_of_two_either_may_be_wrong() -> None:
    (found,) = differences(("parallel.tp=2",), 4, {3: 1})
    assert found == Difference((1, 3), (FIRST,), 1, has_majority=False)
    text = found.text([f"rank {rank} on a" for rank in range(4)])
    assert text == (
        "rank 1 on a, rank 3 on a have different weights, and nothing tells which are right: "
        + FIRST
    )


def test_each_group_finds_its_own() -> None:
    """Stage 0 is on ranks 0 and 1, stage 1 on ranks 2 and 3."""
    found = differences(("parallel.pp=2",), 4, {0: 1, 3: 1})
    assert [one.ranks for one in found] == [(0, 1), (2, 3)]
    assert found[1].tensors == ("codes of model.layers.1.self_attn.q_proj.weight",)


def test_everything_that_is_computed_with_is_compared() -> None:
    """Codes and γ, dense weights and gains; before a λ ramp has ended, W̃."""
    config = tiny()
    state = TrainingState.create(config, make_mesh(config))
    names = dict(replicated_tensors(state.stages))
    assert len([name for name in names if name.startswith("codes of ")]) == 2 * 7
    assert len([name for name in names if name.startswith("γ of ")]) == 2 * 7
    assert {"model.embed_tokens.weight", "model.norm.weight"} < names.keys()
    ramp = tiny("train.quantization_ramp=0.5")
    state = TrainingState.create(ramp, make_mesh(ramp))
    mixed = dict(replicated_tensors(state.stages))
    assert not any(name.startswith("codes of ") for name in mixed)
    assert "model.layers.0.self_attn.q_proj.weight" in mixed


# What a run does about it.


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_flip_is_repaired_before_the_next_step(
    corpus: CorpusInfo, tmp_path: Path, world_size: int
) -> None:
    """The run is then the one without it, bit by bit."""
    batch = "train.global_batch_size=12"
    flip = "faults.drills=[{fault: flip_code, rank: 1, step: 3}]"
    folders = [tmp_path / name for name in ("flipped", "plain")]
    finished, said = train(config_of(corpus, folders[0], *CHECKED, batch, flip), world_size)
    assert finished
    train(config_of(corpus, folders[1], batch, "checkpoint.save_interval=0"), world_size)
    assert_same_tensors(*(checkpoint(folder, 6) for folder in folders))
    rows = read_metrics(folders[0] / "metrics.jsonl")
    (event,) = [
        row["event"] for row in rows if row.get("event", {}).get("name") == "weights differ"
    ]
    assert (event["kind"], event["action"]) == ("fault", "repair")
    assert event["evidence"] == {
        "ranks": [1] if world_size == 3 else [0, 1],
        "tensors": [FIRST],
        "count": 1,
    }
    assert f"ALERT {event['text']}" in said
    # The check sends outside of steps: what steps send is as expected.
    assert "DIFFERS" not in said


def test_unnoticed_it_changes_the_run(corpus: CorpusInfo, tmp_path: Path) -> None:
    """So the test above can fail."""
    flip = "faults.drills=[{fault: flip_code, rank: 1, step: 3}]"
    for name, settings in (("flipped", [flip]), ("plain", [])):
        train(config_of(corpus, tmp_path / name, *settings), 2)
    flipped, plain = (checkpoint(tmp_path / name, 6) for name in ("flipped", "plain"))
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in flipped.items())


def test_what_cannot_be_repaired_ends_the_run(corpus: CorpusInfo, tmp_path: Path) -> None:
    """Masters of which each rank has all, and which differ: new weights do, too."""
    config = config_of(corpus, tmp_path / "run", "optim.zero_stage=0", *CHECKED)

    def run() -> str:
        mesh = make_mesh(config)
        state = TrainingState.create(config, mesh)
        log = MetricsLog(None, 0, 6, Console(quiet=True), None, {})
        files = RunFiles(tmp_path)
        checks = open_fault_checks(state, CheckpointStore(tmp_path, mesh), files, log)
        checks.before_step(0)
        if mesh.world.rank == 1:
            for master in state.optimizer.masters:
                master.weights.data.neg_()
        state.optimizer.publish()
        with pytest.raises(RunError) as caught:
            checks.before_step(1)
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert re.match(r"step 1: rank 0 on .*, rank 1 on .* have different weights, ", first)
    assert "New weights from the masters did not help" in first
