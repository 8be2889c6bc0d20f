"""A plan as a file: the chosen layout as YAML that ``megabit train`` takes, all of it as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from megabit.files import write_text
from megabit.plan.machine import Machine
from megabit.plan.search import Candidate, Found, choices_of
from megabit.plan.serving import ServingCandidate, ServingFound


def settings_yaml(settings: Mapping[str, object], comments: list[str]) -> str:
    """``section.key: value`` as YAML in sections, under comment lines."""
    tree: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.safe_dump(tree, sort_keys=False, default_flow_style=False)


def write_layout(path: Path, best: Candidate, machine: Machine) -> None:
    """Write ``best``, to be laid over the settings that it was planned for."""
    comments = [
        f"{best.name}, planned for {best.layout.world_size} ranks of {machine.device.name}, "
        f"{machine.nodes_of} a node ({_kind(machine)}):",
        f"{best.step.total_s:.4g} s a step, {best.step.tokens_per_s:,.0f} tokens/s, "
        f"{best.memory_bytes / 1e9:.3g} GB on a rank.",
        "megabit train SETTINGS THIS_FILE, with the SETTINGS that it was planned for.",
    ]
    # Whatever layout those settings have.
    laid_out = {"parallel.layers_per_stage": None, "parallel.balance": "estimated"}
    write_text(path, settings_yaml({**best.choices, **laid_out}, comments))


def write_serving(path: Path, best: ServingCandidate, machine: Machine) -> None:
    """Write the settings of an engine, for ``megabit serve``."""
    comments = [
        f"{best.name}, planned for {machine.device.name} ({_kind(machine)}):",
        f"{best.tokens_per_s:,.0f} tokens/s from {best.sequences} sequences a replica, "
        f"{1e3 * best.ttft_s:.3g} ms to the first token, {1e3 * best.tpot_s:.3g} ms a later one.",
        "megabit serve MODEL THIS_FILE, once for each replica.",
    ]
    write_text(path, settings_yaml(best.settings, comments))


def write_serving_json(path: Path, found: ServingFound, machine: Machine, top: int) -> None:
    """Write the ``top`` candidates, and why the others are out."""
    document = {
        "machine": json.loads(machine.to_json()),
        "candidates": [asdict(candidate) for candidate in found.candidates[:top]],
        "rejected": found.rejected,
    }
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write_json(path: Path, found: Found, machine: Machine, top: int) -> None:
    """Write the ``top`` candidates with all parts of time and memory, and what did not fit."""
    document = {
        "machine": json.loads(machine.to_json()),
        "candidates": [_candidate(candidate) for candidate in found.candidates[:top]],
        "too_large": [
            {"settings": choices_of(rejected.layout.config), "memory_bytes": rejected.memory}
            for rejected in found.too_large[:top]
        ],
        "considered": found.considered,
        "impossible": dict(found.impossible),
    }
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _kind(machine: Machine) -> str:
    return "measured constants" if machine.is_measured else "a prediction, never measured"


def _candidate(candidate: Candidate) -> dict[str, Any]:
    step = candidate.step
    return {
        "settings": candidate.choices,
        "dp": candidate.layout.dp,
        "step_s": step.total_s,
        "seconds": step.seconds,
        "hidden_s": step.hidden_s,
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "memory_bytes": candidate.memory,
    }
