"""Settings of a policy, read from a word, YAML, a dict or Python.

An unknown key, a wrong value or a size without a unit raises :class:`~tba_offload.errors.ConfigError`. For
each mistake in a policy, the error message names the file, the line and the allowed values.
"""

from __future__ import annotations

import contextlib
import difflib
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
from tba_offload.formatting import quoted
from tba_offload.placements import names

if TYPE_CHECKING:
    from tba_offload.config.policy import LayerId, Layers


MOST_IN_FLIGHT = 256 * 2**20
"""Largest default size of the in-flight window in bytes."""


@settings("budget")
class BudgetConfig:
    """Hard limits in bytes. A limit is a whole number of bytes, or text with a unit. 0 means no limit."""

    activation_bytes: values.Limit = None
    """Upper limit of the activation peak of attached layers. Plans for ``auto`` layers keep the limit even if
    the drive is slow. The in-flight window is never larger than ``activation_bytes``."""

    device_bytes: values.Limit = None
    """Upper limit of all weights, gradients, activations and optimizer states on the device, in forward and
    backward. Offloaded optimizer states do not count. The first step measures how much memory remains for
    activations. If activation_bytes is also set, the smaller limit applies."""

    in_flight_bytes: values.Window = None
    """Size of the in-flight window. The window limits the bytes that are being written, plus the bytes that
    were read back in advance. The default size is 256MiB in the first step. In later steps, the default size
    is an eighth of the bytes that a step saves, at most 256MiB, but at least the largest saved storage. 0
    means no limit."""

    objective: Objective | None = None
    """Goal of the planner for ``auto`` layers: the shortest step (``time``, the default), or the lowest peak
    without waits for the drive (``memory``). If ``budget`` sets no limit, plans with ``time`` use at most
    nine tenths of the device memory."""

    def window(self, saved: int = 0, largest: int = 0) -> int | None:
        """Return the size of the in-flight window in bytes; ``None`` for no limit.

        Args:
            saved: Largest number of saved bytes at one time in a step; 0 before the first step.
            largest: Bytes of the largest saved storage.
        """
        in_flight = self.in_flight_bytes
        if in_flight is None:
            in_flight = max(min(saved // 8, MOST_IN_FLIGHT) if saved else MOST_IN_FLIGHT, largest)
        return min((limit for limit in (self.activation_bytes, in_flight) if limit), default=None)


@settings("store")
class StoreConfig:
    """Settings of the store, which holds offloaded bytes."""

    kind: values.Kind = "auto"
    """Kind of the store: ``file``, ``host`` (host memory), ``gds`` (GPUDirect Storage), ``auto``, or a kind
    registered with :func:`tba_offload.store.register_kind`. ``auto`` selects ``gds`` on a GPU if the machine
    has the nvidia-fs driver and kvikio, and ``file`` otherwise."""

    directories: values.Directories = ()
    """Directories of the store, one per drive, or a single path. Tensors are spread over all drives. ``~``
    and environment variables such as ``$SCRATCH`` are expanded. Relative paths start at the working
    directory. The default is the system's directory for temporary files."""

    capacity: values.Capacity = None
    """Upper limit of the bytes in the store of one process. By default, or with 0, the store leaves a
    twentieth of the disk free, at least 1 GiB."""

    host_capacity: values.Capacity = None
    """Bytes of host memory for activations, in addition to the drives. On a GPU, opening the store pins all
    ``host_capacity`` bytes. ``host_capacity`` is not allowed with kind ``host``. By default 0: no host memory
    is used."""

    order: values.Order | None = None
    """Order in which host memory and drives are used, if host_capacity is set. With ``[host, drive]``, drives
    get the bytes that do not fit into host memory. With ``[drive, host]``, host memory gets bytes when the
    drives are full or cannot write in time. By default ``[host, drive]``."""

    write_bytes_per_day: values.Limit = None
    """Upper limit of the activation bytes that one process writes to the drives in a day of training without
    pauses. Plans for ``auto`` layers keep the limit. By default, or with 0, there is no limit."""

    checksum: StrictBool = True
    """Whether a checksum compares the bytes of each read with the bytes that were written. Without checksums,
    a drive that corrupts bytes changes the training result without an error. By default true."""

    stall_seconds: values.Seconds = values.STALL_SECONDS
    """Time limit in seconds for a transfer without progress. After a tenth of the limit, a warning names the
    drive. After the whole limit, the step fails. By default 300; 0 means no warning and no limit. Set a
    smaller limit than the timeout of collective operations, which is ten minutes by default."""

    readers: values.Threads = None
    """Number of reading threads for each directory. The default is 1 on a machine with one or two cores, and
    2 on other machines."""

    writers: values.Threads = None
    """Number of writing threads for each directory. The default is 1 on a machine with one or two cores, and
    2 on other machines."""

    def __post_init__(self) -> None:
        for setting in ("directories", "host_capacity", "order", "write_bytes_per_day"):
            if self.kind == "host" and getattr(self, setting):
                raise conflict(setting, f"has no effect with kind: host. Remove {setting}")
        if self.order and not self.host_capacity:
            raise conflict("order", "has no effect without host_capacity. Set host_capacity, or remove order")
        if (count := len(self.directories)) and self.capacity and self.capacity < count * values.BLOCK:
            raise conflict("capacity", f"must be {values.BLOCK} B or more for each of {count} directories")

    @property
    def drives(self) -> StoreConfig:
        """Settings of the same store without host memory, for optimizer states and frozen weights."""
        return replace(self, host_capacity=None, order=None)


_ON_CPU, _ON_ACCELERATOR = 64 * 2**20, 256 * 2**20
"""Default sizes of a sub-group of optimizer states in bytes: on a CPU, and on other devices.

Each kernel launch on an accelerator has a delay, so large sub-groups are faster. On an H200, an update in
sub-groups of 64 MiB takes 1.6 times as long as in sub-groups of 256 MiB.
"""


@settings("states")
class StatesConfig:
    """Settings for offloading optimizer states."""

    default: Literal["offload", "auto"] = "offload"
    """Which states to offload. ``offload`` offloads all states. ``auto`` offloads only as many sub-groups as
    ``budget.device_bytes`` requires."""

    sub_group_bytes: values.Capacity = None
    """Size of a sub-group of states in bytes. A sub-group is read and written as a whole. Memory for three
    sub-groups stays on the device. A parameter that cannot be split may need a larger sub-group. By default
    64MiB on a CPU and 256MiB on other devices."""

    trust: StrictBool = False
    """Whether to accept an optimizer of an unknown class. Set ``true`` only if the optimizer updates each
    parameter independently. Otherwise, for example with a norm over all parameters, the results are wrong."""

    when: Literal["step", "backward"] = "step"
    """Time of the parameter updates. ``step`` updates in the optimizer's ``step()``. ``backward`` updates a
    sub-group during ``backward()`` as soon as the gradients of the sub-group are final, and then frees these
    gradients. With ``backward``, gradient clipping and gradient scalers raise an error."""

    micro_batches: values.Passes = 1
    """Number of backward passes between two optimizer steps, with ``when: backward``. The last backward pass
    before a step updates the parameters. One more backward pass before ``step()`` raises an error."""

    masters: Literal["keep", "offload"] = "offload"
    """Placement of Megatron-LM's fp32 copies of 16-bit parameters. ``offload`` offloads the copies with the
    states, and ``keep`` keeps the copies in memory."""

    update: Literal["device", "host", "auto"] = "device"
    """Processor that computes the updates. ``device`` updates on the device. ``host`` updates on the CPU,
    with states in host memory. ``auto`` updates on the device and on the CPU at the same time. ``host`` and
    ``auto`` are experimental: some bits of parameters may differ from plain training, because the CPU may
    round differently. With ``auto``, parameters may also differ between two runs. Without an accelerator,
    ``update`` has no effect."""

    def __post_init__(self) -> None:
        in_backward = self.when == "backward"
        if in_backward and self.default == "auto":
            raise conflict("when", "'backward' cannot be used with 'default: auto'. Use 'default: offload'")
        if self.micro_batches != 1 and not in_backward:
            raise conflict("micro_batches", "has no effect with when: step. Remove micro_batches")
        if self.update != "device" and (in_backward or self.default == "auto"):
            raise conflict("update", f"'{self.update}' needs 'when: step' and 'default: offload'. Set both")

    def sub_group_on(self, device_type: str) -> int:
        """Return the size of a sub-group in bytes on a device.

        Args:
            device_type: Type of the device, such as ``"cuda"``.
        """
        return self.sub_group_bytes or (_ON_CPU if device_type == "cpu" else _ON_ACCELERATOR)


@settings("weights")
class WeightsConfig:
    """Settings for offloading weights."""

    frozen: values.Share = "keep"
    """Placement of weights without gradients, such as the base model of LoRA. ``keep`` keeps frozen weights
    in memory. ``offload`` reads frozen weights before the forward and the backward of their layer.
    ``offload-25%`` offloads a quarter of the bytes, in whole weights, spread over the layers. ``auto`` keeps
    as many frozen weights in memory as fit the limit of the device."""

    @property
    def percent(self) -> int:
        """Percentage of the bytes of frozen weights that is offloaded."""
        if self.frozen.endswith("%"):
            return int(self.frozen.removeprefix("offload-")[:-1])
        return 0 if self.frozen == "keep" else 100


@settings("")
class OffloadConfig:
    """A policy: placements, limits, the store, and settings for optimizer states and weights."""

    default: values.PlacementName = Placement.OFFLOAD
    """Placement of layers that no rule matches."""

    layers: tuple[Rule, ...] = ()
    """Rules for layers. The first matching rule sets the placement of a layer."""

    budget: BudgetConfig = BudgetConfig()
    """Limits of memory in bytes."""

    store: StoreConfig = StoreConfig()
    """Settings of the store."""

    states: StatesConfig | None = None
    """Settings for offloading the states of the optimizers that are passed to ``attach``. None means the
    defaults of :class:`StatesConfig`."""

    weights: WeightsConfig | None = None
    """Settings for offloading weights. None means that no weights are offloaded."""

    on_full: Literal["keep", "error"] = "keep"
    """Reaction to a full store or a failed drive. ``keep`` keeps the activation in memory. ``error`` ends the
    step with an error."""

    on_slow: Literal["wait", "keep"] | None = None
    """Reaction to a drive that is too slow. ``wait`` waits for the drive, and ``keep`` keeps activations in
    memory. After the first plan for ``auto`` layers, training always waits. By default ``wait``, or ``keep``
    for ``auto`` layers with ``objective: memory``."""

    min_tensor_bytes: values.Threshold = 64 * 2**10
    """Activations smaller than this size are kept. 0 offloads all activations. By default 64KiB."""

    source: Provenance[InstanceOf[Source]] = field(default=Source(), compare=False, repr=False)
    """Origin of the configuration, for error messages. Comparisons of configurations ignore ``source``."""

    def __post_init__(self) -> None:
        may_plan = Placement.AUTO in (self.default, *(rule.placement for rule in self.layers))
        if self.weights and self.weights.frozen == "auto" and not self.budget.device_bytes and not may_plan:
            why = "'frozen: auto' needs a limit. Set budget.device_bytes, or make layers 'auto'"
            raise conflict("weights", why)
        if self.states and self.states.default == "auto" and self.budget.device_bytes is None:
            why = "'default: auto' needs budget.device_bytes. Set this limit, or use 'default: offload'"
            raise conflict("states", why)

    @property
    def policy(self) -> Policy:
        """Rules and default placement of the policy, for matching against the layers of a model."""
        return Policy(self.default, self.layers, self.source.file)

    @property
    def frozen_percent(self) -> int:
        """Percentage of the bytes of frozen weights that is offloaded."""
        return 0 if self.weights is None else self.weights.percent

    @classmethod
    def from_yaml(cls, text: str, *, file: str | None = None, layers: Layers = None) -> OffloadConfig:
        """Read a configuration from YAML text. Empty text gives the default configuration.

        Args:
            text: The YAML text, which has one document.
            file: Name of the YAML file, for error messages.
            layers: The layers of all ranks. With ``layers``, a rule that has no effect on any layer is also
                an error.

        Raises:
            ConfigError: The text is invalid. The error lists all problems, by line.
        """
        return _checked(*read_yaml(text, file), layers)

    @classmethod
    def from_dict(cls, document: Mapping[str, object], *, layers: Layers = None) -> OffloadConfig:
        """Create a configuration from a dict with the keys of a YAML policy.

        Args:
            document: The settings. A size is a whole number of bytes, or text with a unit.
            layers: The layers of all ranks. With ``layers``, a rule that has no effect on any layer is also
                an error.

        Raises:
            ConfigError: The dict is invalid. The error lists all problems.
        """
        return _checked(_plain(document), Source(), [], layers)

    def doubts(self, layers: Sequence[LayerId]) -> list[str]:
        """Return a message for each valid setting that has no effect, or less effect than expected.

        Args:
            layers: The layers of all ranks.
        """
        found, placements = list[str](), self.policy.placements(layers)
        has_auto, in_flight = Placement.AUTO in placements, self.budget.in_flight_bytes
        moves = has_auto or any(placement.offloads for placement in placements)
        window = MOST_IN_FLIGHT if in_flight is None else in_flight or 2**60
        narrows = (self.budget.activation_bytes or 0) < window or self.on_slow == "keep"
        has_effect = {
            ("budget", "objective"): has_auto,
            ("budget", "activation_bytes"): has_auto or (moves and narrows),
            ("budget", "device_bytes"): moves
            or (self.states is not None and self.states.default == "auto")
            or (self.weights is not None and self.weights.frozen == "auto"),
            ("store", "write_bytes_per_day"): has_auto,
        }
        for (section, setting), has in has_effect.items():
            if getattr(getattr(self, section), setting) is not None and not has and placements:
                who = "'auto' or 'offload'" if setting == "device_bytes" else "'auto'"
                why = f"has no effect: no layer has placement {who}. Change a placement, or remove {setting}"
                found.append(str(self.source.error((section, setting), why)))
        return found

    def to_yaml(self) -> str:
        """Return all settings as YAML text, from which :meth:`from_yaml` reads an equal configuration."""
        exclude: Any = {"source": True, "layers": {"__all__": {"line"}}}
        document = _ADAPTER.dump_python(self, mode="json", exclude=exclude, exclude_none=True)
        document["store"].setdefault("stall_seconds", 0)  # None means no limit
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


_ADAPTER = TypeAdapter(OffloadConfig)


def _checked(document: object, source: Source, errors: list[ConfigError], layers: Layers) -> OffloadConfig:
    """Return the configuration of a document.

    Raises:
        ConfigError: The document is invalid, or ``errors`` is not empty. The error lists all problems. If a
            rule is invalid, rules are not matched with the layers.
    """
    config = None
    try:
        config = _ADAPTER.validate_python(document, context=source)
    except ValidationError as error:
        told = {each.line for each in errors if each.line}  # pydantic reports missing values again
        errors += [each for each in errors_of(error, OffloadConfig, source) if each.line not in told]
        with contextlib.suppress(ValidationError):
            rules = document.get("layers", ()) if isinstance(document, dict) else ()
            config = _ADAPTER.validate_python({"layers": rules}, context=source)
    if config is not None:
        known = (replace(rule, line=source.line(("layers", n))) for n, rule in enumerate(config.layers))
        config = replace(config, layers=tuple(known), source=source)
        errors += config.policy.problems(layers) if layers is not None else []
    if errors or config is None:
        raise ConfigError.joined(errors)
    return config


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


ConfigLike = OffloadConfig | Mapping[str, object] | str | os.PathLike[str] | None
"""Types of a policy argument: a word, the path of a YAML file, YAML text, a dict, or a configuration."""

FIT = "fit"
"""Word that sets all layers to ``auto`` without a budget. Plans for ``"fit"`` use at most nine tenths of the
device memory."""


def read_config(config: ConfigLike, *, layers: Layers = None) -> OffloadConfig:
    """Return the configuration for a policy argument.

    Args:
        config: ``"fit"``, a placement, the path of a YAML file, YAML text, a dict of settings, or a
            configuration. ``None`` means ``"fit"``.
        layers: The layers of all ranks. With ``layers``, a rule that has no effect on any layer is also an
            error.

    Raises:
        ConfigError: The policy is invalid. The error lists all problems.
    """
    if isinstance(config, Mapping):
        return OffloadConfig.from_dict(config, layers=layers)
    if isinstance(config, os.PathLike):
        return load_config(Path(config), layers=layers)
    if config is None or isinstance(config, str):
        return _read_text(FIT if config is None else config, layers)
    if not isinstance(config, OffloadConfig):
        remedy = "Pass a word such as 'fit', the path of a YAML file, a dict, or an OffloadConfig"  # type: ignore[unreachable]
        raise ConfigError(f"the policy {quoted(config)} has the wrong type. {remedy}")
    if layers is not None and (problems := config.policy.problems(layers)):
        raise ConfigError.joined(problems)
    return config


def _read_text(text: str, layers: Layers) -> OffloadConfig:
    if "\n" in text or ": " in text:
        return OffloadConfig.from_yaml(text, layers=layers)
    with contextlib.suppress(ValueError):
        return OffloadConfig(Placement.AUTO if text == FIT else Placement(text))
    if os.path.exists(text):  # noqa: PTH110 - Path.exists raises an error if the name is too long
        return load_config(text, layers=layers)
    words, files = [FIT, *names()], list[str]()
    with contextlib.suppress(OSError, ValueError):  # a zero byte in the name
        files = sorted(map(str, Path(text).parent.glob("*.y*ml")))
    nearest = difflib.get_close_matches(text, [*words, *files], n=1)
    guess = f" Did you mean {nearest[0]!r}?" if nearest else ""
    found = f" YAML files in the directory: {', '.join(files[:8])}." if files else ""
    what = f"the policy {quoted(text)} is neither a known word nor an existing file"
    raise ConfigError(f"{what}.{guess} Known words: {', '.join(words)}.{found}")


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Type of the argument for one directory, or for one directory on each drive."""


def with_directories(config: OffloadConfig, directories: Paths | None) -> OffloadConfig:
    """Return the configuration with other store directories; unchanged if ``directories`` is None.

    Args:
        config: The configuration.
        directories: One path, or one path for each drive.

    Raises:
        ConfigError: The list is empty, or a directory cannot be used.
    """
    if directories is None:
        return config
    paths = [directories] if isinstance(directories, str | os.PathLike) else list(directories)
    if not paths:
        raise ConfigError("directories=[] has no path. Name a path, or omit directories")
    store = replace(config.store, directories=tuple(Path(path) for path in paths))
    return replace(config, store=store)


def load_config(path: str | Path, *, layers: Layers = None) -> OffloadConfig:
    """Read a configuration from a YAML file.

    Args:
        path: The file.
        layers: The layers of all ranks. With ``layers``, a rule that has no effect on any layer is also an
            error.

    Raises:
        ConfigError: The file cannot be read, or the policy is invalid. The message lists each problem with
            its line.
    """
    file = str(path)
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not UTF-8 text: {error.reason}", file=file) from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=file) from None
    return OffloadConfig.from_yaml(text, file=file, layers=layers)


SCHEMA_URL = "https://raw.githubusercontent.com/tba-offload/tba-offload/main/docs/policy.schema.json"
"""Address of the JSON schema of policy files in the latest version."""


def policy_schema() -> dict[str, Any]:
    """Return the JSON schema of policy files, for completion and checks in editors."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_URL}
    return {**head, **_ADAPTER.json_schema(), "title": "tba-offload policy"}
