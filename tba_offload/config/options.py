"""What the user can set: strict YAML ⇄ frozen dataclasses.

Nothing is ignored and nothing is guessed: an unknown key, a value that is not legal or a size without a
unit is a :class:`~tba_offload.errors.ConfigError` that names the file, the line and what is legal, for every
mistake there is. The dataclasses check their arguments in the same way, so a configuration written in Python,
as a dict too, is as safe as one read from a file.

Values are read as they are written: in YAML only ``true``, ``false`` and ``null`` are special, so ``off``,
``12:30`` and ``012`` are words, not a boolean, a number to base 60 or an octal number.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from tba_offload.config.policy import Objective, Placement, Policy, Rule
from tba_offload.config.store import BLOCK, STALL_SECONDS, StoreOptions, kinds, threads_per_direction
from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, shortened
from tba_offload.reading import UnreadableError, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tba_offload.config.policy import LayerId

_T = TypeVar("_T")
_Path = tuple[str | int, ...]

# --------------------------------------------------------------------------------------------- sizes

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = _DECIMAL | _BINARY
_MOST_BYTES = 2**60
"""The largest size: no drive is near it, and sums of some still fit the system's counters of 64 bits."""
_MOST_DIGITS = 40
_SIZE = re.compile(r"(?P<sign>-?)(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_size(text: str) -> int:
    """Reads a size such as ``12GiB``, ``1.5 GB`` or ``0``, in bytes; part of a byte is dropped.

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
    """A size that counters of the system can hold."""
    if size > _MOST_BYTES:
        raise ConfigError(f"{quoted(size)} bytes are more than {format_size(_MOST_BYTES)}, the most there is")
    return size


def format_size(size: int) -> str:
    """Writes a number of bytes exactly, in the largest binary unit that divides it: ``12GiB``, ``1000B``."""
    if size < 0:
        raise ConfigError(f"a size cannot be negative: {size}")
    if size == 0:
        return "0"
    for unit, factor in reversed(_BINARY.items()):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


def _bytes(value: object) -> int:
    """A size as Python users give it: whole bytes, or text with a unit."""
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
    """A size of which 0 means that there is no limit."""
    return None if value is None else _bytes(value) or None


_LONGEST = 1e9
"""Seconds of the longest time limit, 31 years; the system's clocks overflow at ten times as much."""


def _seconds(value: object) -> float | None:
    """A time limit of which 0 means that there is none."""
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

_Seconds = Annotated[
    float | None, BeforeValidator(_seconds), WithJsonSchema({"anyOf": [_TIME_TEXT, _NONE_TEXT]})
]
_Limit = Annotated[int | None, BeforeValidator(_limit), WithJsonSchema({"anyOf": [_SIZE_TEXT, _NONE_TEXT]})]
_Threshold = Annotated[int, BeforeValidator(_bytes), WithJsonSchema(_SIZE_TEXT)]


def _optional_bytes(value: object) -> int | None:
    """A size; ``None`` for what suits the device."""
    return None if value is None else _bytes(value)


_OptionalBytes = Annotated[
    int | None, BeforeValidator(_optional_bytes), WithJsonSchema({"anyOf": [_SIZE_TEXT, _NONE_TEXT]})
]


_MOST_THREADS = 256


def _threads(value: object) -> int | None:
    """A number of threads; ``None`` for what suits the machine."""
    if value is None:
        return None
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= _MOST_THREADS:
        raise ConfigError(
            f"{quoted(value)} is no number of threads; write one from 1 to {_MOST_THREADS}, or remove "
            "the line for what suits the machine"
        )
    return number


_Threads = Annotated[
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
    """Checks that a path can be the name of a file.

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
    """A path with the values of the environment variables that it names."""

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
    """A kind of store: one of the package's own, or one that was registered."""
    if value not in kinds():
        *most, last = map(repr, kinds())
        raise ConfigError(f"must be {', '.join(most)} or {last}, not {quoted(value)}")
    return value


_PATH_TEXT = {"type": ["string", "integer"], "minLength": 1}
_PATHS_TEXT = {"anyOf": [_PATH_TEXT, {"type": "array", "items": _PATH_TEXT, "uniqueItems": True}]}

_Kind = Annotated[str, BeforeValidator(_kind)]
_Directory = Annotated[Path | str, BeforeValidator(_directory)]
_Directories = Annotated[
    tuple[_Directory, ...], BeforeValidator(_one_or_several), WithJsonSchema(_PATHS_TEXT)
]

# -------------------------------------------------------------------------------------- dataclasses


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _settings(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass that checks its arguments and raises ConfigError."""
    checked: Any = pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    initialise: Callable[..., None] = checked.__init__

    @functools.wraps(initialise)
    def __init__(self: _T, *args: object, **kwargs: object) -> None:  # noqa: N807 - it becomes that method
        try:
            initialise(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError.joined([_error_at(each) for each in _value_problems(checked, error)]) from None

    checked.__init__ = __init__
    made: type[_T] = checked
    return made


@_settings
class BudgetConfig:
    """Hard ceilings in bytes. Sizes are whole bytes or text with a unit; 0 and None mean no limit.

    Attributes:
        activation_bytes: Activations of offloaded layers resident on the device. Layers placed ``auto`` keep
            to it when the drive is slow; and no more than this is ever in flight.
        device_bytes: Everything on the device in forward and backward: weights, gradients, states of
            optimizers that are not offloaded, activations. What it leaves for activations is measured in the
            first step and is a budget as activation_bytes is; of both the smaller one holds.
        in_flight_bytes: Activations that are being written, or read back and not yet used.
        objective: What layers placed ``auto`` are planned for: the least ``time`` of a step, the least
            ``memory`` at which nothing waits, or ``endurance``, the fewest written bytes. None means ``time``
            with activation_bytes or device_bytes and ``memory`` without.
    """

    activation_bytes: _Limit = None
    device_bytes: _Limit = None
    in_flight_bytes: _Limit = 256 * 2**20
    objective: Objective | None = None

    @pydantic.field_validator("objective")
    @classmethod
    def _has_a_budget(cls, objective: Objective | None, info: ValidationInfo) -> Objective | None:
        needs = objective in {Objective.TIME, Objective.ENDURANCE}
        if needs and info.data.get("activation_bytes") is None and info.data.get("device_bytes") is None:
            raise ConfigError(
                f"{objective} needs activation_bytes or device_bytes: without a budget nothing would leave "
                "memory"
            )
        return objective

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Both limits of activations."""
        return self.activation_bytes, self.in_flight_bytes

    @property
    def window(self) -> int | None:
        """Most bytes in flight: the lower of the two limits."""
        return min((limit for limit in self.limits if limit is not None), default=None)


@_settings
class StoreConfig:
    """Where offloaded bytes go.

    Attributes:
        kind: ``file``, ``host`` (memory of the host), ``gds`` (GPUDirect Storage), or ``auto``: ``file``, and
            on a GPU the faster of ``file`` and ``gds``, which is measured on each drive; or a kind of your
            own, see :func:`tba_offload.store.register_kind`.
        directories: One per drive, or the path of the only one; extents are spread over them. ``~`` and
            environment variables (``$SCRATCH``, ``${SCRATCH}``) are expanded, relative ones start at the
            working directory. If empty, the system's directory for temporary files.
        capacity: Bytes that the store of one process may hold at most; 0 and None mean as much as there is
            room for.
        host_capacity: Bytes of host memory that take what the drives have no time for, with any kind but
            ``host``; 0 and None mean that there is no such memory.
        write_bytes_per_day: Bytes of activations that one process may write to drives in a day, which spares
            them: layers placed ``auto`` are planned so that steps that follow each other day and night write
            no more; 0 and None mean that there is no limit.
        checksum: Whether bytes that are read from drives are compared with those written, by a checksum;
            without it a drive that changes bytes changes the training, and nothing tells.
        stall_seconds: A wait for the drive during which nothing moves is named in a warning after a tenth of
            this time and is an error at its end; 0 and None mean never. Collective operations of other ranks
            time out after ten minutes unless told otherwise, so it should be less.
        readers: Threads that read, for each directory; None for what suits the machine: one on up to two
            cores, else two, or more with ``kind: auto`` on a GPU if neither number is given and more move
            more, which is measured.
        writers: Threads that write, likewise.
    """

    kind: _Kind = "auto"
    directories: _Directories = ()
    capacity: _Limit = None
    host_capacity: _Limit = None
    write_bytes_per_day: _Limit = None
    checksum: Annotated[bool, Strict()] = True
    stall_seconds: _Seconds = STALL_SECONDS
    readers: _Threads = None
    writers: _Threads = None

    @pydantic.field_validator("directories")
    @classmethod
    def _takes_effect(cls, directories: tuple[Path, ...], info: ValidationInfo) -> tuple[Path, ...]:
        if directories and info.data.get("kind") == "host":
            raise ConfigError("these have no effect with kind: host; remove them or choose another kind")
        seen: set[Path] = set()
        for directory in directories:
            if directory.absolute() in seen:
                raise ConfigError(f"{quoted(str(directory))} is given twice; name each directory once")
            seen.add(directory.absolute())
        return directories

    @pydantic.field_validator("capacity")
    @classmethod
    def _holds_an_extent(cls, capacity: int | None, info: ValidationInfo) -> int | None:
        least = BLOCK * max(len(info.data.get("directories", ())), 1)
        if capacity is not None and capacity < least:
            raise ConfigError(
                f"{capacity} bytes hold no extent; the least is {least} bytes, 4 KiB a directory"
            )
        return capacity

    @pydantic.field_validator("host_capacity")
    @classmethod
    def _is_beside_drives(cls, capacity: int | None, info: ValidationInfo) -> int | None:
        if capacity is not None and info.data.get("kind") == "host":
            raise ConfigError(
                "this is memory beside drives, so it has no effect with kind: host; set capacity instead, or "
                "choose another kind"
            )
        if capacity is not None and capacity < BLOCK:
            raise ConfigError(f"{capacity} bytes hold no extent; the least is 4 KiB")
        return capacity

    @pydantic.field_validator("write_bytes_per_day")
    @classmethod
    def _is_of_drives(cls, limit: int | None, info: ValidationInfo) -> int | None:
        if limit is not None and info.data.get("kind") == "host":
            raise ConfigError("it spares drives, and kind: host has none; remove it or choose another kind")
        return limit

    def options(self) -> StoreOptions:
        """What a store is opened with."""
        usual = threads_per_direction()
        directories = tuple(map(str, self.directories))
        if not directories and self.kind != "host":
            directories = (tempfile.gettempdir(),)
        return StoreOptions(
            kind=self.kind,
            directories=directories,
            capacity=self.capacity,
            host_capacity=self.host_capacity,
            checksum=self.checksum,
            stall_seconds=self.stall_seconds,
            readers=self.readers or usual,
            writers=self.writers or usual,
            may_add_threads=self.readers is None and self.writers is None and usual > 1,
        )


_ON_CPU, _ON_ACCELERATOR = 64 * 2**20, 256 * 2**20
"""Bytes of states that travel as one. Work for an accelerator starts with a delay: on an H200 an update takes
1.6 times as long with 64 MiB, and a whole step with ``when: backward`` 1.4 times."""


_UPDATES = "device|host|auto|host-[1-9][0-9]?%"
_Update = Annotated[str, Strict(), WithJsonSchema({"type": "string", "pattern": f"^({_UPDATES})$"})]


@_settings
class StatesConfig:
    """How the states of optimizers are offloaded.

    Attributes:
        default: All of them (``offload``), or with ``budget.device_bytes`` as few as let the whole step be
            fastest (``auto``): what they leave there is for activations, and costs travels in each update.
        sub_group_bytes: Bytes of states that travel as one; three times as many stay on the device. A state
            of a parameter that cannot be cut may be larger. By default 64 MiB on a CPU and 256 MiB elsewhere.
        trust: Whether an optimizer of a class that is not known updates each parameter by itself. One that
            computes something over all of them, as a norm or an estimate of the step's size, would be wrong.
        when: In the optimizer's ``step``, or in ``backward``, as soon as the gradients of a sub-group are
            there. What ``step`` then finds changed, as gradients that were clipped, is updated again from
            what there was before.
        gradients: With ``when: backward``, whether they are kept until ``step``, as clipping needs it, or
            ``free``, at once.
        masters: Whether copies in fp32, which the optimizer of Megatron-LM updates in place of parameters in
            16 bits, are away with their states, or are kept in memory.
        update: Where sub-groups are updated: on the ``device``; in ``host`` memory, by the processor; or both
            at the same time, ``host-25%`` of them by the processor or, with ``auto``, as many as let both end
            together. The processor's kernels may round differently, so parameters get other bits than in
            plain training, and with ``auto`` others in each run. Without an accelerator it means nothing.
    """

    default: Literal["offload", "auto"] = "offload"
    sub_group_bytes: _OptionalBytes = None
    trust: Annotated[bool, Strict()] = False
    when: Literal["step", "backward"] = "step"
    gradients: Literal["keep", "free"] = "keep"
    masters: Literal["keep", "offload"] = "offload"
    update: _Update = "device"

    @pydantic.field_validator("update")
    @classmethod
    def _names_lanes(cls, update: str, others: pydantic.ValidationInfo) -> str:
        if re.fullmatch(_UPDATES, update) is None:
            raise ConfigError(
                f"{quoted(update)} is none of device, host, auto, and host-1% to host-99%, the share of the "
                "sub-groups that the processor updates"
            )
        known = others.data  # without those that are wrong themselves
        if update != "device" and (known.get("when") == "backward" or known.get("default") == "auto"):
            raise ConfigError(
                f"{update} goes with when: step and default: offload only; set these, or update to device"
            )
        return update

    @pydantic.field_validator("when")
    @classmethod
    def _is_step_for_auto(cls, when: str, others: pydantic.ValidationInfo) -> str:
        if when == "backward" and others.data.get("default") == "auto":
            raise ConfigError("states are auto with when: step only; set states.default to offload")
        return when

    @pydantic.field_validator("gradients")
    @classmethod
    def _are_used_before_step(cls, gradients: str, others: pydantic.ValidationInfo) -> str:
        if gradients == "free" and others.data.get("when") == "step":
            raise ConfigError("gradients are free before step() with when: backward only")
        return gradients

    @pydantic.field_validator("sub_group_bytes")
    @classmethod
    def _holds_a_block(cls, nbytes: int | None) -> int | None:
        if nbytes is not None and nbytes < BLOCK:
            raise ConfigError(f"{nbytes} bytes are less than one block; the least is {BLOCK} bytes")
        return nbytes

    @property
    def host_percent(self) -> int | None:
        """Percent of the sub-groups that the processor updates; ``None`` if that is to be found out."""
        return None if self.update == "auto" else _percent(self.update, "host")

    def sub_group_on(self, device_type: str) -> int:
        """Bytes of states that travel as one on a device.

        Args:
            device_type: Its type, as ``torch.device`` names it.
        """
        return self.sub_group_bytes or (_ON_CPU if device_type == "cpu" else _ON_ACCELERATOR)


_FROZEN = "keep|offload|offload-[1-9][0-9]?%"
_Frozen = Annotated[str, Strict(), WithJsonSchema({"type": "string", "pattern": f"^({_FROZEN})$"})]


@_settings
class WeightsConfig:
    """Where weights are while their layer does not compute.

    Attributes:
        frozen: Whether those that are not trained, as the model below LoRA, are kept in memory, or
            ``offload``: read before the forward and the backward of their layer; ``offload-25%`` for a share
            of their bytes, in whole weights, evenly over the layers.
    """

    frozen: _Frozen = "keep"

    @pydantic.field_validator("frozen")
    @classmethod
    def _names_a_share(cls, frozen: str) -> str:
        if re.fullmatch(_FROZEN, frozen) is None:
            raise ConfigError(
                f"{quoted(frozen)} is none of keep, offload, and offload-1% to offload-99%, the share of the "
                "bytes that travels"
            )
        return frozen

    @property
    def percent(self) -> int:
        """Percent of the bytes of frozen weights that travel."""
        return _percent(self.frozen, "offload")


def _percent(value: str, whole: str) -> int:
    """What a value such as ``host-25%`` names: 100 where it is the whole word, 0 where it is another one."""
    found = re.fullmatch(f"{whole}-([1-9][0-9]?)%", value)
    return int(found[1]) if found is not None else 100 * (value == whole)


@_settings
class OffloadConfig:
    """Everything that can be set.

    Attributes:
        default: The placement of layers that no rule matches.
        layers: Rules; the first that matches a layer decides.
        budget: Ceilings in bytes.
        store: Where offloaded bytes go.
        states: How the states of optimizers that a session is given are offloaded; None means as
            :class:`StatesConfig` says by default.
        weights: Where weights are; None means in memory.
        on_full: When an activation cannot be written, to a full drive or one that fails: ``keep`` it in
            memory and count it, or raise an ``error``.
        on_slow: When the drive cannot follow: ``wait`` for it, or ``keep`` activations in memory while
            the budget allows. None means ``wait`` where the policy says ``offload`` and ``keep`` where
            it says ``auto``.
        min_tensor_bytes: Smaller activations are kept; 0 means that all are offloaded.
        file: The file that this was read from, for messages. It does not count in comparisons.
        lines: The lines of its settings there, likewise.
    """

    default: Placement = Placement.OFFLOAD
    layers: tuple[Rule, ...] = ()
    budget: BudgetConfig = BudgetConfig()
    store: StoreConfig = StoreConfig()
    states: StatesConfig | None = None
    weights: WeightsConfig | None = None
    on_full: Literal["keep", "error"] = "keep"
    on_slow: Literal["wait", "keep"] | None = None
    min_tensor_bytes: _Threshold = 64 * 2**10
    file: str | None = field(default=None, compare=False, repr=False)
    lines: Any = field(default=None, compare=False, repr=False)

    @pydantic.field_validator("states")
    @classmethod
    def _has_a_budget(
        cls, states: StatesConfig | None, others: pydantic.ValidationInfo
    ) -> StatesConfig | None:
        budget = others.data.get("budget")
        is_auto = states is not None and states.default == "auto"
        if is_auto and budget is not None and budget.device_bytes is None:
            raise ConfigError(
                "default: auto needs budget.device_bytes: without it all states would stay in memory"
            )
        return states

    @property
    def policy(self) -> Policy:
        """The rules, ready to be matched against the layers of a model."""
        return Policy(self.default, self.layers, self.file)

    @classmethod
    def from_yaml(
        cls, text: str, *, file: str | None = None, layers: Sequence[LayerId] | None = None
    ) -> OffloadConfig:
        """Reads a configuration from YAML text; an empty text is the default configuration.

        Args:
            text: One YAML document.
            file: Where it comes from, for messages.
            layers: The layers of all ranks; what takes no effect on them is an error too.

        Raises:
            ConfigError: Every problem that there is, by line.
        """
        with _not_too_deep(file):
            return _build(_read_yaml(text, file), layers)

    @classmethod
    def from_dict(
        cls, document: Mapping[str, object], *, layers: Sequence[LayerId] | None = None
    ) -> OffloadConfig:
        """Makes a configuration of a dict with the keys that a YAML file has.

        Args:
            document: Sizes in it may be whole bytes as well as text with a unit.
            layers: The layers of all ranks; what takes no effect on them is an error too.

        Raises:
            ConfigError: Every problem that there is.
        """
        with _not_too_deep(None):
            return _build(_Source(None, _plain(document), {}), layers)

    def problems(self, layers: Sequence[LayerId]) -> list[ConfigError]:
        """Everything in it that cannot take effect on the layers of all ranks."""
        found = self.policy.problems(layers)
        placements = self.policy.placements(layers)
        if self.budget.objective is not None and placements and Placement.AUTO not in placements:
            found.append(
                self.error_at(
                    ("budget", "objective"),
                    f"{self.budget.objective} is what layers placed auto are planned for, and no layer is "
                    "placed auto; place layers auto, or remove it",
                )
            )
        return found

    def error_at(self, path: tuple[str | int, ...], message: str) -> ConfigError:
        """An error about one of the settings, with its line where that is known.

        Args:
            path: Keys and indices that lead to it.
            message: What is wrong with it, and what to do.
        """
        return _error_at(_Problem(path, message), self.file, (self.lines or {}).get)

    def to_yaml(self) -> str:
        """Writes every setting as YAML that :meth:`from_yaml` reads back to an equal configuration."""
        document: dict[str, object] = {
            "default": self.default.value,
            "layers": [{"match": rule.match, "placement": rule.placement.value} for rule in self.layers],
            "budget": {
                "activation_bytes": _size_word(self.budget.activation_bytes),
                "device_bytes": _size_word(self.budget.device_bytes),
                "in_flight_bytes": _size_word(self.budget.in_flight_bytes),
                "objective": self.budget.objective.value if self.budget.objective else None,
            },
            "store": {
                "kind": self.store.kind,
                "directories": [str(directory) for directory in self.store.directories],
                "capacity": _size_word(self.store.capacity),
                "host_capacity": _size_word(self.store.host_capacity),
                "write_bytes_per_day": _size_word(self.store.write_bytes_per_day),
                "checksum": self.store.checksum,
                "stall_seconds": self.store.stall_seconds,
                "readers": self.store.readers,
                "writers": self.store.writers,
            },
            "on_full": self.on_full,
            "on_slow": self.on_slow,
            "min_tensor_bytes": _size_word(self.min_tensor_bytes) or 0,
        }
        if self.states is not None:
            document["states"] = {
                "default": self.states.default,
                "sub_group_bytes": self.states.sub_group_bytes and _size_word(self.states.sub_group_bytes),
                "trust": self.states.trust,
                "when": self.states.when,
                "gradients": self.states.gradients,
                "masters": self.states.masters,
                "update": self.states.update,
            }
        if self.weights is not None:
            document["weights"] = {"frozen": self.weights.frozen}
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


ConfigLike = OffloadConfig | Mapping[str, object] | str | os.PathLike[str] | None


def read_config(config: ConfigLike, *, layers: Sequence[LayerId] | None = None) -> OffloadConfig:
    """A configuration from what a caller may give.

    Args:
        config: A configuration, a dict of settings, the path of a YAML file, or nothing for the default one.
        layers: The layers of all ranks; what takes no effect on them is an error too.

    Raises:
        ConfigError: Every problem that there is.
    """
    if isinstance(config, Mapping):
        return OffloadConfig.from_dict(config, layers=layers)
    if isinstance(config, str | os.PathLike):
        return load_config(Path(config), layers=layers)
    if not isinstance(config, OffloadConfig | None):
        raise ConfigError(
            f"the policy is {quoted(config)}: give the path of a YAML file, a dict with its keys, or an "
            "OffloadConfig"
        )
    config = OffloadConfig() if config is None else config
    if layers is not None and (problems := config.problems(layers)):
        raise ConfigError.joined(problems)
    return config


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One directory, or one for each drive."""


def with_directories(config: OffloadConfig, directories: Paths | None) -> OffloadConfig:
    """A configuration whose store has other directories, if any are given.

    Args:
        config: The configuration.
        directories: One path, or one for each drive.

    Raises:
        ConfigError: No directory is named, or one cannot be used.
    """
    if directories is None:
        return config
    paths = [directories] if isinstance(directories, str | os.PathLike) else list(directories)
    if not paths:
        raise ConfigError("directories=[] names none; name some, or leave directories out for the policy's")
    store = replace(config.store, directories=tuple(Path(path) for path in paths))
    return replace(config, store=store)


MOST_TEXT = 2**20
"""Bytes of the largest policy file: thousands of rules."""


def load_config(path: str | Path, *, layers: Sequence[LayerId] | None = None) -> OffloadConfig:
    """Reads a configuration from a YAML file.

    Args:
        path: The file.
        layers: The layers of all ranks; what takes no effect on them is an error too.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong; says of each problem the line and
            what is legal.
    """
    file = str(path)
    try:
        text = read_regular(Path(path), MOST_TEXT).decode("utf-8-sig")
    except UnreadableError as error:
        raise ConfigError(f"cannot be read: {error}", file=file) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error.reason}", file=file) from None
    return OffloadConfig.from_yaml(text, file=file, layers=layers)


def _size_word(size: int | None) -> str | None:
    """A size in YAML; null where there is no limit."""
    return format_size(size) if size else None


# --------------------------------------------------------------------------------- YAML with its lines


class _Problem(NamedTuple):
    """Something wrong: where in the configuration, and what to do about it."""

    path: _Path
    message: str


@dataclass(frozen=True)
class _Source:
    """A document: its values, the line of each of them, and what no value could be made of."""

    file: str | None
    document: object
    lines: dict[_Path, int]
    problems: tuple[_Problem, ...] = ()

    def line(self, path: _Path) -> int | None:
        """The line of a key or an item, or of the nearest one around it."""
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
def _not_too_deep(file: str | None) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ConfigError("cannot be read: nested too deeply", file=file) from None


def _read_yaml(text: str, file: str | None) -> _Source:
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
    return _Source(file, document, reader.lines, tuple(reader.problems))


class _NodeReader:
    """Turns nodes into plain values; remembers lines, collects what no value can be made of."""

    def __init__(self) -> None:
        self.lines: dict[_Path, int] = {}
        self.problems: list[_Problem] = []

    def read(self, node: yaml.Node, path: _Path) -> object:
        """The value of a node: text, bool, None, list or dict."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: _Path) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(_Problem(path, "a key must be a word"))
            elif key in values:
                first = self.lines[*path, key]
                self.problems.append(
                    _Problem((*path, key), f"given twice, first in line {first}; remove one")
                )
                self.lines[*path, key] = line
            else:
                self.lines[*path, key] = line
                values[key] = self.read(value_node, (*path, key))
        return values

    def _scalar(self, node: yaml.Node, path: _Path) -> object:
        if _is_empty(node):
            self.problems.append(
                _Problem(path, "has no value; write one, or remove the line for the default")
            )
        if node.tag == _NULL:
            return None
        return node.value.lower() == "true" if node.tag == _BOOL else node.value


def _is_empty(node: yaml.Node) -> bool:
    """Whether nothing at all is written where a value should be."""
    return node.tag == _NULL and not node.value


# ------------------------------------------------------------------------ from a document to a config

_VALIDATOR = TypeAdapter(OffloadConfig)
_PARTS: dict[str | int, type] = {
    "budget": BudgetConfig,
    "store": StoreConfig,
    "states": StatesConfig,
    "weights": WeightsConfig,
    "layers": Rule,
}
_PROVENANCE = ("file", "line", "lines")  # filled in while reading, never written by the user


def _build(source: _Source, layers: Sequence[LayerId] | None) -> OffloadConfig:
    """Checks a document and makes the configuration of it; reports every problem."""
    unknown = list(_unknown_keys(source.document, ()))
    known = _without(source.document, {problem.path for problem in unknown}, ())
    found = [*unknown, *source.problems]
    config: OffloadConfig | None = None
    rules: tuple[Rule, ...] = ()
    try:
        config = _VALIDATOR.validate_python(known)
    except ValidationError as error:
        found += _without_misspelt(_value_problems(OffloadConfig, error), unknown, source)
        rules = tuple(_sound_rules(known, source))
    else:
        rules = tuple(replace(rule, line=source.line(("layers", n))) for n, rule in enumerate(config.layers))
        config = replace(config, layers=rules, file=source.file, lines=source.lines)
    once = {problem.path: problem for problem in reversed(found)}.values()  # the first of each place
    errors = [_error_at(problem, source.file, source.line) for problem in reversed(once)]
    if layers is not None:
        judged = Policy(Placement.OFFLOAD, rules, source.file) if config is None else config
        errors += judged.problems(layers)
    if errors or config is None:
        raise ConfigError.joined(errors)
    return config


def _sound_rules(document: object, source: _Source) -> Iterator[Rule]:
    """The rules of a document, without those that are none."""
    items = document.get("layers") if isinstance(document, dict) else None
    for index, item in enumerate(items if isinstance(items, list) else []):
        with contextlib.suppress(ConfigError, TypeError):
            yield Rule(**item, line=source.line(("layers", index)))


def _plain(value: object, path: _Path = ()) -> object:
    """What a Python user gives, with the types that a file would give: dicts, lists, words of matches."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index)) for index, item in enumerate(value)]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and path[::2] == ("layers", "match") else value


def _unknown_keys(value: object, path: _Path) -> Iterator[_Problem]:
    """All keys that their section does not have."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_keys(item, (*path, index))
    if isinstance(value, dict):
        legal = _legal_keys(_section(OffloadConfig, path))
        for key, item in value.items():
            if key not in legal:
                yield _Problem((*path, key), _unknown_key(key, legal))
            elif key in _PARTS:
                yield from _unknown_keys(item, (*path, key))


def _without(value: object, unwanted: set[_Path], path: _Path) -> object:
    """The same document without some of its keys."""
    if isinstance(value, list):
        return [_without(item, unwanted, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if (*path, key) not in unwanted}
    return {key: _without(item, unwanted, (*path, key)) for key, item in kept.items()}


def _without_misspelt(
    problems: Iterable[_Problem], unknown: Iterable[_Problem], source: _Source
) -> Iterator[_Problem]:
    """Leaves out keys that are missing because they were misspelt: that is one problem, not two."""
    sections = {problem.path[:-1] for problem in unknown}
    for problem in problems:
        if problem.path in source.lines or problem.path[:-1] not in sections:
            yield problem


def _section(root: type, path: _Path) -> type:
    """The dataclass that a path leads to, from the one at its root."""
    names = [step for step in path if isinstance(step, str)]
    return _PARTS.get(names[-1], root) if names else root


def _legal_keys(section: Any) -> list[str]:
    return [each.name for each in fields(section) if each.name not in _PROVENANCE]


# ------------------------------------------------------------------------------------------- messages


def _error_at(
    problem: _Problem, file: str | None = None, line: Callable[[_Path], int | None] = lambda _: None
) -> ConfigError:
    message = f"{shortened(_dotted(problem.path))}: {problem.message}" if problem.path else problem.message
    return ConfigError(message, file=file, line=line(problem.path))


def _value_problems(root: type, error: ValidationError) -> Iterator[_Problem]:
    """What pydantic found, in the words of the configuration."""
    for found in error.errors(include_url=False):
        path = _named(root, found["loc"])
        if found["type"] == "value_error" and _section(root, path) is Rule:
            path = (*path, "match")
        yield _Problem(path, _describe(root, path, found))


def _named(root: type, path: _Path) -> _Path:
    """The path with the name of an argument that was given by position."""
    names = _legal_keys(root)
    if path and isinstance(path[0], int) and path[0] < len(names):
        return (names[path[0]], *path[1:])
    return path


def _describe(root: type, path: _Path, found: Any) -> str:
    shown = quoted(found["input"])
    match found["type"]:
        case "value_error":
            return str(found["ctx"]["error"])
        case "enum" | "literal_error":
            return f"must be {found['ctx']['expected']}, not {shown}"
        case "bool_type":
            return f"must be true or false, not {shown}"
        case "tuple_type":
            return f"must be a list, not {shown}"
        case "dataclass_type":
            legal = ", ".join(_legal_keys(_section(root, path)))
            return f"must be a mapping with the keys {legal}, not {shown}"
        case "missing":
            return f"is missing; the keys {', '.join(_legal_keys(_section(root, path[:-1])))} are needed here"
        case "unexpected_keyword_argument":
            return _unknown_key(str(path[-1]), _legal_keys(_section(root, path[:-1])))
        case _:
            return f"{found['msg']}, not {shown}"


def _unknown_key(key: str, legal: list[str]) -> str:
    nearest = difflib.get_close_matches(key, legal, n=1)
    guess = f"; did you mean '{nearest[0]}'?" if nearest else ""
    return f"unknown key{guess} (the keys here are {', '.join(legal)})"


def _dotted(path: _Path) -> str:
    """``("layers", 0, "match")`` → ``layers[0].match``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
