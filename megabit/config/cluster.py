"""Settings of what is between ranks: how they communicate, and what is done when that breaks."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class CommunicationConfig:
    """How gradients and codes travel over DP. The defaults lose nothing."""

    topology: Literal["auto", "flat", "hierarchical"] = "auto"
    """``hierarchical``: reduce-scatter among the DP ranks of a host, then across hosts, and codes
    the other way round, so that what crosses hosts falls by ``dp_intra``. ``auto``: so where a DP
    group has several ranks on each of several hosts."""
    dp_intra: int | None = None
    """DP ranks that share a fast network, consecutive ones; default: those of a host."""
    block: int = 128
    """Elements of a row that share a scale in ``precision.gradients=int8`` and ``int4``; with 1
    nothing is lost, and nothing saved."""
    topk_ratio: float = 0.01
    """Share of each row that ``precision.gradients=topk`` sends; with 1 nothing is lost."""
    min_numel: int = 0
    """Tensors with fewer elements travel uncompressed, as fp32; gains always do."""
    error_feedback: bool = True
    """Add what compression has lost to the next gradient. ``ternary`` is unbiased by itself and
    has none."""
    tune_buckets: bool = False
    """Measure exposed communication at first, and where it is above a tenth of the step, try other
    sizes than ``parallel.bucket_mb`` once and stay with the fastest."""
    tune_steps: int = 5
    """Steps that each size is measured for."""


@dataclass(frozen=True)
class OuterConfig:
    """Training with little communication: *islands*, each of them TP × PP × DP ranks, train by
    themselves for ``inner_steps`` steps, and then their master weights come together."""

    method: Literal["none", "diloco", "gossip", "stale"] = "none"
    """``diloco`` (arXiv 2311.08105): the mean of all, and Nesterov momentum on its change.
    ``gossip`` (experimental): pairs of islands, other ones each time, take their mean. ``stale``
    (experimental): islands are jobs of their own, which a process that owns the outer weights
    (``megabit owner``) keeps together; who is slow or dead does not stop the others."""
    islands: int = 1
    """All of them; the world size is islands · dp · pp · tp, but for ``stale`` that of one."""
    inner_steps: int = 20
    """Steps between two meetings, H."""
    lr: float = 0.7
    """Of the outer step; 1 with ``momentum`` 0 is plain averaging."""
    momentum: float = 0.9
    """Nesterov momentum of the outer step; ``gossip`` has none. Made for hundreds of meetings: with
    a few dozen, ``lr`` 1 and momentum 0 lose less (docs/low_communication.md)."""
    wire: Literal["float32", "bfloat16", "int8"] = "float32"
    """What islands send each other of a weight's change; below float32 with error feedback."""
    fragments: int = 1
    """Parts of the weights that meet one after another, evenly spread over ``inner_steps``
    (Streaming DiLoCo, arXiv 2501.18512): the same bytes, and the peak divided by so many."""
    staleness: int = 0
    """``stale``: meetings that an island may be ahead of the slowest; with 0 it is ``diloco``."""
    patience_s: float = 60.0
    """``stale``: how long the others wait for an island that is further behind than that."""
    owner: str | None = None
    """``stale``: host:port of the process that owns the outer weights."""
    island: int = 0
    """``stale``: which island this job is, from 0 on."""


@dataclass(frozen=True)
class Drill:
    """A fault that is planted on purpose, once in a run."""

    fault: Literal[
        "kill",
        "stop",
        "term",
        "exit",
        "exception",
        "segfault",
        "abort",
        "hang",
        "hold_gil",
        "slow",
        "nan",
        "flip_code",
        "mismatch",
        "disk_full",
        "storage_error",
    ] = "kill"
    """``kill``, ``stop``, ``term``: the signal. ``exit``: with code 1. ``exception``: in the
    training thread. ``segfault``, ``abort``: of the process. ``hang``: the training thread sleeps
    for ever; ``hold_gil``: and lets no other thread run. ``slow``: it sleeps for ``seconds`` in
    each step from then on. ``nan``: in a gradient. ``flip_code``: a bit of a weight's codes.
    ``mismatch``: a collective of another shape. ``disk_full``, ``storage_error``: the next save
    meets it."""
    rank: int = 0
    """Of the world."""
    step: int = 0
    """Before step ``step`` (0-based) begins."""
    seconds: float = 0.5
    """For ``slow``."""


@dataclass(frozen=True)
class FaultsConfig:
    """How a run notices that something is broken, and what it does then."""

    heartbeat_s: float = 1.0
    """Seconds between the signs of life that ranks give each other; 0: none, and no watchdog."""
    hang_s: float = 600.0
    """Seconds without progress in a step after which a rank writes down the stacks of all of its
    threads, says which ranks are behind, and ends. Longer than any step takes; 0: never."""
    check_collectives: bool = False
    """For debugging: ranks compare the kind, shape and dtype of each collective before it runs.
    gloo ends the process if they differ, and NCCL hangs."""
    check_codes_interval: int = 0
    """Steps between comparisons of all DP replicas' weights by a hash; 0: none."""
    retries: int = 3
    """How often something is tried again that storage or the rendezvous has failed at."""
    retry_pause_s: float = 10.0
    drills: list[Drill] = field(default_factory=list)
    """Faults to plant; ``megabit inject`` makes lists of them."""


@dataclass(frozen=True)
class SiteConfig:
    """What is true of a cluster rather than of a run; hosts may have different ones."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables for NCCL, gloo, torch and OpenMP, set when a rank starts unless the environment
    has them already. ``examples/site`` has some, with the reasons."""
