"""Evaluation of the model that is being trained, at the layout of the run."""

from collections.abc import Mapping

from megabit.data.corpus import SplitInfo
from megabit.data.sampler import HeldOutWindows
from megabit.evaluation import text_loss
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.text_loss import Evaluation, bits_per_byte
from megabit.evaluation.text_sets import TextSet
from megabit.tensor_parallel import Quantization
from megabit.training.step import TrainingState

__all__ = ["Evaluation", "bits_per_byte", "evaluate", "evaluate_sets"]


def evaluate_sets(
    state: TrainingState,
    sets: Mapping[str, TextSet],
    limit: int | None = None,
    quantization: Quantization = Quantization(),  # noqa: B008  (it is frozen)
) -> dict[str, Evaluation]:
    """The loss of each text (``text_sets.open_sets``), on all of its windows or on ``limit`` of
    them; collective over the mesh, and the same on every rank.

    Args:
        quantization: of the forward passes. Below λ = 1 the model is not ternary.
    """
    runner = ForwardRunner(state.stages, state.plan.schedule.placement, state.mesh, quantization)
    return text_loss.evaluate_sets(runner, sets, state.config.train.micro_batch_size, limit)


def evaluate(
    state: TrainingState, windows: HeldOutWindows, split: SplitInfo, limit: int | None = None
) -> Evaluation:
    """``evaluate_sets`` of one text."""
    return evaluate_sets(state, {"": TextSet(windows, split)}, limit)[""]
