"""A step's parts: what they add up to, and what they do when a layout changes. And the end of a
step, which a search puts together from few tensors, against all of them."""

import dataclasses
from collections.abc import Sequence
from itertools import product

import pytest

from megabit.config import Config
from megabit.plan.catalog import known_machine
from megabit.plan.layout import Layout, Schedules, make_layout
from megabit.plan.machine import Machine
from megabit.plan.rank_end import RankEnds, _sums
from megabit.plan.step import PARTS, Account, Memo, Step, step_of
from tests.training.tiny import tiny

H100 = known_machine("h100", 8, "ib400")
HOST = known_machine("cpu", 4, "eth25")
SIZES = (
    *("model.hidden_size=128", "model.intermediate_size=256", "model.num_hidden_layers=8"),
    *("train.micro_batch_size=1", "train.global_batch_size=16", "data.seq_length=64"),
)


def laid_out(config: Config, ranks: int, machine: Machine = H100) -> Layout:
    return make_layout(config, ranks, machine, Schedules())


def step(*settings: str, ranks: int = 4, machine: Machine = H100) -> Step:
    return step_of(laid_out(tiny(*SIZES, *settings), ranks, machine))


def without_overlap(machine: Machine, overlap: float) -> Machine:
    network = dataclasses.replace(machine.network, overlap=overlap)
    return dataclasses.replace(machine, network=network)


@pytest.mark.parametrize("machine", [H100, HOST], ids=["h100", "cpu"])
@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.tp=2", "parallel.pp=2"),
        ("parallel.pp=4", "parallel.schedule=zb-v"),
        ("parallel.pp=2", "optim.zero_stage=2", "train.recompute=full"),
        ("parallel.tp=2", "parallel.sequence_parallel=true", "optim.zero_stage=0"),
    ],
)
def test_parts_add_up(settings: tuple[str, ...], machine: Machine) -> None:
    found = step(*settings, machine=machine)
    assert tuple(found.seconds) == PARTS
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.total_s == sum(found.seconds.values())
    assert found.tokens == 16 * 64
    assert found.tokens_per_s * found.total_s == pytest.approx(found.tokens)
    assert found.bubble + found.exposed < 1
    # A host of the catalog has no peak.
    assert (found.mfu is None) == (machine is HOST)


@pytest.mark.parametrize("machine", [H100, HOST], ids=["h100", "cpu"])
def test_one_rank_talks_to_nobody(machine: Machine) -> None:
    found = step(ranks=1, machine=machine)
    assert {part for part, seconds in found.seconds.items() if seconds} == {
        *("compute", "update", "other")
    }
    assert found.hidden_s == 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_more_microbatches_leave_less_bubble(schedule: str) -> None:
    """What is longer than the work of the busiest rank is for the pipeline to fill and to drain,
    however many there are; what is uneven between ranks comes again in each microbatch."""
    shares, once = [], []
    for batch in (8, 32, 128):
        settings = ("parallel.pp=4", f"parallel.schedule={schedule}")
        config = tiny(*SIZES, *settings, f"train.global_batch_size={batch}")
        account = Account.of(laid_out(config, 4))
        found = account.step()
        shares.append(found.bubble)
        waiting = found.seconds["bubble"] + found.seconds["PP"]
        once.append(waiting - (account.least_s - account.mean_s))
    assert shares == sorted(shares, reverse=True)
    assert once == pytest.approx([once[0]] * 3, rel=1e-6)
    assert once[0] > 0


def test_zero_2_sends_gradients_in_each_microbatch() -> None:
    slow = without_overlap(H100, 0.0)
    accounts = [
        Account.of(laid_out(tiny(*SIZES, f"optim.zero_stage={stage}"), 4, slow)) for stage in (1, 2)
    ]
    ((once,), (often,)), microbatches = [account.ends for account in accounts], 4
    assert microbatches <= often.gradients / once.gradients < 1.25 * microbatches
    assert (often.weights, often.agreement) == (once.weights, once.agreement)
    once_step, often_step = (account.step() for account in accounts)
    more = often_step.seconds["DP"] - once_step.seconds["DP"]
    assert more == pytest.approx(often.gradients - once.gradients)
    assert often_step.seconds["compute"] == once_step.seconds["compute"]


def test_what_is_hidden_is_not_exposed() -> None:
    """Where all ranks do the same: whatever the share that hides, all is one or the other."""
    for settings in (("optim.zero_stage=1",), ("optim.zero_stage=2",), ("parallel.tp=2",)):
        whole = step(*settings, machine=without_overlap(H100, 0.0))
        assert whole.hidden_s == 0
        for overlap in (0.3, 0.9, 1.0):
            found = step(*settings, machine=without_overlap(H100, overlap))
            assert found.hidden_s > 0
            assert found.seconds["DP"] + found.hidden_s == pytest.approx(whole.seconds["DP"])
            same = {**found.seconds, "DP": 0} == {**whole.seconds, "DP": 0}
            assert same


def test_a_slower_network_costs_its_own_part_only() -> None:
    """TP stays in a node; DP leaves it on 16 ranks."""
    slow = known_machine("h100", 8, "eth25")
    for settings, ranks in ((("parallel.tp=4",), 4), (("parallel.tp=4",), 16)):
        fast_step, slow_step = (step(*settings, ranks=ranks, machine=m) for m in (H100, slow))
        for part in ("compute", "TP", "update", "other"):
            assert fast_step.seconds[part] == slow_step.seconds[part]
        assert (slow_step.seconds["DP"] > fast_step.seconds["DP"]) == (ranks > 8)


def _has_value(item: tuple[object, float]) -> bool:
    return bool(item[1])


def layouts_of_one_model(
    tied: bool, layers: int, ranks: int, recomputes: Sequence[str] = ("none", "full")
) -> list[Layout]:
    """All with one model, batch and world: what a memo is for."""
    found, schedules = [], Schedules()
    for tp, pp, schedule, stage, micro, recompute, sequence in product(
        *((1, 2), (1, 2, 4), ("1f1b", "zb-v"), (0, 1, 2), (1, 2), recomputes, (False, True)),
    ):
        if ranks % (tp * pp) or (sequence and tp == 1) or (pp == 1 and schedule != "1f1b"):
            continue
        base = tiny(*SIZES, f"model.tie_word_embeddings={tied}".lower())
        model = dataclasses.replace(base.model, num_hidden_layers=layers)
        parallel = dataclasses.replace(
            base.parallel, tp=tp, pp=pp, schedule=schedule, sequence_parallel=sequence
        )
        train = dataclasses.replace(base.train, micro_batch_size=micro, recompute=recompute)
        optim = dataclasses.replace(base.optim, zero_stage=stage)
        config = dataclasses.replace(base, model=model, parallel=parallel, train=train, optim=optim)
        found.append(make_layout(config, ranks, H100, schedules))
    return found


@pytest.mark.parametrize(
    ("layers", "tied"),
    [
        *((7, False), (8, True)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((7, True), (8, False))),
    ],
)
def test_the_end_of_a_rank_is_that_of_all_its_tensors(layers: int, tied: bool) -> None:
    """Bytes and work to the last one, from memos that all layouts share."""
    ends, uneven = RankEnds(), False
    # What is recomputed is over when a step ends.
    for layout in layouts_of_one_model(tied, layers, 8, recomputes=["none"]):
        uneven |= len({len(shape.layers) for shape in layout.shapes}) > 1
        for shape in layout.shapes:
            quick, direct = ends._sums_of(shape), _sums(shape)
            assert quick.elements == direct.elements
            for mine, theirs in ((quick.sent, direct.sent), (quick.work, direct.work)):
                assert dict(filter(_has_value, mine.items())) == dict(
                    filter(_has_value, theirs.items())
                )
    assert uneven == (layers == 7)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_memo_changes_nothing(tied: bool) -> None:
    memo = Memo()
    for layout in layouts_of_one_model(tied, 8, 8):
        shared, alone = Account.of(layout, memo), Account.of(layout)
        assert shared.costs == alone.costs
        assert shared.ends == alone.ends
        assert shared.least_s == alone.least_s
        # A bound of what is to come is none if anything is faster.
        assert alone.least_s <= alone.step().total_s * (1 + 1e-9)
        assert alone.mean_s <= alone.step().total_s * (1 + 1e-9)


def test_muon_is_accounted_for_whole() -> None:
    shape = laid_out(tiny(*SIZES, "optim.name=muon"), 4).shapes[0]
    assert RankEnds()._sums_of(shape) == _sums(shape)
    ends = [
        RankEnds().of(each.shapes[0], each.rates, each.message_s)
        for name in ("adamw", "muon")
        for each in [laid_out(tiny(*SIZES, f"optim.name={name}"), 4)]
    ]
    assert ends[1].update > ends[0].update
