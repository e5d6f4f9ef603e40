"""Hooks that are put into the user's model, and how copies and pickles of the model do without them."""

from __future__ import annotations

import copyreg
from collections import Counter, OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


class InstalledHook:
    """A hook on a module, or a function among its attributes, that belongs to one session.

    Attributes:
        replaced: The attribute that stood in its place; ``None`` for none.
    """

    replaced: object = None

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # Modules that copy themselves by methods of their own get a function of Python's that does nothing.
        return getattr, (nullcontext(), "__exit__")


class HookFreeCopies:
    """Copies and pickles of modules without any :class:`InstalledHook`, until :meth:`remove` is called.

    A file that was saved from an attached model is that of the bare model: ``torch.load`` needs no other safe
    globals, and no package. Python's registry of reducers is by class, and tells the reducer which object is
    copied, also where copies share the attributes of another module.

    Args:
        modules: The modules.
    """

    _users: ClassVar[Counter[type]] = Counter()

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kinds = [
            kind
            for kind in set(map(type, modules))
            if copyreg.dispatch_table.get(kind, _reduce_without_hooks) is _reduce_without_hooks
        ]
        self._users.update(self._kinds)
        for kind in self._kinds:
            copyreg.pickle(kind, _reduce_without_hooks)

    def remove(self) -> None:
        """Have modules copied as ever. May be called twice."""
        kinds, self._kinds = self._kinds, []
        self._users.subtract(kinds)
        for kind in kinds:
            if not self._users[kind]:
                del self._users[kind], copyreg.dispatch_table[kind]


def _reduce_without_hooks(module: nn.Module) -> Any:
    reduced = module.__reduce_ex__(2)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    hooks = {name: held for name, held in reduced[2].items() if type(held) is OrderedDict and "hooks" in name}
    ours = {
        key
        for held in hooks.values()
        for key, hook in held.items()
        if isinstance(getattr(hook, "hook", hook), InstalledHook)  # PyTorch wraps some
    }
    state: dict[str, object] = {}
    for name, value in reduced[2].items():
        if name in hooks and not ours.isdisjoint(value):  # there are dictionaries of the keys of hooks, too
            state[name] = OrderedDict((key, hook) for key, hook in value.items() if key not in ours)
        elif not isinstance(value, InstalledHook):
            state[name] = value
        elif value.replaced is not None:
            state[name] = value.replaced
    return (*reduced[:2], state, *reduced[3:])
