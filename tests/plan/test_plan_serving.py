"""A plan for serving: memory to the byte beside real engines', limits, and reasons."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megabit.config import ModelConfig, load_serving_config
from megabit.inference.core import CoreSettings, EngineCore
from megabit.inference.opening import open_stages
from megabit.interop.opening import open_source
from megabit.launch import run_ranks
from megabit.mesh import ParallelMesh
from megabit.plan.catalog import known_machine
from megabit.plan.machine import Machine
from megabit.plan.search import USABLE_MEMORY
from megabit.plan.serving import (
    Engine,
    Load,
    Served,
    ServingCandidate,
    ServingFound,
    _config,
    _plan,
    plan_serving,
    reasons,
)
from megabit.plan.write import write_serving
from megabit.tensor_parallel import ternary_layers
from tests.inference.models import save_served_model, served_model

H100 = known_machine("h100", 8, "ib400")
LOAD = Load(prompt_tokens=96, answer_tokens=32)
FLOAT = Engine("float32")
LARGE = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
)


def host(memory_bytes: int, ranks: int = 4) -> Machine:
    """A CPU that has nothing in its memory yet."""
    machine = known_machine("cpu", ranks, "eth25")
    device = dataclasses.replace(machine.device, memory_bytes=memory_bytes, base_bytes=0)
    return dataclasses.replace(machine, device=device)


def planned(
    load: Load = LOAD, machine: Machine = H100, ranks: int = 8, model: ModelConfig = LARGE
) -> ServingFound:
    return plan_serving(model, Engine("bfloat16"), ranks, machine, load)


def at(found: ServingFound, tp: int, pp: int) -> ServingCandidate:
    (candidate,) = (c for c in found.candidates if (c.tp, c.pp) == (tp, pp))
    return candidate


Held = tuple[int, int, int, int]


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (4, 1)], ids=str)
def test_ranks_hold_what_was_planned(layout: tuple[int, int], tied: bool, tmp_path: Path) -> None:
    """Codes, dense weights, blocks and their bytes, of each rank of a real engine with the settings
    that the plan writes."""
    tp, pp = layout
    changes = {"tie_word_embeddings": tied}
    model = served_model(**changes)
    checkpoint = save_served_model(tmp_path / "model", **changes)
    machine = host(64 * 2**20)
    found = plan_serving(model, FLOAT, 4, machine, LOAD)
    candidate = at(found, tp, pp)
    write_serving(tmp_path / "serve.yaml", candidate, machine)
    serving = load_serving_config([str(tmp_path / "serve.yaml")])
    assert (serving.parallel.tp, serving.parallel.pp) == layout

    def run() -> Held:
        mesh = ParallelMesh.create(tp, pp, torch.device("cpu"))
        stages, _ = open_stages(open_source(checkpoint), serving, mesh)
        engine = serving.engine
        core = EngineCore(
            stages,
            mesh,
            CoreSettings(
                engine.max_model_len or 0,
                engine.max_sequences,
                engine.max_batched_tokens,
                engine.block_size,
                kv_cache_mb=engine.kv_cache_mb,
            ),
        )
        codes = sum(layer.ternary().nbytes for layer in ternary_layers(stages))
        dense = sum(p.nbytes for p in stages.parameters() if not p.is_meta)
        pages = sum(pages.nbytes for pages in core.runner.cache.pages.values())
        return codes, dense, core.num_blocks, pages

    held = run_ranks(run, tp * pp)
    config = _config(model, FLOAT, tp, pp, LOAD)
    served = Served(config, FLOAT, machine, 4, _plan(config))
    for stage, shape in enumerate(served.shapes):
        weights = served.weights(shape)
        for codes, dense, blocks, pages in held[stage * tp : (stage + 1) * tp]:
            assert (codes, dense) == (weights["codes"], weights["dense weights"])
            assert blocks == candidate.blocks
            assert pages == blocks * served.block_bytes(shape)
    most = max(codes + dense for codes, dense, *_ in held)
    assert candidate.memory["codes"] + candidate.memory["dense weights"] <= most


def test_memory_is_what_there_is() -> None:
    for candidate in planned().candidates:
        total = sum(candidate.memory.values())
        assert 0.9 * USABLE_MEMORY < total / H100.device.memory_bytes <= USABLE_MEMORY
        needed = -(-LOAD.context // FLOAT.block_size)
        assert candidate.blocks >= candidate.sequences * needed
    # The ranks of a host share its memory.
    for candidate in planned(machine=host(2**33), model=served_model(), ranks=4).candidates:
        assert sum(candidate.memory.values()) <= USABLE_MEMORY * 2**33 / 4


def test_ranks_are_engines_times_replicas() -> None:
    found = planned()
    assert {c.replicas * c.tp * c.pp for c in found.candidates} == {8}
    speeds = [c.tokens_per_s for c in found.candidates]
    assert speeds == sorted(speeds, reverse=True)
    # On 16 ranks of two nodes an engine is still on one.
    assert max(c.tp * c.pp for c in planned(ranks=16).candidates) == 8
    for candidate in found.candidates:
        twice = at(planned(ranks=16), candidate.tp, candidate.pp)
        assert twice.replicas == 2 * candidate.replicas
        assert twice.tokens_per_s == pytest.approx(2 * candidate.tokens_per_s)


def test_limits_are_kept() -> None:
    free, alone = planned(), planned(dataclasses.replace(LOAD, sequences=1))
    ttft_s = min(c.ttft_s for c in free.candidates) / 2
    assert {c.sequences for c in planned(dataclasses.replace(LOAD, sequences=3)).candidates} == {3}
    first, later = (
        sorted(times)
        for times in zip(*((c.ttft_s, c.tpot_s) for c in alone.candidates), strict=True)
    )
    # Which one sequence keeps in all layouts, in some of them, and both in some.
    for limits, are_all in (
        ({"ttft_s": 1.1 * first[-1]}, True),
        ({"tpot_s": 1.05 * later[0]}, False),
        ({"ttft_s": 1.02 * first[0], "tpot_s": 1.05 * later[0]}, False),
    ):
        found = planned(dataclasses.replace(LOAD, **limits))
        assert found.candidates
        assert (len(found.candidates) == len(free.candidates)) == are_all
        for candidate in found.candidates:
            assert candidate.ttft_s <= limits.get("ttft_s", 1e9)
            assert candidate.tpot_s <= limits.get("tpot_s", 1e9)
            assert candidate.sequences < at(free, candidate.tp, candidate.pp).sequences
            assert candidate.tokens_per_s <= at(free, candidate.tp, candidate.pp).tokens_per_s
        assert len(found.candidates) + len(found.rejected) == len(free.candidates) + len(
            free.rejected
        )
    nothing = planned(dataclasses.replace(LOAD, ttft_s=ttft_s / 1e3))
    assert nothing.candidates == []
    assert all("too slow" in line for line in nothing.rejected.values())


def test_more_sequences_are_faster_together_and_slower_each() -> None:
    one, many = (at(planned(dataclasses.replace(LOAD, sequences=n)), 1, 1) for n in (1, 32))
    assert many.tokens_per_s > 4 * one.tokens_per_s
    assert many.tpot_s > one.tpot_s
    assert many.ttft_s > one.ttft_s
    assert many.decode_s < many.tpot_s


def test_what_a_layout_changes() -> None:
    load = dataclasses.replace(LOAD, sequences=8)
    whole, split, staged = (at(planned(load), *layout) for layout in ((1, 1), (4, 1), (1, 4)))
    assert split.memory["codes"] == whole.memory["codes"] // 4
    assert split.decode_s < whole.decode_s
    assert staged.memory["codes"] < whole.memory["codes"] / 3
    assert staged.blocks > 3 * whole.blocks  # of a quarter of the layers each


def test_every_rejected_layout_has_a_reason() -> None:
    model = served_model()  # of four heads and four layers
    found = planned(model=model)
    layouts = {f"TP {tp} × PP {pp}" for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8}
    there = {f"TP {c.tp} × PP {c.pp}" for c in found.candidates}
    assert there | {*found.rejected} == layouts
    assert not there & {*found.rejected}
    assert "parallel.tp" in found.rejected["TP 8 × PP 1"]
    assert [*reasons(found)] == [f"{name}: {why}" for name, why in found.rejected.items()]
    small = planned(machine=host(2**22), ranks=4, model=model)
    assert small.candidates == []
    assert all("no room for the keys and values" in why for why in small.rejected.values())
    many = planned(dataclasses.replace(LOAD, sequences=10**6))
    assert all("need more room" in why for why in many.rejected.values())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_written_settings_are_an_engines(compute: str, tmp_path: Path) -> None:
    found = plan_serving(LARGE, Engine(compute), 8, H100, Load(sequences=700))
    for number, candidate in enumerate(found.candidates):
        path = tmp_path / f"{number}.yaml"
        write_serving(path, candidate, H100)
        serving = load_serving_config([str(path)])
        assert serving.engine.max_model_len == 512 + 256
        assert serving.engine.max_batched_tokens >= serving.engine.max_sequences == 700
        assert serving.engine.compute == compute
        block = candidate.memory["keys and values"] // candidate.blocks
        assert serving.engine.kv_cache_mb * 2**20 // block == candidate.blocks
    assert found.candidates
