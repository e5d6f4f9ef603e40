"""What a placement is: a word of the policy, and what becomes of a layer that has it.

Every placement is one object, found by its name: ``Placement("keep") is Placement.KEEP``. To add one, derive
a class from :class:`Placement`, say in its one method which way a layer goes, and :func:`register` an object
of it. Session, simulator, the times of a profile and the planner's explanations all go by that method.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_known: dict[str, Placement] = {}
_with_percent: dict[str, Callable[[int], Placement]] = {}

SomePlacement = TypeVar("SomePlacement", bound="Placement")
Result_co = TypeVar("Result_co", covariant=True)


class Ways(Protocol[Result_co]):
    """The ways that a layer can go: for the session one call of it, for the simulator a stretch of time."""

    @property
    def layer(self) -> int:
        """Index of the layer among those of this process."""

    def keep(self) -> Result_co:
        """Return what the layer saves stays in memory. No hooks at all.

        Autograd's own way and checks, no cost.
        """

    def offload(self, *, rebuilds: bool = False, percent: int = 100) -> Result_co:
        """Return what the layer saves passes through hooks and travels.

        Args:
            rebuilds: Whether what cheap parts of the layer put out is made again instead of written.
            percent: Of its bytes, how many travel, 1 to 100; the rest stays, in whole activations. A layer
                that rebuilds gives no other number than 100.
        """

    def recompute(self, *, inputs_travel: bool = False, attention_travels: bool = False) -> Result_co:
        """Return the layer runs in a checkpoint: backward runs it again on its inputs.

        Args:
            inputs_travel: Whether the inputs travel meanwhile; otherwise they stay in memory.
            attention_travels: Whether what fused attention puts out travels, with the inputs, and is not
                computed again.
        """


class _ByName(type):
    """Has ``Placement(name)`` look a placement up, and ``Placement`` itself be all that there are."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if cls is not Placement:
            return super().__call__(*arguments, **options)
        (name,) = arguments
        found = _known.get(name) if isinstance(name, str) else None
        if found is None and isinstance(name, str):
            found = _found_by_percent(name)
        if found is None:
            raise ValueError(f"{name!r} is not one of {', '.join(names())}")
        return found

    def __iter__(cls) -> Iterator[Placement]:
        return iter(_known.values())


class Placement(str, metaclass=_ByName):
    """Where the activations of a layer spend the time between forward and backward.

    A placement is a ``str``, its name. A class of placements that takes parameters makes the name of them in
    ``__new__``.

    Args:
        name: The word for it in policies, tables and run logs.

    Attributes:
        recomputes: Whether backward runs the forward of some layer again that has the placement: ranks that
            share the layer must do so together.
        travels: Whether something of some such layer is written and read back.
        rebuilds: Whether cheap parts of some such layer are made again from what is read back.

    Raises:
        ValueError: ``Placement(name)`` finds no placement of this name.
    """

    __slots__ = ()

    KEEP: ClassVar[Placement]
    OFFLOAD: ClassVar[Placement]
    RECOMPUTE: ClassVar[Placement]
    RECOMPUTE_OFFLOAD: ClassVar[Placement]
    RECOMPUTE_EXCEPT_ATTENTION: ClassVar[Placement]
    OFFLOAD_REMAT: ClassVar[Placement]
    AUTO: ClassVar[Placement]

    recomputes: ClassVar[bool] = False
    travels: ClassVar[bool] = False
    rebuilds: ClassVar[bool] = False

    @property
    def value(self) -> str:
        """The name."""
        return str(self)

    @property
    def percent(self) -> int:
        """Of the bytes of a layer whose activations travel, how many do."""
        return 100

    @property
    def is_offloaded(self) -> bool:
        """Whether all that a layer saves for backward may pass through hooks: it is never recomputed."""
        return self.travels and not self.recomputes

    def take(self, ways: Ways[Result_co]) -> Result_co:
        """Says which way a layer goes: the same one whenever it is asked for the same layer.

        Args:
            ways: One of its methods is called, once.

        Returns:
            What that method returns.
        """
        return ways.keep()

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> Any:
        """How pydantic reads a placement: by its name, as the values of an enumeration."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(_read)

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: object, _handler: object) -> dict[str, object]:
        words = (re.escape(word).replace("N", "[1-9][0-9]?") for word in _with_percent)
        patterns = [{"type": "string", "pattern": f"^{word}$"} for word in words]
        return {"anyOf": [{"enum": list(_known)}, *patterns]}

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return f"Placement({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (str(self),)


def _read(value: object) -> Placement:
    from pydantic_core import PydanticCustomError

    try:
        return Placement(value)
    except ValueError:
        *most, last = [f"'{name}'" for name in names()]
        expected = f"{', '.join(most)} or {last}"
        raise PydanticCustomError("enum", "Input should be {expected}", {"expected": expected}) from None


def register(placement: SomePlacement) -> SomePlacement:
    """Make a placement known by its name: in policies, in plans, in run logs.

    Args:
        placement: The placement.

    Returns:
        The same.

    Raises:
        ValueError: The name is taken.
    """
    if _known.setdefault(str(placement), placement) is not placement:
        raise ValueError(f"a placement of the name {str(placement)!r} is known already")
    return placement


def register_percentages(word: str, make: Callable[[int], Placement]) -> None:
    """Make placements known whose names hold a whole number from 1 to 99.

    Args:
        word: Their names, with ``N`` for the number.
        make: Makes the placement of a number, the same one each time.
    """
    _with_percent[word] = make


def _found_by_percent(name: str) -> Placement | None:
    for word, make in _with_percent.items():
        before, after = word.split("N")
        number = name.removeprefix(before).removesuffix(after)
        if f"{before}{number}{after}" == name and re.fullmatch("[1-9][0-9]?", number):
            return make(int(number))
    return None


def names() -> list[str]:
    """Return the names of all placements, with ``N`` where any whole number from 1 to 99 may stand."""
    return [*_known, *_with_percent]


def unregister(placement: Placement) -> None:
    """Undoes :func:`register`."""
    _known.pop(str(placement), None)
