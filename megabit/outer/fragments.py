"""Which tensors meet when, if islands exchange a fragment of the weights at a time.

Streaming DiLoCo (arXiv 2501.18512, section 2.2): every fragment meets once in H steps, evenly
spread, so that a meeting sends a part of the bytes. A fragment here is a set of whole tensors, and
which one a tensor belongs to depends on the model only: a run that goes on at another layout meets
as before. (In the paper fragments are sets of layers. Tensors are shared out more evenly, and most
models have more of them than of layers.) What else the paper has, overlapping a meeting with the
next steps, is not done.
"""

from collections.abc import Mapping

import torch

from megabit.mesh import Axis
from megabit.reduce import gather_json


def is_due(step: int, fragment: int, fragments: int, inner_steps: int) -> bool:
    """Whether ``fragment`` meets after ``step`` steps; the first one at multiples of H."""
    return (step + fragment * inner_steps // fragments) % inner_steps == 0


def assign_fragments(sizes: Mapping[str, int], fragments: int) -> dict[str, int]:
    """A fragment for each tensor, as even in elements as whole tensors can be: largest first, each
    to the fragment that has least (no fragment then exceeds the ideal by more than the largest of
    the tensors).

    Args:
        sizes: elements by name, of the whole model.
    """
    held = [0] * fragments
    assigned = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        fragment = held.index(min(held))
        held[fragment] += size
        assigned[name] = fragment
    return assigned


def sizes_of_all_stages(
    sizes: Mapping[str, int], pipeline: Axis, device: torch.device
) -> dict[str, int]:
    """Elements of the logical tensors of all stages, by name, from those of this rank's;
    collective over ``pipeline``."""
    merged: dict[str, int] = {}
    for of_stage in gather_json(dict(sizes), pipeline, device):
        merged.update(of_stage)
    return merged
