"""A checkpoint of one layout loads at any other: masters, moments and codes are the same bits, and
the next step has the same loss."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megabit.checkpoint import CheckpointStore
from megabit.config import Config
from megabit.launch import run_ranks
from megabit.tensor_parallel import ternary_layers
from megabit.training.more_state import training_parts
from megabit.training.resume import manifest_of, restore
from megabit.training.step import TrainingState, train_step
from tests.training.tiny import Owned, logical, make_mesh, own_batch, owned, tiny

KINDS = ("master", "exp_avg", "exp_avg_sq")
STEPS = 2

ONE = ((), 1)
TP2 = (("parallel.tp=2",), 2)
TP2_SP = (("parallel.tp=2", "parallel.sequence_parallel=true"), 2)
TP4 = (("parallel.tp=4",), 4)
PP2 = (("parallel.pp=2",), 2)
INTERLEAVED = (("parallel.pp=2", "parallel.schedule=interleaved", "parallel.vpp=2"), 2)
ZB_V = (("parallel.pp=2", "parallel.schedule=zb-v"), 2)
UNEVEN = (("parallel.pp=2", "parallel.layers_per_stage=[3,1]"), 2)
DP2 = ((), 2)
DP4_ZERO0 = (("optim.zero_stage=0",), 4)
DP2_ZERO2 = (("optim.zero_stage=2",), 2)
TP2_DP2_ZERO2 = (("parallel.tp=2", "optim.zero_stage=2"), 4)
TP2_PP2 = (("parallel.tp=2", "parallel.pp=2"), 4)
TP2_PP2_DP2 = (("parallel.tp=2", "parallel.pp=2"), 8)
UNTIED = ("model.tie_word_embeddings=false",)

Layout = tuple[tuple[str, ...], int]


class RankState(NamedTuple):
    """What a rank reports."""

    parts: dict[str, Owned]
    codes: list[tuple[str, tuple[slice, ...], Tensor]]
    scales: dict[str, Tensor]
    next_loss: float


@pytest.mark.parametrize(
    ("saved", "loaded", "model"),
    [
        pytest.param(ONE, TP2_PP2, (), id="one-to-tp2_pp2"),
        pytest.param(TP2_PP2, ONE, (), id="tp2_pp2-to-one"),
        pytest.param(TP4, DP2, (), id="tp4-to-dp2"),
        pytest.param(DP2, TP4, UNTIED, id="dp2-to-tp4-untied"),
        pytest.param(DP4_ZERO0, DP2_ZERO2, (), id="dp4_zero0-to-dp2_zero2"),
        pytest.param(DP2_ZERO2, PP2, UNTIED, id="dp2_zero2-to-pp2-untied"),
        pytest.param(INTERLEAVED, UNEVEN, (), id="interleaved-to-uneven"),
        pytest.param(UNEVEN, ZB_V, UNTIED, id="uneven-to-zb_v-untied"),
        pytest.param(ZB_V, TP2_SP, (), id="zb_v-to-tp2_sp"),
        pytest.param(TP2_SP, INTERLEAVED, (), id="tp2_sp-to-interleaved"),
        pytest.param(TP2_DP2_ZERO2, DP4_ZERO0, (), id="tp2_dp2_zero2-to-dp4_zero0"),
        pytest.param(TP2_PP2_DP2, TP2, (), id="tp2_pp2_dp2-to-tp2", marks=pytest.mark.slow),
        pytest.param(PP2, TP2_PP2_DP2, UNTIED, id="pp2-to-tp2_pp2_dp2", marks=pytest.mark.slow),
        pytest.param(ONE, DP2, ("model.linear=dense",), id="one-to-dp2-dense"),
    ],
)
def test_another_layout_loads_the_same_bits(
    saved: Layout, loaded: Layout, model: tuple[str, ...], tmp_path: Path
) -> None:
    four_layers = ("model.num_hidden_layers=4", *model)

    def save() -> RankState:
        state = start(tiny(*four_layers, *saved[0]))
        for step in range(STEPS):
            train_step(state, own_batch(state.config, state.mesh, step), step)
        store = CheckpointStore(tmp_path, state.mesh)
        store.save(manifest_of(state, STEPS, "none"), training_parts(state), {})
        ended = store.finish()
        assert ended is not None
        assert ended.problem is None
        return report(state)

    def load() -> RankState:
        state = start(tiny(*four_layers, *loaded[0]))
        checkpoint = CheckpointStore(tmp_path, state.mesh).find(False, print)
        assert checkpoint is not None
        assert restore(state, checkpoint) == STEPS
        assert state.optimizer.updates == STEPS
        return report(state)

    before, after = run_ranks(save, saved[1]), run_ranks(load, loaded[1])
    for kind in KINDS:
        wholes = [logical(rank.parts[kind] for rank in ranks) for ranks in (before, after)]
        assert wholes[0].keys() == wholes[1].keys()
        for name, whole in wholes[0].items():
            assert torch.equal(whole, wholes[1][name]), f"{kind}/{name}"
    codes = [assembled_codes(ranks) for ranks in (before, after)]
    assert codes[0].keys() == codes[1].keys()
    assert all(torch.equal(whole, codes[1][name]) for name, whole in codes[0].items())
    scales = {name: scale for rank in before for name, scale in rank.scales.items()}
    assert all(scales[name] == scale for rank in after for name, scale in rank.scales.items())
    # Losses of a step are taken before its update. A ternary model's forward pass has the same bits
    # at every layout; what differs is the order in which fp32 losses of tokens are added up, and a
    # dense model's row-parallel products.
    for rank in after:
        assert rank.next_loss == pytest.approx(before[0].next_loss, rel=1e-6)


def start(config: Config) -> TrainingState:
    return TrainingState.create(config, make_mesh(config))


def report(state: TrainingState) -> RankState:
    parts = {kind: owned(state.optimizer, kind) for kind in KINDS}
    codes = []
    for layer in ternary_layers(state.stages):
        shard = layer.weight.shard
        index = [slice(0, size) for size in shard.shape]
        index[shard.dim] = slice(shard.span.start, shard.span.stop)
        codes.append((layer.name, tuple(index), layer.ternary().codes().clone()))
    scales = {layer.name: layer.ternary().scale.clone() for layer in ternary_layers(state.stages)}
    loss = train_step(state, own_batch(state.config, state.mesh, STEPS), STEPS).loss
    return RankState(parts, codes, scales, loss)


def assembled_codes(ranks: list[RankState]) -> dict[str, Tensor]:
    """Whole matrices; ranks that hold the same part must agree on it."""
    wholes: dict[str, Tensor] = {}
    for name, index, codes in (item for rank in ranks for item in rank.codes):
        rows = max(part[0].stop for r in ranks for n, part, _ in r.codes if n == name)
        columns = max(part[1].stop for r in ranks for n, part, _ in r.codes if n == name)
        whole = wholes.setdefault(name, torch.full((rows, columns), 9, dtype=torch.int8))
        assert ((whole[index] == 9) | (whole[index] == codes)).all(), name
        whole[index] = codes
    assert all((whole != 9).all() for whole in wholes.values())
    return wholes
