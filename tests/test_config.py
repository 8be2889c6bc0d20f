"""Configuration: what is wrong is named, all of it at once; what is right comes through."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megabit.config import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    find_problems,
    load_config,
    to_yaml,
)
from megabit.errors import UserError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
YAML_FILES = sorted(
    path for path in EXAMPLES.rglob("*.yaml") if path.parent.name not in ("serving", "launch")
)
"""Those of served models have settings of their own (``test_serving_examples``), and those of
launchers are no settings (``test_launch_files``)."""


def problems_of(*arguments: str | Path, world_size: int | None = None) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        load_config([str(argument) for argument in arguments], world_size)
    for problem in caught.value.problems:
        assert "\n" not in problem
    return caught.value.problems


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# Composition


def test_defaults_are_a_valid_configuration() -> None:
    assert load_config([]) == Config()
    assert find_problems(Config(), world_size=1) == []


def test_later_arguments_win(tmp_path: Path) -> None:
    one = written(tmp_path / "one.yaml", "train: {steps: 1, seed: 1}\nmodel: {hidden_size: 64}\n")
    two = written(tmp_path / "two.yaml", "train: {steps: 2}\n")
    config = load_config([str(one), str(two)])
    assert (config.train.steps, config.train.seed, config.model.hidden_size) == (2, 1, 64)
    assert load_config([str(two), str(one)]).train.steps == 1
    assert load_config(["train.steps=3", str(one)]).train.steps == 1
    assert load_config([str(one), "train.steps=3", str(two), "train.steps=4"]).train.steps == 4


def test_a_list_is_replaced_not_merged(tmp_path: Path) -> None:
    stages = written(tmp_path / "a.yaml", "parallel: {pp: 3, layers_per_stage: [2, 1, 1]}\n")
    config = load_config([str(stages), "parallel.pp=2", "parallel.layers_per_stage=[1,3]"])
    assert config.parallel.layers_per_stage == [1, 3]
    config = load_config([str(stages), "parallel.layers_per_stage=null"])
    assert config.parallel.layers_per_stage is None


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", ".001", "1E-03"])
def test_ways_to_write_a_float(tmp_path: Path, text: str) -> None:
    """PyYAML by itself reads 1e-3 as text."""
    path = written(tmp_path / "lr.yaml", f"optim: {{eps: {text}, lr: [{text}, {text}]}}\n")
    for config in (load_config([str(path)]), load_config([f"optim.eps={text}"])):
        assert config.optim.eps == 1e-3
    assert load_config([str(path)]).optim.lr == [1e-3, 1e-3]
    assert load_config([f"optim.lr=[{text},{text}]"]).optim.lr == [1e-3, 1e-3]


def test_values_from_the_command_line() -> None:
    config = load_config(
        [
            "run.dir=runs/a=b",
            "run.sample_prompt=To be, or",
            "data.text=null",
            "model.rope_theta=500000",
            "model.tie_word_embeddings=false",
        ]
    )
    assert config.run.dir == "runs/a=b"
    assert config.run.sample_prompt == "To be, or"
    assert config.data.text is None
    assert config.model.rope_theta == 500_000.0
    assert config.model.tie_word_embeddings is False


def test_text_that_yaml_would_read_as_a_mapping() -> None:
    assert load_config(["run.sample_prompt=JULIET:"]).run.sample_prompt == "JULIET:"


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    for text in ("# only a comment\n", "{}\n", "model: {}\n"):
        assert load_config([str(written(tmp_path / "empty.yaml", text))]) == Config()


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(hidden_size=80, num_attention_heads=20, num_key_value_heads=5),
        parallel=ParallelConfig(tp=5, pp=2, layers_per_stage=[1, 3], bucket_mb=0.1),
        optim=OptimConfig(lr=[1e-3, 1e-4 / 3], eps=1e-300, min_lr=1e-5),
    )
    for tree in (Config(), config):
        path = written(tmp_path / "resolved.yaml", to_yaml(tree))
        assert load_config([str(path)]) == tree


def test_the_tree_is_frozen() -> None:
    config = load_config(["parallel.pp=2"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.parallel.pp = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = ModelConfig()  # type: ignore[misc]
    assert type(config.optim.lr) is list  # plain values, nothing of OmegaConf's


def test_the_configuration_does_not_import_torch() -> None:
    """So that ``megabit config`` and ``--help`` answer at once."""
    code = "import sys, megabit.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Settings that are refused one by one


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("model.hiden_size=8", "model.hiden_size: unknown key 'hiden_size'; did you mean 'hidden_"),
        ("modle.hidden_size=8", "modle.hidden_size: unknown key 'modle'; did you mean 'model'?"),
        ("steps=8", "steps: unknown key 'steps'; did you mean 'train.steps'?"),
        ("qqqq=8", "qqqq: unknown key 'qqqq'; known: checkpoint, communication, data, faults,"),
        ("site.environment.NCCL_X=[1]", "site.environment.NCCL_X: must be text or a number"),
        ("site.environment.PATH=x", "site.environment.PATH: is for variables of communication"),
        ("train.steps.x=1", "train.steps: is a value and has no key 'x'"),
        ("optim.lr.0=1", "optim.lr: is a value and has no key '0'"),
        ("model=3", "model: is a section; set its keys, such as model.vocab_size"),
        ("model=null", "model: is a section; set its keys, such as model.vocab_size"),
        ("train.steps=many", "train.steps: must be a whole number, not 'many'"),
        ("train.steps=2.5", "train.steps: must be a whole number, not 2.5"),
        ("train.steps=true", "train.steps: must be a whole number, not True"),
        ("train.steps=", "train.steps: must be a whole number, not None"),
        ("optim.lr=1e-3", "optim.lr: must be a list such as [0.1, 0.2], not 0.001"),
        ("optim.lr=[a,b]", "optim.lr: must be a list such as [0.1, 0.2], not ['a', 'b']"),
        ("model.linear=dens", "model.linear: must be one of ternary, dense, not 'dens'"),
        ("parallel.exact=all", "parallel.exact: must be one of forward, full, not 'all'"),
        ("parallel.row_reduce=int16", "parallel.row_reduce: must be one of int32, exact16, not"),
        ("train.recompute=all", "train.recompute: must be one of none, selective, full, not 'all'"),
        ("precision.gradients=float16", "precision.gradients: must be one of float32, bfloat16,"),
        (
            "precision.ternary_backward=int4",
            "precision.ternary_backward: must be one of compute, bfloat16, int8, not 'int4'",
        ),
        ("train.steps={", "train.steps: must be a whole number, not '{'"),
        ("run.dir=${", "run.dir: ${…} is not supported; write the value itself"),
    ],
)
def test_a_wrong_setting(tmp_path: Path, setting: str, problem: str) -> None:
    (found,) = problems_of(setting)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: [1\n", "not valid YAML at line 2"),
        ("model:\n\thidden_size: 1", "not valid YAML at line 2"),
        ("- 1\n", "must hold settings such as 'model:', not a list"),
        ("just text", "just text: unknown key 'just text'; known: checkpoint, communication"),
        ("a: 1\n---\nb: 2\n", "not valid YAML at line 2"),
        ("a: !!python/object:os.system x\n", "not valid YAML at line 1"),
        ("train:\n  steps: 1\n  steps: 2\n", "not valid YAML at line 3"),
        ("run: {dir: '${'}", "not valid YAML"),
        ("run: {dir: '${nothing.here}'}", "run.dir: "),
        ("model: 3", "model: is a section; set its keys, such as model.vocab_size"),
        ("train: {steps: [1]}", "train.steps: must be a whole number, not [1]"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, problem: str) -> None:
    path = written(tmp_path / "wrong.yaml", text)
    (found,) = problems_of(path)
    assert found.startswith(f"{path}: {problem}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    missing, folder, binary_problem, word = problems_of(
        tmp_path / "none.yaml", tmp_path, binary, "steps"
    )
    assert missing.startswith(f"{tmp_path / 'none.yaml'}: cannot read it (No such file")
    assert folder.startswith(f"{tmp_path}: cannot read it (Is a directory)")
    assert binary_problem.startswith(f"{binary}: cannot read it (not UTF-8 text)")
    assert word.endswith("give a YAML file or key=value")


def test_all_problems_are_listed_with_their_file(tmp_path: Path) -> None:
    one = written(tmp_path / "one.yaml", "model: {hiden_size: 8}\ntrain: {steps: many, seed: 5}\n")
    two = written(tmp_path / "two.yaml", "parallel: {tq: 2}\n")
    problems = problems_of(one, "optim.lr=3", tmp_path / "none.yaml", two)
    starts = (
        f"{one}: model.hiden_size: ",
        f"{one}: train.steps: ",
        "optim.lr: ",
        f"{tmp_path / 'none.yaml'}: cannot read it",
        f"{two}: parallel.tq: ",
    )
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)


# The examples


@pytest.mark.parametrize("path", YAML_FILES, ids=[path.stem for path in YAML_FILES])
def test_every_example_loads_alone(path: Path) -> None:
    load_config([str(path)])


@pytest.mark.parametrize("model", sorted(EXAMPLES.glob("model/*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("layout", sorted(EXAMPLES.glob("parallel/*.yaml")), ids=lambda p: p.stem)
def test_any_model_runs_at_any_layout(model: Path, layout: Path) -> None:
    """With every data and recipe file, on as few ranks as the layout takes and on twice as many."""
    for data in EXAMPLES.glob("data/*.yaml"):
        for recipe in EXAMPLES.glob("recipe/*.yaml"):
            arguments = [str(model), str(layout), str(data), str(recipe)]
            parallel = load_config(arguments).parallel
            for dp in (1, 2):
                load_config(arguments, world_size=parallel.tp * parallel.pp * dp)
