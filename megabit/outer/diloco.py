"""DiLoCo: islands train by themselves for H steps, then the mean of their weights is taken.

    masters of all islands → mean (``mean``) → outer step from the anchor (``outer_step``) → the new
    anchor, which is everybody's masters → γ and codes, made anew (``tensors.publish``)

(Douillard et al., arXiv 2311.08105.) Moments of the inner optimizer stay where they are. With
``fragments``, a part of the tensors meets at a time (``fragments``). Between meetings nothing is
sent, and whoever looks at an island's model sees that island's.

Neutral settings: with lr 1 and momentum 0 a meeting is the mean itself, and a mean of the same
weights changes no bit where islands are 1, 2, 4, …

After the last step of a run there is one model, whatever was left over: ``conclude`` takes the mean
of what has not met just then, without momentum, which is made for whole rounds.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megabit.config import OuterConfig
from megabit.data_parallel import Piece, ZeroOptimizer
from megabit.outer.fragments import assign_fragments, is_due, sizes_of_all_stages
from megabit.outer.mean import Finish, Mean
from megabit.outer.outer_step import outer_step
from megabit.outer.tensors import AnchoredTensor, by_bucket, outer_tensors, publish

MAX_IN_FLIGHT = 3
"""Buckets that travel at a time: buffers of a meeting take so much memory, and not the model's."""


@dataclass
class DiLoCo:
    """What a rank keeps of the outer optimizer, and its meetings; see ``opening.Outer``."""

    config: OuterConfig
    optimizer: ZeroOptimizer
    mean: Mean
    fragments: list[list[AnchoredTensor]]
    """This rank's tensors by fragment; some may be empty."""

    @staticmethod
    def create(
        config: OuterConfig, optimizer: ZeroOptimizer, mean: Mean, is_coded: bool
    ) -> "DiLoCo":
        """Begin a first round with the present masters; collective over the mesh."""
        mesh, held = optimizer.mesh, outer_tensors(optimizer)
        fragment_of = {tensor.name: 0 for tensor in held}
        if config.fragments > 1:
            own = {tensor.name: tensor.shard.numel for tensor in held}
            sizes = sizes_of_all_stages(own, mesh.pp, mesh.device)
            fragment_of = assign_fragments(sizes, config.fragments)
        fragments: list[list[AnchoredTensor]] = [[] for _ in range(config.fragments)]
        for tensor in held:
            fragments[fragment_of[tensor.name]].append(AnchoredTensor.of(tensor, is_coded))
        return DiLoCo(config, optimizer, mean, fragments)

    def begin(self) -> None:
        """See ``opening.Outer``."""
        for tensor in self._tensors():
            tensor.begin()

    def state(self) -> dict[str, Any]:
        """See ``opening.Outer``: that there are pieces."""
        return {"is_anchored": True}

    def resume(self, state: Mapping[str, Any]) -> bool:
        """See ``opening.Outer``."""
        if not state.get("is_anchored"):
            self.begin()
        return False

    def after_step(self, step: int) -> bool:
        """See ``opening.Outer``."""
        return self._meet(self._due(step), is_whole_round=True)

    def conclude(self, step: int) -> bool:
        """See ``opening.Outer``."""
        return self._meet(self._left_over(step), is_whole_round=False)

    def pieces(self, owned: bool = False) -> Iterator[Piece]:
        """See ``opening.Outer``."""
        for tensor in self._tensors():
            if tensor.owned or not owned:
                yield tensor.kept(owned)

    def meeting(self) -> str:
        """See ``opening.Outer``: all have the same weights then."""
        return ""

    def expected_bytes(self, step: int, is_last: bool = False) -> float:
        """See ``opening.Outer``."""
        met = self._due(step) + (self._left_over(step) if is_last else [])
        return sum(
            self.mean.nbytes(message)
            for message in by_bucket(t for number in met for t in self.fragments[number])
        )

    def _due(self, step: int) -> list[int]:
        fragments, inner_steps = len(self.fragments), self.config.inner_steps
        return [f for f in range(fragments) if is_due(step, f, fragments, inner_steps)]

    def _left_over(self, step: int) -> list[int]:
        """Fragments that have not met after ``step``."""
        met = self._due(step)
        return [number for number in range(len(self.fragments)) if number not in met]

    def _tensors(self) -> Iterator[AnchoredTensor]:
        return (tensor for fragment in self.fragments for tensor in fragment)

    def _meet(self, fragments: Sequence[int], is_whole_round: bool) -> bool:
        """Islands bring ``fragments`` together; whether there are any."""
        if not fragments:
            return False
        self.optimizer.publisher.settle()  # what still travels may be the masters' own memory
        tensors = [tensor for number in fragments for tensor in self.fragments[number]]
        in_flight: deque[tuple[list[AnchoredTensor], Finish]] = deque()
        for message in by_bucket(tensors):
            in_flight.append((message, self.mean.start(message)))
            if len(in_flight) == MAX_IN_FLIGHT:
                self._receive(*in_flight.popleft(), is_whole_round)
        for message, finish in in_flight:
            self._receive(message, finish, is_whole_round)
        publish(self.optimizer, tensors)
        return True

    def _receive(
        self, message: Sequence[AnchoredTensor], finish: Finish, is_whole_round: bool
    ) -> None:
        """The outer step from the anchor to the next one, which is what all islands now have."""
        for tensor, mean in zip(message, finish(), strict=True):
            if is_whole_round:
                config = self.config
                outer_step(tensor.anchor, mean, tensor.momentum, config.lr, config.momentum)
            else:
                tensor.anchor.copy_(mean)
            tensor.weights.copy_(tensor.anchor)
