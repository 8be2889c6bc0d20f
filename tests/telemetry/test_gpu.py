"""What is made of a GPU's figures. There is none here: only NVML itself is made up."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from megabit.telemetry import GpuMetrics, GpuWatch, open_gpu_reader
from megabit.telemetry.gpu import NvmlReader

UUID = "GPU-00000000-1111-2222-3333-444444444444"
FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetPowerUsage": 612_500,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, free=0, used=70 * 2**30),
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTotalEccErrors": 2,
}
"""Of a GPU, and what they give: NVML's units are percent, milliwatts, bytes and °C."""


class Nvml:
    """A driver with one GPU; names, arguments and errors are pynvml's, and so are constants."""

    def __init__(self, unsupported: tuple[str, ...] = ()) -> None:
        self.unsupported = unsupported
        self.xid_errors: list[int] = []
        self.freed = 0

    def __getattr__(self, name: str) -> Any:
        given = getattr(pynvml, name)  # which must exist
        if name in FUNCTIONS:
            return lambda *arguments: self.answer(name, *arguments)
        return given

    def answer(self, name: str, handle: object, *arguments: int) -> object:
        assert handle == "handle"
        expected = {
            "nvmlDeviceGetTemperature": (pynvml.NVML_TEMPERATURE_GPU,),
            "nvmlDeviceGetTotalEccErrors": (
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            ),
        }
        assert arguments == expected.get(name, ())
        self.check(name)
        return FUNCTIONS[name]

    def check(self, name: str) -> None:
        if name in self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlEventSetFree(self, events: str) -> None:
        self.freed += 1

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        assert (handle, kinds, events) == ("handle", pynvml.nvmlEventTypeXidCriticalError, "events")
        self.check("nvmlDeviceRegisterEvents")

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        assert (events, timeout_ms) == ("events", 0)
        if not self.xid_errors:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xid_errors.pop())


def test_a_reading() -> None:
    nvml = Nvml()
    reader = NvmlReader(nvml, UUID)
    assert reader.read() == GpuMetrics(0.97, 612.5, 61, 70 * 1024, 0, 2)
    nvml.xid_errors = [79, 48]
    assert reader.read().xid_errors == 2
    nvml.xid_errors = [31]
    assert reader.read().xid_errors == 3


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetMemoryInfo", "memory_mib"),
        ("nvmlDeviceRegisterEvents", "xid_errors"),
        ("nvmlDeviceGetTotalEccErrors", "ecc_errors"),
    ],
)
def test_what_a_gpu_does_not_support_is_not_known(function: str, field: str) -> None:
    nvml = Nvml((function,))
    reading = vars(NvmlReader(nvml, UUID).read())
    assert [name for name, value in reading.items() if value is None] == [field]
    assert nvml.freed == (function == "nvmlDeviceRegisterEvents")


def test_a_cpu_has_no_reader() -> None:
    assert open_gpu_reader(torch.device("cpu"), fail) is None


def fail(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_driver_that_is_not_there_is_one_line() -> None:
    """The real library."""
    said: list[str] = []
    assert open_gpu_reader(torch.device("cuda"), said.append) is None
    assert said == ["no GPU metrics: NVML says NVML Shared Library Not Found"]


class Readings:
    """One after the other."""

    def __init__(self, *readings: GpuMetrics) -> None:
        self.readings = list(readings)

    def read(self) -> GpuMetrics:
        return self.readings.pop(0)


def clock(*moments: float) -> Callable[[], float]:
    times = list(moments)
    return lambda: times.pop(0)


def test_a_watch_takes_means_and_maxima_of_an_interval() -> None:
    reader = Readings(
        GpuMetrics(0.5, 100.0, 60.0, 10.0, 0, 1),
        GpuMetrics(1.0, 300.0, 50.0, 30.0, 1, 1),
        GpuMetrics(None, None, 40.0, 20.0, 1, None),
        GpuMetrics(0.25),
    )
    # The second call is too soon after the first; each reading asks for the time once more.
    watch = GpuWatch(reader, clock(0.0, 0.0, 0.9, 1.0, 1.1, 2.5, 2.5))
    for _ in range(4):
        watch.sample()
    assert watch.take() == GpuMetrics(0.75, 200.0, 60.0, 30.0, 1, 1)
    assert watch.take() == GpuMetrics(0.25), "an interval without a sample takes one at its end"
    assert reader.readings == []


def test_a_watch_without_a_gpu_knows_nothing() -> None:
    watch = GpuWatch(None)
    watch.sample()
    assert watch.take() == GpuMetrics()


def test_the_worst_of_several() -> None:
    readings = [
        GpuMetrics(0.97, 600.0, 61.0, None, 0, 0),
        GpuMetrics(0.0, 650.0, 55.0, None, 3, None),
        GpuMetrics(None, 10.0, None, None, None, 0),
    ]
    maxima = [max(column) for column in zip(*(r.as_maxima() for r in readings), strict=True)]
    worst = GpuMetrics.from_maxima(maxima)
    assert worst == GpuMetrics(0.0, 650.0, 61.0, None, 3, 0)
    assert math.copysign(1.0, worst.utilization or 0.0) == 1.0
    assert isinstance(worst.xid_errors, int)
