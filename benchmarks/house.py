"""The shape of the code at a commit and now: packages, functions, classes, import circles, foreign state.

    python benchmarks/house.py 2ea67f7

prints one table for each of them, before and after; after is the working tree. Both are read as text: nothing
of the old code is imported, and nothing of the new one.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tba_offload", "tba_lab")
LARGEST = 5
"""Classes that are named."""

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

Sources = dict[str, str]
"""Path of a file, relative to the repository: its text."""


@dataclass(frozen=True)
class Class:
    """One class.

    Attributes:
        name: Its name.
        lines: Its lines, docstrings included.
        methods: Its methods.
        attributes: Attributes that its methods assign to ``self``.
    """

    name: str
    lines: int
    methods: int
    attributes: int

    def __str__(self) -> str:
        return f"{self.name} {self.lines}/{self.methods}/{self.attributes}"


@dataclass
class House:
    """The figures of one state of the code.

    Attributes:
        lines: Lines by package.
        functions: Lines of each function and method, docstrings included.
        classes: The classes, the largest first.
        circles: How often a file must be left out until no file imports itself by way of others.
        foreign: Assignments to attributes of other objects than ``self`` and ``cls``.
    """

    lines: Counter[str] = field(default_factory=Counter)
    functions: list[int] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    circles: int = 0
    foreign: int = 0


def of_commit(commit: str) -> Sources:
    """Return the files of a commit.

    Raises:
        subprocess.CalledProcessError: There is no such commit.
    """
    names = _git("ls-tree", "-r", "--name-only", commit).splitlines()
    return {name: _git("show", f"{commit}:{name}") for name in names if _belongs(name)}


def of_tree() -> Sources:
    """Return the files of the working tree."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def _belongs(name: str) -> bool:
    return name.endswith(".py") and name.split("/", maxsplit=1)[0] in PACKAGES


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measured(sources: Sources) -> House:
    """Return the figures of some files."""
    house = House()
    for path, text in sources.items():
        house.lines[package_of(path)] += len(text.splitlines())
        tree = ast.parse(text)
        house.functions += [_length(node) for node in ast.walk(tree) if isinstance(node, _FUNCTION)]
        house.classes += [_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        house.foreign += sum(_is_foreign(node) for node in ast.walk(tree))
    house.classes.sort(key=lambda each: each.lines, reverse=True)
    house.circles = circles_in(imports_between(sources))
    return house


def package_of(path: str) -> str:
    """Return the part of the code that a file belongs to: ``tba_offload/store``."""
    first, *rest = path.removesuffix(".py").split("/")
    return first if first == "tba_lab" or len(rest) < 2 else f"{first}/{rest[0]}"


def _length(node: ast.stmt) -> int:
    """Lines from the first to the last."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _class(node: ast.ClassDef) -> Class:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    own = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }
    return Class(node.name, _length(node), len(methods), len(own))


def _is_foreign(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return ast.unparse(node.value) not in {"self", "cls"}


def imports_between(sources: Sources) -> dict[str, set[str]]:
    """Each module, and those of the same code that it imports when it runs, in functions too."""
    modules = {_module(path): text for path, text in sources.items()}
    return {name: {each for each in _needed(text, modules) if each != name} for name, text in modules.items()}


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _needed(text: str, modules: Mapping[str, str]) -> Iterator[str]:
    for node in _at_run_time(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            whole = [f"{home}.{alias.name}" for alias in node.names]
            names = [name if name in modules else home for name in whole]
        yield from (name for name in names if name in modules)


def _at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _at_run_time(node)


def circles_in(needs: Mapping[str, set[str]]) -> int:
    """How many circles are found in turn, each time without the file that the last one ended at."""
    left = {name: set(others) for name, others in needs.items()}
    for count in range(len(left)):
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            gone = error.args[1][0]
            left.pop(gone, None)
            left = {name: others - {gone} for name, others in left.items()}
        else:
            return count
    return len(left)


def table(before: House, after: House) -> Iterator[str]:
    """Yield the lines that are printed."""
    yield f"{'':32}{'before':>30}{'after':>30}"
    for name in sorted({*before.lines, *after.lines}):
        yield _row(f"lines of {name}", before.lines[name], after.lines[name])
    yield _row("lines", before.lines.total(), after.lines.total())
    yield _row("functions", len(before.functions), len(after.functions))
    yield _row("  median length", *(statistics.median(each.functions or [0]) for each in (before, after)))
    yield _row("  longest", *(max(each.functions, default=0) for each in (before, after)))
    for place in range(LARGEST):
        some = [str(each.classes[place]) if place < len(each.classes) else "" for each in (before, after)]
        yield _row("lines/methods/attributes" if not place else "", *some)
    yield _row("import circles", before.circles, after.circles)
    yield _row("foreign assignments", before.foreign, after.foreign)


def _row(name: str, before: object, after: object) -> str:
    return f"{name:32}{before!s:>30}{after!s:>30}".rstrip()


def main() -> None:
    """Print the table for the commit that is named."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} COMMIT")
    for line in table(measured(of_commit(sys.argv[1])), measured(of_tree())):
        print(line)


if __name__ == "__main__":
    main()
