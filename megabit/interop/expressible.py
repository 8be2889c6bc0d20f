"""What formats of other tools can't say of a model: it is refused, since they would compute another
one without a word."""

from collections.abc import Iterator

from megabit.checkpoint.source import ModelSource
from megabit.config import ModelConfig
from megabit.errors import UserError


def check_expressible(
    source: ModelSource,
    form: str,
    has_prenorm: bool = False,
    derives_scales: str | None = None,
) -> None:
    """Refuse a model that is more than BitNet-2B4T's architecture with other sizes.

    Args:
        form: the format, for messages.
        has_prenorm: whether it can leave out the norms before o_proj and down_proj, too.
        derives_scales: what would be right where readers take γ anew from master weights, as
            mean|W|; None where γ is carried, however it was made.

    Raises:
        UserError: one line for each thing.
    """
    placements = ("subln", "prenorm") if has_prenorm else ("subln",)
    problems = [*_problems(source.model, form, placements)]
    if derives_scales is not None:
        problems += _scale_problems(source.model, form, derives_scales)
    if problems:
        raise UserError(*(f"{source.path}: {problem}" for problem in problems))


def _problems(model: ModelConfig, form: str, placements: tuple[str, ...]) -> Iterator[str]:
    if model.norm_placement not in placements:
        yield (
            f"model.norm_placement is {model.norm_placement}; {form} has norms as "
            f"{' or '.join(placements)} has them: train with model.norm_placement=subln"
        )
    if model.activations != "int8":
        yield (
            f"model.activations is {model.activations}; readers of {form} quantize activations to "
            "int8: train on with model.activations=int8 first"
        )
    if model.hadamard:
        yield (
            f"model.hadamard is true; {form} has no such transform: train with model.hadamard=false"
        )


def _scale_problems(model: ModelConfig, form: str, right: str) -> Iterator[str]:
    for key, plain in (("weight_scale", "absmean"), ("scale_mult", 1.0)):
        value = getattr(model, key)
        if value != plain:
            yield (
                f"model.{key} is {value}; whoever reads {form} takes mean|W| for γ again: {right}"
            )
