"""TFLOP/s, MFU and the peaks of devices that are known."""

import pytest
import torch

from megabit.telemetry.utilization import KNOWN_PEAKS, known_peak, peak_tflops, tflops_per_rank


@pytest.mark.parametrize(
    ("name", "half", "tf32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0, 156.0),
        ("NVIDIA A100 80GB PCIe", 312.0, 156.0),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756.0, 378.0),
        ("NVIDIA H100 NVL", 835.5, 417.5),
        ("NVIDIA H200", 989.4, 494.7),
        ("NVIDIA H200 NVL", 835.5, 417.5),
        ("NVIDIA GH200 480GB", 989.4, 494.7),
        ("NVIDIA L40S", 362.05, 183.2),
        ("NVIDIA L40", 181.05, 90.5),
        ("NVIDIA L4", 121.0, 60.0),
        ("NVIDIA A10", 125.0, 62.5),
        ("NVIDIA RTX A6000", 154.8, 77.4),
        ("NVIDIA B200", 2250.0, 1125.0),
        ("NVIDIA GB200", 2500.0, 1250.0),
    ],
)
def test_known_peaks(name: str, half: float, tf32: float) -> None:
    """By the names that torch gives."""
    assert known_peak(name, "bfloat16") == known_peak(name, "float16") == half
    assert known_peak(name, "float32") == tf32
    assert known_peak(name, "float64") is None


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "AMD Instinct MI300X", ""]
)
def test_others_have_no_peak(name: str) -> None:
    assert known_peak(name, "bfloat16") is None


def test_the_special_comes_before_the_general() -> None:
    """Else a row would never count."""
    for number, (words, *_) in enumerate(KNOWN_PEAKS):
        assert not any(set(words) >= set(before) for before, *_ in KNOWN_PEAKS[:number])


def test_a_cpu_has_the_peak_that_is_configured() -> None:
    assert peak_tflops(torch.device("cpu"), "bfloat16", None) is None
    assert peak_tflops(torch.device("cpu"), "bfloat16", 1.5) == 1.5
    assert peak_tflops(torch.device("cuda"), "bfloat16", 500.0) == 500.0


def test_tflops_of_palm() -> None:
    """PaLM 540B: 238.3 k tokens/s on 6144 chips of 275 TFLOP/s are 46.2 % (arXiv 2204.02311,
    section 4.1 and appendix B)."""
    layers, heads, head_dim, length = 118, 48, 256, 2048
    flops = 6 * 540.35e9 + 12 * layers * heads * head_dim * length
    mfu = tflops_per_rank(flops, 238.3e3, 6144) / 275
    # The paper rounds to three digits.
    assert mfu == pytest.approx(0.462, abs=5e-4)
