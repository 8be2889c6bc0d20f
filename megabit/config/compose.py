"""Compose a ``Config`` from YAML files and ``key=value`` arguments, left to right.

Every leaf is set on its own, so that all unknown keys and wrong types are reported together, each
with the file (or argument) it came from.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megabit.config.schema import Config
from megabit.config.validate import find_problems
from megabit.errors import UserError


def load_config(arguments: Sequence[str], world_size: int | None = None) -> Config:
    """Merge YAML paths and ``a.b=value`` arguments into a checked ``Config``.

    Args:
        arguments: paths of YAML files and ``key=value`` settings; later ones win.
        world_size: number of ranks the run will have, where that is known.

    Raises:
        UserError: with every problem found; nothing else has happened by then.
    """
    tree = _unset_tree()
    problems: list[str] = []
    for argument in arguments:
        for key, value in _settings(argument, problems):
            problem = _set(tree, key, value)
            if problem is not None:
                problems.append(f"{argument}: {problem}" if "=" not in argument else problem)
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    problems += find_problems(config, world_size)
    if problems:
        raise UserError(*problems)
    return config


def to_yaml(config: Config) -> str:
    """The resolved tree as YAML; ``load_config`` of it gives the same ``Config``."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _unset_tree() -> DictConfig:
    """The defaults, writable for as long as they are composed (frozen dataclasses are not)."""
    tree = OmegaConf.structured(Config)
    for node in (tree, *(tree[section] for section in tree)):
        OmegaConf.set_readonly(node, False)
    return tree


def _settings(argument: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The dotted keys and values that one argument sets; appends what cannot be read."""
    if "=" in argument:
        key, _, text = argument.partition("=")
        try:
            yield key.strip(), OmegaConf.from_dotlist([f"value={text}"])["value"]
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(f"{key}: cannot read the value {text!r} ({_first_line(error)})")
        return
    path = Path(argument)
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problems.append(f"{argument}: cannot read it ({reason}); give a YAML file or key=value")
        return
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        problems.append(f"{argument}: not valid YAML{line}")
        return
    if loaded is None:
        return
    if not isinstance(loaded, Mapping):
        problems.append(f"{argument}: must hold settings such as 'model:', not {loaded!r}")
        return
    # OmegaConf reads 1e-3 as a number; PyYAML by itself reads it as text.
    yield from _leaves(OmegaConf.to_container(OmegaConf.load(path)), prefix="")


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _set(tree: DictConfig, key: str, value: Any) -> str | None:
    """Set one leaf; returns what is wrong with it, or None."""
    *sections, leaf = key.split(".")
    node: Any = tree
    walked: list[str] = []
    for name in (*sections, leaf):
        if not isinstance(node, DictConfig):
            return f"{'.'.join(walked)}: is a value and has no key {name!r}"
        if name not in node:
            known = sorted(str(k) for k in node)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
            return f"{key}: unknown key {name!r}; {hint}"
        walked.append(name)
        if len(walked) <= len(sections):
            node = node[name]
    if isinstance(node[leaf], DictConfig):
        return f"{key}: is a section; set its keys, such as {key}.{next(iter(node[leaf]))}"
    try:
        node[leaf] = value
    except OmegaConfBaseException as error:
        return f"{key}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
