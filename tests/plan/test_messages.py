"""A planner's messages are all that ``training.traffic`` says a rank sends, and no more."""

import dataclasses
from collections import defaultdict
from itertools import product
from typing import Any

import pytest

from megabit.config import (
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megabit.pipeline.plan import plan_stages
from megabit.plan.messages import (
    PHASES,
    between_stages,
    embedding_messages,
    head_messages,
    layer_messages,
    step_messages,
)
from megabit.training.messages import Message
from megabit.training.shapes import RankShape
from megabit.training.traffic import AXES, step_traffic

MODELS: tuple[dict[str, Any], ...] = (
    {},
    {"norm_placement": "prenorm", "tie_word_embeddings": False},
    {"norm_placement": "per_proj", "activations": "a4.8"},
    {"norm_placement": "in_linear", "hadamard": True},
    {"activations": "full"},
    {"linear": "dense"},
)
LAYOUTS = ((1, 1, 1, None), (2, 2, 1, None), (3, 1, 2, None), (1, 2, 4, 2), (2, 2, 2, None))
TRAININGS = (
    (OptimConfig(), PrecisionConfig(), "none", 0.0),
    (
        OptimConfig(name="muon", zero_stage=0),
        PrecisionConfig(compute="bfloat16", gradients="bfloat16"),
        "full",
        0.1,
    ),
    (OptimConfig(zero_stage=2), PrecisionConfig(gradients="ternary"), "selective", 0.0),
    (OptimConfig(zero_stage=2), PrecisionConfig(gradients="topk"), "full", 0.0),
)


def sent_by(shape: RankShape) -> dict[tuple[str, str], float]:
    """All that a rank sends in a step, from the planner's messages."""
    total: defaultdict[tuple[str, str], float] = defaultdict(float)

    def add(messages: list[Message], times: int = 1) -> None:
        for message in messages:
            axis = AXES.get(message.axis, message.axis)
            total[axis, message.purpose] += times * message.sent_bytes

    m = shape.microbatches
    for times, part in (
        (len(shape.layers), layer_messages),
        (int(shape.has_embedding), embedding_messages),
        (int(shape.has_head), head_messages),
    ):
        by_phase = part(shape)
        assert [*by_phase] == [*PHASES]
        for messages in by_phase.values():
            add(messages, m * times)
    hidden = between_stages(shape)
    placement, own = shape.plan.schedule.placement, shape.pipeline_rank
    for stage in placement.stages[own]:
        if stage < placement.num_stages - 1 and placement.rank_of(stage + 1) != own:
            add([hidden], m)
        if stage > 0 and placement.rank_of(stage - 1) != own:
            add([dataclasses.replace(hidden, purpose="activation gradients")], m)
    for messages in step_messages(shape).values():
        add(messages)
    return {key: num_bytes for key, num_bytes in total.items() if num_bytes}


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_messages_add_up_to_the_traffic(
    layout: tuple[int, int, int, int | None], model: dict[str, Any]
) -> None:
    tp, pp, dp, dp_intra = layout
    ways = product(
        (False, True) if tp > 1 else (False,), ("int32", "exact16"), ("forward", "full"), TRAININGS
    )
    for sequence_parallel, row_reduce, exact, (optim, precision, recompute, smoothing) in ways:
        config = Config(
            model=ModelConfig(
                vocab_size=600,
                hidden_size=96,
                intermediate_size=192,
                num_attention_heads=6,
                num_key_value_heads=2,
                **model,
            ),
            parallel=ParallelConfig(
                tp=tp,
                pp=pp,
                sequence_parallel=sequence_parallel,
                row_reduce=row_reduce,  # type: ignore[arg-type]
                exact=exact,  # type: ignore[arg-type]
            ),
            precision=precision,
            data=DataConfig(seq_length=30),
            train=TrainConfig(
                recompute=recompute,  # type: ignore[arg-type]
                global_batch_size=16,
                micro_batch_size=1,
            ),
            loss=LossConfig(label_smoothing=smoothing),
            optim=optim,
        )
        plan = plan_stages(config, dp)
        for rank in {0, tp * pp * dp - 1}:
            shape = RankShape(config, tp * pp * dp, rank, plan, dp_intra)
            assert sent_by(shape) == pytest.approx(step_traffic(shape), rel=1e-12)


def test_a_message_says_what_a_ring_sends() -> None:
    for kind, sent in (("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75)):
        message = Message("dp", "weights", kind, 1000, 4, 2)  # type: ignore[arg-type]
        assert message.sent_bytes == 2 * 1000 * sent
    assert Message("pp", "activations", "send", 1000, 2).sent_bytes == 1000
