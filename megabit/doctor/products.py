"""Each rank's arithmetic: whether it is right, the same everywhere, and as fast as its likes'.

All ranks multiply the same matrices at the same time, again and again for a moment. A ternary
product is exact, so a rank knows by itself that it is wrong. A floating-point one has the same bits
on ranks with the same device and software; of those whose bits differ, most are taken to be right.
So a device that computes wrong without saying so is named, if it does it here.
"""

import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megabit.doctor.finding import Finding
from megabit.doctor.places import Cluster
from megabit.doctor.ranks import Ranks
from megabit.units import flops_text
from megabit_kernels import TernaryWeight, native, ternary_matmul

SEED = 20
WINDOWS = 3
"""Of equal length; the best one counts, since others may use the machine for a moment."""
SLOW = 0.7


@dataclass(frozen=True)
class Products:
    """Of one rank."""

    kind: str
    """Ranks of the same kind have the same bits: device, instruction set, release, threads."""
    flops: float
    """Of floating-point products, a second."""
    digest: str
    """SHA-256 of the floating-point result."""
    is_exact: bool
    """Whether ternary products are what they must be."""
    is_repeatable: bool
    """Whether each repetition gave the same bits."""


def measure(ranks: Ranks, seconds: float) -> list[Products]:
    """Those of all ranks, in their order; collective.

    Args:
        seconds: that ranks compute, at least.
    """
    is_exact = _is_exact(ranks.device)
    size = 4096 if ranks.device.type == "cuda" else 256
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randn(size, size, generator=generator).to(ranks.device, dtype) for _ in range(2))
    first = a @ b
    is_repeatable = True
    ranks.wait()  # all at the same time
    rates = []
    for _ in range(WINDOWS):
        count, busy_s, started = 0, 0.0, time.perf_counter()
        while busy_s < seconds / WINDOWS:
            again = a @ b
            is_repeatable &= torch.equal(first, again)  # waits for a GPU, too
            count, busy_s = count + 1, time.perf_counter() - started
        rates.append(2 * size**3 * count / busy_s)
    own = Products(_kind(ranks.device), max(rates), _digest(first), is_exact, is_repeatable)
    return [Products(**found) for found in ranks.gather(asdict(own))]


def _kind(device: torch.device) -> str:
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU {next(iter(native.isas()), '')} {torch.backends.cpu.get_cpu_capability()} with "
        f"{torch.get_num_threads()} threads"
    )
    return f"{name}, torch {torch.__version__}"


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _is_exact(device: torch.device) -> bool:
    """A ternary product of integers, against plain fp64 on the CPU, which holds them exactly."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randint(-127, 128, (64, 512), generator=generator, dtype=torch.int8)
    codes = torch.randint(-1, 2, (384, 512), generator=generator, dtype=torch.int8)
    weight = TernaryWeight.from_codes(codes.to(device), torch.ones((), device=device))
    result = ternary_matmul(x.to(device), weight)
    return torch.equal(result.cpu().double(), x.double() @ codes.double().T)


def judge(everyone: Sequence[Products], cluster: Cluster) -> Iterator[Finding]:
    """Ranks that are wrong, differ from their likes, or are slower than these."""
    inexact = [rank for rank, products in enumerate(everyone) if not products.is_exact]
    fickle = [rank for rank, products in enumerate(everyone) if not products.is_repeatable]
    for found, what in (
        (inexact, "gets wrong results in integer products"),
        (fickle, "gets another result when it computes the same again"),
    ):
        if found:
            yield Finding("wrong", "products", f"{cluster.names(found)}: {what}", REPLACE)
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for rank, products in enumerate(everyone):
        kinds[products.kind].append(rank)
    for kind, likes in kinds.items():
        yield from _odd(everyone, likes, cluster)
        typical = statistics.median_high(everyone[rank].flops for rank in likes)
        slow = [rank for rank in likes if everyone[rank].flops < SLOW * typical]
        if slow:
            rates = statistics.median(everyone[rank].flops for rank in slow)
            yield Finding(
                "warning",
                "products",
                f"{cluster.names(slow)}: {flops_text(rates)}, typical of its kind ({kind}) is "
                f"{flops_text(typical)}",
                "see what else runs there, its temperature and power limit, and which cores it is "
                "bound to; all others wait for it in every step",
            )


def _odd(everyone: Sequence[Products], likes: Sequence[int], cluster: Cluster) -> Iterator[Finding]:
    by_digest: defaultdict[str, list[int]] = defaultdict(list)
    for rank in likes:
        by_digest[everyone[rank].digest].append(rank)
    if len(by_digest) == 1:
        return
    *others, most = sorted(by_digest.values(), key=len)
    if len(most) > len(likes) / 2:
        for found in others:
            yield Finding(
                "wrong",
                "products",
                f"{cluster.names(found)}: other bits than {len(most)} ranks of the same kind have",
                REPLACE,
            )
    else:
        yield Finding(
            "wrong",
            "products",
            f"ranks of the same kind have different bits, and no majority tells who is right: "
            f"{'; '.join(cluster.names(found) for found in by_digest.values())}",
            REPLACE,
        )


REPLACE = "do not train there: test its memory and its processor or GPU, or replace it"


def figures(everyone: Sequence[Products]) -> Iterator[tuple[str, str]]:
    """The fastest and the slowest rank."""
    rates = [products.flops for products in everyone]
    low, high = flops_text(min(rates)), flops_text(max(rates))
    yield "products", f"{high} on each rank" if low == high else f"{low} to {high} on a rank"
