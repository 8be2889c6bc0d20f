"""Where the time of a step goes, by torch's profiler: each operator's own time belongs to one part.

The operator itself or one that called it says which part that is, so an operation that converts its
operands before it multiplies them counts as a product with all it does. What the profiler itself
takes makes the step a little longer, and small operators most of all.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megabit.benchmark.baselines import QuantizeInput, QuantizeWeight

Parts = dict[str, float]
"""Seconds by part."""

FORWARD = "forward products"
BACKWARD = "backward products"
QUANTIZE = "quantization"
ATTENTION = "attention"
HEAD = "embedding, head, loss"
ELEMENTWISE = "norms, RoPE, gates, casts, adds"
COMMUNICATION = "communication"
UPDATE = "update"
OUTSIDE = "outside operators"
PARTS = (
    *(FORWARD, BACKWARD, QUANTIZE, ATTENTION, HEAD),
    *(ELEMENTWISE, COMMUNICATION, UPDATE, OUTSIDE),
)
LEGEND = (
    f"{FORWARD}, {BACKWARD}: those of linear layers, conversion of operands included. {UPDATE}: "
    "all after the last backward operator: norm, clipping, AdamW, new codes. "
    f"{OUTSIDE}: Python, and waiting for communication that runs beside."
)

MULTIPLY = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul")
OUR_MULTIPLY = ("linear", "matmul", "gradient")
"""What the names of megabit's own operators that multiply contain."""
RUNS_BACKWARD = "autograd::engine::evaluate_function"
MEASURED = "megabit benchmark step"


def time_parts(step: Callable[[], object], module: nn.Module) -> Parts:
    """Run ``step`` twice under the profiler; seconds of the second by part, in all its wall time.

    Args:
        module: what is trained. Operators that see a tensor as wide as its part of the vocabulary
            count as those of embedding and head.
    """
    with (
        _quantizers_named(module),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        step()  # starting the profiler gives free memory back to the system, so this one is slower
        with record_function(MEASURED):
            started = time.perf_counter()
            step()
            wall_s = time.perf_counter() - started
    events: list[Any] = list(profiler.events() or [])
    roots = next(event for event in events if event.name == MEASURED).cpu_children
    backward = (event.time_range.end for event in roots if event.name.startswith(RUNS_BACKWARD))
    last_backward = max(backward, default=float("inf"))
    widths = _vocabulary_widths(module)
    parts = dict.fromkeys(PARTS, 0.0)
    for root in roots:
        is_update = root.time_range.start > last_backward
        for part, seconds in _own_times(root, UPDATE if is_update else None, widths):
            parts[part] += seconds
    parts[OUTSIDE] = wall_s - sum(parts.values())
    return parts


def _own_times(
    event: Any, inherited: str | None, widths: set[int], is_backward: bool = False
) -> Iterator[tuple[str, float]]:
    """The part of ``event`` and of all that it called, each with its own seconds."""
    is_backward = is_backward or event.name.startswith(RUNS_BACKWARD)
    part = inherited or _part_of(event, widths, is_backward)
    yield part or ELEMENTWISE, event.self_cpu_time_total / 1e6
    for child in event.cpu_children:
        yield from _own_times(child, part, widths, is_backward)


def _part_of(event: Any, widths: set[int], is_backward: bool) -> str | None:
    name: str = event.name
    namespace, _, operator = name.partition("::")
    if namespace == "c10d" or name.startswith("gloo:"):
        return COMMUNICATION
    if "scaled_dot_product" in name:
        return ATTENTION
    if not widths.isdisjoint(_sizes(event.input_shapes)):
        return HEAD
    if name in MULTIPLY or (
        namespace == "megabit" and any(word in operator for word in OUR_MULTIPLY)
    ):
        return BACKWARD if is_backward else FORWARD
    if "quantize" in name.lower() or "ternarize" in name:
        return QUANTIZE
    return None


def _sizes(shapes: Any) -> Iterator[int]:
    """All sizes in the shapes of an operator's arguments, of which some are lists of tensors."""
    for shape in shapes or ():
        if isinstance(shape, int):
            yield shape
        else:
            yield from _sizes(shape)


def _vocabulary_widths(module: nn.Module) -> set[int]:
    return {
        parameter.shape[0]
        for name, parameter in module.named_parameters()
        if name.endswith(("embed_tokens.weight", "lm_head.weight"))
    }


@contextmanager
def _quantizers_named(module: nn.Module) -> Iterator[None]:
    """Makes what a fake-quantizer does one event; its operators alone could be anyone's."""
    with ExitStack() as hooks:
        for quantizer in module.modules():
            if isinstance(quantizer, QuantizeInput | QuantizeWeight):
                range_ = record_function(type(quantizer).__name__)
                for handle in (
                    quantizer.register_forward_pre_hook(_entering(range_)),
                    quantizer.register_forward_hook(_leaving(range_)),
                ):
                    hooks.callback(handle.remove)
        yield


def _entering(range_: record_function) -> Callable[[nn.Module, Any], None]:
    def enter(module: nn.Module, arguments: Any) -> None:
        range_.__enter__()

    return enter


def _leaving(range_: record_function) -> Callable[[nn.Module, Any, Any], None]:
    def leave(module: nn.Module, arguments: Any, result: Any) -> None:
        range_.__exit__(None, None, None)

    return leave
