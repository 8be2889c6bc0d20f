"""The messages of a step as a planner takes them: of each part of the model, by phase.

``training.messages`` has each of them; ``training.traffic`` adds up their bytes.
"""

from megabit.training import messages
from megabit.training.messages import Message, Messages, Phase
from megabit.training.shapes import RankShape

__all__ = [
    "PHASES",
    "Message",
    "between_stages",
    "embedding_messages",
    "head_messages",
    "layer_messages",
    "step_messages",
]

PHASES: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient")


def layer_messages(shape: RankShape) -> dict[str, list[Message]]:
    """Of one microbatch in one layer. Layers are taken to be alike: they recompute what most of the
    rank's do."""
    by_phase = _by_phase(messages.layer(shape))
    layers, recomputing = len(shape.layers), shape.recomputing_layers()
    if 2 * recomputing >= max(1, layers):
        for message in messages.recomputed_layer(shape):
            by_phase[message.phase].append(message)
    return by_phase


def embedding_messages(shape: RankShape) -> dict[str, list[Message]]:
    """Of one microbatch."""
    return _by_phase(messages.embedding(shape))


def head_messages(shape: RankShape) -> dict[str, list[Message]]:
    """Of one microbatch, the loss included."""
    return _by_phase(messages.head(shape))


def between_stages(shape: RankShape) -> Message:
    """What one stage sends to the next of a microbatch, or back."""
    return messages.hidden_message(shape)


def step_messages(shape: RankShape) -> dict[str, list[Message]]:
    """Of one step beside its microbatches: ``gradients`` at the end of backward, ``weights`` after
    the update (with the sums that γ is made of, and what Muon sends), ``agreement`` on numbers."""
    return {
        "gradients": list(messages.gradients(shape)),
        "weights": [*messages.updates(shape), *messages.weights(shape)],
        "agreement": list(messages.agreement(shape)),
    }


def _by_phase(sent: Messages) -> dict[str, list[Message]]:
    by_phase: dict[str, list[Message]] = {phase: [] for phase in PHASES}
    for message in sent:
        by_phase[message.phase].append(message)
    return by_phase
