"""What a probed step saw of quantization, and of gradients before their reduction: on one rank, and
put together for all of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean, pstdev

import torch

from megabit.checkpoint.source import LogicalTensor
from megabit.data_parallel.probe import WeightCounts
from megabit.telemetry import LayerMetrics
from megabit.tensor_parallel import ActivationProbe


@dataclass(frozen=True)
class StepProbe:
    """This rank's part; ``training.interval`` puts the parts of all ranks together."""

    activations: ActivationProbe
    weights: Mapping[str, WeightCounts]
    """By name of the ternary weight; empty if the step changed none."""
    local_square: float
    """Σg² of the gradients that this rank brings to the reduction over DP."""


@dataclass(frozen=True)
class LayerCounts:
    """Of one ternary weight: ``WeightCounts``, and of the activations that are its input."""

    codes: float = 0
    flips: float = 0
    zeros: float = 0
    distance: float = 0
    saturated: float = 0
    values: float = 0

    @property
    def metrics(self) -> LayerMetrics:
        """Shares; None of what was not counted."""
        return LayerMetrics(
            zero_fraction=_share(self.zeros, self.codes),
            code_flips=_share(self.flips, self.codes),
            threshold_distance=_share(self.distance, self.codes),
            saturation=_share(self.saturated, self.values),
        )


COUNTS = len(astuple(LayerCounts()))
"""Numbers for each layer."""


def pack(probe: StepProbe, names: Sequence[str]) -> list[float]:
    """What this rank counted, ``COUNTS`` numbers for each of ``names`` (all ternary weights of the
    model), which ranks can add up."""
    weights = probe.weights
    counts = {f"{layer}.weight": count for layer, count in probe.activations.counts.items()}
    assert {*counts, *weights} <= set(names), "there is no such ternary weight"
    own = dict.fromkeys(names, LayerCounts())
    # One look at all of them, so that a GPU is waited for once.
    activations = torch.stack([*counts.values()]).tolist() if counts else []
    for name, (saturated, values) in zip(counts, activations, strict=True):
        own[name] = LayerCounts(saturated=saturated, values=values)
    for name, weight in weights.items():
        own[name] = LayerCounts(
            weight.codes,
            weight.flips,
            weight.zeros,
            weight.distance,
            own[name].saturated,
            own[name].values,
        )
    return [number for layer in own.values() for number in astuple(layer)]


def unpack(numbers: Sequence[float], names: Sequence[str]) -> dict[str, LayerCounts]:
    """From the sums over ranks of what ``pack`` gave."""
    return {
        name: LayerCounts(*numbers[index * COUNTS : (index + 1) * COUNTS])
        for index, name in enumerate(names)
    }


def over_layers(
    layers: Mapping[str, LayerCounts], tensors: Mapping[str, LogicalTensor]
) -> LayerMetrics:
    """All layers together: each code counts once.

    An activation counts once for each layer that quantizes it, whatever the layout: TP ranks that
    all have it have counted it, too, so layers are weighted by their widths.
    """
    sums = LayerCounts(*map(sum, zip(*map(astuple, layers.values()), strict=True)))
    widths = {name: tensors[name].shape[1] for name, layer in layers.items() if layer.values}
    saturated = sum(layers[n].saturated / layers[n].values * w for n, w in widths.items())
    return LayerMetrics(
        zero_fraction=_share(sums.zeros, sums.codes),
        code_flips=_share(sums.flips, sums.codes),
        threshold_distance=_share(sums.distance, sums.codes),
        saturation=_share(saturated, sum(widths.values())),
    )


def layer_rows(layers: Mapping[str, LayerCounts]) -> Iterator[tuple[str, LayerMetrics]]:
    """By the name of the layer, of those that were counted.

    q, k and v share their input, and gate and up do: its saturation is with the first of them.
    """
    for name, layer in layers.items():
        if layer.codes or layer.values:
            yield name.removesuffix(".weight"), layer.metrics


def spread(squares: Sequence[float]) -> float | None:
    """Standard deviation of the norms of DP ranks' gradients as a share of their mean, from the
    squares of the norms; None for a single rank."""
    if len(squares) < 2:
        return None
    norms = [math.sqrt(square) for square in squares]
    mean = fmean(norms)
    return pstdev(norms) / mean if math.isfinite(mean) and mean > 0 else math.nan


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
