"""Evaluation of the model that is being trained, at the layout of the run."""

from collections.abc import Mapping

from megabit.data.corpus import HELD_OUT
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.text_loss import evaluate_sets
from megabit.evaluation.text_sets import TextSet
from megabit.telemetry import EvaluationMetrics
from megabit.training.embedding import evaluate_embeddings
from megabit.training.step import TrainingState


def evaluate(
    state: TrainingState, sets: Mapping[str, TextSet], step: int, limit: int | None = None
) -> EvaluationMetrics:
    """After ``step`` steps: the loss of each text (``text_sets.open_sets``), on all of its windows
    or on ``limit`` of them; of embeddings, how well held-out pairs find each other. Collective over
    the mesh, and the same on every rank.
    """
    config = state.config
    size = config.train.micro_batch_size
    runner = ForwardRunner(
        state.stages, state.plan.schedule.placement, state.mesh, state.quantization_of(step)
    )
    if config.loss.objective == "embedding":
        pairs = evaluate_embeddings(
            runner, sets[HELD_OUT].windows, size, config.loss.triplet_margin, limit
        )
        return EvaluationMetrics(
            step,
            pairs.loss,
            None,
            held_out_tokens=pairs.num_pairs,
            held_out_recall_at_1=pairs.recall_at_1,
        )
    results = evaluate_sets(runner, sets, size, limit)
    held_out = results.pop(HELD_OUT)
    return EvaluationMetrics(
        step, held_out.loss, held_out.bits_per_byte, results, held_out.num_tokens
    )
