"""What is counted of a rank's work is the model's work, and splits as the layout does."""

import dataclasses
from collections.abc import Mapping

import pytest

from megabit.config import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megabit.model.flops import flops_per_token
from megabit.pipeline.plan import plan_stages
from megabit.plan.catalog import known_machine
from megabit.plan.compute import head_work, part_times, update_s, update_work
from megabit.plan.layer_work import layer_work
from megabit.plan.machine import TERMS, Rates
from megabit.training.shapes import RankShape

MODEL = ModelConfig(
    vocab_size=600,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=4,
)
RATES = known_machine("h100", 8, "ib400").device.rates["bfloat16"]


def shape(tp: int = 1, dp: int = 1, rank: int = 0, **changes: object) -> RankShape:
    """Of a configuration; ``changes`` are of any section, by name."""
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(tp=tp),
        data=DataConfig(seq_length=32),
        train=TrainConfig(micro_batch_size=2, global_batch_size=16),
    )
    for section in ("model", "parallel", "precision", "train", "optim"):
        part = getattr(config, section)
        known = {f.name for f in dataclasses.fields(part)} & {*changes}
        own = {name: changes.pop(name) for name in known}
        config = dataclasses.replace(config, **{section: dataclasses.replace(part, **own)})
    assert not changes
    return RankShape(config, tp * dp, rank, plan_stages(config, dp))


def products(work: Mapping[str, float]) -> float:
    return sum(units for term, units in work.items() if term.endswith("product"))


@pytest.mark.parametrize("linear", ["ternary", "dense"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_products_are_those_of_the_model(tp: int, linear: str) -> None:
    flops = flops_per_token(MODEL, 32)
    tokens, layers = 64, MODEL.num_hidden_layers
    each = [layer_work(shape(tp, rank=rank, linear=linear)) for rank in range(tp)]
    for phase in ("forward", "input_gradient", "weight_gradient"):
        counted = sum(products(getattr(work, phase)) for work in each)
        assert 2 * counted == (flops.products - flops.head) / layers * tokens
    heads = [head_work(shape(tp, rank=rank)) for rank in range(tp)]
    for phase in ("forward", "input_gradient", "weight_gradient"):
        assert 2 * sum(products(getattr(work, phase)) for work in heads) == flops.head * tokens
    # Of S keys, a token meets (S + 1)/2.
    attention = sum(work.forward["attention"] for work in each)
    assert 2 * attention == pytest.approx(flops.attention / layers * tokens * 33 / 64)


def test_each_term_is_known_and_none_is_negative() -> None:
    for options in ({}, {"linear": "dense"}, {"ternary_backward": "int8"}, {"hadamard": True}):
        one = shape(2, dp=2, **options)
        for work in (layer_work(one), head_work(one)):
            for phase in (work.forward, work.input_gradient, work.weight_gradient):
                assert {*phase} <= {*TERMS}
                assert min(phase.values()) >= 0
        assert {*update_work(one)} <= {*TERMS}


def test_a_narrow_rank_has_less_to_do_but_not_in_proportion() -> None:
    one, two = part_times(shape(1), RATES), part_times(shape(2), RATES)
    for phase in ("forward", "input_gradient", "weight_gradient"):
        whole, half = getattr(one.layer, phase), getattr(two.layer, phase)
        assert whole / 2 < half < whole


def test_sequence_parallelism_saves_norms() -> None:
    plain, split = shape(2), shape(2, sequence_parallel=True)
    before, after = (layer_work(s).forward["forward bytes"] for s in (plain, split))
    assert after < before


def test_recomputation_is_in_b_and_full_is_more_than_selective() -> None:
    none, selective, full = (
        part_times(shape(recompute=recompute), RATES).layer
        for recompute in ("none", "selective", "full")
    )
    assert none.forward == selective.forward == full.forward
    assert none.input_gradient < selective.input_gradient < full.input_gradient
    # Row-parallel products are kept.
    assert full.input_gradient < none.input_gradient + none.forward
    some = shape(recompute="full", recompute_layers=[0])
    assert part_times(some, RATES).layer == none  # one of four: most do not


@pytest.mark.parametrize(("backward", "term"), [("int8", "int8 "), ("bfloat16", "bfloat16 ")])
def test_backward_products_have_the_rate_of_their_operands(backward: str, term: str) -> None:
    work = layer_work(shape(ternary_backward=backward))
    assert work.input_gradient[f"{term}input gradient product"]  # type: ignore[index]
    assert work.weight_gradient[f"{term}weight gradient product"]  # type: ignore[index]
    assert "input gradient product" not in work.input_gradient
    dense = layer_work(shape(ternary_backward=backward, linear="dense"))
    assert "input gradient product" in dense.input_gradient


def test_dp_shares_out_the_update() -> None:
    alone, shared, whole = shape(), shape(dp=4), shape(dp=4, zero_stage=0)
    own = [update_work(s)["updated element"] for s in (alone, shared, whole)]
    assert own[0] == pytest.approx(4 * own[1], rel=0.02)
    assert own[2] >= own[0]
    assert update_s(shared, RATES) < update_s(whole, RATES)
    assert update_work(shape(name="muon"))["weight gradient product"] > 0


def test_what_has_no_rate_takes_no_time() -> None:
    assert Rates({}).of({"attention": 5}) == 0
    assert Rates({"attention": 2.0}).of({"attention": 5, "head": 1}) == 10
    assert Rates({"step": 3.0}).step_s == 3


def test_bf16_moves_fewer_bytes_but_converts() -> None:
    wide = layer_work(shape())
    narrow = layer_work(shape(compute="bfloat16"))
    assert narrow.forward["forward bytes"] < wide.forward["forward bytes"]
    assert PrecisionConfig().compute == "float32"
