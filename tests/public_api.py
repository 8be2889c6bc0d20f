"""Which names are public: those of ``docs/api.md``. All that ``__all__`` of some packages lists is
among them, or, where a module has none, what it defines."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
PACKAGES = (
    "megabit",
    "megabit.checkpoint",
    "megabit.config",
    "megabit.data_parallel",
    "megabit.errors",
    "megabit.inference",
    "megabit.mesh",
    "megabit.pipeline.actions",
    "megabit.pipeline.catalog",
    "megabit.pipeline.placement",
    "megabit.pipeline.simulate",
    "megabit.pipeline.validate",
    "megabit.telemetry",
    "megabit.tensor_parallel",
    "megabit_kernels",
)


def source_of(package: str) -> Path:
    """The file of a package or a module."""
    home = ROOT / "kernels" if package.startswith("megabit_kernels") else ROOT
    path = home / package.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(package: str) -> list[str]:
    """Read from the source, so that nothing is imported."""
    tree = ast.parse(source_of(package).read_text(encoding="utf-8"))
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    definitions = (ast.ClassDef, ast.FunctionDef)
    names = [node.name for node in tree.body if isinstance(node, definitions)]
    return [name for name in names if not name.startswith("_")]
