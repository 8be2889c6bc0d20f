"""The benchmark of checkpoints: it saves what it says, on one rank and on two, and cleans up."""

from pathlib import Path

import pytest

from megabit.benchmark.checkpoint import SNAPSHOT, SYNCHRONOUS, run
from megabit.config import load_config
from megabit.model import num_parameters

TINY = (
    *("model.hidden_size=32", "model.intermediate_size=48", "model.vocab_size=64"),
    *("model.num_hidden_layers=2", "data.seq_length=16"),
    *("train.global_batch_size=4", "train.micro_batch_size=2"),
)


@pytest.mark.parametrize("settings", [(), ("parallel.tp=2",)])
def test_a_run(settings: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config([*TINY, *settings])
    begun: list[str] = []
    result = run(config, 1 + len(settings), repeats=2, folder=tmp_path, progress=begun.append)
    assert SYNCHRONOUS in result.saves
    assert [*tmp_path.iterdir()] == []
    masters_and_moments = 12 * num_parameters(config.model)
    for name, save in result.saves.items():
        assert 0 < save.blocked_s <= save.total_s
        if "snapshot" not in name:
            assert save.bytes == masters_and_moments
    assert result.saves[SNAPSHOT].bytes < masters_and_moments / 3
    assert result.step_s > 0
    assert result.step_while_saving_s > 0
