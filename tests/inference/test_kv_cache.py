"""Memory for keys and values: as much as is said, and as many blocks on all ranks."""

from pathlib import Path

import pytest
import torch

from megabit.config import load_serving_config
from megabit.inference.core import CoreSettings, EngineCore
from megabit.inference.kv_cache import KVCache, bytes_per_block
from megabit.inference.opening import open_stages
from megabit.inference.report import RankReport, summed
from megabit.interop.opening import open_source
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from tests.inference.models import save_served_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_a_block_takes_what_it_is_said_to_take(dtype: torch.dtype) -> None:
    cache = KVCache(range(3), 7, 16, 2, 24, dtype, torch.device("cpu"))
    held = [
        tensor.nbytes
        for pages in cache.pages.values()
        for tensor in (pages.keys, pages.values, pages.key_scale, pages.value_scale)
        if tensor is not None
    ]
    assert sum(held) == 7 * bytes_per_block(3, 16, 2, 24, dtype)


def test_all_stages_have_as_many_blocks_as_the_one_with_the_fewest(tmp_path: Path) -> None:
    model = save_served_model(tmp_path / "model")
    settings = ["parallel.pp=2", "parallel.layers_per_stage=[1,3]"]

    def compute() -> tuple[int, int]:
        mesh = ParallelMesh.create(1, 2, torch.device("cpu"))
        stages, _ = open_stages(open_source(model), load_serving_config(settings), mesh)
        core = EngineCore(stages, mesh, CoreSettings(128, kv_cache_mb=1))
        return core.num_blocks, len(core.runner.cache.pages)

    found = run_ranks(compute, 2)
    of_three = 2**20 // bytes_per_block(3, 16, 2, 16, torch.float32)
    assert found == [(of_three, 1), (of_three, 3)]


def test_what_all_ranks_have_sent_is_added_and_fallbacks_are_counted_once_a_stage() -> None:
    def report(stage: int, tp_rank: int, sent: float) -> RankReport:
        own = {"tp/int8": sent, "pp/activations": 1.0}
        return RankReport(stage, tp_rank, 0.0, 0, 0, own, fallbacks={"size": 2})

    reports = [report(stage, tp, 10.0 * stage + tp) for stage in range(2) for tp in range(2)]
    assert summed(reports) == ({"tp/int8": 22.0, "pp/activations": 4.0}, {"size": 4})
