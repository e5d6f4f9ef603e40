"""Which layer gets which placement: what the user wrote, matched against the layers of a model.

A rule's ``match`` takes one of three forms:

* **numbers** of layers, from 0: ``"3"``, ``"0-3"`` (both ends included), ``"0,2,8-11"``, and counted from the
  end, so that a policy fits models of any depth: ``"last 2"``, ``"0-1,last 2"``;
* **numbers within a stack**, where a model has several: ``"encoder:0-3"``;
* **a name**, or a glob over names: ``"decoder.layers.2?"``, ``"*.layers.1*"``.

What has a colon is numbers within a stack; what has only digits, commas, hyphens, spaces and the word
``last`` before a number is numbers; everything else is a name. A module whose whole name is a number is
matched by its number, or by the glob ``"[3]"``. Globs are those of :func:`fnmatch.fnmatchcase`: they match
the whole name, case counts, and ``*`` also crosses dots.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, WithJsonSchema

from tba_offload.errors import ConfigError
from tba_offload.formatting import quoted, shortened
from tba_offload.placements import Placement, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["LayerId", "Objective", "Placement", "Policy", "Rule", "with_depths"]

_LEGAL_FORMS = (
    "a match is layer numbers ('3', '0-3', '0,2,8-11', 'last 2'), numbers within a stack ('encoder:0-3') "
    "or a name with globs ('decoder.layers.2?')"
)
_ONLY_NUMBERS = re.compile(r"(?:[0-9,\-\s]|last\s)*")
_ITEM = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_FROM_END = re.compile(r"last\s+([0-9]+)")
_GLOB_BRACKETS = re.compile(r"\[!?\]?[^\]]*\]")
_NOT_IN_NAMES = re.compile(r"[\s,:\[\]]")


class Objective(StrEnum):
    """What is wanted of the plan for layers placed ``auto``."""

    TIME = "time"
    """The least step time under the budget."""

    MEMORY = "memory"
    """The lowest peak at which compute waits for nothing; what would free hardly anything stays."""


@dataclass(frozen=True)
class LayerId:
    """One layer as a policy sees it.

    Attributes:
        number: Number of the layer from 0, over all pipeline stages and model chunks. Where the model
            has several stacks, each of them counts from 0.
        name: Name of the module, without wrappers and numbered over all stages: ``decoder.layers.3``. Empty
            where there is no model yet; then rules by name are not judged.
        stack: ``encoder`` or ``decoder`` where the model has several stacks, else None.
        depth: How many layers its stack has, over all ranks; None if that is not known. It does not count
            when layers are compared.
    """

    number: int
    name: str
    stack: str | None = None
    depth: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"layer {self.number} ({self.name})"

    def numbers(self, count: int) -> str:
        """Return the numbers of ``count`` layers from this one on, as rules of a policy take them."""
        numbers = str(self.number) if count == 1 else f"{self.number}-{self.number + count - 1}"
        return f"{self.stack}:{numbers}" if self.stack else numbers


def with_depths(layers: Iterable[LayerId], everywhere: Iterable[LayerId]) -> list[LayerId]:
    """Return the same layers with the depths of their stacks, by which ``last 2`` is matched.

    Args:
        layers: Some layers.
        everywhere: The layers of all ranks.
    """
    depths: dict[str | None, int] = {}
    for layer in everywhere:
        depths[layer.stack] = max(depths.get(layer.stack, 0), layer.number + 1)
    return [replace(layer, depth=depths.get(layer.stack, layer.depth)) for layer in layers]


@dataclass(frozen=True)
class Rule:
    """Gives a placement to the layers that it matches.

    Attributes:
        match: Numbers (``3``, ``0-3``, ``0,2,8-11``, ``last 2``), numbers in a stack (``encoder:0-3``), or
            a name, with globs.
        placement: What these layers get; the word itself (``"keep"``) will do.
        line: The line of the file that it was read from. It does not count when rules are compared.

    Raises:
        ConfigError: The match has none of the legal forms, or the placement is not one.
    """

    match: str
    placement: PlacementName
    line: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise ConfigError(f"match: {quoted(self.match)} is not text; {_LEGAL_FORMS}", line=self.line)
        try:
            _matcher(self.match)
        except ValueError as error:
            raise ConfigError(str(error), line=self.line) from None
        try:
            object.__setattr__(self, "placement", _placement(self.placement))
        except ValueError as error:
            raise ConfigError(f"placement: {error}", line=self.line) from None

    def matches(self, layer: LayerId) -> bool:
        """Whether this rule speaks of the layer.

        Raises:
            ConfigError: The rule counts from the end, and the layer does not know the depth of its stack.
        """
        return _matcher(self.match).matches(layer)

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        return f"'{shortened(self.match)}'{where}"


@dataclass(frozen=True)
class Policy:
    """Rules, and the placement of every layer that no rule matches.

    Attributes:
        default: The placement of layers without a rule.
        rules: In order: the first that matches a layer decides.
        file: The file that the rules were read from, for messages.
    """

    default: Placement
    rules: tuple[Rule, ...] = ()
    file: str | None = None

    def resolve(
        self, layers: Sequence[LayerId], everywhere: Sequence[LayerId] | None = None
    ) -> dict[int, Placement]:
        """Give every layer its placement.

        Args:
            layers: The layers of this process.
            everywhere: The layers of all processes, by which rules are judged: a rule may match nothing
                on one pipeline stage. By default the same as ``layers``.

        Returns:
            Index into ``layers`` → placement. It may be ``AUTO`` where the policy says so.

        Raises:
            ConfigError: A rule matches no layer anywhere, earlier rules leave it none, or it gives bare
                numbers where several stacks count their own; says all of them.
        """
        everywhere = layers if everywhere is None else everywhere
        if problems := self.problems(everywhere):
            raise ConfigError.joined(problems)
        known = with_depths(layers, everywhere)
        return {index: self.explain(layer)[0] for index, layer in enumerate(known)}

    def explain(self, layer: LayerId) -> tuple[Placement, str]:
        """Return the placement of a layer, and why: the rule that gives it, or ``default``."""
        for rule in self.rules:
            if rule.matches(layer):
                return rule.placement, f"rule {rule}"
        return self.default, "default"

    def problems(self, everywhere: Sequence[LayerId]) -> list[ConfigError]:
        """Return what is wrong with each rule that cannot take effect on the layers of all ranks."""
        everywhere = with_depths(everywhere, everywhere)
        found: list[ConfigError] = []
        undecided = set(everywhere)
        for index, rule in enumerate(self.rules):
            matched = {layer for layer in everywhere if rule.matches(layer)}
            if self._waits_for_names(rule, everywhere):
                continue
            if _is_ambiguous(rule, everywhere):
                found.append(self._ambiguous(rule, everywhere))
            elif not matched:
                found.append(self._unmatched(rule, everywhere))
            elif not matched & undecided:
                found.append(self._shadowed(rule, matched, self.rules[:index]))
            undecided -= matched
        return found

    def placements(self, everywhere: Sequence[LayerId]) -> set[Placement]:
        """Return what the layers of all ranks get; also by rules that are not judged."""
        known = with_depths(everywhere, everywhere)
        return {self.explain(layer)[0] for layer in known} | {
            rule.placement for rule in self.unjudged(everywhere)
        }

    def unjudged(self, everywhere: Sequence[LayerId]) -> list[Rule]:
        """Return the rules by name that match nothing because the layers have no names yet."""
        return [rule for rule in self.rules if self._waits_for_names(rule, everywhere)]

    def doubts(self, everywhere: Sequence[LayerId]) -> list[str]:
        """Of each rule that names numbers of which some are no layer's, which they are.

        A policy for models of several depths may mean it.
        """
        everywhere = with_depths(everywhere, everywhere)
        found: list[str] = []
        for rule in self.rules:
            matcher = _matcher(rule.match)
            missing = matcher.missing(everywhere) if isinstance(matcher, _Numbers) else ""
            if missing and any(map(rule.matches, everywhere)):
                missing = shortened(missing)
                text = f"the rule {rule} names layers that there are not: {missing}; {_describe(everywhere)}"
                found.append(str(self._error(rule, text)))
        return found

    @staticmethod
    def _waits_for_names(rule: Rule, everywhere: Sequence[LayerId]) -> bool:
        if not isinstance(_matcher(rule.match), _Name) or any(layer.name for layer in everywhere):
            return False
        return not any(map(rule.matches, everywhere))

    def _unmatched(self, rule: Rule, everywhere: Sequence[LayerId]) -> ConfigError:
        return self._error(rule, f"the rule {rule} matches no layer; {_describe(everywhere)}")

    def _shadowed(self, rule: Rule, matched: set[LayerId], earlier: Sequence[Rule]) -> ConfigError:
        winners = [other for other in earlier if any(other.matches(layer) for layer in matched)]
        return self._error(
            rule,
            f"the rule {rule} never takes effect: the first match wins, and all its layers are already "
            f"matched by {shortened(', '.join(map(str, winners)))}; move it up or remove it",
        )

    def _ambiguous(self, rule: Rule, everywhere: Sequence[LayerId]) -> ConfigError:
        choices = " or ".join(quoted(f"{stack}:{rule.match}") for stack in _stacks(everywhere) if stack)
        return self._error(
            rule, f"the rule {rule} must say which stack it counts in: {choices}; {_describe(everywhere)}"
        )

    def _error(self, rule: Rule, message: str) -> ConfigError:
        return ConfigError(message, file=self.file, line=rule.line)


@dataclass(frozen=True)
class _Numbers:
    """Layers by number, in one stack or in a model that has only one."""

    ranges: tuple[tuple[int, int], ...]
    from_end: int = 0
    stack: str | None = None

    def matches(self, layer: LayerId) -> bool:
        if self.stack not in {None, layer.stack}:
            return False
        return any(first <= layer.number <= last for first, last in self._ranges_at(layer.depth))

    def missing(self, layers: Iterable[LayerId]) -> str:
        """Return the numbers of the ranges that no layer has: ``24-30``.

        And how far ``last`` goes beyond them.
        """
        own = [layer for layer in layers if self.stack in {None, layer.stack}]
        numbers = sorted({layer.number for layer in own})
        found = [gap for first, last in self.ranges for gap in _gaps(first, last, numbers)]
        if own and self.from_end > (own[0].depth or 0):
            found.append(f"last {self.from_end}")
        return ",".join(found)

    def _ranges_at(self, depth: int | None) -> tuple[tuple[int, int], ...]:
        if not self.from_end:
            return self.ranges
        if depth is None:
            raise ConfigError(
                f"'last {self.from_end}' counts from the end of a stack whose depth is not known; give "
                "LayerId its depth"
            )
        return (*self.ranges, (depth - self.from_end, depth - 1))


@dataclass(frozen=True)
class _Name:
    """Layers by name."""

    glob: str

    def matches(self, layer: LayerId) -> bool:
        return fnmatch.fnmatchcase(layer.name, self.glob)


@functools.lru_cache(maxsize=1024)
def _matcher(match: str) -> _Numbers | _Name:
    """Read a match; ValueError when it has none of the legal forms."""
    text = match.strip()
    if ":" in text:
        stack, numbers = text.split(":", 1)
        return _numbers(match, numbers, _checked_name(match, stack))
    if _ONLY_NUMBERS.fullmatch(text):
        return _numbers(match, text, None)
    return _Name(_checked_name(match, text))


def _numbers(match: str, numbers: str, stack: str | None) -> _Numbers:
    """Read ``"0,2,8-11,last 2"``."""
    items = [item.strip() for item in numbers.split(",")]
    from_end = [int(found[1]) for item in items if (found := _FROM_END.fullmatch(item))]
    if 0 in from_end:
        raise _malformed(match, f"'last 0' names no layer; {_LEGAL_FORMS}")
    ranges = tuple(_range(match, item) for item in items if not _FROM_END.fullmatch(item))
    return _Numbers(ranges, max(from_end, default=0), stack)


def _range(match: str, item: str) -> tuple[int, int]:
    """Read ``"3"`` or ``"0-3"``, both ends included."""
    found = _ITEM.fullmatch(item)
    if found is None:
        problem = f"{quoted(item)} is not a layer number or a range" if item else "a layer number is missing"
        if re.fullmatch(r"-[0-9]+", item):
            problem += f", the layers at the end are 'last {shortened(item[1:])}'"
        raise _malformed(match, f"{problem}; {_LEGAL_FORMS}")
    first = int(found[1])
    last = int(found[2]) if found[2] else first
    if last < first:
        raise _malformed(match, f"{quoted(item)} runs backwards, write {quoted(f'{last}-{first}')}")
    return first, last


def _malformed(match: str, problem: str) -> ValueError:
    return ValueError(f"malformed match {quoted(match)}: {problem}")


def _gaps(first: int, last: int, numbers: Iterable[int]) -> Iterator[str]:
    """Yield the parts of a range that are not among sorted numbers."""
    for number in numbers:
        if first <= number <= last:
            yield from _range_word(first, number - 1)
            first = number + 1
    yield from _range_word(first, last)


def _range_word(first: int, last: int) -> Iterator[str]:
    """``3-5``, or ``3`` for one number; nothing for none."""
    if first <= last:
        yield str(first) if first == last else f"{first}-{last}"


def _checked_name(match: str, name: str) -> str:
    """Return the name itself; ValueError when no module can be called that."""
    unexpected = _NOT_IN_NAMES.search(_GLOB_BRACKETS.sub("", name))
    if unexpected is not None:
        raise _malformed(match, f"unexpected {unexpected[0]!r}; {_LEGAL_FORMS}")
    if not name:
        raise _malformed(match, f"the stack's name is missing; {_LEGAL_FORMS}")
    return name


def _placement(word: object) -> Placement:
    try:
        return Placement(str(word))
    except ValueError:
        raise ValueError(f"must be one of {', '.join(names())}, not {quoted(word)}") from None


PlacementName = Annotated[
    Placement,
    BeforeValidator(_placement),
    WithJsonSchema(
        {"anyOf": [{"enum": list(Placement)}, {"type": "string", "pattern": "^offload-[1-9][0-9]?%$"}]}
    ),
]


def _is_ambiguous(rule: Rule, layers: Iterable[LayerId]) -> bool:
    """Whether the rule gives bare numbers although several stacks count their own."""
    matcher = _matcher(rule.match)
    return isinstance(matcher, _Numbers) and matcher.stack is None and len(_stacks(layers)) > 1


def _stacks(layers: Iterable[LayerId]) -> list[str | None]:
    """Return the stacks in order of appearance."""
    return list(dict.fromkeys(layer.stack for layer in layers))


def _describe(layers: Sequence[LayerId]) -> str:
    """Return what layers there are, for messages: ``the layers are 0-7 (decoder.layers.0 ...

    Decoder.layers.7)``.
    """
    if not layers:
        return "the model has no layers"
    return "the layers are " + ", ".join(_describe_stack(stack, layers) for stack in _stacks(layers))


def _describe_stack(stack: str | None, layers: Iterable[LayerId]) -> str:
    own = sorted({layer for layer in layers if layer.stack == stack}, key=lambda layer: layer.number)
    prefix = f"{stack}:" if stack else ""
    names = [layer.name for layer in own if layer.name]
    shown = ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}"
    numbers = ",".join(_runs([layer.number for layer in own]))
    return f"{prefix}{numbers} ({shown})" if shown else f"{prefix}{numbers}"


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Sorted numbers as ranges: 0, 1, 2, 5 → ``0-2``, ``5``."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] > numbers[end - 1] + 1:
            yield from _range_word(numbers[start], numbers[end - 1])
            start = end
