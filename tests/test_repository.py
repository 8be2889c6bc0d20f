"""What keeps the code readable: dependencies point one way, and no state hides in a module.

Each rule reads the sources as syntax trees, so that it holds for code that no other test runs.
The snippets at the end of the file show that every rule can fail.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("megabit", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

# A part may import the parts of later lines, not those of its own line or of earlier ones.
ORDER = (
    {"__main__"},
    {"cli"},
    {"benchmark"},
    {"plan"},
    {"training"},
    {"evaluation", "serving", "doctor"},
    {"inference"},
    {"model", "report"},
    {"interop", "outer"},
    {"pipeline", "data_parallel", "checkpoint", "data", "telemetry", "faults", "launch"},
    {"tensor_parallel"},
    {"reduce"},
    {"mesh", "apex"},
    {"megabit_kernels"},
    {"config"},
    {"files", "retry", "units"},
    {"errors"},
)
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}

MAX_LINES = 500
CODE = {".py", ".c", ".h", ".sh", ".yaml", ".js", ".css", ".html"}
"""What people write and read; JSON and CSV are data."""
READS_ENVIRONMENT = ("megabit/cli/", "megabit/launch.py", "megabit/mesh.py")
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
MUTABLE_LITERALS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MUTABLE_TYPES = {"dict", "list", "set", "defaultdict", "deque", "OrderedDict", "Counter"}


# The rules: each yields a line number and what is wrong there.


def dependencies(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports that go against ``ORDER``."""
    part = part_of(path)
    if part is None:
        return
    if part not in LEVEL:
        yield 1, f"{part} has no place in ORDER"
        return
    for line, module in imports(tree):
        target = part_of_module(module)
        if part == "megabit_kernels" and module.split(".")[0] == "megabit":
            yield line, f"megabit_kernels imports {module}"
        elif target is None or target == part:
            continue
        elif target not in LEVEL:
            yield line, f"{target} has no place in ORDER"
        elif LEVEL[target] <= LEVEL[part]:
            yield line, f"{part} imports {module}"


def imports_of_triton(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Triton imported when megabit is, not when a kernel is first wanted."""
    if path.startswith("megabit/"):
        for node in at_import_time(tree):
            for line, module in imports(node, deep=False):
                if module.split(".")[0] == "triton":
                    yield line, f"imports {module} at import time"


def pickles(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Formats that run code when they are read; ``launch`` talks to its own forks only."""
    if path == "megabit/launch.py":
        return
    for line, module in imports(tree):
        if module.split(".")[0] in PICKLES or module == "torch.load":
            yield line, f"imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "torch.load":
            yield node.lineno, "torch.load"


def environment(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Settings that come in through the environment and not through the configuration."""
    if path.startswith(READS_ENVIRONMENT):
        return
    for line, module in imports(tree):
        if module in {"os.environ", "os.getenv"}:
            yield line, f"imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.getenv"}:
            yield node.lineno, f"uses {dotted(node)}"


def module_state(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Mutable values that live in a module; UPPER_CASE says that nothing changes them."""
    for statement in at_import_time(tree):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and is_mutable(statement.value):
            assigned = (
                statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            )
            for name in (target.id for target in assigned if isinstance(target, ast.Name)):
                if not name.isupper() and not name.startswith("__"):
                    yield statement.lineno, f"{name} is mutable"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


RULES = (dependencies, imports_of_triton, pickles, environment, module_state)


# What the rules are made of.


def part_of(path: str) -> str | None:
    """The part of the design that a file belongs to: ``megabit/model/rope.py`` is in ``model``."""
    return part_of_module(
        path.removeprefix("kernels/")
        .removesuffix(".py")
        .removesuffix("/__init__")
        .replace("/", ".")
    )


def part_of_module(module: str) -> str | None:
    """The same for a dotted name; None for other libraries and for ``megabit`` itself."""
    first, _, rest = module.partition(".")
    if first == "megabit_kernels":
        return first
    return rest.split(".")[0] or None if first == "megabit" else None


def imports(tree: ast.AST, deep: bool = True) -> Iterator[tuple[int, str]]:
    """Lines and dotted names of what is imported: ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(tree) if deep else (tree,):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                # The root holds dunder names (its version) beside the parts.
                yield node.lineno, "megabit" if name.startswith("megabit.__") else name


def at_import_time(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, those of classes left out."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.stmt):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).split(".")[-1] in MUTABLE_TYPES
    return isinstance(value, MUTABLE_LITERALS)


# The tests.


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(
    rule: Callable[[str, ast.Module], Iterator[tuple[int, str]]],
) -> None:
    broken = [
        f"{path}:{line}: {what}"
        for path, source in SOURCES.items()
        for line, what in rule(path, ast.parse(source))
    ]
    assert not broken, "\n".join(broken)


def test_a_file_is_one_idea() -> None:
    files = [
        path
        for folder in ("megabit", "kernels", "tests", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in CODE and "build" not in path.parts
    ]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path.suffix for path in files} == CODE
    assert not {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_every_part_in_the_order_exists() -> None:
    assert LEVEL.keys() <= {part_of(path) for path in SOURCES}


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("megabit/model/x.py", "from megabit.tensor_parallel import y", None),
        ("megabit/model/x.py", "from megabit import __version__, mesh", None),
        ("megabit/model/x.py", "from megabit.training.z import y", "model imports"),
        ("megabit/mesh.py", "def f():\n    import megabit.reduce", "mesh imports"),
        ("megabit/apex.py", "from megabit import mesh", "apex imports"),
        (
            "kernels/megabit_kernels/x.py",
            "from megabit import __version__",
            "megabit_kernels imports",
        ),
        ("megabit/new.py", "", "new has no place"),
        ("megabit/model/x.py", "from megabit.new import y", "new has no place"),
        ("kernels/megabit_kernels/x.py", "import megabit.errors", "megabit_kernels imports"),
        ("megabit/model/x.py", "if True:\n    import triton.language as tl", "imports triton"),
        ("megabit/model/x.py", "def f():\n    import triton", None),
        ("megabit/checkpoint/x.py", "import torch as t\nfrom torch import load", "torch.load"),
        ("megabit/checkpoint/x.py", "state = torch.load('x')", "torch.load"),
        ("megabit/checkpoint/x.py", "import pickle", "imports pickle"),
        ("megabit/data/x.py", "import os\nd = os.environ['D']", "os.environ"),
        ("megabit/data/x.py", "from os import getenv", "os.getenv"),
        ("megabit/cli/x.py", "d = os.environ['D']", None),
        ("megabit/data/x.py", "cache = {}", "cache is mutable"),
        ("megabit/data/x.py", "seen: list[int] = []", "seen is mutable"),
        ("megabit/data/x.py", "cache = collections.defaultdict(list)", "cache is mutable"),
        ("megabit/data/x.py", "__all__ = ['a']\nTABLE = {1: 2}\n_SIZES = [1]", None),
        ("megabit/data/x.py", "def f():\n    cache = {}\n    return cache", None),
        ("megabit/data/x.py", "def f():\n    global n\n    n = 1", "global n"),
    ],
)
def test_a_rule_sees_what_breaks_it(path: str, source: str, expected: str | None) -> None:
    found = [what for rule in RULES for _, what in rule(path, ast.parse(source))]
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1
        assert expected in found[0]
