"""A frozen model that the run learns from (``loss.teacher``): its logits for a step's microbatches.

It is loaded once, at the layout of the run: the same TP, and its own layers on the stages of the
run's pipeline schedule, so that its logits are where the student's are. Each rank reads its own
slices. There is no optimizer and no gradient; matrices are held in the compute dtype, ternary ones
as codes. Ranks have the same rows of the vocabulary in both models, whatever their heads: these
make the blocks finer, but where a rank's part begins depends on TP only.

A step asks for the logits of all of its microbatches before it trains on the first one, in one
forward-only schedule. So the last stage holds m · T · v of them in the compute dtype: v columns of
the vocabulary (V/tp) for each of the T tokens of m microbatches. With a vocabulary of 128,256 in
bf16 that is 0.25 MB for each token of the rank's step, at TP 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megabit.checkpoint import on_all_ranks, verified
from megabit.checkpoint.model_source import CheckpointSource
from megabit.checkpoint.source import Index, ModelSource
from megabit.config import Config, GuardConfig, LossConfig, ModelConfig, find_problems
from megabit.data.batches import Batch
from megabit.errors import UserError
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.opening import load_runner
from megabit.interop.huggingface import HuggingFaceSource
from megabit.interop.opening import open_source
from megabit.mesh import ParallelMesh
from megabit.tensor_parallel import ForwardPass


@dataclass(frozen=True)
class Teacher:
    """The stages of the teacher on one rank."""

    runner: ForwardRunner
    """With the placement of the run's schedule: the last stage is where the student's is."""

    def logits(self, batch: Batch) -> list[Tensor]:
        """Of each microbatch, ``[T, v]`` in the compute dtype, where the last stage is; none
        elsewhere. Collective over TP and PP.

        Args:
            batch: inputs ``[m, B, S]``, on the mesh's device.
        """
        return self.runner.outputs(batch.inputs.unbind(), self._head)

    def _head(self, hidden: Tensor, microbatch: int, forward_pass: ForwardPass) -> Tensor:
        return self.runner.stages.logits(hidden, forward_pass)


def open_teacher(config: Config, mesh: ParallelMesh) -> Teacher | None:
    """The model that ``loss.teacher`` names, checked and loaded; None if none is asked for.
    Collective over the mesh.

    Raises:
        UserError: it cannot be read, has another vocabulary, or does not fit the run's layout; on
            all ranks.
    """
    if config.loss.teacher is None:
        return None
    path = Path(config.loss.teacher)

    def open_and_check() -> ModelSource:
        source = as_it_computes(open_source(path))
        check_teacher(source, config, mesh.world.size)
        return source

    source = on_all_ranks(open_and_check, mesh)
    if isinstance(source, DenseSource):
        source.verify(mesh)
    runner = load_runner(source, teacher_config(config, source.model), mesh)
    runner.stages.requires_grad_(False)
    return Teacher(runner)


def as_it_computes(source: ModelSource) -> ModelSource:
    """A dense model of Hugging Face's, or a checkpoint that is an import of one, counts as ternary
    elsewhere: as what it is to become. But a teacher is what it was trained to be."""
    if isinstance(source, HuggingFaceSource) and source.quantization is None:
        return DenseSource(source)
    if isinstance(source, CheckpointSource) and source.was_never_ternary:
        return DenseSource(source)
    return source


@dataclass(frozen=True)
class DenseSource:
    """The masters of a model that was never ternary, as a ``ModelSource`` of dense matrices."""

    trained: HuggingFaceSource | CheckpointSource

    def verify(self, mesh: ParallelMesh) -> None:
        """Look at all bytes; collective over the mesh."""
        trained = self.trained
        if isinstance(trained, CheckpointSource):
            verified(trained.path, mesh)
        else:
            on_all_ranks(lambda: trained.verify() if mesh.is_main else None, mesh)

    @property
    def path(self) -> Path:
        return self.trained.path

    @property
    def model(self) -> ModelConfig:
        return replace(self.trained.model, linear="dense")

    @property
    def max_length(self) -> int:
        return self.trained.max_length

    @property
    def has_masters(self) -> bool:
        return True

    @property
    def assets(self) -> Mapping[str, Path]:
        return self.trained.assets

    def values(self, name: str, index: Index | None = None) -> Tensor:
        return self.trained.values(name, index)

    def codes(self, name: str, index: Index | None = None) -> Tensor:
        raise UserError(f"{self.path}: {name} is dense, and has no codes")

    def scale(self, name: str) -> Tensor:
        raise UserError(f"{self.path}: {name} is dense, and has no scale")


def teacher_config(config: Config, model: ModelConfig) -> Config:
    """``config`` for forward passes of a teacher: another model at the same layout."""
    return replace(
        config,
        model=model,
        parallel=replace(
            config.parallel,
            layers_per_stage=None,
            balance="estimated",
            row_reduce="int32",
            exact="forward",
        ),
        precision=replace(config.precision, ternary_backward="compute"),
        train=replace(
            config.train,
            hidden_dropout=0.0,
            recompute="none",
            recompute_layers=None,
            quantization_ramp=0.0,
        ),
        loss=LossConfig(),
        guard=GuardConfig(),
        checkpoint=replace(config.checkpoint, snapshot_interval=0),
    )


def check_teacher(source: ModelSource, config: Config, world_size: int) -> None:
    """Refuse a model that a run of ``config`` cannot learn from.

    Raises:
        UserError: with a line for each problem.
    """
    model, student = source.model, config.model
    problems = []
    if model.vocab_size != student.vocab_size:
        problems.append(
            f"has a vocabulary of {model.vocab_size} tokens, and the model to be trained one of "
            f"{student.vocab_size}; they must have the same tokenizer"
        )
    if config.data.seq_length > source.max_length:
        problems.append(
            f"was made for {source.max_length} positions, fewer than "
            f"data.seq_length={config.data.seq_length}"
        )
    if config.parallel.exact == "full" and not is_exact(model):
        problems.append(
            "adds floats over TP, being dense or with full-precision activations, which "
            "parallel.exact=full cannot"
        )
    # Of these the model is to blame, since the same settings were fine for the student.
    unfit = find_problems(teacher_config(config, model), world_size)
    problems += [f"does not fit the layout: {problem}" for problem in unfit]
    if problems:
        raise UserError(*(f"loss.teacher: {source.path} {problem}" for problem in problems))


def is_exact(model: ModelConfig) -> bool:
    """Whether its forward pass has the same bits at every layout."""
    return model.linear == "ternary" and model.activations != "full"
