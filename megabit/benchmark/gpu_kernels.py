"""Kernels on one device, at the shapes of BitNet 2B4T, beside bf16 PyTorch in the same run."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megabit.benchmark.document import Row, Sample
from megabit.benchmark.gpu_findings import Findings, Place
from megabit.benchmark.parts import kernels_part
from megabit.config import ModelConfig
from megabit_kernels import (
    KVPages,
    TernaryWeight,
    glu_rms_norm_quantize,
    implementations,
    paged_attention,
    rms_norm_quantize,
)
from megabit_kernels.benchmark.measure import time_in_turns
from megabit_kernels.benchmark.run import Benchmark, Settings
from megabit_kernels.benchmark.shapes import MODELS
from megabit_kernels.dispatch import Operation

BLOCK = 16
EPS = 1e-5
OURS = "megabit"
STEP_BY_STEP = "torch, step by step"
"""The same numbers as ours by torch's operators."""

Calls = Mapping[str, Callable[[], object]]


def measure_products(findings: Findings, place: Place, limit_s: float) -> None:
    """Ternary products and whole layers beside cuBLAS; notes the device's measured peak."""
    layers = MODELS["trainer"][:1] if place.is_quick else MODELS["2b4t"]
    settings = Settings(
        layers=layers,
        tokens=(1, 8) if place.is_quick else (1, 16, 64, 512, 4096),
        device=place.device.type,
        threads=() if place.device.type == "cuda" else (1,),
        implementations=("default", "bitlinear"),
        budget_s=place.budget_s,
        limit_s=limit_s,
    )
    benchmark = Benchmark(settings)
    findings.peak_flops = max(one.peaks["bfloat16"] for one in benchmark.result.rooflines.values())
    try:
        for race in benchmark.run():
            place.told(str(race))
    finally:  # what was measured before the time ended
        part = kernels_part(json.loads(benchmark.result.to_json()))
        findings.rows += part.rows
        findings.left_out += part.left_out


def measure_elementwise(findings: Findings, place: Place, model: ModelConfig) -> None:
    """Norms that quantize, and ternarize and pack."""
    device, generator = place.device, torch.Generator(place.device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    hidden, ffn = model.hidden_size, model.intermediate_size
    for m in (1, 8) if place.is_quick else (1, 64, 4096):
        x, gain = random(m, hidden), random(hidden)
        _race(
            findings,
            place,
            f"RMSNorm and quantization, {m} × {hidden}",
            "rms_norm_quantize",
            {
                OURS: partial(rms_norm_quantize, x, gain, EPS),
                STEP_BY_STEP: partial(rms_norm_quantize, x, gain, EPS, "torch"),
                "F.rms_norm, bf16": partial(F.rms_norm, x, (hidden,), gain, EPS),
            },
        )
        gate, up, wide_gain = random(m, ffn), random(m, ffn), random(ffn)
        operands = (gate, up, wide_gain, EPS, "relu2")
        _race(
            findings,
            place,
            f"ReLU² gate, RMSNorm and quantization, {m} × {ffn}",
            "glu_rms_norm_quantize",
            {
                OURS: partial(glu_rms_norm_quantize, *operands),
                STEP_BY_STEP: partial(glu_rms_norm_quantize, *operands, "torch"),
                "gate and F.rms_norm, bf16": partial(_gate_and_norm, gate, up, wide_gain),
            },
        )
    weight = random(ffn, hidden, dtype=torch.float32)
    scale = weight.abs().mean()
    _race(
        findings,
        place,
        f"ternarize and pack, {ffn} × {hidden} fp32",
        "ternarize",
        {
            OURS: partial(TernaryWeight.from_latent, weight, scale),
            "cast to bf16": partial(weight.to, torch.bfloat16),
        },
    )


def measure_attention(findings: Findings, place: Place, model: ModelConfig) -> None:
    """One new token of each sequence over the paged cache, beside contiguous keys and values."""
    device, context = place.device, 32 if place.is_quick else 2048
    heads, kv_heads, head_dim = (
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
    )
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    for count in (1, 2) if place.is_quick else (1, 16, 64):
        blocks = count * context // BLOCK
        pages = KVPages.allocate(blocks, BLOCK, kv_heads, head_dim, torch.bfloat16, device)
        pages = replace(pages, keys=random(*pages.keys.shape), values=random(*pages.values.shape))
        q = random(count, heads, head_dim)
        operands = (
            q,
            pages,
            torch.arange(heads, device=device, dtype=torch.int32) // (heads // kv_heads),
            torch.arange(blocks, device=device, dtype=torch.int32).view(count, -1),
            torch.arange(count + 1, device=device, dtype=torch.int32),
            torch.full((count,), context, device=device, dtype=torch.int32),
        )
        k, v = (
            random(count, kv_heads, context, head_dim),
            random(count, kv_heads, context, head_dim),
        )
        _race(
            findings,
            place,
            f"attention over pages, {count} × {context} tokens",
            "paged_attention",
            {
                OURS: partial(paged_attention, *operands),
                "scaled_dot_product_attention, bf16": partial(
                    F.scaled_dot_product_attention,
                    *(q.unsqueeze(2), k, v),
                    enable_gqa=heads != kv_heads,
                ),
            },
        )


def _gate_and_norm(gate: Tensor, up: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(F.relu(gate).square() * up, tuple(gain.shape), gain, EPS)


def _race(findings: Findings, place: Place, what: str, operation: Operation, calls: Calls) -> None:
    """Rows of ``OURS`` beside each of the other calls."""
    place.told(what)
    timings, failures = time_in_turns(
        {name: [call] for name, call in calls.items()},
        place.device,
        place.cache_bytes,
        place.budget_s,
    )
    name = f"{OURS} ({implementations(operation, place.device)[0]})"
    for failed, reason in failures.items():
        findings.left_out.append(f"{what}: {failed}: {reason}")
    if OURS in timings:
        own = Sample(name, timings[OURS])
        findings.rows += [
            Row(what, own, Sample(baseline, timings[baseline]))
            for baseline in timings
            if baseline != OURS
        ]
