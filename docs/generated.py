"""Directives for tables that are generated from the code.

``{rooms}`` lists every module of the package with the first line of its docstring. ``{constants}`` lists
every constant with a docstring in the given packages: name, value and docstring.

``python docs/generated.py`` writes ``policy.schema.json``, the JSON Schema of policies, from their models.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import tba_offload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sphinx.application import Sphinx

ROOT = Path(tba_offload.__file__).parent
_ROLE = re.compile(r":\w+:(?=`)")


class Constant(NamedTuple):
    """A constant of the source.

    Attributes:
        name: The name in lower case, without underscores around it.
        value: The source text of the value.
        text: The docstring.
    """

    name: str
    value: str
    text: str


def constants_in(path: Path) -> Iterator[Constant]:
    """Yield the constants with a docstring of a module and of its classes, in the order of the source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        for node, following in zip(owner.body, owner.body[1:], strict=False):
            name, value = _assigned(node)
            if name is None or value is None or not _is_constant(name, owner):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = _on_one_line(inspect.cleandoc(str(following.value.value)))
                yield Constant(name.strip("_").lower(), ast.unparse(value), text)


def _assigned(node: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    return None, None


def _is_constant(name: str, owner: ast.AST) -> bool:
    return isinstance(owner, ast.ClassDef) or name.isupper()


class _Table(SphinxDirective):
    """A table with cells in the markup of the page."""

    def table(self, heads: Sequence[str], widths: Sequence[int], rows: Sequence[Sequence[str]]) -> nodes.Node:
        """Return the table with its head."""
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in widths), cols=len(widths))
        head = nodes.thead("", self._row(heads))
        group += [head, nodes.tbody("", *(self._row(row) for row in rows))]
        return nodes.table("", group)

    def _row(self, cells: Sequence[str]) -> nodes.row:
        return nodes.row("", *(nodes.entry("", *self.parse_text_to_nodes(cell)) for cell in cells))


class Rooms(_Table):
    """The modules of every package of tba_offload."""

    def run(self) -> list[nodes.Node]:
        """Return a table for the root modules and for each package."""
        packages = sorted(path for path in ROOT.iterdir() if (path / "__init__.py").exists())
        return [node for package in (ROOT, *packages) for node in self._of(package)]

    def _of(self, package: Path) -> list[nodes.Node]:
        name = ".".join(package.relative_to(ROOT.parent).parts)
        modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
        rows = [(f"`{path.name}`", _summary(path)) for path in modules if path.name != "__main__.py"]
        lines = f"**`{name}`** {'' if package == ROOT else _summary(package / '__init__.py')}"
        return [*self.parse_text_to_nodes(lines), self.table(("module", "job"), (25, 75), rows)]


def _summary(path: Path) -> str:
    """Return the first paragraph of the docstring of a module."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return _on_one_line(text.partition("\n\n")[0])


def _on_one_line(text: str) -> str:
    """Return a docstring as the cell of a table: one line, without roles of reStructuredText."""
    return _ROLE.sub("", " ".join(text.split())).replace("``", "`")


class Constants(_Table):
    """The constants with a docstring of packages."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a table for each module with constants."""
        found: list[nodes.Node] = []
        for name in self.content:
            folder = Path(import_module(name).__file__ or "").parent
            for path in sorted(folder.glob("*.py")):
                constants = list(constants_in(path))
                if constants:
                    found += self._of(f"{name}.{path.stem}", constants)
        return found

    def _of(self, module: str, constants: Sequence[Constant]) -> list[nodes.Node]:
        rows = [(f"`{each.name}`", f"`{each.value}`", each.text) for each in constants]
        table = self.table(("constant", "value", "unit and meaning"), (20, 20, 60), rows)
        return [*self.parse_text_to_nodes(f"**`{module}`**"), table]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("rooms", Rooms)
    app.add_directive("constants", Constants)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    from tba_offload.config import policy_schema

    schema = json.dumps(policy_schema(), indent=2) + "\n"
    Path(__file__).with_name("policy.schema.json").write_text(schema, encoding="utf-8")
