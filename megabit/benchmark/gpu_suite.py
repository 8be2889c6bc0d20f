"""Kernels, a training step and decoding on one device, within a given time.

Each part has its share of the time that is left when it begins, and is ended when that is over;
what it found by then is kept, and that it was ended is said.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import torch

from megabit.benchmark.document import Document, Part
from megabit.benchmark.engine import Load
from megabit.benchmark.environment import card_state, describe_place
from megabit.benchmark.gpu_decode import measure_decoding
from megabit.benchmark.gpu_findings import Findings, Place
from megabit.benchmark.gpu_kernels import (
    measure_attention,
    measure_elementwise,
    measure_products,
)
from megabit.benchmark.gpu_train import measure_training
from megabit.benchmark.time_limit import OutOfTime, time_limit
from megabit.config import Config, load_config
from megabit.errors import UserError
from megabit_kernels.benchmark.measure import first_line

TRAINED, DECODED = "recipe/700m.yaml", "model/bitnet_2b4t.yaml"
TRAINING = ("train.global_batch_size=16", "train.tokens=null", "train.steps=10")
"""A step of 32,768 tokens, in microbatches as the recipe has them."""
TINY = (
    *("model.hidden_size=32", "model.intermediate_size=48", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=2", "model.num_key_value_heads=1", "model.vocab_size=300"),
    *("data.seq_length=16", "train.global_batch_size=8"),
)
RESERVE_S = 10.0
"""Kept for what comes at the end."""

Told = Callable[[str], None]


def run_gpu_suite(
    device: torch.device, examples: Path, minutes: float, is_quick: bool, told: Told
) -> Document:
    """Measure everything that ``minutes`` allow.

    Raises:
        UserError: ``examples`` is not the repository's folder of that name.
    """
    for name in (TRAINED, DECODED):
        if not (examples / name).is_file():
            raise UserError(
                f"--examples: {examples} has no {name}; run it in megabit's repository, or name "
                "its folder examples"
            )
    document = describe_place(device, is_quick)
    place = Place(device, is_quick, document.machine["cache_bytes"], told)
    tiny = TINY if is_quick else ()
    trained = load_config([str(examples / TRAINED), *TRAINING, *tiny])
    decoded = load_config([str(examples / DECODED), *tiny]).model
    load = (
        Load((1, 2), prompt_tokens=4, new_tokens=3, turns=1)
        if is_quick
        else Load((1, 16, 64), prompt_tokens=128, new_tokens=128, turns=3)
    )
    findings = Findings()  # has the peak, which two parts need
    end = monotonic() + 60 * minutes - RESERVE_S
    steps = 1 if is_quick else 5

    def products(own: Findings) -> None:
        try:
            measure_products(own, place, 0.25 * (end - monotonic()))
        finally:
            findings.peak_flops = own.peak_flops

    def training(own: Findings) -> None:
        own.peak_flops = findings.peak_flops
        own.settings |= _training_settings(trained, own.peak_flops)
        measure_training(own, place, trained, steps, compiles=not is_quick)

    def decoding(own: Findings) -> None:
        own.settings |= {"layers": decoded.num_hidden_layers, "hidden_size": decoded.hidden_size}
        own.settings |= {"prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens}
        measure_decoding(own, place, decoded, load)

    shares: Sequence[tuple[str, str, float, Callable[[Findings], None]]] = (
        ("products", "Ternary products, 2B4T shapes", 0.3, products),
        (
            "elementwise",
            "Norms, quantization, ternarizing, 2B4T shapes",
            0.2,
            lambda own: measure_elementwise(own, place, decoded),
        ),
        (
            "attention",
            "Attention over a paged cache, 2B4T shape",
            0.15,
            lambda own: measure_attention(own, place, decoded),
        ),
        ("train", "A training step, 700M shape", 0.55, training),
        ("decode", "Decoding, 2B4T shape", 1.0, decoding),
    )
    parts = []
    for number, (name, title, share, measure) in enumerate(shares, 1):
        told(f"{number} of {len(shares)}: {title}")
        parts.append(_part(name, title, share * (end - monotonic()), measure, device))
        told(f"  {parts[-1].elapsed_s:.0f} s, {len(parts[-1].rows)} rows")
    return document.with_parts(*parts)


def _part(
    name: str, title: str, limit_s: float, measure: Callable[[Findings], None], device: torch.device
) -> Part:
    findings, started = Findings(), monotonic()
    try:
        with time_limit(limit_s):
            measure(findings)
        if state := card_state(device):  # clocks that were lowered explain slow kernels
            findings.settings["card_at_the_end"] = state
    except OutOfTime:
        findings.left_out.append(f"what is not above: no time left after {limit_s:.0f} s")
    except Exception as error:  # of one part, which must not cost the others' results
        findings.left_out.append(f"what is not above: {first_line(error)}")
    elapsed_s = round(monotonic() - started, 1)
    part = Part(name, title, findings.settings, tuple(findings.rows), tuple(findings.left_out))
    return replace(part, elapsed_s=elapsed_s)


def _training_settings(config: Config, peak_flops: float | None) -> dict[str, object]:
    return {
        "layers": config.model.num_hidden_layers,
        "hidden_size": config.model.hidden_size,
        "seq_length": config.data.seq_length,
        "samples_a_step": config.train.global_batch_size,
        "samples_a_microbatch": config.train.micro_batch_size,
        "compute": config.precision.compute,
        "MFU": "of the bf16 peak that torch.mm reached here, "
        + ("not known" if peak_flops is None else f"{peak_flops / 1e12:,.3g} TFLOP/s"),
    }
