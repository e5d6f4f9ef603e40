"""A strict YAML reader that records the line of each value for error messages.

All values except ``true``, ``false`` and ``null`` are read as text. YAML's own rules would read ``off`` as a
boolean, ``12:30`` as a base-60 number and ``012`` as an octal number.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform

import pydantic.dataclasses
import yaml
from pydantic import BeforeValidator, ConfigDict, ValidationError, ValidationInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pydantic_core import ErrorDetails

T = TypeVar("T")
Keys = tuple[str | int, ...]
"""Path of a value in a document: keys and list indices, from the outermost to the innermost."""


@dataclass(frozen=True)
class Source:
    """Origin of a configuration. A configuration from Python code has no file and no lines.

    Attributes:
        file: Path of the YAML file.
        lines: Line number of each key and list item.
    """

    file: str | None = None
    lines: Mapping[Keys, int] = field(default_factory=dict)

    def line(self, path: Keys) -> int | None:
        """Return the line of a key or list item, or of the nearest enclosing key."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)

    def error(self, path: Keys, message: str) -> ConfigError:
        """Return an error about the value at ``path`` that names the file and the line."""
        dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
        text = f"{shortened(dotted)}: {message}" if path else message
        return ConfigError(text, file=self.file, line=self.line(path))


# ---------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - declared so by PyYAML


# PyYAML only matches the beginning of a word, so each pattern ends with \Z.
_TAGS = [f"tag:yaml.org,2002:{kind}" for kind in ("bool", "null", "str", "seq", "map")]
_BOOL, _NULL, *_ = _TAGS
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])


def read_yaml(text: str, file: str | None) -> tuple[object, Source, list[ConfigError]]:
    """Read YAML text. Empty text gives an empty document.

    Returns:
        The document, the line of each value, and an error for each illegal value.

    Raises:
        ConfigError: The text is not YAML.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        line = None if mark is None else mark.line + 1
        raise ConfigError(f"the YAML cannot be read: {shortened(problem)}", file=file, line=line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"the YAML cannot be read: {error.reason}", file=file, line=line) from None
    if root is None or (root.tag == _NULL and not root.value):
        return {}, Source(file), []
    reader = _NodeReader(file)
    return reader.read(root, ()), reader.source, reader.errors


class _NodeReader:
    def __init__(self, file: str | None) -> None:
        self.lines: dict[Keys, int] = {}
        self.source = Source(file, self.lines)
        self.errors: list[ConfigError] = []

    def read(self, node: yaml.Node, path: Keys) -> object:
        """Return the value of a node as text, bool, None, list or dict."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        if node.tag not in _TAGS:
            self._refuse(path, f"the YAML tag {quoted(node.tag)} is not allowed")
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, path))
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        if node.tag == _NULL and not node.value:
            self._refuse(path, "has no value; write a value, or remove the line to use the default")
        if node.tag == _NULL:
            return None
        return node.value.lower() == "true" if node.tag == _BOOL else node.value

    def _items(self, node: yaml.MappingNode, path: Keys) -> Iterator[tuple[str, object]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(path, "a key must be a word")
                continue
            if key in seen:
                again = Source(self.source.file, {(*path, key): line})
                message = f"is given twice, first in line {seen[key]}; remove one of the two lines"
                self.errors.append(again.error((*path, key), message))
            else:
                seen[key] = self.lines[*path, key] = line
                yield key, self.read(value_node, (*path, key))

    def _refuse(self, path: Keys, message: str) -> None:
        self.errors.append(self.source.error(path, message))


# ------------------------------------------------------------------------------------------ settings


_SECTIONS: dict[str, type] = {}


def _not_in_documents(value: T, info: ValidationInfo) -> T:
    if info.context:
        raise PydanticCustomError("unexpected_keyword_argument", "not a setting")
    return value


Provenance = Annotated[T, BeforeValidator(_not_in_documents), SkipJsonSchema()]


def conflict(setting: str, message: str) -> PydanticCustomError:
    """Return the error that ``__post_init__`` raises if a setting contradicts another setting."""
    return PydanticCustomError("conflict", "{message}", {"setting": setting, "message": message})


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(key: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that turns a class into a frozen dataclass whose constructor checks its arguments.

    Args:
        key: Key of the section in a policy, or an empty text for the whole policy.
    """

    def decorate(cls: type[T]) -> type[T]:
        config = ConfigDict(extra="forbid", use_attribute_docstrings=True, json_schema_extra=_for_editors)
        checked: Any = pydantic.dataclasses.dataclass(frozen=True, config=config)(cls)
        initialise: Callable[..., None] = checked.__init__

        @functools.wraps(initialise)
        def __init__(self: T, *args: object, **kwargs: object) -> None:  # noqa: N807 - becomes that method
            try:
                initialise(self, *args, **kwargs)
            except ValidationError as error:
                raise ConfigError.joined(errors_of(error, checked, Source())) from None

        checked.__init__ = __init__
        _SECTIONS[key] = checked
        made: type[T] = checked
        return made

    return decorate


def _for_editors(schema: dict[str, Any]) -> None:
    """Remove titles and defaults from the JSON schema, because the descriptions name the defaults."""
    for setting in schema["properties"].values():
        setting.pop("default", None)
        setting.pop("title", None)


def errors_of(error: ValidationError, root: type, source: Source) -> list[ConfigError]:
    """Return a ConfigError for each problem that pydantic found.

    Args:
        error: The exception that pydantic raised.
        root: The dataclass that pydantic validated.
        source: Origin of the validated values.
    """
    found = [(_path(each, root), each) for each in error.errors(include_url=False)]
    misspelt = {path[:-1] for path, each in found if each["type"] == "unexpected_keyword_argument"}
    return [
        source.error(path, _message(path, each, root))
        for path, each in found
        if each["type"] != "missing" or path[:-1] not in misspelt  # report a misspelt key only once
    ]


def _path(found: ErrorDetails, root: type) -> Keys:
    """Return the path of a setting, with names instead of pydantic's numbers of arguments."""
    path = found["loc"]
    if path and isinstance(path[0], int):
        path = (*_legal_keys(root)[path[0] : path[0] + 1], *path[1:])
    return (*path, found["ctx"]["setting"]) if found["type"] == "conflict" else path


_MESSAGES = {
    "value_error": "{error}",
    "conflict": "{message}",
    "enum": "must be {expected}, not {shown}",
    "literal_error": "must be {expected}, not {shown}",
    "string_pattern_mismatch": "must be one of {words}, not {shown}",
    "greater_than_equal": "must be {ge} or more, not {shown}",
    "less_than_equal": "must be {le} or less, not {shown}",
    "bool_type": "must be true or false, not {shown}",
    "tuple_type": "must be a list, not {shown}",
    "dataclass_type": "must be a mapping with the keys {inner}, not {shown}",
    "missing": "is missing; this section needs the keys {keys}",
    "unexpected_positional_argument": "this section has more values than keys; its keys are {keys}",
    "unexpected_keyword_argument": "unknown key{guess} (the keys of this section are {keys})",
}


def _message(path: Keys, found: ErrorDetails, root: type) -> str:
    keys, context = _legal_keys(_section(path, root)), dict(found.get("ctx", {}))
    nearest = difflib.get_close_matches(str(path[-1]), keys, n=1) if path else []
    words = str(context.get("pattern")).strip("^()$").replace("[1-9][0-9]?", "N").split("|")
    return _MESSAGES.get(found["type"], f"{found['msg']}, not {{shown}}").format(
        **context,
        shown=quoted(found["input"]),
        words=", ".join(words),
        keys=", ".join(keys),
        inner=", ".join(_legal_keys(_section((*path, ""), root))),
        guess=f"; did you mean '{nearest[0]}'?" if nearest else "",
    )


def _section(path: Keys, root: type) -> type:
    names = [step for step in path[:-1] if step in _SECTIONS]
    return _SECTIONS[str(names[-1])] if names else root


def _legal_keys(section: Any) -> list[str]:
    return [each.name for each in fields(section) if each.name not in {"source", "line"}]
