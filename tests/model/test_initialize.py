"""Initialisation: the same logical values at every layout, and N(0, std²)."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megabit.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.model import build_stages
from megabit.model.initialize import ROWS_PER_CHUNK, logical_normal
from megabit.tensor_parallel import Shard, sharded_parameters

SHAPE = (3 * ROWS_PER_CHUNK + 17, 5)
ALL = (0, SHAPE[0])


def config_at(tp: int = 1, pp: int = 1, seed: int = 7, tied: bool = True) -> Config:
    """Blocks of unequal width in the vocabulary and the feed-forward layer; KV heads shared."""
    return Config(
        model=ModelConfig(
            vocab_size=301,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        ),
        parallel=ParallelConfig(tp=tp, pp=pp),
        data=DataConfig(seq_length=8),
        train=TrainConfig(seed=seed),
    )


def local_values(config: Config, mesh: ParallelMesh) -> dict[str, tuple[Shard, Tensor]]:
    parameters = sharded_parameters(build_stages(config, mesh))
    return {name: (p.shard, p.detach().clone()) for name, p in parameters.items()}


def assembled(ranks: Sequence[dict[str, tuple[Shard, Tensor]]]) -> dict[str, Tensor]:
    """Logical tensors from all ranks' shards, of which replicas must be equal."""
    values: dict[str, Tensor] = {}
    for rank in ranks:
        for name, (shard, local) in rank.items():
            whole = values.setdefault(name, torch.full(shard.shape, math.nan))
            part = whole.narrow(shard.dim, shard.span.start, shard.span.width)
            assert bool((part.isnan() | (part == local)).all())
            part.copy_(local)
    return values


@pytest.mark.parametrize(
    ("tp", "pp", "tied"), [(2, 1, True), (4, 1, False), (1, 2, True), (2, 2, True), (1, 3, False)]
)
def test_the_layout_does_not_change_a_bit(tp: int, pp: int, tied: bool) -> None:
    config = config_at(tp, pp, tied=tied)
    unsplit = assembled([local_values(config_at(tied=tied), ParallelMesh())])
    cpu = torch.device("cpu")
    ranks = run_ranks(lambda: local_values(config, ParallelMesh.create(tp, pp, cpu)), tp * pp)
    split = assembled(ranks)
    assert split.keys() == unsplit.keys()
    for name, value in unsplit.items():
        assert torch.equal(split[name], value), name


def test_tied_copies_on_two_stages_are_equal() -> None:
    config = config_at(pp=2)
    first, last = run_ranks(
        lambda: local_values(config, ParallelMesh.create(1, 2, torch.device("cpu"))), 2
    )
    name = "model.embed_tokens.weight"
    assert torch.equal(first[name][1], last[name][1])
    assert first[name][0].owned(first[name][1]).shape == (301, 48)
    assert last[name][0].owned(last[name][1]).shape == (0, 48)  # counted once


@given(st.tuples(st.integers(*ALL), st.integers(*ALL)).filter(lambda ends: ends[0] != ends[1]))
def test_any_rows_are_those_of_the_whole(ends: tuple[int, int]) -> None:
    start, stop = sorted(ends)
    whole = logical_normal(1, "a.weight", SHAPE, *ALL)
    assert torch.equal(logical_normal(1, "a.weight", SHAPE, start, stop), whole[start:stop])


def test_values_depend_on_seed_name_and_chunk() -> None:
    values = logical_normal(1, "a.weight", SHAPE, *ALL)
    assert torch.equal(values, logical_normal(1, "a.weight", SHAPE, *ALL))
    for other in (logical_normal(2, "a.weight", SHAPE, *ALL), logical_normal(1, "b", SHAPE, *ALL)):
        assert not (values == other).any(1).all()
        assert not torch.equal(values[:2], other[:2])
    chunks = values[: 3 * ROWS_PER_CHUNK].split(ROWS_PER_CHUNK)
    assert not torch.equal(chunks[0], chunks[1])
    assert not torch.equal(chunks[1], chunks[2])


def test_no_two_matrices_of_a_model_are_equal() -> None:
    values = assembled([local_values(config_at(), ParallelMesh())])
    beginnings = [v.flatten()[:16].tolist() for v in values.values() if v.dim() == 2]
    assert len({tuple(numbers) for numbers in beginnings}) == len(beginnings) == 1 + 3 * 7


def test_it_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    build_stages(config_at(), ParallelMesh())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_distribution() -> None:
    for name, value in assembled([local_values(config_at(), ParallelMesh())]).items():
        if value.dim() == 1:
            assert (value == 1).all(), name
            continue
        # Within five standard errors of mean 0 and deviation 0.02 (seeds are fixed: no flakes).
        count = value.numel()
        assert abs(value.mean().item()) < 5 * 0.02 / math.sqrt(count)
        assert abs(value.std().item() - 0.02) < 5 * 0.02 / math.sqrt(2 * count)
