"""Run tasks of lm-evaluation-harness: their YAML files, or their names in folders of such files."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabit.errors import UserError
from megabit.evaluation.forward import ForwardRunner
from megabit.evaluation.token_batches import Shapes
from megabit.inference.model_text import ModelTokenizer

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

FEWSHOT_SEED = 1234
"""Of the examples before a question, as in the harness."""
BOOTSTRAP = 0
"""Standard errors are not computed: those that need resampling fork processes."""


@dataclass(frozen=True)
class TaskResult:
    """What the harness says of a task or of a group of tasks."""

    documents: int | None
    metrics: Mapping[str, float]
    """By name; that of a filter's result has it behind a comma."""


def check_harness() -> None:
    """Refuse to go on without lm-evaluation-harness.

    Raises:
        UserError: it is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError(
            "--tasks: needs lm-evaluation-harness; install it with pip install 'megabit[lm-eval]'"
        ) from error


def load_tasks(tasks: Sequence[str], include_path: Path | None) -> Any:
    """The tasks for ``run_tasks``, with their documents.

    Args:
        tasks: paths of YAML files, or names of tasks, groups and tags; none are all of
            ``include_path``.
        include_path: a folder of YAML files. Names that are not in it are the harness' own.

    Raises:
        UserError: there is no such task, or it cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    # Its notes on what it does are many, and each rank would make them.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"--include-path: {include_path} is no folder")
    names = [task for task in tasks if not task.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if any(name not in manager.all_tasks for name in names):
        manager = TaskManager(include_path=include_path)
    return _load(manager, [*tasks] or manager.all_subtasks, include_path)


def _load(manager: "TaskManager", tasks: Sequence[str], include_path: Path | None) -> Any:
    if not tasks:
        raise UserError(f"--include-path: {include_path} holds no task")
    for task in tasks:
        is_file = task.endswith((".yaml", ".yml"))
        if is_file and not Path(task).is_file():
            raise UserError(f"--tasks: there is no file {task}")
        if not is_file and task not in manager.all_tasks:
            raise UserError(
                f"--tasks: there is no task {task!r}; name a YAML file, a task in --include-path "
                "or one of lm-evaluation-harness"
            )
    try:
        loaded = manager.load([*tasks])
    except Exception as error:  # whatever is wrong with what others wrote
        lines = str(error).splitlines() or [""]
        raise UserError(
            f"--tasks: cannot load {', '.join(tasks)} ({type(error).__name__}: {lines[0]})"
        ) from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def run_tasks(
    runner: ForwardRunner,
    tokenizer: ModelTokenizer,
    shapes: Shapes,
    loaded: Any,
    limit: int | None = None,
) -> dict[str, TaskResult]:
    """What the model reaches in each of the tasks, by name, on every rank; collective.

    Args:
        loaded: what ``load_tasks`` gave, the same on all ranks.
        limit: documents of each task.
    """
    from lm_eval.evaluator import evaluate

    from megabit.evaluation.lm_eval_adapter import MegabitLM

    found = evaluate(
        lm=MegabitLM(runner, tokenizer, shapes),
        task_dict=loaded,
        limit=limit,
        bootstrap_iters=BOOTSTRAP,
        log_samples=False,
    )
    assert found is not None  # it is a world of one for the harness
    documents = {name: int(count["effective"]) for name, count in found["n-samples"].items()}
    return {
        name: TaskResult(documents.get(name), _metrics(result))
        for name, result in found["results"].items()
    }


def _metrics(result: Mapping[str, Any]) -> dict[str, float]:
    metrics = {}
    for key, value in result.items():
        name, _, of_filter = key.partition(",")
        if "," in key and isinstance(value, int | float) and not name.endswith("_stderr"):
            metrics[name if of_filter == "none" else key] = float(value)
    return metrics
