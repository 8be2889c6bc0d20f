"""Calibration runs end to end, on a tiny plan: real ranks, real parts, a machine of it."""

import pytest
import torch

from megabit.plan.calibrate import CPU_PROBES, GPU_PROBES, Plan, Probe, calibrate
from megabit.plan.compute import part_times, update_s
from megabit.plan.link_samples import LinkEffort
from megabit.plan.machine import KINDS, Machine
from megabit.plan.part_samples import Effort, measure_parts

TINY = Plan(
    cpu_probes=(Probe(32, 64, 2, 2, 16, 2, vocab=64), Probe(32, 96, 2, 1, 16, 1, vocab=64, tp=2)),
    parts=Effort(steps=2, microbatches=1),
    links=LinkEffort(sizes=(64, 2**14), runs=2, calls=1),
    cases=((2, 1),),
    dtypes=("float32",),
)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return calibrate(plan=TINY, created={"commit": "none"})


def test_a_calibrated_machine_predicts_and_survives_its_file(machine: Machine) -> None:
    assert machine.is_measured
    assert machine.device.is_shared
    assert machine.device.cores is not None
    assert machine.device.base_bytes > 0
    assert machine.created["commit"] == "none"
    assert "date" in machine.created
    assert {each.kind for each in machine.network.measured} == {*KINDS}
    rates = machine.device.rates_of("float32")
    assert "layer forward" in rates.errors
    assert "update" in rates.errors
    shape = TINY.cpu_probes[0].shape("float32")
    assert part_times(shape, rates).layer.total > 0
    assert update_s(shape, rates) > 0
    assert Machine.from_json(machine.to_json(), "it") == machine


def test_every_part_of_a_narrow_rank_is_measured() -> None:
    shape = TINY.cpu_probes[1].shape("bfloat16")
    samples = measure_parts(shape, torch.device("cpu"), TINY.parts)
    assert {sample.what for sample in samples} == {
        *("embedding forward", "embedding weight_gradient"),
        *("layer forward", "layer input_gradient", "layer weight_gradient"),
    }
    assert all(sample.seconds > 0 and sample.work for sample in samples)


@pytest.mark.parametrize("probe", [*CPU_PROBES, *GPU_PROBES], ids=str)
def test_each_probe_is_a_shape_that_trains(probe: Probe) -> None:
    shape = probe.shape("bfloat16")
    assert shape.tp == probe.tp
    assert probe.heads % probe.tp == 0
    assert len(shape.layers) == 2
