"""Types of settings: sizes, times, shares, directories, placements and store kinds."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted
from tba_offload.placements import Placement, names

KINDS = ["auto", "gds", "file", "host"]
"""Known store kinds. :func:`tba_offload.store.register_kind` appends kinds to this list."""

STALL_SECONDS = 300.0
"""Default of ``store.stall_seconds``: seconds without progress after which a transfer fails."""

BLOCK = 4096
"""Size of the smallest extent in a store, in bytes."""

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY}
_LEGAL = f"write a number and a unit ({', '.join(_UNITS)}), such as 12GiB, or write 0"
_SIZE = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z]*)\s*")
_MOST_BYTES = 2**60
"""Largest allowed size in bytes. Sums of a few sizes must fit in a 64-bit integer."""


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as ``12GiB``, ``1.5 GB`` or ``0``, rounded down.

    Raises:
        ConfigError: The text is not a size, is negative, or has no known unit. Known units are B, KB, MB, GB,
            TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024). The size 0 needs no unit.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{quoted(text)} is not a size; {_LEGAL}")
    number, unit = Fraction(found[1]), found[2]
    if not unit and number:
        raise ConfigError(f"{quoted(text)} has no unit; {_LEGAL}")
    if unit and unit not in _UNITS:
        raise ConfigError(f"{quoted(text)} has an unknown unit {quoted(unit)}; {_LEGAL}")
    size = int(number * _UNITS.get(unit, 1))
    if number and not 0 < size <= _MOST_BYTES:
        raise ConfigError(f"{quoted(text)} is not between 1 and {_MOST_BYTES} bytes; {_LEGAL}")
    return size


def format_size(size: int) -> str:
    """Return a number of bytes as exact text, in the largest binary unit without a fraction: ``12GiB``."""
    for unit, factor in reversed(_BINARY.items()):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B" if size else "0"


def _bytes(value: object) -> int:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_BYTES:
        return value
    raise ConfigError(f"{quoted(value)} is not a size; write a whole number of bytes, or text such as 12GiB")


def _limit(value: object) -> int | None:
    """Convert a limit to bytes. The limit 0 becomes None, which means no limit."""
    return None if value is None else _bytes(value) or None


def _window(value: object) -> int | None:
    """Convert the size of the in-flight window to bytes. None means the default size, 0 means no limit."""
    return None if value is None else _bytes(value)


_LONGEST = 1e9
"""Largest time limit in seconds: 31 years. System clocks overflow at ten times this limit."""


def _seconds(value: object) -> float | None:
    """Convert a time limit to seconds. The limit 0 becomes None, which means no limit."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and 0 <= (number := float(value)) <= _LONGEST:  # type: ignore[arg-type]
            return number or None
    raise ConfigError(f"{quoted(value)} is not a time; write seconds, such as 300, or 0 for no limit")


def _count(value: object) -> int | None:
    if value is not None and not str(value).isdecimal():
        raise ConfigError(f"must be a whole number, not {quoted(value)}")
    return None if value is None else int(str(value))


def _directories(value: object) -> tuple[Path, ...]:
    several = [value] if isinstance(value, str | Path) else value
    if not isinstance(several, list | tuple):
        raise ConfigError(f"must be a path or a list of paths, not {quoted(value)}")
    found: dict[Path, Path] = {}
    for path in map(_directory, several):
        if (other := found.setdefault(Path(os.path.realpath(path)), path)) is not path:
            also = "" if other.absolute() == path.absolute() else f", also as {quoted(str(other))}"
            raise ConfigError(f"{quoted(str(path))} is given twice{also}; write each directory once")
    return tuple(found.values())


def _directory(value: object) -> Path:
    text = str(value)
    if not isinstance(value, str | Path) or not text.strip() or "\0" in text:
        raise ConfigError(f"a directory must be a path, not {quoted(value)}")
    for name in re.findall(r"\$\{?(\w+)", text):
        if not os.environ.get(name):  # an empty variable would turn $SCRATCH/tba into /tba
            why = f"names the environment variable {quoted(name)}, which is empty or not set"
            raise ConfigError(f"{quoted(text)} {why}. Set the variable, or write the path")
    try:
        os.fsencode(text)
        return Path(os.path.expandvars(text)).expanduser()
    except (RuntimeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{quoted(text)} is not a path: {error}") from None


def _kind(value: object) -> object:
    if value not in KINDS:
        *most, last = map(repr, KINDS)
        raise ConfigError(f"must be {', '.join(most)} or {last}, not {quoted(value)}")
    return value


def _order(value: object) -> object:
    if isinstance(value, list | tuple) and sorted(map(str, value)) == ["drive", "host"]:
        return tuple(value)
    raise ConfigError(f"must be [host, drive] or [drive, host], not {quoted(value)}")


def placement(word: object) -> Placement:
    """Return the placement with the given name.

    Raises:
        ConfigError: No placement has this name.
    """
    try:
        return Placement(str(word))
    except ValueError:
        hints = {
            "fit": "in a policy file, write 'auto' and no budget",
            "offload-N%": "N is a whole number from 1 to 99",
        }
        nearest = difflib.get_close_matches(str(word), [*names(), "fit"], n=1)
        hint = "".join(f"; {hints.get(each, f'did you mean {each!r}?')}" for each in nearest)
        raise ConfigError(f"must be one of {', '.join(names())}, not {quoted(word)}{hint}") from None


# Patterns of the JSON schema of policy files.
_SIZE_TEXT = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(_UNITS)})\s*$"}
_SIZE_TEXTS = {"anyOf": [_SIZE_TEXT, {"enum": [0, "0"]}]}
_LIMIT_TEXTS = {"anyOf": [_SIZE_TEXT, {"enum": [0, "0", None]}]}
_PATH_TEXT = {"type": ["string", "integer"], "minLength": 1}
_PATH_TEXTS = {"anyOf": [_PATH_TEXT, {"type": "array", "items": _PATH_TEXT, "uniqueItems": True}]}
_SHARE_TEXT = {"type": "string", "pattern": "^offload-[1-9][0-9]?%$"}
_PLACEMENT_TEXTS = {"anyOf": [{"enum": list(Placement)}, _SHARE_TEXT]}
_WRITTEN = PlainSerializer(format_size, when_used="unless-none")

Limit = Annotated[int | None, BeforeValidator(_limit), _WRITTEN, WithJsonSchema(_LIMIT_TEXTS)]
Capacity = Annotated[
    int | None, Field(ge=BLOCK), BeforeValidator(_limit), _WRITTEN, WithJsonSchema(_LIMIT_TEXTS)
]
Window = Annotated[int | None, BeforeValidator(_window), _WRITTEN, WithJsonSchema(_LIMIT_TEXTS)]
Threshold = Annotated[int, BeforeValidator(_bytes), _WRITTEN, WithJsonSchema(_SIZE_TEXTS)]
Seconds = Annotated[float | None, Field(ge=0, le=_LONGEST), BeforeValidator(_seconds)]
Threads = Annotated[int | None, Field(ge=1, le=256), BeforeValidator(_count)]
Kind = Annotated[str, BeforeValidator(_kind), WithJsonSchema({"enum": KINDS[:4]})]
Order = Annotated[tuple[Literal["host", "drive"], ...], BeforeValidator(_order)]
Directories = Annotated[tuple[Path, ...], BeforeValidator(_directories), WithJsonSchema(_PATH_TEXTS)]
PlacementName = Annotated[Placement, BeforeValidator(placement), WithJsonSchema(_PLACEMENT_TEXTS)]
Passes = Annotated[int, Field(ge=1), BeforeValidator(_count)]
Share = Annotated[str, Field(pattern=r"^(keep|offload|auto|offload-[1-9][0-9]?%)$")]
