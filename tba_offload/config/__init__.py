"""The settings of a policy, read from YAML, a dict or Python.

Nothing is ignored and nothing is guessed: an unknown key, a value that is not legal or a size without a
unit is a :class:`~tba_offload.errors.ConfigError` that names the file, the line and what is legal, for every
mistake there is. The dataclasses check their arguments in the same way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import InstanceOf, StrictBool, TypeAdapter, ValidationError

from tba_offload.config import values
from tba_offload.config.document import Provenance, Source, conflict, errors_of, read_yaml, settings
from tba_offload.config.policy import Objective, Placement, Policy, Rule
from tba_offload.config.values import format_size as format_size
from tba_offload.config.values import parse_size as parse_size
from tba_offload.errors import ConfigError
from tba_offload.files import read_regular
from tba_offload.formatting import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.config.policy import LayerId, Layers


@settings("budget")
class BudgetConfig:
    """Hard ceilings in bytes. Sizes are whole bytes or text with a unit; 0 and None mean no limit."""

    activation_bytes: values.Limit = None
    """Activations of offloaded layers resident on the device. Layers placed ``auto`` keep to it when the
    drive is slow; and no more than this is ever in flight."""

    device_bytes: values.Limit = None
    """Everything on the device in forward and backward: weights, gradients, states of optimizers that are not
    offloaded, activations. What it leaves for activations is measured in the first step and is a budget as
    activation_bytes is; of both the smaller one holds."""

    in_flight_bytes: values.Limit = 256 * 2**20
    """Activations that are being written, or read back and not yet used. By default 256MiB."""

    objective: Objective | None = None
    """What layers placed ``auto`` are planned for: the least ``time`` of a step, or the least ``memory`` at
    which nothing waits. By default ``time``. Without activation_bytes and device_bytes, ``time`` fits nine
    tenths of the device."""

    @property
    def window(self) -> int | None:
        """Most bytes in flight: the lower of the two limits."""
        limits = (self.activation_bytes, self.in_flight_bytes)
        return min((limit for limit in limits if limit is not None), default=None)


@settings("store")
class StoreConfig:
    """Where offloaded bytes go."""

    kind: values.Kind = "auto"
    """``file``, ``host`` (memory of the host), ``gds`` (GPUDirect Storage), or ``auto``: ``gds`` on a GPU
    whose machine has the nvidia-fs driver and kvikio, else ``file``; or a kind of your own, see
    :func:`tba_offload.store.register_kind`."""

    directories: values.Directories = ()
    """One per drive, or the path of the only one; tensors are spread over them. ``~`` and environment
    variables (``$SCRATCH``, ``${SCRATCH}``) are expanded, relative ones start at the working directory. If
    empty, the system's directory for temporary files."""

    capacity: values.Capacity = None
    """Bytes that the store of one process may hold at most; 0 and None mean what is free, but for a twentieth
    of the disk and 1 GiB at least, which is left to others."""

    host_capacity: values.Capacity = None
    """Bytes of host memory that take what the drives have no time for, with any kind but ``host``; 0 and None
    mean that there is no such memory."""

    write_bytes_per_day: values.Limit = None
    """Bytes of activations that one process may write to drives in a day, which spares them: layers placed
    ``auto`` are planned so that steps that follow each other day and night write no more; 0 and None mean
    that there is no limit."""

    checksum: StrictBool = True
    """Whether bytes that are read from drives are compared with those written, by a checksum; without it a
    drive that changes bytes changes the training, and nothing tells. By default true."""

    stall_seconds: values.Seconds = values.STALL_SECONDS
    """A wait for the drive during which nothing moves is named in a warning after a tenth of this time and is
    an error at its end; 0 and None mean never. By default 300. Collective operations of other ranks time out
    after ten minutes unless told otherwise, so it should be less."""

    readers: values.Threads = None
    """Threads that read, for each directory; None for what suits the machine: one on up to two cores, else
    two."""

    writers: values.Threads = None
    """Threads that write, likewise."""

    def __post_init__(self) -> None:
        for setting in ("directories", "host_capacity", "write_bytes_per_day"):
            if self.kind == "host" and getattr(self, setting):
                raise conflict(setting, "has no effect with kind: host, which uses no drive. Remove it")


_ON_CPU, _ON_ACCELERATOR = 64 * 2**20, 256 * 2**20
"""Bytes of states that travel as one. Work for an accelerator starts with a delay: on an H200 an update takes
1.6 times as long with 64 MiB, and a whole step with ``when: backward`` 1.4 times."""


@settings("states")
class StatesConfig:
    """How the states of optimizers are offloaded."""

    default: Literal["offload", "auto"] = "offload"
    """All of them (``offload``), or with ``budget.device_bytes`` as few as let the whole step be fastest
    (``auto``): what they leave there is for activations, and costs travels in each update."""

    sub_group_bytes: values.Capacity = None
    """Bytes of states that travel as one; three times as many stay on the device. A parameter that cannot
    be cut may have more. By default 64MiB on a CPU and 256MiB elsewhere."""

    trust: StrictBool = False
    """Whether an optimizer of a class that is not known updates each parameter by itself. One that computes
    something over all of them, as a norm or an estimate of the step's size, would be wrong."""

    when: Literal["step", "backward"] = "step"
    """Update in the optimizer's ``step``, or in ``backward``, as soon as the gradients of a sub-group are
    final. These are then freed. What reads a parameter between ``backward()`` and ``step()`` reads the
    updated value; clipping and gradient scalers are errors."""

    micro_batches: values.Passes = 1
    """With ``when: backward``, the number of backward passes between two steps: parameters are updated in the
    last of them. Another pass before ``step`` is an error."""

    masters: Literal["keep", "offload"] = "offload"
    """Whether copies in fp32, which the optimizer of Megatron-LM updates in place of parameters in 16 bits,
    are away with their states, or are kept in memory."""

    update: Literal["device", "host", "auto"] = "device"
    """Where sub-groups are updated: on the ``device``; in ``host`` memory, by the processor; or with ``auto``
    both at the same time, each sub-group in the lane that ends it first. The processor's kernels may round
    differently, so parameters get other bits than in plain training, and with ``auto`` others in each run.
    Experimental; without an accelerator it means nothing."""

    def __post_init__(self) -> None:
        in_backward = self.when == "backward"
        if in_backward and self.default == "auto":
            raise conflict("when", "states are auto with when: step only; set states.default to offload")
        if self.micro_batches != 1 and not in_backward:
            raise conflict("micro_batches", "has no effect with when: step. Remove it")
        if self.update != "device" and (in_backward or self.default == "auto"):
            raise conflict("update", f"{self.update} goes with when: step, default: offload only; set both")

    def sub_group_on(self, device_type: str) -> int:
        """Return the bytes of states that travel as one on a device.

        Args:
            device_type: Its type, as ``torch.device`` names it.
        """
        return self.sub_group_bytes or (_ON_CPU if device_type == "cpu" else _ON_ACCELERATOR)


@settings("weights")
class WeightsConfig:
    """Where weights are while their layer does not compute."""

    frozen: values.Share = "keep"
    """Whether weights that are not trained, as the model below LoRA, are kept in memory, or ``offload``: read
    before the forward and the backward of their layer; ``offload-25%`` for a share of their bytes, in whole
    weights, evenly over the layers."""

    @property
    def percent(self) -> int:
        """Percent of the bytes of frozen weights that are offloaded."""
        if self.frozen.endswith("%"):
            return int(self.frozen.removeprefix("offload-")[:-1])
        return 0 if self.frozen == "keep" else 100


@settings("")
class OffloadConfig:
    """What the user wants: a placement for each layer, ceilings, a store, and what else is offloaded."""

    default: values.PlacementName = Placement.OFFLOAD
    """The placement of layers that no rule matches."""

    layers: tuple[Rule, ...] = ()
    """Rules in order; the first that matches a layer decides."""

    budget: BudgetConfig = BudgetConfig()
    """Ceilings in bytes."""

    store: StoreConfig = StoreConfig()
    """The store of offloaded bytes."""

    states: StatesConfig | None = None
    """How the states of the optimizers that a session is given are offloaded; None for the defaults."""

    weights: WeightsConfig | None = None
    """Which weights are offloaded; None for none."""

    on_full: Literal["keep", "error"] = "keep"
    """What happens when the store cannot take an activation, because it is full or the drive fails: it stays
    in memory (``keep``) or the step ends with an ``error``."""

    on_slow: Literal["wait", "keep"] | None = None
    """What happens when the drive cannot follow: compute waits (``wait``), or activations stay in memory
    (``keep``). None means ``wait`` for ``offload``, and ``keep`` for ``auto``."""

    min_tensor_bytes: values.Threshold = 64 * 2**10
    """Smaller activations are kept; 0 means that all are offloaded. By default 64KiB."""

    source: Provenance[InstanceOf[Source]] = field(default=Source(), compare=False, repr=False)
    """Where it was read from, for messages. It does not count in comparisons."""

    def __post_init__(self) -> None:
        if self.states and self.states.default == "auto" and self.budget.device_bytes is None:
            why = "default: auto needs budget.device_bytes: without it all states would stay in memory"
            raise conflict("states", why)

    @property
    def policy(self) -> Policy:
        """The rules, ready to be matched against the layers of a model."""
        return Policy(self.default, self.layers, self.file)

    @property
    def file(self) -> str | None:
        """The file that it was read from."""
        return self.source.file

    @property
    def frozen_percent(self) -> int:
        """Percent of the bytes of frozen weights that are offloaded."""
        return 0 if self.weights is None else self.weights.percent

    @classmethod
    def from_yaml(cls, text: str, *, file: str | None = None, layers: Layers = None) -> OffloadConfig:
        """Read a configuration from YAML text; an empty text is the default configuration.

        Args:
            text: One YAML document.
            file: Where it comes from, for messages.
            layers: The layers of all ranks; what takes no effect on them is an error too.

        Raises:
            ConfigError: Every problem that there is, by line.
        """
        return _checked(lambda: read_yaml(text, file), layers, file)

    @classmethod
    def from_dict(cls, document: Mapping[str, object], *, layers: Layers = None) -> OffloadConfig:
        """Make a configuration of a dict with the keys that a YAML file has.

        Args:
            document: Sizes in it may be whole bytes as well as text with a unit.
            layers: The layers of all ranks; what takes no effect on them is an error too.

        Raises:
            ConfigError: Every problem that there is.
        """
        return _checked(lambda: (_plain(document), Source(), []), layers)

    def problems(self, layers: Sequence[LayerId]) -> list[ConfigError]:
        """Return an error for each rule that cannot take effect on the layers of all ranks."""
        return self.policy.problems(layers)

    def doubts(self, layers: Sequence[LayerId]) -> list[str]:
        """Return what is legal and has no effect on these layers, or less than it seems to.

        Args:
            layers: The layers of all ranks.
        """
        found, placements = self.policy.doubts(layers), self.policy.placements(layers)
        has_auto, window = Placement.AUTO in placements, self.budget.in_flight_bytes or 2**60
        moves = has_auto or any(placement.offloads for placement in placements)
        narrows = (self.budget.activation_bytes or 0) < window or self.on_slow == "keep"
        has_effect = {
            ("budget", "objective"): has_auto,
            ("budget", "activation_bytes"): has_auto or (moves and narrows),
            ("budget", "device_bytes"): moves or (self.states is not None and self.states.default == "auto"),
            ("store", "write_bytes_per_day"): has_auto,
        }
        for (section, setting), has in has_effect.items():
            if getattr(getattr(self, section), setting) is not None and not has and placements:
                who = "auto or offload" if setting == "device_bytes" else "auto"
                why = f"has no effect: no layer is {who}. Make layers auto, or remove this setting"
                found.append(str(self.source.error((section, setting), why)))
        return found

    def to_yaml(self) -> str:
        """Write every setting as YAML that :meth:`from_yaml` reads back to an equal configuration."""
        exclude: Any = {"source": True, "layers": {"__all__": {"line"}}}
        document = _ADAPTER.dump_python(self, mode="json", exclude=exclude)
        for section, setting in (("budget", "in_flight_bytes"), ("store", "stall_seconds")):
            document[section][setting] = document[section][setting] or 0  # no limit is not what is usual
        return yaml.safe_dump(_without_nulls(document), sort_keys=False, allow_unicode=True)


_ADAPTER = TypeAdapter(OffloadConfig)


def _without_nulls(document: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that have a value; the others are those by default."""
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in document.items()
        if value is not None
    }


def _checked(read: Callable[[], Any], layers: Layers, file: str | None = None) -> OffloadConfig:
    """Return the configuration that a document holds.

    Raises:
        ConfigError: Every problem that there is; rules are judged where all of them are legal.
    """
    config = None
    try:
        document, source, errors = read()
    except RecursionError:
        raise ConfigError("cannot be read: nested too deeply", file=file) from None
    try:
        config = _ADAPTER.validate_python(document, context=source)
    except ValidationError as error:
        told = {each.line for each in errors if each.line}  # a value that is missing is a wrong one, too
        errors += [each for each in errors_of(error, OffloadConfig, source) if each.line not in told]
        with contextlib.suppress(ValidationError):
            rules = document.get("layers", ()) if isinstance(document, dict) else ()
            config = _ADAPTER.validate_python({"layers": rules}, context=source)
    if config is not None:
        known = (replace(rule, line=source.line(("layers", n))) for n, rule in enumerate(config.layers))
        config = replace(config, layers=tuple(known), source=source)
        errors += config.problems(layers) if layers is not None else []
    if errors or config is None:
        raise ConfigError.joined(errors)
    return config


def _plain(value: object) -> object:
    """Return dicts and lists in place of what behaves as these do."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


ConfigLike = OffloadConfig | Mapping[str, object] | str | os.PathLike[str] | None


def read_config(config: ConfigLike, *, layers: Layers = None) -> OffloadConfig:
    """Return a configuration from what a caller may give.

    Args:
        config: A configuration, a dict of settings, the path of a YAML file, or nothing for the default one.
        layers: The layers of all ranks; what takes no effect on them is an error too.

    Raises:
        ConfigError: Every problem that there is.
    """
    if config is None or isinstance(config, Mapping):
        return OffloadConfig.from_dict(config or {}, layers=layers)
    if isinstance(config, str | os.PathLike):
        return load_config(Path(config), layers=layers)
    if not isinstance(config, OffloadConfig):
        remedy = "give the path of a YAML file, a dict with its keys, or an OffloadConfig"  # type: ignore[unreachable]
        raise ConfigError(f"the policy is {quoted(config)}: {remedy}")
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


def load_config(path: str | Path, *, layers: Layers = None) -> OffloadConfig:
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
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error.reason}", file=file) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=file) from None
    return OffloadConfig.from_yaml(text, file=file, layers=layers)


SCHEMA_URL = "https://raw.githubusercontent.com/tba-offload/tba-offload/main/docs/policy.schema.json"
"""Address of the JSON schema of the latest version."""


def policy_schema() -> dict[str, Any]:
    """Return a JSON schema of policy files, by which editors complete keys and underline mistakes."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_URL}
    return {**head, **_ADAPTER.json_schema(), "title": "tba-offload policy"}
