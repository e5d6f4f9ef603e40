"""Events of a run log are checked before anything is computed from them, and damage is named.

The bounds are far beyond any machine; what lies outside of them is damage, and would overflow on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from tba_offload.errors import RunLogError

if TYPE_CHECKING:
    from collections.abc import Mapping

_Model = TypeVar("_Model", bound=BaseModel)

# Types of what events hold.
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**50)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Number = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Flag = Annotated[bool, Field(strict=True)]
Word = Annotated[str, Field(max_length=1000)]


def checked(model: type[_Model], event: Mapping[str, object]) -> _Model:
    """Return an event with its types.

    Args:
        model: What it must look like.
        event: The event.

    Raises:
        RunLogError: A part is missing, of another type or beyond all bounds; says which.
    """
    try:
        return model.model_validate(event)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        said = ": ".join(part for part in (where, first["msg"].removeprefix("Value error, ")) if part)
        raise RunLogError(f"the {event.get('event')} event is damaged: {said}{more}") from None
