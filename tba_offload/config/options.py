"""What the user can set: frozen dataclasses, from a document and to one.

Nothing is ignored and nothing is guessed: an unknown key, a value that is not legal or a size without a
unit is a :class:`~tba_offload.errors.ConfigError` that names the file, the line and what is legal, for every
mistake there is. The dataclasses check their arguments in the same way, so a configuration written in Python,
as a dict too, is as safe as one read from a file.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
import yaml
from pydantic import (
    ConfigDict,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from tba_offload.config.document import Keys, Problem, Source, not_too_deep, plain, read_yaml
from tba_offload.config.policy import Objective, Placement, PlacementName, Policy, Rule
from tba_offload.config.store import BLOCK, STALL_SECONDS, StoreOptions, threads_per_direction
from tba_offload.config.values import (
    Directories,
    Kind,
    Limit,
    OptionalBytes,
    Seconds,
    Threads,
    Threshold,
    format_size,
)
from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, shortened
from tba_offload.reading import UnreadableError, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tba_offload.config.policy import LayerId

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _settings(cls: type[_T]) -> type[_T]:
    """Make a frozen dataclass that checks its arguments and raise ConfigError."""
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
        objective: What layers placed ``auto`` are planned for: the least ``time`` of a step, or the
            least ``memory`` at which nothing waits. None means ``time`` with activation_bytes or
            device_bytes and ``memory`` without.
    """

    activation_bytes: Limit = None
    device_bytes: Limit = None
    in_flight_bytes: Limit = 256 * 2**20
    objective: Objective | None = None

    @pydantic.field_validator("objective")
    @classmethod
    def _has_a_budget(cls, objective: Objective | None, info: ValidationInfo) -> Objective | None:
        needs = objective is Objective.TIME
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
        kind: ``file``, ``host`` (memory of the host), ``gds`` (GPUDirect Storage), or ``auto``: ``gds`` on
            a GPU whose machine has the nvidia-fs driver and kvikio, else ``file``; or a kind of your own, see
            :func:`tba_offload.store.register_kind`.
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
            cores, else two.
        writers: Threads that write, likewise.
    """

    kind: Kind = "auto"
    directories: Directories = ()
    capacity: Limit = None
    host_capacity: Limit = None
    write_bytes_per_day: Limit = None
    checksum: Annotated[bool, Strict()] = True
    stall_seconds: Seconds = STALL_SECONDS
    readers: Threads = None
    writers: Threads = None

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
        """Return what a store is opened with."""
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
    sub_group_bytes: OptionalBytes = None
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
    """Return what a value such as ``host-25%`` names.

    100 where it is the whole word, 0 where it is another one.
    """
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

    default: PlacementName = Placement.OFFLOAD
    layers: tuple[Rule, ...] = ()
    budget: BudgetConfig = BudgetConfig()
    store: StoreConfig = StoreConfig()
    states: StatesConfig | None = None
    weights: WeightsConfig | None = None
    on_full: Literal["keep", "error"] = "keep"
    on_slow: Literal["wait", "keep"] | None = None
    min_tensor_bytes: Threshold = 64 * 2**10
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

    @property
    def frozen_percent(self) -> int:
        """Percent of the bytes of frozen weights that travel."""
        return 0 if self.weights is None else self.weights.percent

    @classmethod
    def from_yaml(
        cls, text: str, *, file: str | None = None, layers: Sequence[LayerId] | None = None
    ) -> OffloadConfig:
        """Read a configuration from YAML text; an empty text is the default configuration.

        Args:
            text: One YAML document.
            file: Where it comes from, for messages.
            layers: The layers of all ranks; what takes no effect on them is an error too.

        Raises:
            ConfigError: Every problem that there is, by line.
        """
        with not_too_deep(file):
            return _build(read_yaml(text, file), layers)

    @classmethod
    def from_dict(
        cls, document: Mapping[str, object], *, layers: Sequence[LayerId] | None = None
    ) -> OffloadConfig:
        """Make a configuration of a dict with the keys that a YAML file has.

        Args:
            document: Sizes in it may be whole bytes as well as text with a unit.
            layers: The layers of all ranks; what takes no effect on them is an error too.

        Raises:
            ConfigError: Every problem that there is.
        """
        with not_too_deep(None):
            return _build(Source(None, plain(document), {}), layers)

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
        """Return an error about one of the settings, with its line where that is known.

        Args:
            path: Keys and indices that lead to it.
            message: What is wrong with it, and what to do.
        """
        return _error_at(Problem(path, message), self.file, (self.lines or {}).get)

    def to_yaml(self) -> str:
        """Write every setting as YAML that :meth:`from_yaml` reads back to an equal configuration."""
        document: dict[str, object] = {
            "default": self.default.value,
            "layers": [{"match": rule.match, "placement": rule.placement.value} for rule in self.layers],
            "budget": {
                **_sizes(self.budget, "activation_bytes", "device_bytes", "in_flight_bytes"),
                "objective": self.budget.objective.value if self.budget.objective else None,
            },
            "store": {
                **asdict(self.store),
                **_sizes(self.store, "capacity", "host_capacity", "write_bytes_per_day"),
                "directories": [str(directory) for directory in self.store.directories],
            },
            "on_full": self.on_full,
            "on_slow": self.on_slow,
            "min_tensor_bytes": format_size(self.min_tensor_bytes) if self.min_tensor_bytes else 0,
        }
        if self.states is not None:
            document["states"] = asdict(self.states) | _sizes(self.states, "sub_group_bytes")
        if self.weights is not None:
            document["weights"] = {"frozen": self.weights.frozen}
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


ConfigLike = OffloadConfig | Mapping[str, object] | str | os.PathLike[str] | None


def read_config(config: ConfigLike, *, layers: Sequence[LayerId] | None = None) -> OffloadConfig:
    """Return a configuration from what a caller may give.

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
    """Return a configuration whose store has other directories, if any are given.

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
    """Read a configuration from a YAML file.

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


def _sizes(section: object, *names: str) -> dict[str, str | None]:
    """Return some sizes of a section in YAML; null where there is no limit."""
    return {name: format_size(size) if (size := getattr(section, name)) else None for name in names}


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


def _build(source: Source, layers: Sequence[LayerId] | None) -> OffloadConfig:
    """Check a document and make the configuration of it; reports every problem."""
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


def _sound_rules(document: object, source: Source) -> Iterator[Rule]:
    """Yield the rules of a document, without those that are none."""
    items = document.get("layers") if isinstance(document, dict) else None
    for index, item in enumerate(items if isinstance(items, list) else []):
        with contextlib.suppress(ConfigError, TypeError):
            yield Rule(**item, line=source.line(("layers", index)))


def _unknown_keys(value: object, path: Keys) -> Iterator[Problem]:
    """All keys that their section does not have."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_keys(item, (*path, index))
    if isinstance(value, dict):
        legal = _legal_keys(_section(OffloadConfig, path))
        for key, item in value.items():
            if key not in legal:
                yield Problem((*path, key), _unknown_key(key, legal))
            elif key in _PARTS:
                yield from _unknown_keys(item, (*path, key))


def _without(value: object, unwanted: set[Keys], path: Keys) -> object:
    """Return the same document without some of its keys."""
    if isinstance(value, list):
        return [_without(item, unwanted, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if (*path, key) not in unwanted}
    return {key: _without(item, unwanted, (*path, key)) for key, item in kept.items()}


def _without_misspelt(
    problems: Iterable[Problem], unknown: Iterable[Problem], source: Source
) -> Iterator[Problem]:
    """Leaves out keys that are missing because they were misspelt: that is one problem, not two."""
    sections = {problem.path[:-1] for problem in unknown}
    for problem in problems:
        if problem.path in source.lines or problem.path[:-1] not in sections:
            yield problem


def _section(root: type, path: Keys) -> type:
    """Return the dataclass that a path leads to, from the one at its root."""
    names = [step for step in path if isinstance(step, str)]
    return _PARTS.get(names[-1], root) if names else root


def _legal_keys(section: Any) -> list[str]:
    return [each.name for each in fields(section) if each.name not in _PROVENANCE]


# ------------------------------------------------------------------------------------------- messages


def _error_at(
    problem: Problem, file: str | None = None, line: Callable[[Keys], int | None] = lambda _: None
) -> ConfigError:
    message = f"{shortened(_dotted(problem.path))}: {problem.message}" if problem.path else problem.message
    return ConfigError(message, file=file, line=line(problem.path))


def _value_problems(root: type, error: ValidationError) -> Iterator[Problem]:
    """Yield what pydantic found, in the words of the configuration."""
    for found in error.errors(include_url=False):
        path = _named(root, found["loc"])
        if found["type"] == "value_error" and _section(root, path) is Rule:
            path = (*path, "match")
        yield Problem(path, _describe(root, path, found))


def _named(root: type, path: Keys) -> Keys:
    """Return the path with the name of an argument that was given by position."""
    names = _legal_keys(root)
    if path and isinstance(path[0], int) and path[0] < len(names):
        return (names[path[0]], *path[1:])
    return path


def _describe(root: type, path: Keys, found: Any) -> str:
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


def _dotted(path: Keys) -> str:
    """``("layers", 0, "match")`` → ``layers[0].match``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
