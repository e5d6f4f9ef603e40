"""Tests use what the package shows; private names are used by few files, and by fewer as time goes on."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from places import ROOT, TESTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PRIVATE = r"_[a-z]\w*|_[A-Z]\w*"

ALLOWED = {
    "megatron_ranks.py": 2,
    "programs.py": 1,
    "test_demo.py": 1,
    "test_demo_dtype.py": 1,
    "test_demo_progress.py": 1,
    "test_demo_text.py": 5,
    "test_docs.py": 1,
    "test_extents.py": 4,
    "test_frameworks.py": 1,
    "test_hanging_drive.py": 1,
    "test_interrupts.py": 2,
    "test_megatron_recipes.py": 2,
    "test_megatron_training.py": 24,
    "test_memory.py": 2,
    "test_offloader.py": 4,
    "test_order.py": 2,
    "test_race.py": 2,
    "test_ranks.py": 2,
    "test_rematerialize.py": 2,
    "test_renamed.py": 1,
    "test_rok.py": 1,
    "test_samples.py": 1,
    "test_steps.py": 2,
    "test_store_file.py": 9,
    "test_store_host.py": 1,
    "test_store_probe.py": 4,
    "test_store_striped.py": 5,
    "test_store_tiered.py": 2,
    "test_verified.py": 4,
}
"""How often each file uses one. May only shrink: a test of a new private name is a test of a public one."""


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Private names that are made here: functions, classes, variables and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def used_in(tree: ast.AST) -> Iterator[str]:
    """Names that are asked of something else than ``self``, imported, or written out to be patched."""
    composed = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_private = re.fullmatch(PRIVATE, node.attr)
            if is_private and not re.match(r"(self|cls|super\(\)|torch(\..*)?)$", ast.unparse(node.value)):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and id(node) not in composed
            and re.fullmatch(r"[\w.]+", str(node.value))
        ):
            yield str(node.value).rpartition(".")[2]


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_private_names_of_the_package_are_used_as_rarely_as_before() -> None:
    sources = [path for part in ("tba_offload", "tba_lab") for path in (ROOT / part).rglob("*.py")]
    private = {name for path in sources for name in defined_in(parsed(path)) if re.fullmatch(PRIVATE, name)}
    assert len(private) > 200
    found: dict[str, int] = {}
    for path in sorted(TESTS.rglob("*.py")):
        tree = parsed(path)
        foreign = private - {*defined_in(tree)}
        names = [name for name in used_in(tree) if name in foreign]
        if names:
            found[path.name] = len(names)
    more = {name: count for name, count in found.items() if count > ALLOWED.get(name, 0)}
    assert more == {}, "use what the package shows instead of names that begin with an underscore"
    fewer = {name: count for name, count in ALLOWED.items() if found.get(name, 0) < count}
    assert fewer == {}, "well done: write the smaller number into ALLOWED"
