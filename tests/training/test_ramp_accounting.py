"""What is sent and kept while a λ ramp lasts, with full-precision activations and with medians,
against the formulas: to the byte, on every rank."""

from dataclasses import dataclass

import pytest
import torch

from megabit.launch import run_ranks
from megabit.pipeline.plan import plan_stages
from megabit.tensor_parallel import Quantization
from megabit.training.memory import resident_bytes
from megabit.training.step import TrainingState, train_step
from megabit.training.traffic import Sent, StepKind, step_traffic, total_traffic
from tests.training.tiny import make_mesh, own_batch, shape_of, tiny

CPU = torch.device("cpu")
STEPS = 4
# 52 columns and 301 rows fill neither tiles of codes nor multiples of 64.
SIZES = (
    *("model.intermediate_size=52", "model.vocab_size=301", "data.seq_length=8"),
    *("train.global_batch_size=4", "train.micro_batch_size=2", f"train.steps={STEPS}"),
)
RAMP = "train.quantization_ramp=0.5"
BF16 = "precision.compute=bfloat16"
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
OPTIONS = (
    (RAMP,),
    (RAMP, BF16, "train.recompute=full", "model.weight_scale=absmedian"),
    (RAMP, "optim.zero_stage=0", "train.recompute=selective"),
    ("model.activations=full", "train.recompute=full", "model.weight_scale=absmedian"),
    (RAMP, BF16, "parallel.row_reduce=exact16"),
)


@dataclass(frozen=True)
class Step:
    now: Quantization
    next_share: float
    sent: Sent
    kept: dict[str, int]


def without_control(sent: Sent) -> Sent:
    """What ranks agree on has nothing to do with quantization."""
    return {key: count for key, count in sent.items() if key[1] != "control" and count}


def run_steps(*settings: str) -> list[Step]:
    config = tiny(*SIZES, *settings)
    state, steps = TrainingState.create(config, make_mesh(config)), []
    for step in range(STEPS):
        before = state.mesh.sent()
        train_step(state, own_batch(config, state.mesh, step), step)
        state.optimizer.publisher.settle()
        sent = {key: total - before.get(key, 0) for key, total in state.mesh.sent().items()}
        now, following = state.quantization_of(step), state.quantization_of(step + 1)
        kept = state.optimizer.nbytes()
        steps.append(Step(now, following.share, without_control(sent), kept))
    return steps


@pytest.mark.parametrize(
    ("tp", "dp", "settings"),
    [
        (2, 1, (SEQUENCE_PARALLEL,)),
        (1, 2, ()),
        pytest.param(2, 1, (), marks=pytest.mark.slow),
        pytest.param(2, 2, (), marks=pytest.mark.slow),
    ],
)
def test_what_is_sent_and_kept_is_what_the_formulas_say(
    tp: int, dp: int, settings: tuple[str, ...]
) -> None:
    options = [(*option, *settings, f"parallel.tp={tp}") for option in OPTIONS]
    ranks = run_ranks(lambda: [run_steps(*option) for option in options], tp * dp)
    for number, option in enumerate(options):
        config = tiny(*SIZES, *option)
        for step in range(STEPS):
            total: Sent = {}
            for rank, of_rank in enumerate(ranks):
                found = of_rank[number][step]
                share = min(1.0, step / 2) if RAMP in option else 1.0
                assert found.now == Quantization(share)
                shape = shape_of(config, tp * dp, rank)
                kind = StepKind(quantization=found.now, next_share=found.next_share)
                expected = step_traffic(shape, kind)
                assert found.sent == without_control(expected), (option, step, rank)
                kept = resident_bytes(shape, CPU, share=found.next_share)
                assert found.kept == kept, (option, step, rank)
                assert (found.kept["codes"] == 0) == (found.next_share < 1)
                for key, count in found.sent.items():
                    total[key] = total.get(key, 0) + count
            sent = total_traffic(config, tp * dp, plan_stages(config, dp), kind)
            assert without_control(sent) == total


def test_a_skipped_step_sends_weights_only_for_another_share() -> None:
    shape = shape_of(tiny(*SIZES, "parallel.tp=2"), 4, 0)

    def purposes(now: float, following: float) -> set[str]:
        return {
            p
            for _, p in step_traffic(
                shape, StepKind(None, False, False, Quantization(now), following)
            )
        }

    assert not purposes(1.0, 1.0) & {"weights", "scales"}
    assert purposes(0.5, 0.6) >= {"weights", "scales"}
