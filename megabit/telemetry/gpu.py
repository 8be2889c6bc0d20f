"""What a GPU says of itself while a run uses it, through NVML.

NVML's utilization is the share of the driver's last sample period (a sixth of a second to a second)
in which any kernel ran, so a watch takes samples while steps run, one a second at most, and reports
what they have in common at the end of a log interval.

XID errors are events: those that the driver reports while the run watches are counted. It reports
none inside some virtual machines and on MIG slices; then the figure is absent, as is whatever else
a GPU does not support. ECC errors are counted by the GPU itself since its driver was loaded.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import torch

from megabit.units import MIB


@dataclass(frozen=True)
class GpuMetrics:
    """Of one GPU, at a moment or over an interval, or the worst of several; None: not known."""

    utilization: float | None = None
    """0 to 1"""
    power_w: float | None = None
    temperature_c: float | None = None
    memory_mib: float | None = None
    """In use, by whatever process."""
    xid_errors: int | None = None
    """Critical ones in this run."""
    ecc_errors: int | None = None
    """Uncorrected ones."""

    def as_maxima(self) -> list[float]:
        """Numbers of which the largest is the worst; −∞ for what is not known."""
        values = asdict(self)
        if self.utilization is not None:
            values["utilization"] = -self.utilization
        return [-math.inf if value is None else float(value) for value in values.values()]

    @staticmethod
    def from_maxima(maxima: list[float]) -> "GpuMetrics":
        """The inverse of ``as_maxima``."""
        values: dict[str, Any] = {
            name: value
            for name, value in zip(GPU_KEYS, maxima, strict=True)
            if not math.isinf(value)
        }
        if "utilization" in values:
            values["utilization"] = abs(values["utilization"])
        values |= {name: int(values[name]) for name in GPU_COUNTS if name in values}
        return GpuMetrics(**values)


GPU_KEYS = tuple(field.name for field in fields(GpuMetrics))
GPU_COUNTS = ("xid_errors", "ecc_errors")


class GpuReader(Protocol):
    """Reads one GPU."""

    def read(self) -> GpuMetrics:
        """As it is now; takes about a millisecond."""
        ...


class GpuWatch:
    """The GPU of a rank, over one log interval after the other.

    Args:
        reader: None where there is no GPU; then nothing is known.
        clock: seconds.
    """

    PERIOD_S = 1.0
    """Between samples."""

    def __init__(
        self, reader: GpuReader | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._samples: list[GpuMetrics] = []
        self._next = -math.inf

    def sample(self) -> None:
        """Take one, if the last was not just now; to be called while the GPU is at work."""
        if self._reader is not None and self._clock() >= self._next:
            self._samples.append(self._reader.read())
            self._next = self._clock() + self.PERIOD_S

    def take(self) -> GpuMetrics:
        """Mean utilization and power, largest temperature and memory, and the newest counts, since
        the last call."""
        if self._reader is not None and not self._samples:
            self._samples.append(self._reader.read())
        samples, self._samples = self._samples, []

        def known(name: str) -> list[float]:
            return [v for sample in samples if (v := getattr(sample, name)) is not None]

        def mean(values: list[float]) -> float | None:
            return sum(values) / len(values) if values else None

        return GpuMetrics(
            mean(known("utilization")),
            mean(known("power_w")),
            max(known("temperature_c"), default=None),
            max(known("memory_mib"), default=None),
            *(int(values[-1]) if (values := known(name)) else None for name in GPU_COUNTS),
        )


class NvmlReader:
    """A ``GpuReader`` through ``pynvml``, of the package nvidia-ml-py.

    Args:
        nvml: the module, initialised.
        uuid: of the GPU, such as ``GPU-1b2c…``. CUDA's numbers are not NVML's.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._xid_errors = 0
        self._events: Any = None
        events = self._known(nvml.nvmlEventSetCreate)
        if events is not None:
            try:
                nvml.nvmlDeviceRegisterEvents(
                    self._handle, nvml.nvmlEventTypeXidCriticalError, events
                )
                self._events = events
            except nvml.NVMLError:
                nvml.nvmlEventSetFree(events)

    def read(self) -> GpuMetrics:
        """See ``GpuReader``; what the GPU does not support is None."""
        nvml, handle = self._nvml, self._handle
        rates = self._known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        milliwatts = self._known(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        used = self._known(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return GpuMetrics(
            utilization=None if rates is None else rates / 100,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=self._known(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            memory_mib=None if used is None else used / MIB,
            xid_errors=self._count_xid_errors(),
            ecc_errors=self._known(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        )

    def _known(self, ask: Callable[[], Any]) -> Any:
        """The answer, or None where the GPU or its driver has none."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return None

    def _count_xid_errors(self) -> int | None:
        """Take the events that are waiting."""
        if self._events is None:
            return None
        while True:
            event = self._known(lambda: self._nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:  # a time-out: there is no other one
                return self._xid_errors
            self._xid_errors += 1


def open_gpu_reader(device: torch.device, warn: Callable[[str], None]) -> GpuReader | None:
    """That of a rank's ``device``; None on a CPU, and where NVML does not answer (``warn`` gets a
    line that says why: a run does not need it)."""
    if device.type != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        warn("GPU metrics need the package nvidia-ml-py: pip install 'megabit[telemetry]'")
        return None
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return NvmlReader(pynvml, f"GPU-{uuid.removeprefix('GPU-')}")
    except pynvml.NVMLError as error:
        warn(f"no GPU metrics: NVML says {error}")
        return None
