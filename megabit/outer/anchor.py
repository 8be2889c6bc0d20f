"""The outer weights: what rounds begin with, what a round makes of them, and the file they are in.

An anchor is the whole model in fp32, by logical tensor. Closing a round makes a new one from the
islands' terms, as DiLoCo does: the mean by a tree sum in the order of islands, then ``outer_step``,
so that islands which began with this anchor get the very bits of DiLoCo. An anchor is never
changed: whoever is sent one gets it whole, whatever is closed meanwhile.

Memory: 4 bytes a weight for the anchor and 4 for the momentum; each island's term of a round that
is not closed is another 4; and while a round is closed, or its predecessor still sent, a second
anchor is there.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megabit.checkpoint.tensor_file import LazyTensor, write_tensors
from megabit.errors import UserError
from megabit.files import replacing, sync
from megabit.outer.hello import Settings, Shapes, disagreement
from megabit.outer.outer_step import outer_step
from megabit.outer.rounds import STATES, State
from megabit.reduce import tree_sum

FORMAT = "megabit outer weights 1"

Holds = Literal["weights", "change"]


@dataclass(frozen=True)
class Anchor:
    """The outer weights after ``version`` rounds."""

    version: int
    id: str
    """Random: an owner that has gone back to an older file makes other weights of that version."""
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    """What an island has made of a round."""

    holds: Holds
    """``weights``: what it has now, if it began with the anchor of the round. ``change``: how much
    it has gone down from where it began; then the term is anchor − change."""
    values: Mapping[str, Tensor]
    is_whole: bool
    """Whether it did all steps of a round; false for what was left over at the end of a run."""


class OuterWeights:
    """The newest anchor and the outer momentum.

    Args:
        remembered: how many older anchors' names are kept, to recognise who began with one.
    """

    def __init__(self, anchor: Anchor, momentum: dict[str, Tensor], remembered: int) -> None:
        self.anchor = anchor
        self.momentum = momentum
        self._ids = {anchor.version: anchor.id}
        self._remembered = remembered

    @staticmethod
    def begin(weights: Mapping[str, Tensor], remembered: int) -> "OuterWeights":
        """Before the first round."""
        zeros = {name: torch.zeros_like(x) for name, x in weights.items()}
        return OuterWeights(Anchor(0, secrets.token_hex(8), weights), zeros, remembered)

    def knows(self, version: int, id_: str) -> bool:
        """Whether the anchor of that name was one of the last, in this history."""
        return self._ids.get(version) == id_

    @torch.no_grad()
    def close(self, terms: Sequence[Term], lr: float, momentum: float) -> None:
        """Make the next anchor. Of what was left over at the end, as of DiLoCo's, the mean is
        taken without momentum, which is made for whole rounds.

        Args:
            terms: of all islands that took part, in their order.
            lr: of the outer step.
            momentum: of the outer step.
        """
        old = self.anchor
        weights = {}
        for name, anchor in old.weights.items():
            mean = tree_sum(torch.stack([_weights_of(term, name, anchor) for term in terms]))
            mean = mean.div_(len(terms))
            if any(term.is_whole for term in terms):
                weights[name] = anchor.clone()
                outer_step(weights[name], mean, self.momentum[name], lr, momentum)
            else:
                weights[name] = mean
        self.anchor = Anchor(old.version + 1, secrets.token_hex(8), weights)
        self._ids[self.anchor.version] = self.anchor.id
        self._ids.pop(self.anchor.version - self._remembered - 1, None)

    def save(self, path: Path, settings: Settings, islands: Sequence[State]) -> None:
        """Write everything to ``path``, which is then whole, and durable.

        Raises:
            OSError: that is not possible; what was there is there still.
        """
        tensors = [LazyTensor.of(f"anchor/{n}", x) for n, x in self.anchor.weights.items()]
        tensors += [LazyTensor.of(f"momentum/{n}", x) for n, x in self.momentum.items()]
        about = {
            "format": FORMAT,
            "settings": json.dumps(settings),
            "version": str(self.anchor.version),
            "ids": json.dumps(self._ids),
            "islands": json.dumps([*islands]),
        }
        with replacing(path) as draft:
            write_tensors(draft, tensors, about)
        sync(path.parent)

    @staticmethod
    def load(
        path: Path, settings: Settings, shapes: Shapes, remembered: int
    ) -> "tuple[OuterWeights, list[State]]":
        """What ``save`` has written, and the islands' states.

        Raises:
            UserError: it is not such a file, or that of another run.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise UserError(f"{path}: holds no outer weights; name another --state")
                problem = disagreement(json.loads(about["settings"]), settings)
                if problem is not None:
                    raise UserError(f"{path}: belongs to another run: {problem}")
                kinds = {
                    kind: {name: _read(file, f"{kind}/{name}", shapes[name]) for name in shapes}
                    for kind in ("anchor", "momentum")
                }
            version = int(about["version"])
            ids = {int(number): str(id_) for number, id_ in json.loads(about["ids"]).items()}
            islands = _states(json.loads(about["islands"]), settings["outer.islands"])
            anchor = Anchor(version, ids[version], kinds["anchor"])
        except OSError as error:
            raise UserError(f"{path}: cannot read it ({error.strerror or error})") from error
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: is damaged ({error}); use a copy, or begin anew without it"
            ) from error
        outer = OuterWeights(anchor, kinds["momentum"], remembered)
        outer._ids |= ids
        return outer, islands


def _weights_of(term: Term, name: str, anchor: Tensor) -> Tensor:
    values = term.values[name]
    return values if term.holds == "weights" else anchor - values


def _read(file: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = file.get_tensor(name)
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not fp32 {shape}")
    return tensor.clone()  # not the file's own pages


def _states(values: Any, islands: int) -> list[State]:
    if not isinstance(values, list) or len(values) != islands:
        raise ValueError(f"it has no states of {islands} islands")
    return [STATES[STATES.index(value)] for value in values]


def empty_weights(shapes: Shapes) -> dict[str, Tensor]:
    """Room for a model's logical tensors, fp32."""
    return {name: torch.empty(shape) for name, shape in shapes.items()}
