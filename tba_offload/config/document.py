"""A policy as a document: strict YAML, with the line of each value.

Values are read as they are written: in YAML only ``true``, ``false`` and ``null`` are special, so ``off``,
``12:30`` and ``012`` are words, not a boolean, a number to base 60 or an octal number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

Keys = tuple[str | int, ...]
"""Keys and indices that lead to a value of a document."""


class Problem(NamedTuple):
    """Something wrong: where in the configuration, and what to do about it."""

    path: Keys
    message: str


@dataclass(frozen=True)
class Source:
    """A document: its values, the line of each of them, and what no value could be made of."""

    file: str | None
    document: object
    lines: dict[Keys, int]
    problems: tuple[Problem, ...] = ()

    def line(self, path: Keys) -> int | None:
        """Return the line of a key or an item, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


class _Loader(yaml.SafeLoader):
    """Reads words as words: only true, false and null are special. Anchors, aliases and tags are refused."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - declared so by PyYAML

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        events: Any = self  # PyYAML's stubs do not type the event queue
        event = events.peek_event()
        if event.anchor is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed", problem_mark=event.start_mark
            )
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the tag {quoted(event.tag)} is not allowed", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


# PyYAML asks whether a word begins with these, hence the end.
_BOOL, _NULL = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null"
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])


@contextlib.contextmanager
def not_too_deep(file: str | None) -> Iterator[None]:
    """Return a block that goes down a document.

    Raises:
        ConfigError: It is nested too deeply.
    """
    try:
        yield
    except RecursionError:
        raise ConfigError("cannot be read: nested too deeply", file=file) from None


def read_yaml(text: str, file: str | None) -> Source:
    """Read YAML text; an empty one is an empty document.

    Raises:
        ConfigError: It is no YAML.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"cannot be read: {shortened(problem)}", file=file, line=line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"cannot be read: {error.reason}", file=file, line=line) from None
    reader = _NodeReader()
    document = {} if root is None or _is_empty(root) else reader.read(root, ())
    return Source(file, document, reader.lines, tuple(reader.problems))


class _NodeReader:
    """Turns nodes into plain values; remembers lines, collects what no value can be made of."""

    def __init__(self) -> None:
        self.lines: dict[Keys, int] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, path: Keys) -> object:
        """Return the value of a node: text, bool, None, list or dict."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Keys) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(path, "a key must be a word"))
            elif key in values:
                first = self.lines[*path, key]
                self.problems.append(Problem((*path, key), f"given twice, first in line {first}; remove one"))
                self.lines[*path, key] = line
            else:
                self.lines[*path, key] = line
                values[key] = self.read(value_node, (*path, key))
        return values

    def _scalar(self, node: yaml.Node, path: Keys) -> object:
        if _is_empty(node):
            self.problems.append(Problem(path, "has no value; write one, or remove the line for the default"))
        if node.tag == _NULL:
            return None
        return node.value.lower() == "true" if node.tag == _BOOL else node.value


def _is_empty(node: yaml.Node) -> bool:
    """Whether nothing at all is written where a value should be."""
    return node.tag == _NULL and not node.value


def plain(value: object, path: Keys = ()) -> object:
    """Return what a Python user gives, with the types that a file would give.

    Dicts, lists, words of matches.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, (*path, index)) for index, item in enumerate(value)]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and path[::2] == ("layers", "match") else value
