"""TFLOP/s and MFU: how much of what a device could compute goes into the model.

    tflops = FLOPs per token · target tokens per second / ranks / 10¹²
    MFU    = tflops / peak

FLOPs per token are those of the *dense* model of the same shape (``model.flops``, the convention of
PaLM, arXiv 2204.02311, appendix B), also in a ternary run: its MFU compares with that of other
trainers, and says nothing about how many bits the products had. What recomputation computes again
does not count, nor do masked targets; so both make MFU smaller.

The peak is that of dense products (without structured sparsity) in the compute dtype, added up in
fp32: ``telemetry.peak_tflops``, or what the maker says of a GPU that is known.
"""

import torch

KNOWN_PEAKS: tuple[tuple[tuple[str, ...], float, float, str], ...] = (
    # Words of torch's device name; TFLOP/s of 16-bit products (bf16, and fp16 with sums in fp32),
    # and of TF32; source. The first row whose words all occur counts, so what is special is first.
    (("GB200",), 2500.0, 1250.0, "NVIDIA GB200 NVL72 datasheet, half of what is with sparsity"),
    (("B200",), 2250.0, 1125.0, "NVIDIA HGX B200 datasheet, half of what is with sparsity"),
    (("GH200",), 989.4, 494.7, "NVIDIA GH200 datasheet: as H100 SXM"),
    (("H200", "NVL"), 835.5, 417.5, "NVIDIA H200 datasheet, half of what is with sparsity"),
    (("H200",), 989.4, 494.7, "NVIDIA H200 datasheet, half of what is with sparsity"),
    (("H100", "PCIe"), 756.0, 378.0, "NVIDIA H100 architecture whitepaper, table 2"),
    (("H100", "NVL"), 835.5, 417.5, "NVIDIA H100 datasheet, half of what is with sparsity"),
    (("H100",), 989.4, 494.7, "NVIDIA H100 architecture whitepaper, table 2 (SXM5)"),
    (("H800", "PCIe"), 756.0, 378.0, "as H100 PCIe; its links are slower, its cores are not"),
    (("H800",), 989.4, 494.7, "as H100 SXM"),
    (("A100",), 312.0, 156.0, "NVIDIA A100 datasheet (SXM and PCIe)"),
    (("A800",), 312.0, 156.0, "as A100"),
    (("A30",), 165.0, 82.0, "NVIDIA A30 datasheet"),
    (("A40",), 149.7, 74.8, "NVIDIA A40 datasheet"),
    (("A10",), 125.0, 62.5, "NVIDIA A10 datasheet"),
    (("A6000",), 154.8, 77.4, "NVIDIA GA102 architecture whitepaper, table of the RTX A6000"),
    (("L40S",), 362.05, 183.2, "NVIDIA L40S datasheet"),
    (("L40",), 181.05, 90.5, "NVIDIA L40 datasheet"),
    (("L4",), 121.0, 60.0, "NVIDIA L4 datasheet, half of what is with sparsity"),
)


def known_peak(device_name: str, compute: str) -> float | None:
    """TFLOP/s of a GPU by torch's name; None if it is not in the table or a MIG slice, or for fp64.

    For fp32 it is the peak of TF32, the fastest that the device multiplies fp32 numbers at, whether
    the run uses it or not.
    """
    words = set(device_name.replace("-", " ").split())
    for meant, half, tf32, _ in KNOWN_PEAKS:
        if words.issuperset(meant) and "MIG" not in words:
            return {"bfloat16": half, "float16": half, "float32": tf32}.get(compute)
    return None


def peak_tflops(device: torch.device, compute: str, configured: float | None) -> float | None:
    """Of a rank's device: as configured, or as known; on a CPU only as configured."""
    if configured is not None or device.type != "cuda":
        return configured
    return known_peak(torch.cuda.get_device_name(device), compute)


def tflops_per_rank(flops_per_token: float, tokens_per_s: float, ranks: int) -> float:
    """See above."""
    return flops_per_token * tokens_per_s / ranks / 1e12
