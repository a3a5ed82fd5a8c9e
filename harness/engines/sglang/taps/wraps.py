"""Methods of single objects and functions of modules that something stands around for a while."""

from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]


class Wraps:
    """`around` is called in the place of what it wraps, with that before its arguments. `undo` takes everything off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def method(self, owner: Any, name: str, around: Around) -> None:
        """Of this object alone; others of its class are untouched."""
        before = vars(owner).get(name)
        self._set(owner, name, around)
        if before is None:
            self._undo.append(lambda: delattr(owner, name))  # the class's own method shows again
        else:  # somebody else stands around it already
            self._undo.append(lambda: setattr(owner, name, before))

    def function(self, module: Any, name: str, around: Around) -> None:
        """As the code of this module calls it."""
        original = self._set(module, name, around)
        self._undo.append(lambda: setattr(module, name, original))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, around: Around) -> Any:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))
        return original
