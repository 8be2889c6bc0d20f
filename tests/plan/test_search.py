"""What a search finds is possible, fits, is trained by what it writes, and is the best there is."""

import dataclasses
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from megabit.config import SCHEDULE_CHUNKS, Config, find_problems, load_config
from megabit.errors import UserError
from megabit.plan.catalog import known_machine
from megabit.plan.layout import Schedules, make_layout
from megabit.plan.machine import Machine
from megabit.plan.memory import memory_of
from megabit.plan.search import KEYS, USABLE_MEMORY, Found, Search, choices_of
from megabit.plan.step import step_of
from megabit.plan.write import write_layout
from tests.training.tiny import SETTINGS, tiny

H100 = known_machine("h100", 8, "ib400")
HOST = known_machine("cpu", 4, "eth25")
RANKS = 4
EVERYTHING = 10**6
SIZES = ("model.num_hidden_layers=4", "train.global_batch_size=8", "train.micro_batch_size=1")
CONFIG = tiny(*SIZES)
OWN = """
from megabit.pipeline.schedules import gpipe


def all_forward(ranks, microbatches, chunks):
    return gpipe(ranks, microbatches, chunks)
"""


def search(
    *keep: str, config: Config = CONFIG, machine: Machine = H100, ranks: int = RANKS
) -> Found:
    return Search(config, ranks, machine, frozenset(keep), EVERYTHING).run()


def with_memory(machine: Machine, num_bytes: float) -> Machine:
    device = dataclasses.replace(machine.device, memory_bytes=int(num_bytes))
    return dataclasses.replace(machine, device=device)


@pytest.fixture(scope="module")
def found() -> Found:
    return search()


def test_candidates_are_possible_and_in_order(found: Found) -> None:
    assert found.slower == 0
    assert len(found.candidates) > 100
    for candidate in found.candidates:
        assert find_problems(candidate.layout.config, RANKS) == []
    times = [float(f"{candidate.step.total_s:.3g}") for candidate in found.candidates]
    assert times == sorted(times)
    for first, second in zip(found.candidates, found.candidates[1:], strict=False):
        if f"{first.step.total_s:.3g}" == f"{second.step.total_s:.3g}":
            assert first.memory_bytes <= second.memory_bytes
    choices = [tuple(candidate.choices.values()) for candidate in found.candidates]
    assert len({*choices}) == len(choices)


def test_memory_is_of_the_rank_that_needs_most(found: Found) -> None:
    for candidate in found.candidates[::7]:
        each = [sum(memory_of(s, H100.device).values()) for s in candidate.layout.shapes]
        assert candidate.memory_bytes == max(each)


def test_what_is_written_is_what_was_planned(found: Found, tmp_path: Path) -> None:
    """Over the settings that were planned for, whatever layout is in them."""
    laid_out = (
        *("parallel.pp=2", "parallel.schedule=interleaved", "parallel.vpp=2"),
        *("parallel.layers_per_stage=[1,1,1,1]", "train.recompute=full"),
    )
    of_kind = {
        (parallel.schedule, parallel.tp, parallel.pp, candidate.layout.config.optim.zero_stage): (
            candidate
        )
        for candidate in found.candidates
        for parallel in [candidate.layout.config.parallel]
    }
    assert {key[0] for key in of_kind} == {*SCHEDULE_CHUNKS} - {"gpipe"}
    for number, candidate in enumerate(of_kind.values()):
        path = tmp_path / f"{number}.yaml"
        write_layout(path, candidate, H100)
        for before in ((), laid_out):
            config = load_config([*SETTINGS, *SIZES, *before, str(path)], RANKS)
            planned = candidate.layout.config
            assert config.parallel.chunks == planned.parallel.chunks
            assert config.parallel.layers_per_stage is None
            chosen, wanted = choices_of(config), candidate.choices
            assert {**chosen, "parallel.vpp": 0} == {**wanted, "parallel.vpp": 0}


def all_configs(config: Config, ranks: int) -> Iterator[Config]:
    """Every combination, impossible ones as well."""
    schedules = [(name, None) for name in SCHEDULE_CHUNKS if name != "gpipe"]
    for tp, pp, (name, vpp), sequence, way, zero, micro, recompute in product(
        *((1, 2, 4), (1, 2, 4), [*schedules, ("interleaved", 4)], (False, True)),
        *(("int32", "exact16"), (1, 2), (1, 2, 4, 8), ("none", "selective", "full")),
    ):
        if ranks % (tp * pp) or (pp == 1 and name != "1f1b"):
            continue
        if (tp == 1 and way == "exact16") or (ranks == tp * pp and zero == 2):
            continue  # the same once more
        parallel = dataclasses.replace(
            config.parallel,
            tp=tp,
            pp=pp,
            schedule=name,
            vpp=vpp,
            sequence_parallel=sequence,
            row_reduce=way,
        )
        optim = dataclasses.replace(config.optim, zero_stage=zero)
        train = dataclasses.replace(config.train, micro_batch_size=micro, recompute=recompute)
        yield dataclasses.replace(config, parallel=parallel, optim=optim, train=train)


@pytest.mark.parametrize("machine", [H100, HOST], ids=["h100", "cpu"])
def test_nothing_is_faster_than_the_best(machine: Machine) -> None:
    """Of all combinations, each played by itself; the search plays few of them."""
    schedules, times = Schedules(), []
    for config in all_configs(CONFIG, RANKS):
        if not find_problems(config, RANKS):
            times.append(step_of(make_layout(config, RANKS, machine, schedules)).total_s)
    first = Search(CONFIG, RANKS, machine, top=1).run()
    assert first.slower > len(times) / 4
    # The search does not tell times apart that are the same to three digits.
    assert first.candidates[0].step.total_s == pytest.approx(min(times), rel=5e-3)
    several = Search(CONFIG, RANKS, machine, top=5).run()
    assert several.candidates[0].choices == first.candidates[0].choices
    fastest = [candidate.step.total_s for candidate in several.candidates[:5]]
    best = search(machine=machine).candidates[:5]
    assert fastest == pytest.approx([candidate.step.total_s for candidate in best], rel=5e-3)


@pytest.mark.parametrize("machine", [H100, HOST], ids=["h100", "cpu"])
def test_no_more_memory_than_there_is(machine: Machine) -> None:
    everything = search(machine=machine)
    sizes = sorted(candidate.memory_bytes for candidate in everything.candidates)
    limit = sizes[len(sizes) // 2]
    sharing = RANKS if machine.device.is_shared else 1
    small = with_memory(machine, 1 + limit * sharing / USABLE_MEMORY)
    found = search(machine=small)
    assert {candidate.memory_bytes <= limit for candidate in found.candidates} == {True}
    assert len(found.candidates) == sum(size <= limit for size in sizes)
    assert len(found.candidates) + len(found.too_large) == len(sizes)
    missing = [rejected.missing for rejected in found.too_large]
    assert missing == sorted(missing)
    assert missing[0] > 1
    assert found.considered == everything.considered


def test_nothing_fits() -> None:
    found = search(machine=with_memory(H100, 1))
    assert found.candidates == []
    assert found.too_large[0].missing <= found.too_large[-1].missing


KEPT = {
    "parallel.tp": ("parallel.tp=2",),
    "parallel.pp": ("parallel.pp=2",),
    "parallel.schedule": ("parallel.pp=2", "parallel.schedule=gpipe"),
    "parallel.vpp": ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.vpp=2"),
    "parallel.sequence_parallel": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "parallel.row_reduce": ("parallel.tp=2", "parallel.row_reduce=exact16"),
    "optim.zero_stage": ("optim.zero_stage=0",),
    "train.micro_batch_size": ("train.micro_batch_size=2",),
    "train.recompute": ("train.recompute=selective",),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_kept_choice_is_kept(key: str) -> None:
    config = tiny(*SIZES, *KEPT[key])
    found = search(key, config=config)
    wanted = choices_of(config)[key]
    for candidate in found.candidates:
        choices = candidate.choices
        if key == "parallel.vpp":  # as many stages on a rank, whatever the schedule
            assert candidate.layout.config.parallel.chunks == wanted
        else:
            assert choices[key] == wanted
    assert len({tuple(candidate.choices.values()) for candidate in found.candidates}) > 1


def test_what_cannot_be_kept_is_no_candidate() -> None:
    """Degrees that the ranks do not make, and more stages than there are layers."""
    for settings in ({"pp": 4}, {"tp": 4}, {"tp": 3}):
        parallel = dataclasses.replace(CONFIG.parallel, **settings)
        config = dataclasses.replace(CONFIG, parallel=parallel)
        found = search(*(f"parallel.{name}" for name in settings), config=config, ranks=2)
        assert found.candidates == []
        assert found.impossible.total() > 0
        assert {*found.impossible} == {*found.examples}
    parallel = dataclasses.replace(CONFIG.parallel, schedule="interleaved")
    config = dataclasses.replace(CONFIG, parallel=parallel)
    found = search("parallel.schedule", config=config)
    assert {c.layout.config.parallel.schedule for c in found.candidates} == {"interleaved"}


def test_a_schedule_of_ones_own_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN, encoding="utf-8")
    settings = ("parallel.pp=2", f"parallel.schedule={path}:all_forward")
    keep = ("parallel.pp", "parallel.schedule", "parallel.tp", "train.recompute")
    own = search(*keep, config=tiny(*SIZES, *settings))
    known = search(*keep, config=tiny(*SIZES, "parallel.pp=2", "parallel.schedule=gpipe"))
    assert own.candidates
    assert [c.step for c in own.candidates] == [c.step for c in known.candidates]


@pytest.mark.parametrize(
    ("settings", "keep", "line"),
    [
        ((), ("parallel.dp",), f"--keep: parallel.dp is nothing that is chosen: {', '.join(KEYS)}"),
        (
            ("outer.method=diloco", "outer.islands=2", "outer.inner_steps=2"),
            (),
            "outer.method: plan one island by itself, with outer.method=none",
        ),
        (
            ("communication.tune_buckets=true",),
            (),
            "communication.tune_buckets: must be false to plan a run",
        ),
    ],
)
def test_what_is_no_search(settings: tuple[str, ...], keep: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError) as raised:
        Search(tiny(*SIZES, *settings), RANKS, H100, frozenset(keep))
    assert str(raised.value) == line


def test_progress_goes_from_nothing_to_all() -> None:
    shares: list[float] = []
    Search(CONFIG, RANKS, H100, top=1).run(shares.append)
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1


def test_tp_stays_inside_a_node() -> None:
    """Of 8 GPUs a node, 6 would span two, over the slow network in each layer."""
    config = load_config(
        [
            *("model.num_attention_heads=12", "model.num_key_value_heads=12"),
            *("model.hidden_size=192", "model.vocab_size=512", "train.global_batch_size=48"),
            "train.micro_batch_size=1",
        ]
    )
    found = Search(
        config,
        48,
        known_machine("h100", 8, "ib400"),
        frozenset({"train.micro_batch_size", "train.recompute"}),
        10**6,
    ).run()
    degrees = {candidate.layout.config.parallel.tp for candidate in found.candidates}
    assert degrees == {1, 2, 4}
