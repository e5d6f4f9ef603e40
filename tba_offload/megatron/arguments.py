"""Flags for Megatron-LM's training scripts, in one argparse group.

All flags begin with ``--tba-`` and override the policy file. Any of these flags switches offloading on. If a
setting of Megatron is incompatible with offloading, the command line is refused before a process group
exists.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tba_offload.config import FIT, OffloadConfig, StatesConfig, load_config
from tba_offload.config.document import Source
from tba_offload.errors import ConfigError, StoreError
from tba_offload.store.file import check_directory

_FILE, _SIZE = {"metavar": "FILE"}, {"metavar": "SIZE"}
_DIRECTORIES = {"metavar": "DIR", "nargs": "+"}
_STEPS = {"metavar": "STEP", "nargs": "+", "type": int}
_SWITCH = {"action": argparse.BooleanOptionalAction, "default": None}
_STATES = {"choices": ("keep", "offload")}

_FLAGS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("policy", "", _FILE, "Policy in YAML."),
    ("placement", "default", {"metavar": "WORD"}, "The word fit, or the placement of layers without a rule."),
    ("directory", "store.directories", _DIRECTORIES, "One directory for each drive, shared by the ranks."),
    ("activation-bytes", "budget.activation_bytes", _SIZE, "Largest activation peak, such as 12GiB."),
    ("device-bytes", "budget.device_bytes", _SIZE, "Memory limit of each rank's device, with weights."),
    ("in-flight-bytes", "budget.in_flight_bytes", _SIZE, "Size of the in-flight window, such as 1GiB."),
    ("objective", "budget.objective", {"metavar": "GOAL"}, "Goal of the planner: time or memory."),
    ("store", "store.kind", {"metavar": "KIND"}, "Kind of store: auto, gds, file or host."),
    ("host-capacity", "store.host_capacity", _SIZE, "Host memory that fills up before the drives."),
    ("checksum", "store.checksum", _SWITCH, "Compare the checksums of reads and writes (default)."),
    ("optimizer-states", "states", _STATES, "Whether optimizer states are offloaded between updates."),
    ("run-log", "", _FILE, "Run log. Each rank has its own: run.rank0.jsonl and so on."),
    ("trace-steps", "", _STEPS, "Numbers of steps, from 1, with a timeline."),
)
"""The flags. Each has a name, the setting that it overrides, its options for argparse, and its help."""


class Conflict(NamedTuple):
    """A setting of Megatron that is incompatible with offloading.

    Attributes:
        flag: The flag. If only one value is incompatible, this includes the value.
        why: The reason.
        allowed: Values that are compatible.
        instead: Another remedy than removing the flag.
    """

    flag: str
    why: str
    allowed: tuple[str, ...] = ("none",)
    instead: str = "the --tba- flags"

    @property
    def name(self) -> str:
        """Attribute of Megatron's arguments. It is missing in releases without the setting."""
        return self.flag.partition(" ")[0].removeprefix("--").replace("-", "_")

    def is_in_the_way(self, arguments: argparse.Namespace) -> bool:
        """Return True if the setting has an incompatible value."""
        value = getattr(arguments, self.name, None)
        return bool(value) and value not in self.allowed


_SAME_ACTIVATIONS, _SAME_STATES = "it also offloads activations", "it also offloads states"
_GRAPH = "a CUDA graph needs activations at fixed addresses"
_OUTSIDE = "it uses activations outside of backward"
_FSDP = "it is not supported yet"
_KEEP_MASTERS = "set states.masters to 'keep' in the policy"

CONFLICTS = (
    Conflict("--distribute-saved-activations", "it spreads the inputs of recomputed layers over ranks"),
    Conflict("--cpu-offloading", _SAME_ACTIVATIONS),
    Conflict("--cpu-offloading-num-layers", _SAME_ACTIVATIONS),
    Conflict("--fine-grained-activation-offloading", _SAME_ACTIVATIONS),
    Conflict("--moe-paged-stash", _SAME_ACTIVATIONS),
    Conflict("--enable-cuda-graph", _GRAPH),
    Conflict("--external-cuda-graph", _GRAPH),
    Conflict("--cuda-graph-impl", _GRAPH),
    Conflict(
        "--overlap-moe-expert-parallel-comm",
        "it runs layers in pieces that belong to different micro-batches",
    ),
    Conflict("--overlap-dispatch-backward-with-experts-wgrad", _OUTSIDE),
    Conflict("--delay-wgrad-compute", _OUTSIDE),
    Conflict("--yaml-cfg", "it makes Megatron ignore the command line, including the flags of tba-offload"),
    Conflict("--use-megatron-fsdp", _FSDP),
    Conflict("--use-torch-fsdp2", _FSDP),
)

STATES_CONFLICTS = (
    Conflict("--use-precision-aware-optimizer", "it keeps states in its own format"),
    Conflict("--optimizer-cpu-offload", _SAME_STATES),
    Conflict("--offload-optimizer-states", _SAME_STATES),
    Conflict("--rl-offload-optimizer-during-inference", _SAME_STATES),
    Conflict("--optimizer-cuda-graph", "a CUDA graph needs states at fixed addresses"),
    Conflict("--optimizer", "only states of adam and sgd can be offloaded", ("adam", "sgd")),
)
"""Settings that are incompatible with offloaded optimizer states."""

MASTERS_CONFLICTS = (
    Conflict("--log-params-norm", "it computes with all masters at the same time", instead=_KEEP_MASTERS),
    Conflict("--qk-clip", "it changes masters after the update", instead=_KEEP_MASTERS),
)
"""Settings that are incompatible with offloaded masters."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser, and a check for incompatible settings.

    If a parser already has the flags, it is not changed.
    """
    if "--tba-policy" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(
        "activation offloading (tba-offload)",
        "Any of these flags switches offloading on. Flags override the policy.",
    )
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
    """Return True if any of the flags was given."""
    return any(value is not None for name, value in vars(arguments).items() if name.startswith("tba_"))


def config_of(arguments: argparse.Namespace) -> OffloadConfig:
    """Return the configuration of the policy file and the flags.

    Raises:
        ConfigError: The file or a flag is wrong.
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
        raise ConfigError(f"with the --tba- flags, {error}") from None


def refuse_conflicts(arguments: argparse.Namespace, config: OffloadConfig) -> None:
    """Check directories and Megatron's own settings.

    Args:
        arguments: All arguments.
        config: The configuration of the flags and the policy.

    Raises:
        ConfigError: A setting is incompatible with offloading. The message names its flag.
        StoreError: A directory is missing or not accessible.
    """
    for directory in map(str, config.store.directories):
        check_directory(directory)
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
    """Escape per cent signs.

    A help text of Megatron-LM 0.19 has an unescaped sign, on which argparse fails.
    """
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")
