"""The benchmark from beginning to end: plan, predict, measure.

Roofs are measured before the races and again after those of each layer, and the highest of each
counts: a machine that is busy while its roofs are measured would make every percentage too good.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from megabit_kernels.benchmark.clock import Call
from megabit_kernels.benchmark.contestants import (
    BASELINES,
    Contestant,
    contestant,
    other_names,
    our_names,
)
from megabit_kernels.benchmark.machine import Machine
from megabit_kernels.benchmark.measure import time_in_turns, turns_of
from megabit_kernels.benchmark.results import Caches, Finish, LeftOut, Race, Result
from megabit_kernels.benchmark.roofline import CACHES, Roofline, measure_roofline
from megabit_kernels.benchmark.shapes import Layer
from megabit_kernels.benchmark.weights import LayerWeights, NoRoom, bytes_per_value

FORMS = 6
"""Forms of weights that may be in memory at once, with room to spare"""
MAKING_BYTES_PER_S = 3e8
"""At which weights are made, for the prediction"""
ROOFLINE_S = 2.0
"""For one measurement of the roofs"""
MAX_TOKENS = 65_536
NO_TIME = "no time left"


@dataclass(frozen=True)
class Settings:
    """What to measure, and how long."""

    layers: tuple[Layer, ...]
    tokens: tuple[int, ...]
    """Every M"""
    device: str = "cpu"
    threads: tuple[int, ...] = ()
    """Every number of threads on a CPU; none named: torch's"""
    implementations: tuple[str, ...] = ()
    """Which contestants of ours take part; none named: ``our_names``, each product once"""
    budget_s: float = 0.3
    """For each contestant in a race, unless its calls are long"""
    limit_s: float = 3600.0
    """For everything; races that would go beyond it are left out"""


class Benchmark:
    """A benchmark that is planned, and then run race by race."""

    def __init__(self, settings: Settings) -> None:
        """Check ``settings``, measure the roofs (a few seconds), plan and predict.

        Raises:
            ValueError: a setting is wrong; one line that names it and what would be right.
        """
        self.device = _device(settings.device)
        self.settings = replace(settings, threads=_thread_counts(settings, self.device))
        self._names = (*_our_contestants(settings, self.device), *BASELINES)
        for m in settings.tokens:
            if not 1 <= m <= MAX_TOKENS:
                raise ValueError(f"m: {m} is not from 1 to {MAX_TOKENS}")
        machine = Machine.describe(self.device)
        self.result = Result(machine, self._measure_roofs(machine), asdict(self.settings))
        self.races = [race for layer in settings.layers for race in self._races_of(layer)]

    def predicted_s(self) -> float:
        """About how long ``run`` takes."""
        making = sum(self._making_s(layer) for layer in self.settings.layers)
        racing = sum(self.predicted_race_s(race) for race in self.races)
        measuring = ROOFLINE_S * len(self.settings.layers) * len(self.settings.threads)
        return min(making + racing + measuring, self.settings.limit_s)

    def run(self) -> Iterator[Race]:
        """Measure, and yield each race when its finishes are in ``result``.

        ``result`` can be used whenever the iteration is left.
        """
        started = time.monotonic()
        result = self.result
        for layer in self.settings.layers:
            weights = self._make_weights(layer)
            for race in self._races_of(layer):
                result.elapsed_s = time.monotonic() - started
                if result.elapsed_s + self.predicted_race_s(race) > self.settings.limit_s:
                    result.left_out.append(LeftOut(race, "all contestants", NO_TIME))
                    continue
                with torch.no_grad(), _torch_threads(race.threads):
                    self._measure(race, weights)
                yield race
            del weights  # before those of the next layer are made
            if any(one.race.layer == layer for one in result.finishes):
                again = self._measure_roofs(result.machine)
                result.rooflines = {
                    count: roofs.at_best(again[count]) for count, roofs in result.rooflines.items()
                }
        result.elapsed_s = time.monotonic() - started
        result.is_complete = all(one.reason != NO_TIME for one in result.left_out)

    def predicted_race_s(self, race: Race) -> float:
        """About how long a race takes."""
        return sum(self._predicted_contestant_s(name, race) for name in self.names_of(race))

    def names_of(self, race: Race) -> tuple[str, ...]:
        """Who takes part: what ``default`` chose does so once, unless it was asked for by name."""
        if self.settings.implementations:
            return self._names
        chosen = contestant("default", race.layer, race.m, self.device).implementation
        return tuple(name for name in self._names if name != chosen)

    def _measure_roofs(self, machine: Machine) -> dict[int, Roofline]:
        """By number of threads."""
        rooflines = {}
        for count in self.settings.threads:
            with _torch_threads(count):
                rooflines[count] = measure_roofline(machine, self.device)
        return rooflines

    def _predicted_contestant_s(self, name: str, race: Race) -> float:
        one = contestant(name, race.layer, race.m, self.device)
        call_s = one.predicted_s(race.layer, race.m, self.result.rooflines[race.threads])
        return 2 * call_s + max(self.settings.budget_s, turns_of(call_s) * call_s)

    def _races_of(self, layer: Layer) -> list[Race]:
        """Hot caches are measured where they can hold the smallest form of the weight.

        Numbers of threads, which are compared with each other, follow one another at once.
        """
        packed_bytes = layer.n * layer.k // 4
        fits = packed_bytes <= self.result.machine.cache_bytes
        states: tuple[Caches, ...] = ("cold", "hot") if fits else ("cold",)
        return [
            Race(layer, m, caches, threads)
            for caches in states
            for m in self.settings.tokens
            for threads in self.settings.threads
        ]

    def _making_s(self, layer: Layer) -> float:
        forms = {contestant(name, layer, 1, self.device).form for name in self._names}
        cold_bytes = CACHES * self.result.machine.cache_bytes
        values = layer.n * layer.k
        made = (max(cold_bytes, 2 * values * bytes_per_value(form)) for form in forms)
        return sum(made) / MAKING_BYTES_PER_S

    def _make_weights(self, layer: Layer) -> LayerWeights:
        machine = self.result.machine
        return LayerWeights(layer, self.device, machine.cache_bytes, machine.memory_bytes // FORMS)

    def _measure(self, race: Race, weights: LayerWeights) -> None:
        """One race; what cannot take part in it is noted in ``result.left_out``."""
        generator = torch.Generator().manual_seed(race.m)
        x = torch.randn(race.m, race.layer.k, generator=generator).to(self.device)
        entrants: dict[str, tuple[Contestant, Sequence[Call]]] = {}
        for name in self.names_of(race):
            one = contestant(name, race.layer, race.m, self.device)
            try:
                entrants[name] = one, one.calls(x, weights, cold=race.caches == "cold")
            except NoRoom as error:
                self.result.left_out.append(LeftOut(race, name, str(error)))
        timings, failures = time_in_turns(
            {name: calls for name, (_, calls) in entrants.items()},
            self.device,
            self.result.machine.cache_bytes,
            self.settings.budget_s,
        )
        self.result.left_out += [LeftOut(race, *failure) for failure in failures.items()]
        for name, timing in timings.items():
            one, calls = entrants[name]
            weight_bytes = weights.bytes_of(one.form)
            self.result.finishes.append(
                Finish(
                    race,
                    name,
                    one.implementation,
                    one.is_ours,
                    one.operands,
                    weight_bytes,
                    weight_bytes * len(calls),
                    timing,
                )
            )


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is not cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch finds no CUDA device; use cpu")
    return torch.device(name)


def _thread_counts(settings: Settings, device: torch.device) -> tuple[int, ...]:
    """Ascending; on a card 1, the thread that launches."""
    if device.type == "cuda":
        if settings.threads:
            raise ValueError("threads: those of a card cannot be chosen; leave them out with cuda")
        return (1,)
    cores = os.cpu_count() or 1
    for count in settings.threads:
        if not 1 <= count <= cores:
            raise ValueError(f"threads: {count} is not from 1 to {cores}, the machine's cores")
    return tuple(sorted(set(settings.threads))) or (torch.get_num_threads(),)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Run with so many threads, and then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _our_contestants(settings: Settings, device: torch.device) -> tuple[str, ...]:
    usual = our_names(device)
    known = (*usual, *other_names(device))
    for name in settings.implementations:
        if name not in known:
            raise ValueError(f"implementations: {name!r} is not one of {', '.join(known)}")
    return tuple(dict.fromkeys(settings.implementations)) or usual
