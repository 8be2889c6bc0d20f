"""All layouts of a model on so many ranks of a machine: which fit, and how fast each would be.

A candidate is TP × PP × DP, a schedule with its stages on a rank, sequence parallelism, the way
integers are added over TP, the samples of a microbatch, the ZeRO stage and what is recomputed. What
``config.find_problems`` refuses is no candidate, and what needs more memory than there is does not
fit. The rest is ordered by the predicted time of a step.

GPipe is 1F1B with more memory, and ZeRO 0 is ZeRO 1 with more of it: both are tried only if they
are *kept* (``Search.keep``).
"""

import dataclasses
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from megabit.config import SCHEDULE_CHUNKS, Config, find_problems
from megabit.config.validate import divisors
from megabit.errors import UserError
from megabit.plan.layout import Layout, Schedules, make_layout
from megabit.plan.machine import Machine
from megabit.plan.memory import memory_of
from megabit.plan.step import Account, Memo, Step

KEYS = (
    "parallel.tp",
    "parallel.pp",
    "parallel.schedule",
    "parallel.vpp",
    "parallel.sequence_parallel",
    "parallel.row_reduce",
    "optim.zero_stage",
    "train.micro_batch_size",
    "train.recompute",
)
"""What a search chooses."""
MAX_MICRO_BATCH = 64
MAX_CHUNKS = 8
USABLE_MEMORY = 0.94
"""Of a device's memory, for what a rank is predicted to need: an allocator cannot use all of it,
and a prediction is off by a few percent (docs/planning.md)."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    step: Step
    memory: dict[str, int]
    """Bytes by part, of the rank that needs most."""

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def name(self) -> str:
        """``TP 2 × PP 4 × DP 8``."""
        parallel = self.layout.config.parallel
        return f"TP {parallel.tp} × PP {parallel.pp} × DP {self.layout.dp}"

    @property
    def choices(self) -> dict[str, object]:
        """The settings of ``KEYS``."""
        return choices_of(self.layout.config)


@dataclass(frozen=True)
class Rejected:
    """A layout that does not fit in memory."""

    layout: Layout
    memory: dict[str, int]
    """Of the first rank that needs too much; others may need more."""
    usable_bytes: float
    """Of a rank."""

    @property
    def missing(self) -> float:
        """What it needs, against what there is; above 1."""
        return sum(self.memory.values()) / self.usable_bytes


@dataclass
class Found:
    """What a search has found."""

    candidates: list[Candidate] = field(default_factory=list)
    """The fastest first."""
    too_large: list[Rejected] = field(default_factory=list)
    """The nearest miss first."""
    slower: int = 0
    """Not played: their work alone takes longer."""
    impossible: Counter[str] = field(default_factory=Counter)
    """How many layouts a rule excludes, by its name."""
    examples: dict[str, str] = field(default_factory=dict)
    """What the rule says of one of them."""

    @property
    def considered(self) -> int:
        played = len(self.candidates) + len(self.too_large)
        return played + self.slower + self.impossible.total()


@dataclass(frozen=True)
class Search:
    """What is looked for.

    Args:
        config: the model, its recipe and its global batch; what ``KEYS`` has in it counts where
            ``keep`` names it.
        keep: those of ``KEYS`` that stay as configured.
        top: so many of the best are looked for; others are found by the way.
    """

    config: Config
    world_size: int
    machine: Machine
    keep: frozenset[str] = frozenset()
    top: int = 5
    schedules: Schedules = field(default_factory=Schedules, repr=False)

    def __post_init__(self) -> None:
        unknown = sorted(self.keep - {*KEYS})
        if unknown:
            raise UserError(f"--keep: {unknown[0]} is nothing that is chosen: {', '.join(KEYS)}")
        if self.config.outer.islands > 1 or self.config.outer.method != "none":
            raise UserError("outer.method: plan one island by itself, with outer.method=none")
        if self.config.communication.tune_buckets:
            raise UserError("communication.tune_buckets: must be false to plan a run")
        if self.world_size > self.machine.nodes_of and not self.machine.network.inter:
            raise UserError(
                f"--gpus: {self.world_size} ranks are more than the {self.machine.nodes_of} of the "
                "one host that was measured; nothing is known of a network between hosts"
            )

    def run(self, progress: Callable[[float], None] = lambda share: None) -> Found:
        """The ``top`` fastest of all candidates.

        What a family's members have in common, its work, is accounted for first. Families are then
        looked at in the order of the least time that it can take, until that alone is longer than
        the step of the slowest of the best.

        Args:
            progress: is told which share of all is done.
        """
        found, memo = Found(), Memo()
        grids = [(tp, pp) for tp in self._tps() for pp in self._pps(tp)]
        families: list[tuple[float, Config]] = []
        for number, (tp, pp) in enumerate(grids):
            progress(number / len(grids) / 2)
            families += self._families(tp, pp, memo, found)
        families.sort(key=lambda family: family[0])
        for number, (least_s, family) in enumerate(families):
            progress(0.5 + number / len(families) / 2)
            members = [*self._members(family)]
            if self._is_slower(least_s, found):
                found.slower += len(members)
                continue
            for member in members:
                self._try(member, memo, found)
        found.too_large.sort(key=lambda rejected: rejected.missing)
        return found

    def _is_slower(self, least_s: float, found: Found) -> bool:
        best = found.candidates
        return len(best) >= self.top and least_s > best[self.top - 1].step.total_s

    def _try(self, member: Config, memo: Memo, found: Found) -> None:
        """Play a layout, if it is possible and fits in memory."""
        if self._is_impossible(member, found):
            return
        layout = make_layout(member, self.world_size, self.machine, self.schedules)
        account = Account.of(layout, memo)
        if self._is_slower(account.least_s, found):
            found.slower += 1
            return
        usable = self._usable_bytes() / self._sharing
        most: dict[str, int] = {}
        for shape in layout.shapes:
            memory = memory_of(shape, self.machine.device)
            if sum(memory.values()) > sum(most.values()):
                most = memory
            if sum(most.values()) > usable:  # whatever the others need
                found.too_large.append(Rejected(layout, most, usable))
                return
        insort(found.candidates, Candidate(layout, account.step(), most), key=_rank)

    def _is_impossible(self, config: Config, found: Found) -> bool:
        problems = find_problems(config, self.world_size)
        if problems:
            key = problems[0].partition(":")[0]
            found.impossible[key] += 1
            found.examples.setdefault(key, problems[0])
        return bool(problems)

    # What there is of each dimension.

    def _kept(self, key: str) -> bool:
        return key in self.keep

    def _tps(self) -> list[int]:
        if self._kept("parallel.tp"):
            return [self.config.parallel.tp]
        # Beyond a host TP would wait for the slow network in each layer.
        of_node = self.machine.nodes_of
        if self.world_size <= of_node:
            return divisors(self.world_size)
        return [tp for tp in divisors(self.world_size) if of_node % tp == 0]

    def _pps(self, tp: int) -> list[int]:
        if self._kept("parallel.pp"):
            return [self.config.parallel.pp]
        layers = self.config.model.num_hidden_layers
        # A kept TP may be more than there are ranks, which find_problems then says.
        return [pp for pp in divisors(max(1, self.world_size // tp)) if pp <= layers]

    def _schedules(self, pp: int) -> list[tuple[str, int | None]]:
        """Names, and stages on a rank where there is a choice."""
        parallel = self.config.parallel
        if self._kept("parallel.schedule"):
            name = parallel.schedule
            if name == "interleaved" and not self._kept("parallel.vpp"):
                return [(name, chunks) for chunks in self._chunks(pp)] or [(name, None)]
            return [(name, parallel.vpp)]
        if self._kept("parallel.vpp") and parallel.vpp is not None:
            return [
                (name, parallel.vpp)
                for name, chunks in SCHEDULE_CHUNKS.items()
                if name != "gpipe"
                and (chunks == parallel.vpp or (name == "interleaved" and parallel.vpp > 1))
            ]
        if pp == 1:
            return [("1f1b", None)]
        names = [name for name in SCHEDULE_CHUNKS if name not in ("gpipe", "interleaved")]
        return [
            *((name, None) for name in names),
            *(("interleaved", chunks) for chunks in self._chunks(pp)),
        ]

    def _chunks(self, pp: int) -> list[int]:
        layers = self.config.model.num_hidden_layers
        most = min(MAX_CHUNKS, layers // pp)
        return [v for v in range(2, most + 1) if v == 2 or layers % (pp * v) == 0]

    def _micro_batches(self, dp: int) -> list[int]:
        if self._kept("train.micro_batch_size"):
            return [self.config.train.micro_batch_size]
        share = max(1, self.config.train.global_batch_size // max(1, dp))
        return [2**n for n in range(MAX_MICRO_BATCH.bit_length()) if 2**n <= share]

    def _families(
        self, tp: int, pp: int, memo: Memo, found: Found
    ) -> Iterator[tuple[float, Config]]:
        """Configurations at a TP × PP that compute the same in different orders, each with the
        least time of a step: no rank waits, and all have equally much to do."""
        if not self._schedules(pp):
            return
        for micro in self._micro_batches(self.world_size // (tp * pp)):
            for sequence_parallel in self._sequence_parallels(tp):
                for recompute in self._recomputes():
                    best: tuple[float, Config] | None = None
                    for way in self._ways(tp):
                        family = self._family(tp, pp, micro, sequence_parallel, recompute, way)
                        if self._is_impossible(family, found):
                            break
                        layout = make_layout(family, self.world_size, self.machine, self.schedules)
                        least_s = Account.of(layout, memo).mean_s
                        if best is None or least_s < best[0]:
                            best = least_s, family
                    if best is not None:
                        yield best

    def _family(
        self,
        tp: int,
        pp: int,
        micro: int,
        sequence_parallel: bool,
        recompute: Literal["none", "selective", "full"],
        way: Literal["int32", "exact16"],
    ) -> Config:
        config = self.config
        name, vpp = self._schedules(pp)[0]
        parallel = dataclasses.replace(
            config.parallel,
            tp=tp,
            pp=pp,
            schedule=name,
            vpp=vpp,
            sequence_parallel=sequence_parallel,
            row_reduce=way,
            layers_per_stage=None,
            balance="estimated",
        )
        train = dataclasses.replace(config.train, micro_batch_size=micro, recompute=recompute)
        return dataclasses.replace(config, parallel=parallel, train=train)

    def _members(self, family: Config) -> Iterator[Config]:
        """The orders, and what DP ranks share out."""
        for name, vpp in self._schedules(family.parallel.pp):
            parallel = dataclasses.replace(family.parallel, schedule=name, vpp=vpp)
            for zero_stage in self._zero_stages(family):
                optim = dataclasses.replace(family.optim, zero_stage=zero_stage)
                yield dataclasses.replace(family, parallel=parallel, optim=optim)

    def _sequence_parallels(self, tp: int) -> list[bool]:
        if self._kept("parallel.sequence_parallel"):
            return [self.config.parallel.sequence_parallel]
        return [False, True] if tp > 1 else [False]

    def _ways(self, tp: int) -> list[Literal["int32", "exact16"]]:
        """To add integers over TP."""
        if self._kept("parallel.row_reduce"):
            return [self.config.parallel.row_reduce]
        return ["int32", "exact16"] if tp > 1 and self._adds_integers() else ["int32"]

    def _adds_integers(self) -> bool:
        model = self.config.model
        return model.linear == "ternary" and model.activations != "full"

    def _zero_stages(self, family: Config) -> list[int]:
        parallel = family.parallel
        if self._kept("optim.zero_stage") or self.world_size == parallel.tp * parallel.pp:
            return [family.optim.zero_stage]
        return [1, 2]

    def _recomputes(self) -> list[Literal["none", "selective", "full"]]:
        if self._kept("train.recompute"):
            return [self.config.train.recompute]
        return ["none", "selective", "full"]

    @property
    def _sharing(self) -> int:
        """Ranks that share a device's memory: of a CPU, all of a host."""
        ranks = self.machine.on_node(self.world_size)
        return ranks if self.machine.device.is_shared else 1

    def _usable_bytes(self) -> float:
        return USABLE_MEMORY * self.machine.device.memory_bytes


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Time to three digits, then memory: no prediction is better than that."""
    return float(f"{candidate.step.total_s:.3g}"), candidate.memory_bytes


def choices_of(config: Config) -> dict[str, object]:
    """The settings of ``KEYS``."""
    parts = {key: key.split(".") for key in KEYS}
    return {key: getattr(getattr(config, part), name) for key, (part, name) in parts.items()}
