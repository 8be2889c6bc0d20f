"""Machines that are known by name: datasheet figures times stated efficiencies.

What is made of them is a prediction (``Machine.is_measured`` is false). Nothing in this project was
measured on a cluster of these; ``megabit plan --calibrate`` measures the machine at hand instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megabit.errors import UserError
from megabit.plan.machine import AlphaBeta, Device, Machine, Network, Rates, Term
from megabit.training.messages import Kind

GB, TB, TFLOP = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Gpu:
    """A GPU by its maker's figures, without structured sparsity."""

    title: str
    half_tflops: float
    """Dense bf16 and fp16 products, sums in fp32."""
    fp32_tflops: float
    """Outside tensor cores: nothing in megabit turns TF32 on."""
    memory_bytes: float
    """What a process is offered; the gigabytes on the box are binary ones."""
    memory_rate: float
    """Bytes a second."""
    link_rate: float
    """NVLink, bytes a second in each direction."""
    source: str


GPUS: dict[str, Gpu] = {
    "a100": Gpu(
        *("A100 80 GB SXM", 312.0, 19.5, 85.0 * GB, 2.039 * TB, 300 * GB),
        "NVIDIA A100 datasheet (80 GB SXM); NVLink 600 GB/s, both directions",
    ),
    "h100": Gpu(
        *("H100 80 GB SXM", 989.4, 66.9, 85.0 * GB, 3.35 * TB, 450 * GB),
        "NVIDIA H100 architecture whitepaper, table 2 (SXM5); NVLink 900 GB/s, both directions",
    ),
    "h200": Gpu(
        *("H200 141 GB SXM", 989.4, 66.9, 150.0 * GB, 4.8 * TB, 450 * GB),
        "NVIDIA H200 datasheet, half of what is with sparsity; NVLink 900 GB/s, both directions",
    ),
    "b200": Gpu(
        *("B200 180 GB SXM", 2250.0, 75.0, 180.0 * GB, 8.0 * TB, 900 * GB),
        "NVIDIA HGX B200 datasheet, half of what is with sparsity; NVLink 1.8 TB/s, both "
        "directions; DGX B200 datasheet (64 TB/s and 1,440 GB for 8) for memory",
    ),
}


@dataclass(frozen=True)
class Interconnect:
    """Between nodes."""

    rate: float
    """Bytes a second in each direction: of each GPU's adapter, or of a node's only one."""
    alpha_s: float
    efficiency: float
    is_shared: bool
    """Whether a node has one adapter for all of its GPUs."""
    source: str


INTERCONNECTS: dict[str, Interconnect] = {
    "ib800": Interconnect(
        100 * GB, 5e-6, 0.9, False, "NVIDIA ConnectX-8 datasheet: 800 Gb/s InfiniBand XDR"
    ),
    "ib400": Interconnect(
        50 * GB, 5e-6, 0.9, False, "NVIDIA ConnectX-7 datasheet: 400 Gb/s InfiniBand NDR"
    ),
    "ib200": Interconnect(
        25 * GB, 5e-6, 0.9, False, "NVIDIA ConnectX-6 datasheet: 200 Gb/s InfiniBand HDR"
    ),
    "roce400": Interconnect(
        50 * GB, 8e-6, 0.8, False, "400 GbE with RoCE v2, an adapter for each GPU"
    ),
    "efa": Interconnect(
        50 * GB, 20e-6, 0.75, False, "AWS EC2 p5: 3,200 Gb/s EFA for 8 GPUs (EC2 instance types)"
    ),
    "eth100": Interconnect(12.5 * GB, 30e-6, 0.8, True, "one 100 GbE adapter a node, TCP"),
    "eth25": Interconnect(3.125 * GB, 30e-6, 0.8, True, "one 25 GbE adapter a node, TCP"),
}
"""α: an assumption, of one step of a ring between nodes with all that NCCL does for it; 2 µs of it
are the adapter's on InfiniBand, and TCP goes through two kernels. Efficiencies are assumptions,
too: what collectives of large messages reach of the line rate on a network that nobody else uses;
of Ethernet less, because of its headers and its flow control."""

NVLINK_ALPHA_S = 2e-6
"""One step of a ring inside a node: an assumption."""
NVLINK_EFFICIENCY = 0.8
"""What NCCL's bus bandwidth reaches of NVLink's rate for large messages: an assumption, from about
230 of 300 GB/s on A100 and 360 of 450 on H100 in NVIDIA's nccl-tests as people report them."""

# How much of a peak kernels reach in training at shapes of 1 to 70 B parameters: assumptions.
DENSE_EFFICIENCY = 0.7
"""Of the bf16 peak: large cuBLAS products reach 0.65 to 0.8 on H100 under its power limit."""
TERNARY_SPEEDUP = 1.35
"""int8 × codes against the same product by cuBLAS in bf16: this project's target for its Triton
kernel, not a measurement. The peak of int8 is twice that of bf16."""
ATTENTION_EFFICIENCY = 0.55
"""Of the bf16 peak, FlashAttention-2 and -3 forward, causal (arXiv 2407.08608: 0.5 to 0.75)."""
ATTENTION_GRADIENT_EFFICIENCY = 0.4
"""Its backward pass."""
MEMORY_EFFICIENCY = 0.8
"""Of the memory's rate, elementwise passes over large tensors."""
LAUNCH_S = 4e-6
"""The least that a kernel takes from its launch to the next one's."""
LAYER_KERNELS = (70, 110, 30)
"""Kernels of a layer in F, B and W, as plain torch launches them in training."""
STEP_S = 5e-3
"""A step's own: reading results, agreeing, Python. An assumption."""
OVERLAP = 0.9
"""Share of a DP collective that hides behind compute: an assumption, from 0.94 measured on two
hosts with a slow link (docs/optimizer.md)."""
BASE_BYTES = int(2.5 * GB)
"""A CUDA context, NCCL's buffers and cuBLAS' workspace: an assumption."""

CPU_TERMS: Mapping[Term, float] = {
    "ternary product": 2.5e-12,
    "dense product": 1.2e-11,
    "input gradient product": 1.2e-11,
    "weight gradient product": 1.2e-11,
    "bfloat16 input gradient product": 6e-12,
    "bfloat16 weight gradient product": 6e-12,
    "int8 input gradient product": 3e-12,
    "int8 weight gradient product": 3e-12,
    "logits product": 1.5e-11,
    "logits gradient product": 1.2e-11,
    "attention": 1.5e-11,
    "attention gradient": 1.5e-11,
    "forward bytes": 1e-10,
    "input gradient bytes": 1e-10,
    "weight gradient bytes": 1e-10,
    "loss bytes": 2e-10,
    "loss gradient bytes": 1e-10,
    "embedding bytes": 1e-10,
    "embedding gradient bytes": 1e-10,
    "mapped bytes": 2e-10,
    "unpacked code": 2e-10,
    "layer forward": 1e-3,
    "layer input gradient": 1.5e-3,
    "layer weight gradient": 3e-4,
    "embedding": 1e-4,
    "head": 3e-4,
    "updated element": 4e-9,
    "made code": 5e-10,
    "update bytes": 1e-10,
    "tensor": 2e-5,
    "step": 5e-3,
}
"""Of a core: round figures of a server of 2024, for a first look only."""
CPU_MEMORY_BYTES = 16 * 2**30


def known_machine(gpu: str, nodes_of: int, interconnect: str) -> Machine:
    """A machine by name.

    Args:
        gpu: of ``GPUS``, or ``cpu``: ranks that share two cores for each node of 4.
        nodes_of: ranks on a node.
        interconnect: of ``INTERCONNECTS``; a CPU's ranks are taken to be on one host.

    Raises:
        UserError: there is none of that name.
    """
    if nodes_of < 1:
        raise UserError(f"--nodes-of: {nodes_of}; a node has at least one rank")
    if gpu == "cpu":
        return _cpu(nodes_of)
    if gpu not in GPUS:
        raise UserError(f"--gpu: {gpu} is not known; {', '.join([*GPUS, 'cpu'])}")
    if interconnect not in INTERCONNECTS:
        raise UserError(f"--interconnect: {interconnect} is not known; {', '.join(INTERCONNECTS)}")
    chosen, between = GPUS[gpu], INTERCONNECTS[interconnect]
    rate = between.rate * between.efficiency / (nodes_of if between.is_shared else 1)
    inside = AlphaBeta(NVLINK_ALPHA_S, chosen.link_rate * NVLINK_EFFICIENCY)
    return Machine(
        device=_device(chosen),
        network=Network(
            intra=_all_kinds(inside),
            inter=_all_kinds(AlphaBeta(between.alpha_s, rate)),
            overlap=OVERLAP,
        ),
        nodes_of=nodes_of,
        is_measured=False,
        source=f"{chosen.source}; {between.source}; efficiencies are assumptions",
    )


def _device(gpu: Gpu) -> Device:
    half = _rates(gpu, gpu.half_tflops)
    return Device(
        name=gpu.title,
        memory_bytes=int(gpu.memory_bytes),
        base_bytes=BASE_BYTES,
        rates={
            "bfloat16": half,
            "float16": half,
            "float32": _rates(gpu, gpu.fp32_tflops),
        },
        peak_tflops={
            "bfloat16": gpu.half_tflops,
            "float16": gpu.half_tflops,
            "float32": gpu.fp32_tflops,
        },
        source=gpu.source,
    )


def _rates(gpu: Gpu, tflops: float) -> Rates:
    def per_product(peak: float, efficiency: float) -> float:
        return 2 / (peak * TFLOP * efficiency)  # a multiply-add is two

    dense = per_product(tflops, DENSE_EFFICIENCY)
    half = per_product(gpu.half_tflops, DENSE_EFFICIENCY)
    ternary = min(half / TERNARY_SPEEDUP, dense)
    byte = 1 / (gpu.memory_rate * MEMORY_EFFICIENCY)
    forward, backward, weight = (LAUNCH_S * kernels for kernels in LAYER_KERNELS)
    return Rates(
        {
            "ternary product": ternary,
            "dense product": dense,
            "input gradient product": dense,
            "weight gradient product": dense,
            "bfloat16 input gradient product": half,
            "bfloat16 weight gradient product": half,
            "int8 input gradient product": ternary,
            "int8 weight gradient product": ternary,
            "logits product": dense,
            "logits gradient product": dense,
            "attention": per_product(gpu.half_tflops, ATTENTION_EFFICIENCY),
            "attention gradient": per_product(gpu.half_tflops, ATTENTION_GRADIENT_EFFICIENCY),
            "forward bytes": byte,
            "input gradient bytes": byte,
            "weight gradient bytes": byte,
            "loss bytes": byte,
            "loss gradient bytes": byte,
            "embedding bytes": byte,
            "embedding gradient bytes": byte,
            "layer forward": forward,
            "layer input gradient": backward,
            "layer weight gradient": weight,
            "embedding": 10 * LAUNCH_S,
            "head": 30 * LAUNCH_S,
            # 48 bytes: seven of AdamW's fp32 numbers, two of clipping, two of the norm, one of γ.
            "updated element": 48 * byte,
            "made code": 5 * byte,
            "update bytes": byte,
            "tensor": 6 * LAUNCH_S,
            "step": STEP_S,
        }
    )


def _cpu(nodes_of: int) -> Machine:
    rates = Rates(CPU_TERMS)
    link = AlphaBeta(2e-4, 1 * GB)
    return Machine(
        device=Device(
            name="a CPU",
            memory_bytes=CPU_MEMORY_BYTES,
            base_bytes=450 * 2**20,
            rates={"float32": rates, "bfloat16": rates},
            peak_tflops={},
            is_shared=True,
            cores=max(1, nodes_of // 2),
            source="round figures",
        ),
        network=Network(intra=_all_kinds(link)),
        nodes_of=nodes_of,
        is_measured=False,
        source="round figures for a first look; `megabit plan --calibrate` measures this machine",
    )


def _all_kinds(link: AlphaBeta) -> dict[Kind, AlphaBeta]:
    return dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"), link)
