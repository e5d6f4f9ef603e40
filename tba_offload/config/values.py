"""The values that settings have: sizes, times, numbers of threads, directories, kinds of a store."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from tba_offload.config.store import kinds
from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = _DECIMAL | _BINARY
_MOST_BYTES = 2**60
"""The largest size: no drive is near it, and sums of some still fit the system's counters of 64 bits."""
_MOST_DIGITS = 40
_SIZE = re.compile(r"(?P<sign>-?)(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_size(text: str) -> int:
    """Read a size such as ``12GiB``, ``1.5 GB`` or ``0``, in bytes; part of a byte is dropped.

    Raises:
        ConfigError: The text is not a size, is negative, has no unit (only 0 needs none), or its unit is
            not one of B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024).
    """
    found = _SIZE.fullmatch(text.strip())
    units = ", ".join(_UNITS)
    if found is None:
        raise ConfigError(f"{quoted(text)} is not a size; write a number and a unit ({units}), such as 12GiB")
    if len(found["number"]) > _MOST_DIGITS:
        raise ConfigError(f"{quoted(text)} is no size of this world; write one such as 12GiB")
    number, unit = Fraction(found["number"]), found["unit"]
    if found["sign"]:
        raise ConfigError(f"{quoted(text)} is negative; write a number and a unit ({units}), or 0 for off")
    if not unit and number:
        raise ConfigError(f"{quoted(text)} has no unit; write one of {units} after the number, such as 12GiB")
    if unit and unit not in _UNITS:
        raise ConfigError(f"{quoted(text)} has an unknown unit {quoted(unit)}; the units are {units}")
    size = int(number * _UNITS.get(unit, 1))
    if number and not size:
        raise ConfigError(f"{quoted(text)} is less than one byte; write 0 for off")
    return _possible(size)


def _possible(size: int) -> int:
    """Return a size that counters of the system can hold."""
    if size > _MOST_BYTES:
        raise ConfigError(f"{quoted(size)} bytes are more than {format_size(_MOST_BYTES)}, the most there is")
    return size


def format_size(size: int) -> str:
    """Write a number of bytes exactly, in the largest binary unit that divides it: ``12GiB``, ``1000B``."""
    if size < 0:
        raise ConfigError(f"a size cannot be negative: {size}")
    if size == 0:
        return "0"
    for unit, factor in reversed(_BINARY.items()):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def _bytes(value: object) -> int:
    """Return a size as Python users give it: whole bytes, or text with a unit."""
    if isinstance(value, str):
        return parse_size(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(
            f"{quoted(value)} is not a size; write whole bytes, or text with a unit such as '12GiB'"
        )
    if value < 0:
        raise ConfigError(f"{quoted(value)} is negative; write a positive size, or 0 for off")
    return _possible(value)


def _limit(value: object) -> int | None:
    """Return a size of which 0 means that there is no limit."""
    return None if value is None else _bytes(value) or None


_LONGEST = 1e9
"""Seconds of the longest time limit, 31 years; the system's clocks overflow at ten times as much."""


def _seconds(value: object) -> float | None:
    """Return a time limit of which 0 means that there is none."""
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    elif value is None:
        return None
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < math.inf:
        raise ConfigError(f"{quoted(value)} is not a time; write seconds, such as 300, or 0 for no limit")
    if number > _LONGEST:
        raise ConfigError(f"{quoted(value)} s are more than {_LONGEST:.0f}; write 0 for no limit")
    return float(number) or None


# What a policy file may say, for its JSON Schema.
_TIME_TEXT = {"type": "number", "minimum": 0, "maximum": _LONGEST}
_SIZE_TEXT = {
    "anyOf": [
        {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(_UNITS)})\s*$"},
        {"enum": [0, "0"]},
    ]
}
_NONE_TEXT = {"type": "null"}

Seconds = Annotated[
    float | None, BeforeValidator(_seconds), WithJsonSchema({"anyOf": [_TIME_TEXT, _NONE_TEXT]})
]
Limit = Annotated[int | None, BeforeValidator(_limit), WithJsonSchema({"anyOf": [_SIZE_TEXT, _NONE_TEXT]})]
Threshold = Annotated[int, BeforeValidator(_bytes), WithJsonSchema(_SIZE_TEXT)]


def _optional_bytes(value: object) -> int | None:
    """Return a size; ``None`` for what suits the device."""
    return None if value is None else _bytes(value)


OptionalBytes = Annotated[
    int | None, BeforeValidator(_optional_bytes), WithJsonSchema({"anyOf": [_SIZE_TEXT, _NONE_TEXT]})
]


_MOST_THREADS = 256


def _threads(value: object) -> int | None:
    """Return a number of threads; ``None`` for what suits the machine."""
    if value is None:
        return None
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= _MOST_THREADS:
        raise ConfigError(
            f"{quoted(value)} is no number of threads; write one from 1 to {_MOST_THREADS}, or remove "
            "the line for what suits the machine"
        )
    return number


Threads = Annotated[
    int | None,
    BeforeValidator(_threads),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": _MOST_THREADS}, _NONE_TEXT]}),
]

_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\})")


def _directory(value: object) -> Path:
    if not isinstance(value, str | Path):
        raise ConfigError(f"a directory must be a path, not {quoted(value)}")
    if not str(value).strip():
        raise ConfigError("a directory must not be empty; write its path")
    _check_name(str(value))
    try:
        return Path(_with_variables(str(value))).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{quoted(str(value))} cannot be expanded: {error}") from None


def _check_name(path: str) -> None:
    """Check that a path can be the name of a file.

    Raises:
        ConfigError: It holds a zero byte, or half of a character.
    """
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"{quoted(path)} holds a character that no path can have; write it without")


def _with_variables(path: str) -> str:
    """Return a path with the values of the environment variables that it names."""

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[2] or ""
        value = os.environ.get(name)
        if not value:  # an empty one would turn $SCRATCH/tba into /tba
            raise ConfigError(
                f"{quoted(path)} names the environment variable {quoted(name)}, which is "
                f"{'not set' if value is None else 'empty'}; set it, or write the path"
            )
        return value

    return _VARIABLE.sub(value_of, path)


def _one_or_several(value: object) -> object:
    """Directories as users give them: one path, or a list."""
    if isinstance(value, Mapping):
        raise ConfigError(f"must be a path or a list of paths, not {quoted(value)}")
    return (value,) if isinstance(value, str | Path) else value


def _kind(value: object) -> object:
    """Return a kind of store: one of the package's own, or one that was registered."""
    if value not in kinds():
        *most, last = map(repr, kinds())
        raise ConfigError(f"must be {', '.join(most)} or {last}, not {quoted(value)}")
    return value


_PATH_TEXT = {"type": ["string", "integer"], "minLength": 1}
_PATHS_TEXT = {"anyOf": [_PATH_TEXT, {"type": "array", "items": _PATH_TEXT, "uniqueItems": True}]}

Kind = Annotated[str, BeforeValidator(_kind)]
_Directory = Annotated[Path | str, BeforeValidator(_directory)]
Directories = Annotated[tuple[_Directory, ...], BeforeValidator(_one_or_several), WithJsonSchema(_PATHS_TEXT)]
