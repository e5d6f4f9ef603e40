"""Rules of a policy. A rule sets the placement of the layers that its ``match`` selects.

A ``match`` has one of three forms:

* **numbers** of layers, from 0: ``"3"``, ``"0-3"`` (both ends included), ``"0,2,8-11"``. ``"last 2"`` counts
  from the end, so that a policy fits models of any depth. Numbers and ``last`` may be
  joined: ``"0-1,last 2"``.
* **numbers within a stack**, for models with several stacks: ``"encoder:0-3"``.
* **a name**, or a glob over names: ``"decoder.layers.2?"``, ``"*.layers.1*"``.

If the whole name of a module is a number, match the module by layer number or by a glob such as ``"[3]"``. A
glob must match the whole module name, case matters, and ``*`` also matches dots (see
:func:`fnmatch.fnmatchcase`).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, WithJsonSchema

from tba_offload.config.document import Provenance, settings
from tba_offload.config.values import PlacementName
from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, shortened
from tba_offload.placements import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LayerId", "Objective", "Placement", "Policy", "Rule", "with_depths"]

_LEGAL_FORMS = (
    "write layer numbers ('3', '0-3', '0,2,8-11', 'last 2'), layer numbers of a stack ('encoder:0-3') or a "
    "module name, which may have wildcards ('decoder.layers.2?')"
)
_ONLY_NUMBERS = re.compile(r"(?:[0-9,\-\s]|last\s)*")
_ITEM = re.compile(r"last\s+0*([1-9][0-9]{0,17})|([0-9]{1,18})(?:-([0-9]{1,18}))?")


class Objective(StrEnum):
    """Goal of the planner for ``auto`` layers."""

    TIME = "time"
    """Find the shortest step within the budget."""

    MEMORY = "memory"
    """Find the lowest activation peak at which training does not wait for the drive."""


@dataclass(frozen=True)
class LayerId:
    """Identity of a layer in a policy.

    Attributes:
        number: Number of the layer, from 0, over all pipeline stages and model chunks. In a model with
            several stacks, the layers of each stack are numbered from 0.
        name: Module name of the layer without wrappers, numbered over all stages: ``decoder.layers.3``.
            Without a model, the name is empty, and rules that match names are not checked.
        stack: Name of the stack, such as ``encoder``, in a model with several stacks, else None.
        depth: Number of layers in the stack, over all ranks; None if unknown. Comparisons ignore ``depth``.
    """

    number: int
    name: str
    stack: str | None = None
    depth: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"layer {self.number} ({self.name})"

    def numbers(self, count: int) -> str:
        """Return a match for ``count`` consecutive layers, beginning with this layer."""
        numbers = str(self.number) if count == 1 else f"{self.number}-{self.number + count - 1}"
        return f"{self.stack}:{numbers}" if self.stack else numbers


Layers = Sequence[LayerId] | None


def with_depths(layers: Iterable[LayerId], everywhere: Iterable[LayerId]) -> list[LayerId]:
    """Return the layers with ``depth`` set to the number of layers in their stack.

    Args:
        layers: The layers to return.
        everywhere: The layers of all ranks.
    """
    depths: dict[str | None, int] = {}
    for layer in everywhere:
        depths[layer.stack] = max(depths.get(layer.stack, 0), layer.number + 1)
    return [replace(layer, depth=depths.get(layer.stack, layer.depth)) for layer in layers]


# ------------------------------------------------------------------------------------------- matches


@dataclass(frozen=True)
class _Match:
    glob: str | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    from_end: int = 0
    stack: str | None = None

    def matches(self, layer: LayerId) -> bool:
        if self.glob is not None:
            return fnmatch.fnmatchcase(layer.name, self.glob)
        if self.from_end and layer.depth is None:
            why = "needs the number of layers, which is unknown; pass depth to LayerId"
            raise ConfigError(f"'last {self.from_end}' {why}")
        is_last = bool(self.from_end) and layer.number >= (layer.depth or 0) - self.from_end
        is_inside = is_last or any(first <= layer.number <= last for first, last in self.ranges)
        return is_inside and self.stack in {None, layer.stack}


@functools.lru_cache(maxsize=1024)
def _matcher(match: str) -> _Match:
    stack, colon, numbers = match.strip().rpartition(":")
    if stack.strip().isdecimal():
        raise _malformed(match, f"write {quoted(f'{stack}-{numbers}')} for a range that includes both ends")
    if not colon and not _ONLY_NUMBERS.fullmatch(numbers):
        return _Match(numbers)
    ranges, from_end = [], 0
    for item in (item.strip() for item in numbers.split(",")):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise _malformed(match, f"{quoted(item)} is not a layer number or a range; {_LEGAL_FORMS}")
        first, last = int(found[2] or 0), int(found[3] or found[2] or 0)
        if last < first:
            raise _malformed(match, f"{quoted(item)} runs backwards; write {quoted(f'{last}-{first}')}")
        if found[1]:
            from_end = max(from_end, int(found[1]))
        else:
            ranges.append((first, last))
    return _Match(None, tuple(ranges), from_end, stack if colon else None)


def _malformed(match: str, problem: str) -> ConfigError:
    return ConfigError(f"malformed match {quoted(match)}: {problem}")


def _match(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise ConfigError(f"{quoted(value)} is not text; {_LEGAL_FORMS}")
    _matcher(text)
    return text


# --------------------------------------------------------------------------------------------- rules


@settings("layers")
class Rule:
    """Rule of a policy, which sets the placement of all matching layers.

    Raises:
        ConfigError: The match does not have a legal form, or the placement is unknown.
    """

    match: Annotated[str, BeforeValidator(_match), WithJsonSchema({"type": ["string", "integer"]})]
    """Layers of the rule: layer numbers (``3``, ``0-3``, ``0,2,8-11``, ``last 2``), numbers in a stack
    (``encoder:0-3``), or a module name, with globs."""

    placement: PlacementName
    """Placement of the matched layers, such as ``"keep"``."""

    line: Provenance[int | None] = field(default=None, compare=False)
    """Line of the rule in the policy file. Comparisons of rules ignore ``line``."""

    def matches(self, layer: LayerId) -> bool:
        """Return True if the rule matches the layer.

        Raises:
            ConfigError: The rule counts from the end of a stack, and the layer has no depth.
        """
        return _matcher(self.match).matches(layer)

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        return f"'{shortened(self.match)}'{where}"


@dataclass(frozen=True)
class Policy:
    """The rules and the default placement of a policy.

    Attributes:
        default: Placement of layers that no rule matches.
        rules: Rules in their order in the policy. The first matching rule sets the placement of a layer.
        file: Path of the policy file, for error messages.
    """

    default: Placement
    rules: tuple[Rule, ...] = ()
    file: str | None = None

    def resolve(self, layers: Sequence[LayerId], everywhere: Layers = None) -> dict[int, Placement]:
        """Return the placement of each layer.

        Args:
            layers: The layers of this process.
            everywhere: The layers of all processes. Each rule must match at least one layer in
                ``everywhere``, perhaps on another pipeline stage. By default the same as ``layers``.

        Returns:
            The placement of each layer, by its index in ``layers``. A placement may be ``AUTO``.

        Raises:
            ConfigError: A rule matches no layer, has no effect because of earlier rules, or names no stack in
                a model with several stacks. The error lists all invalid rules.
        """
        everywhere = layers if everywhere is None else everywhere
        if problems := self.problems(everywhere):
            raise ConfigError.joined(problems)
        known = with_depths(layers, everywhere)
        return {index: self.explain(layer)[0] for index, layer in enumerate(known)}

    def explain(self, layer: LayerId) -> tuple[Placement, str]:
        """Return the placement of a layer, and the origin of the placement: a rule, or ``default``."""
        for rule in self.rules:
            if rule.matches(layer):
                return rule.placement, f"rule {rule}"
        return self.default, "default"

    def problems(self, everywhere: Sequence[LayerId]) -> list[ConfigError]:
        """Return an error for each rule that has no effect on any layer."""
        everywhere, unjudged = with_depths(everywhere, everywhere), self.unjudged(everywhere)
        stacks = dict.fromkeys(layer.stack for layer in everywhere)
        undecided, found = set(everywhere), []
        for index, rule in enumerate(self.rules):
            matched = {layer for layer in everywhere if rule.matches(layer)}
            matcher = _matcher(rule.match)
            if rule in unjudged:
                continue
            if matcher.glob is None and matcher.stack is None and len(stacks) > 1:
                choices = " or ".join(quoted(f"{stack}:{rule.match}") for stack in stacks if stack)
                why = f"must name the stack of its layer numbers: {choices}; {_described(everywhere)}"
                found.append(self._error(rule, why))
            elif not matched:
                found.append(self._error(rule, f"matches no layer; {_described(everywhere)}"))
            elif not matched & undecided:
                others = [each for each in self.rules[:index] if any(map(each.matches, matched))]
                why = (
                    "has no effect, because earlier rules match all its layers: "
                    f"{shortened(', '.join(map(str, others)))}. Move this rule up, or remove the rule"
                )
                found.append(self._error(rule, why))
            undecided -= matched
        return found

    def placements(self, everywhere: Sequence[LayerId]) -> set[Placement]:
        """Return the placements of all layers, and the placements of all rules in :meth:`unjudged`."""
        known = with_depths(everywhere, everywhere)
        rules = self.unjudged(everywhere)
        return {self.explain(layer)[0] for layer in known} | {rule.placement for rule in rules}

    def unjudged(self, everywhere: Sequence[LayerId]) -> list[Rule]:
        """Return the rules with name patterns, which cannot be checked if the layers have no names."""
        if any(layer.name for layer in everywhere):
            return []
        by_name = [rule for rule in self.rules if _matcher(rule.match).glob is not None]
        return [rule for rule in by_name if not any(map(rule.matches, everywhere))]

    def _error(self, rule: Rule, why: str) -> ConfigError:
        return ConfigError(f"the rule {rule} {why}", file=self.file, line=rule.line)


def _described(layers: Sequence[LayerId]) -> str:
    told = []
    for stack in dict.fromkeys(layer.stack for layer in layers):
        own = sorted((each for each in layers if each.stack == stack), key=lambda layer: layer.number)
        first, last = own[0], own[-1]
        numbers = first.numbers(last.number - first.number + 1)
        names = " ... ".join(dict.fromkeys(layer.name for layer in (first, last) if layer.name))
        told.append(f"{numbers} ({names})" if names else numbers)
    return f"the layers are {', '.join(told)}" if told else "the model has no layers"
