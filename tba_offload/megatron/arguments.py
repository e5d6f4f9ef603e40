"""The flags of Megatron-LM's training scripts: one argparse group, and what it makes of the policy file.

Flags begin with ``--tba-`` and override the file. Offloading is on when any of them is given. What cannot go
together with it is refused when the command line is read, before a process group or a model exists.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.config import OffloadConfig, StatesConfig, load_config, parse_size
from tba_offload.config.policy import Objective, Placement
from tba_offload.config.store import kinds
from tba_offload.errors import ConfigError, StoreError
from tba_offload.store.hanging import ask
from tba_offload.store.run_file import check_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Conflict:
    """A setting of Megatron that does not go together with offloading.

    Attributes:
        name: The attribute of Megatron's arguments; a release that lacks it has no such setting.
        taken: Whether a value of it is in the way.
        flag: What to change on the command line.
        why: Why.
        instead: What to do otherwise than to change that.
    """

    name: str
    taken: Callable[[Any], bool]
    flag: str
    why: str
    instead: str = "the --tba- flags"


CONFLICTS = (
    Conflict(
        "recompute_granularity",
        lambda value: value == "full",
        "--recompute-granularity full",
        "it recomputes whole layers on its own; place layers recompute in the policy instead",
    ),
    Conflict("cpu_offloading", bool, "--cpu-offloading", "it moves the same activations"),
    Conflict(
        "cpu_offloading_num_layers", bool, "--cpu-offloading-num-layers", "it moves the same activations"
    ),
    Conflict(
        "fine_grained_activation_offloading",
        bool,
        "--fine-grained-activation-offloading",
        "it moves the same activations",
    ),
    Conflict("enable_cuda_graph", bool, "--enable-cuda-graph", "a graph fixes the addresses of activations"),
    Conflict(
        "external_cuda_graph", bool, "--external-cuda-graph", "a graph fixes the addresses of activations"
    ),
    Conflict(
        "cuda_graph_impl",
        lambda value: value not in {None, "none"},
        "--cuda-graph-impl",
        "a graph fixes the addresses of activations",
    ),
    Conflict(
        "overlap_moe_expert_parallel_comm",
        bool,
        "--overlap-moe-expert-parallel-comm",
        "it runs layers in pieces that belong to different micro-batches",
    ),
    Conflict(
        "overlap_dispatch_backward_with_experts_wgrad",
        bool,
        "--overlap-dispatch-backward-with-experts-wgrad",
        "it uses activations outside of backward",
    ),
    Conflict("moe_paged_stash", bool, "--moe-paged-stash", "it moves the same activations"),
    Conflict(
        "yaml_cfg", bool, "--yaml-cfg", "it makes Megatron ignore the command line, these flags included"
    ),
    Conflict("delay_wgrad_compute", bool, "--delay-wgrad-compute", "it uses activations outside of backward"),
    Conflict("use_megatron_fsdp", bool, "--use-megatron-fsdp", "it is not supported yet"),
    Conflict("use_custom_fsdp", bool, "--use-custom-fsdp", "it is not supported yet"),
    Conflict("use_torch_fsdp2", bool, "--use-torch-fsdp2", "it is not supported yet"),
)

STATES_CONFLICTS = (
    Conflict(
        "use_precision_aware_optimizer",
        bool,
        "--use-precision-aware-optimizer",
        "it keeps states in a form of its own",
    ),
    Conflict("optimizer_cpu_offload", bool, "--optimizer-cpu-offload", "it moves the same states"),
    Conflict("offload_optimizer_states", bool, "--offload-optimizer-states", "it moves the same states"),
    Conflict(
        "rl_offload_optimizer_during_inference",
        bool,
        "--rl-offload-optimizer-during-inference",
        "it moves the same states",
    ),
    Conflict("optimizer_cuda_graph", bool, "--optimizer-cuda-graph", "a graph fixes the addresses of states"),
    Conflict(
        "optimizer",
        lambda value: value not in {None, "adam", "sgd"},
        "--optimizer",
        "states of adam and sgd alone are offloaded",
    ),
)
"""Settings that do not go together with offloaded optimizer states."""

_KEEP_MASTERS = "set states.masters to keep in the policy"

MASTERS_CONFLICTS = (
    Conflict(
        "log_params_norm", bool, "--log-params-norm", "it computes with all masters at once", _KEEP_MASTERS
    ),
    Conflict("qk_clip", bool, "--qk-clip", "it changes masters after the update", _KEEP_MASTERS),
)
"""Settings that do not go together with masters that are offloaded."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser, which from then on refuses what does not go together with them.

    A parser that has them already stays as it is.
    """
    if "--tba-policy" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(
        "activation offloading (tba-offload)",
        "On when any of these flags is given; flags override the policy.",
    )
    group.add_argument("--tba-policy", metavar="FILE", help="Policy in YAML.")
    group.add_argument(
        "--tba-placement",
        type=_placement,
        metavar="PLACEMENT",
        help="Placement of layers that no rule of the policy matches.",
    )
    group.add_argument(
        "--tba-directory",
        metavar="DIR",
        nargs="+",
        help="Where offloaded bytes go, one directory for each drive; ranks of a node share them out.",
    )
    group.add_argument(
        "--tba-activation-bytes", metavar="SIZE", help="Most bytes of resident activations, such as 12GiB."
    )
    group.add_argument(
        "--tba-device-bytes",
        metavar="SIZE",
        help="Most bytes on the device of each rank, weights and gradients included, such as 70GiB.",
    )
    group.add_argument("--tba-in-flight-bytes", metavar="SIZE", help="Most bytes in flight, such as 1GiB.")
    group.add_argument(
        "--tba-objective",
        choices=[objective.value for objective in Objective],
        help="What layers placed auto are planned for.",
    )
    group.add_argument("--tba-store", choices=kinds(), help="Kind of store.")
    group.add_argument(
        "--tba-host-capacity",
        metavar="SIZE",
        help="Host memory of each rank for what the drives have no time for, such as 16GiB.",
    )
    group.add_argument(
        "--tba-checksum",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Compare bytes that are read from drives with those written; on unless told otherwise.",
    )
    group.add_argument(
        "--tba-optimizer-states",
        choices=("keep", "offload"),
        help="Whether the states of the optimizer lie in the store between updates.",
    )
    group.add_argument(
        "--tba-run-log",
        metavar="FILE",
        help="Run log, such as run.jsonl; of several ranks each has its own, run.rank0.jsonl and so on. A "
        "run that finds it used takes run.2.jsonl.",
    )
    group.add_argument(
        "--tba-trace-steps",
        metavar="STEP",
        type=int,
        nargs="+",
        help="Steps of this run, from 1, that the run log tells over time, for tba-offload timeline.",
    )
    _make_help_printable(parser)
    _check_when_read(parser)
    return parser


def is_on(arguments: argparse.Namespace) -> bool:
    """Whether any of the flags was given."""
    return any(value is not None for name, value in vars(arguments).items() if name.startswith("tba_"))


def config_of(arguments: argparse.Namespace) -> OffloadConfig:
    """Return the policy file with the flags on top.

    Raises:
        ConfigError: File or flags are wrong.
    """
    config = OffloadConfig() if arguments.tba_policy is None else load_config(Path(arguments.tba_policy))
    if arguments.tba_placement is not None:
        config = _placed(config, Placement(arguments.tba_placement))
    budget = _given(
        activation_bytes=_size("--tba-activation-bytes", arguments.tba_activation_bytes),
        device_bytes=_size("--tba-device-bytes", arguments.tba_device_bytes),
        in_flight_bytes=_size("--tba-in-flight-bytes", arguments.tba_in_flight_bytes),
        objective=Objective(arguments.tba_objective) if arguments.tba_objective is not None else None,
    )
    store = _given(
        kind=arguments.tba_store,
        directories=_paths(arguments.tba_directory),
        host_capacity=_size("--tba-host-capacity", arguments.tba_host_capacity),
        checksum=arguments.tba_checksum,
    )
    return dataclasses.replace(
        config,
        lines=None if budget else config.lines,  # what a flag says stands in no line of the file
        budget=dataclasses.replace(config.budget, **budget),
        store=dataclasses.replace(config.store, **store),
        states=_states(config, arguments.tba_optimizer_states),
    )


def _states(config: OffloadConfig, wanted: str | None) -> StatesConfig | None:
    """How states are offloaded: as the policy says, or the flag."""
    if wanted is None:
        return config.states
    return None if wanted == "keep" else config.states or StatesConfig()


def check_directories(config: OffloadConfig) -> None:
    """Check that the store will find or make its directories on this node; none is made yet.

    Raises:
        StoreError: One is missing or cannot be reached.
    """
    for directory in config.store.directories:
        place = str(directory)
        ask(partial(check_directory, place), place, config.store.stall_seconds)


def refuse_conflicts(arguments: argparse.Namespace, config: OffloadConfig) -> None:
    """Check Megatron's own settings.

    Args:
        arguments: All arguments.
        config: What was made of ours.

    Raises:
        ConfigError: One of them does not go together with offloading; the message names its flag.
    """
    for conflict in _conflicts_of(config):
        if conflict.taken(getattr(arguments, conflict.name, None)):
            raise ConfigError(
                f"activation offloading does not go together with {conflict.flag}: {conflict.why}; remove "
                f"{conflict.flag.partition(' ')[0]}, or {conflict.instead}"
            )


def _conflicts_of(config: OffloadConfig) -> Iterator[Conflict]:
    yield from CONFLICTS
    if config.states is not None:
        yield from STATES_CONFLICTS
        if config.states.masters == "offload":
            yield from MASTERS_CONFLICTS


def _make_help_printable(parser: argparse.ArgumentParser) -> None:
    """Megatron-LM 0.19 has a bare per cent sign in a help text, for which argparse prints no help at all."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")


def _check_when_read(parser: argparse.ArgumentParser) -> None:
    """Every way of reading the command line ends in this method of the parser."""
    parse = parser.parse_known_args

    def parse_and_check(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        arguments, rest = parse(*args, **kwargs)
        if is_on(arguments):
            try:
                config = config_of(arguments)
                check_directories(config)
                refuse_conflicts(arguments, config)
            except (ConfigError, StoreError) as error:
                # Not error(), which prints a usage of thousands of lines first.
                parser.exit(2, f"{parser.prog}: error: {error}\n")
        return arguments, rest

    parser.parse_known_args = parse_and_check  # type: ignore[method-assign,assignment]


def _placement(word: str) -> str:
    """Return the name of a placement.

    Raises:
        argparse.ArgumentTypeError: There is none of this name.
    """
    try:
        return Placement(word).value
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _placed(config: OffloadConfig, default: Placement) -> OffloadConfig:
    """Return the configuration with another default; an objective of the file goes with the last ``auto``."""
    config = dataclasses.replace(config, default=default)
    if Placement.AUTO in {default, *(rule.placement for rule in config.layers)}:
        return config
    return dataclasses.replace(config, budget=dataclasses.replace(config.budget, objective=None))


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _paths(directories: Sequence[str] | None) -> tuple[Path, ...] | None:
    return None if directories is None else tuple(Path(directory) for directory in directories)
