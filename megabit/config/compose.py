"""Compose a ``Config`` from YAML files and ``key=value`` arguments, left to right.

Every leaf is set on its own, so that all unknown keys and wrong types are reported together, each
with the file (or argument) it came from.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megabit.config.schema import Config, ModelConfig
from megabit.config.serving import ServingConfig, serving_problems
from megabit.config.validate import find_problems
from megabit.errors import UserError, first_line

Root = TypeVar("Root")


def load_config(arguments: Sequence[str], world_size: int | None = None) -> Config:
    """Merge YAML paths and ``a.b=value`` arguments into a checked ``Config``.

    Args:
        arguments: paths of YAML files and ``key=value`` settings; later ones win.
        world_size: number of ranks the run will have, where that is known.

    Raises:
        UserError: with every problem found; nothing else has happened by then.
    """
    return _load(Config, arguments, lambda config: find_problems(config, world_size))


def load_serving_config(arguments: Sequence[str]) -> ServingConfig:
    """The same for the settings of a served model."""
    return _load(ServingConfig, arguments, serving_problems)


def _load(root: type[Root], arguments: Sequence[str], find: Callable[[Root], list[str]]) -> Root:
    tree = _unset_tree(root)
    problems: list[str] = []
    unset: list[str] = []
    for argument in arguments:
        for setting in _settings(argument, problems):
            problem = _set(tree, setting)
            if problem is not None:
                problems.append(f"{argument}: {problem}" if "=" not in argument else problem)
                unset.append(setting.key)
    config = OmegaConf.to_object(tree)
    assert isinstance(config, root)
    # What could not be set has its default still: a complaint about that would mislead.
    problems += [problem for problem in find(config) if not any(key in problem for key in unset)]
    if problems:
        raise UserError(*problems)
    return config


def config_from_tree(tree: Mapping[str, Any], origin: str) -> Config:
    """The checked ``Config`` that ``tree`` stands for, such as a JSON object; what it leaves out
    has its default.

    Args:
        origin: of the tree, for messages.

    Raises:
        UserError: with every problem found.
    """
    target = _unset_tree(Config)
    found = [_set(target, _Setting(*leaf)) for leaf in leaves(tree)]
    problems = [problem for problem in found if problem is not None]
    config = OmegaConf.to_object(target)
    assert isinstance(config, Config)
    problems = problems or find_problems(config)
    if problems:
        raise UserError(*(f"{origin}: {problem}" for problem in problems))
    return config


def to_yaml(config: Config | ServingConfig) -> str:
    """The resolved tree as YAML; loading it gives the same tree."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def model_to_yaml(model: ModelConfig) -> str:
    """The section ``model`` alone, as a file of settings."""
    return OmegaConf.to_yaml({"model": OmegaConf.structured(model)})


def _unset_tree(root: type) -> DictConfig:
    """The defaults, writable for as long as they are composed (frozen dataclasses are not)."""
    tree: DictConfig = OmegaConf.structured(root)
    for node in (tree, *(tree[section] for section in tree)):
        OmegaConf.set_readonly(node, False)
    return tree


@dataclass(frozen=True)
class _Setting:
    key: str
    value: Any
    text: str | None = None
    """As it was typed, where it was."""


def _settings(argument: str, problems: list[str]) -> Iterator[_Setting]:
    """The dotted keys and values that one argument sets; appends what cannot be read."""
    if "=" in argument:
        key, _, text = (part.strip() for part in argument.partition("="))
        try:
            value = OmegaConf.from_dotlist([f"value={text}"])["value"]
        except (yaml.YAMLError, OmegaConfBaseException):
            value = text  # fine for a setting that is text, refused by the others
        yield _Setting(key, value, text)
        return
    try:
        loaded = OmegaConf.create(Path(argument).read_text(encoding="utf-8"))
        content = OmegaConf.to_container(loaded)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problems.append(f"{argument}: cannot read it ({reason}); give a YAML file or key=value")
    except yaml.MarkedYAMLError as error:
        line = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problems.append(f"{argument}: not valid YAML{line} ({error.problem})")
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{argument}: not valid YAML ({first_line(error)})")
    else:
        if isinstance(content, dict):
            yield from (_Setting(*leaf) for leaf in leaves(content))
        else:
            problems.append(f"{argument}: must hold settings such as 'model:', not a list")


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in a tree of mappings, by their dotted keys."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _set(tree: DictConfig, setting: _Setting) -> str | None:
    """Set one leaf; returns what is wrong with it, or None."""
    key = setting.key
    *sections, leaf = key.split(".")
    node: Any = tree
    walked: list[str] = []
    for name in (*sections, leaf):
        if not isinstance(node, DictConfig):
            return f"{'.'.join(walked)}: is a value and has no key {name!r}"
        if name not in node and not _takes_any_key(node):
            known = sorted(str(k) for k in node)
            near = difflib.get_close_matches(name, known, n=1)
            if not walked:  # a key without its section
                near = [f"{k}.{name}" for k in known if name in node[k]] or near
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
            return f"{key}: unknown key {name!r}; {hint}"
        walked.append(name)
        if len(walked) <= len(sections):
            node = node[name]
    if _takes_any_key(node):
        if not isinstance(setting.value, str | int | float):
            return f"{key}: must be text or a number, not {setting.value!r}"
        node[leaf] = str(setting.value) if setting.text is None else setting.text
        return None
    if isinstance(node[leaf], DictConfig):
        if setting.value is None and setting.text is None:  # an empty section sets nothing
            return None
        return f"{key}: is a section; set its keys, such as {key}.{next(iter(node[leaf]), 'NAME')}"
    kind = get_type_hints(OmegaConf.get_type(node))[leaf]
    if kind is bool and not isinstance(setting.value, bool):
        return f"{key}: must be true or false, not {setting.value!r}"
    value = setting.value
    if kind in (str, str | None) and setting.text is not None and value is not None:
        value = setting.text.strip("'\"")  # as it was typed, though YAML may see a number in it
    if isinstance(value, str) and "${" in value:
        return f"{key}: ${{…}} is not supported; write the value itself"
    if get_origin(kind) is list and dataclasses.is_dataclass(entry := get_args(kind)[0]):
        return _set_entries(tree, key, entry, value)
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except OmegaConfBaseException:
        return f"{key}: must be {_describe(kind)}, not {value!r}"
    return None


def _takes_any_key(node: DictConfig) -> bool:
    """Whether it is a table of the user's own names, not a section."""
    return OmegaConf.get_type(node) is dict


def _set_entries(tree: DictConfig, key: str, entry: Any, value: Any) -> str | None:
    """Set a list of small sections, such as rules; returns what is wrong with it, or None."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if not isinstance(value, list):
        return f"{key}: must be a list of mappings, not {value!r}"
    made = []
    for number, content in enumerate(value):
        place = f"{key}[{number}]"
        if not isinstance(content, Mapping):
            return f"{place}: must be a mapping with keys {', '.join(fields_of(entry))}"
        node = OmegaConf.structured(entry)
        OmegaConf.set_readonly(node, False)
        for name, setting in content.items():
            problem = _set(node, _Setting(str(name), setting))
            if problem is not None:
                return f"{place}.{problem}"
        made.append(node)
    OmegaConf.update(tree, key, made, merge=False)
    return None


def fields_of(section: Any) -> list[str]:
    """The keys of a section."""
    return [field.name for field in dataclasses.fields(section)]


def _describe(kind: Any) -> str:
    """A setting's type in words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    alternatives = [arg for arg in get_args(kind) if arg is not type(None)]
    if get_origin(kind) is list:
        examples = {float: "0.1, 0.2", int: "1, 2", str: "one.txt, two.txt"}
        return f"a list such as [{examples[alternatives[0]]}]"
    if alternatives:
        return " or ".join([*map(_describe, alternatives), "null"])
    return {int: "a whole number", float: "a number", str: "text"}[kind]
