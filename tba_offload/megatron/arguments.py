"""Flags for Megatron-LM's training scripts, in one argparse group.

All flags begin with ``--tba-``. Each of these flags switches offloading on and overrides the policy file.
Settings of Megatron that are incompatible with offloading raise an error before Megatron creates process
groups.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tba_offload.config import FIT, OffloadConfig, StatesConfig, load_config
from tba_offload.config.document import Source
from tba_offload.errors import ConfigError, StoreError
from tba_offload.store.file import existing_directory

_FILE, _SIZE = {"metavar": "FILE"}, {"metavar": "SIZE"}
_DIRECTORIES = {"metavar": "DIR", "nargs": "+"}
_STEPS = {"metavar": "STEP", "nargs": "+", "type": int}
_SWITCH = {"action": argparse.BooleanOptionalAction, "default": None}
_STATES = {"choices": ("keep", "offload")}

_FLAGS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("policy", "", _FILE, "Policy file in YAML."),
    ("placement", "default", {"metavar": "WORD"}, "'fit', or the placement of layers that no rule matches."),
    ("directory", "store.directories", _DIRECTORIES, "Directories for offloaded bytes, one on each drive."),
    ("activation-bytes", "budget.activation_bytes", _SIZE, "Limit of the activation peak, such as 12GiB."),
    ("device-bytes", "budget.device_bytes", _SIZE, "Limit of all memory on each rank's device."),
    ("in-flight-bytes", "budget.in_flight_bytes", _SIZE, "Size of the in-flight window, such as 1GiB."),
    ("objective", "budget.objective", {"metavar": "GOAL"}, "Goal of the planner: 'time' or 'memory'."),
    ("store", "store.kind", {"metavar": "KIND"}, "Kind of store: 'auto', 'file', 'gds' or 'host'."),
    ("host-capacity", "store.host_capacity", _SIZE, "Host memory for activations, used before the drives."),
    ("checksum", "store.checksum", _SWITCH, "Check that reads return the written bytes (default)."),
    ("optimizer-states", "states", _STATES, "Placement of optimizer states between updates."),
    ("run-log", "", _FILE, "Path of the run log, such as run.jsonl. Rank 0 writes run.rank0.jsonl."),
    ("trace-steps", "", _STEPS, "Steps for which a timeline is recorded. The first step is 1."),
)
"""For each flag: its name without ``--tba-``, the setting of the policy that the flag overrides, options for
argparse, and the help text."""


class Conflict(NamedTuple):
    """A setting of Megatron that is incompatible with offloading.

    Attributes:
        flag: The flag of Megatron.
        why: The reason why the flag is incompatible.
        allowed: Values of the flag that are compatible.
        instead: The second remedy, which completes the sentence "Remove the flag, or ...".
    """

    flag: str
    why: str
    allowed: tuple[str, ...] = ("none",)
    instead: str = "the --tba- flags"

    @property
    def name(self) -> str:
        """Name of the flag's attribute in Megatron's parsed arguments. Some releases do not have the flag."""
        return self.flag.partition(" ")[0].removeprefix("--").replace("-", "_")

    def is_in_the_way(self, arguments: argparse.Namespace) -> bool:
        """Return True if the flag has an incompatible value in ``arguments``."""
        value = getattr(arguments, self.name, None)
        return bool(value) and value not in self.allowed


_SAME_ACTIVATIONS, _SAME_STATES = "the flag also offloads activations", "the flag also offloads states"
_GRAPH = "a CUDA graph needs activations at fixed addresses"
_OUTSIDE = "with this flag, Megatron uses activations outside of backward"
_FSDP = "FSDP of Megatron is not supported"
_KEEP_MASTERS = "set states.masters to 'keep' in the policy"

CONFLICTS = (
    Conflict("--distribute-saved-activations", "the flag spreads inputs of recomputed layers over ranks"),
    Conflict("--cpu-offloading", _SAME_ACTIVATIONS),
    Conflict("--cpu-offloading-num-layers", _SAME_ACTIVATIONS),
    Conflict("--fine-grained-activation-offloading", _SAME_ACTIVATIONS),
    Conflict("--moe-paged-stash", _SAME_ACTIVATIONS),
    Conflict("--enable-cuda-graph", _GRAPH),
    Conflict("--external-cuda-graph", _GRAPH),
    Conflict("--cuda-graph-impl", _GRAPH),
    Conflict("--overlap-moe-expert-parallel-comm", "the flag interleaves layers of two micro-batches"),
    Conflict("--overlap-dispatch-backward-with-experts-wgrad", _OUTSIDE),
    Conflict("--delay-wgrad-compute", _OUTSIDE),
    Conflict("--yaml-cfg", "with this flag, Megatron ignores all other flags, including the --tba- flags"),
    Conflict("--use-megatron-fsdp", _FSDP),
    Conflict("--use-torch-fsdp2", _FSDP),
)

STATES_CONFLICTS = (
    Conflict("--use-precision-aware-optimizer", "the flag stores optimizer states in another format"),
    Conflict("--optimizer-cpu-offload", _SAME_STATES),
    Conflict("--offload-optimizer-states", _SAME_STATES),
    Conflict("--rl-offload-optimizer-during-inference", _SAME_STATES),
    Conflict("--optimizer-cuda-graph", "a CUDA graph needs states at fixed addresses"),
    Conflict("--optimizer", "only states of adam and sgd can be offloaded", ("adam", "sgd")),
)
"""Settings that are incompatible with offloaded optimizer states."""

MASTERS_CONFLICTS = (
    Conflict("--log-params-norm", "the flag reads all master copies", instead=_KEEP_MASTERS),
    Conflict("--qk-clip", "the flag changes master copies after the update", instead=_KEEP_MASTERS),
)
"""Settings that are incompatible with offloaded masters (fp32 copies of 16-bit parameters)."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``--tba-`` flags to Megatron's parser, and let the parser check for incompatible settings.

    A parser that already has the flags is not changed.
    """
    if "--tba-policy" in parser._option_string_actions:
        return parser
    text = "Each flag switches offloading on. The flag for a setting overrides this setting in the policy."
    group = parser.add_argument_group("activation offloading (tba-offload)", text)
    for name, _, options, text in _FLAGS:
        group.add_argument(f"--tba-{name}", help=text, **options)
    _make_help_printable(parser)
    parse = parser.parse_known_args

    def parse_and_check(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        arguments, rest = parse(*args, **kwargs)
        try:
            if is_on(arguments):
                refuse_conflicts(arguments, config_of(arguments))
        except (ConfigError, StoreError) as error:
            # error() would first print a usage text of thousands of lines.
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        return arguments, rest

    # All methods that parse the command line call this method.
    parser.parse_known_args = parse_and_check  # type: ignore[method-assign,assignment]
    return parser


def is_on(arguments: argparse.Namespace) -> bool:
    """Return True if at least one ``--tba-`` flag was given."""
    return any(value is not None for name, value in vars(arguments).items() if name.startswith("tba_"))


def config_of(arguments: argparse.Namespace) -> OffloadConfig:
    """Return the configuration that results from the policy file and the flags.

    Raises:
        ConfigError: The policy file or a flag is invalid.
    """
    config = OffloadConfig() if arguments.tba_policy is None else load_config(Path(arguments.tba_policy))
    given: dict[str, dict[str, Any]] = {"budget": {}, "store": {}}
    for flag, setting, _, _ in _FLAGS:
        section, _, name = setting.partition(".")
        value = getattr(arguments, f"tba_{flag.replace('-', '_')}")
        if name and value is not None:
            given[section][name] = value
    placement = arguments.tba_placement
    states = {"keep": None, "offload": config.states or StatesConfig(), None: config.states}
    try:
        return replace(
            config,
            default={FIT: "auto", None: config.default}.get(placement, placement),
            source=Source(config.source.file) if given["budget"] else config.source,  # a flag has no line
            budget=replace(config.budget, **given["budget"]),
            store=replace(config.store, **given["store"]),
            states=states[arguments.tba_optimizer_states],
        )
    except ConfigError as error:
        raise ConfigError(f"with the --tba- flags: {error}") from None


def refuse_conflicts(arguments: argparse.Namespace, config: OffloadConfig) -> None:
    """Check the store directories and the settings of Megatron.

    Args:
        arguments: All parsed arguments of the training script.
        config: The result of :func:`config_of` for these arguments.

    Raises:
        ConfigError: A setting of Megatron is incompatible with offloading. The message names the flag.
        StoreError: A store directory is missing or not accessible.
    """
    for directory in map(str, config.store.directories):
        existing_directory(directory)
    conflicts = [*CONFLICTS, *(STATES_CONFLICTS if config.states is not None else ())]
    if config.states is not None and config.states.masters == "offload":
        conflicts += MASTERS_CONFLICTS
    for conflict in conflicts:
        if conflict.is_in_the_way(arguments):
            raise ConfigError(
                f"activation offloading cannot be combined with {conflict.flag}: {conflict.why}. Remove "
                f"{conflict.flag.partition(' ')[0]}, or {conflict.instead}"
            )


def _make_help_printable(parser: argparse.ArgumentParser) -> None:
    """Escape percent signs in help texts. argparse fails on a percent sign in Megatron-LM 0.19."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")
