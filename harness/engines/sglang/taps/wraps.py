"""Methods of single objects and functions of modules that something stands around for a while."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ..blame import hand_on

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
        call = partial(hand_on, original)

        def stand(*args: Any, **kwargs: Any) -> Any:
            try:
                return around(call, *args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # `around` does not take them
                    hand_on(inspect.signature(original).bind, *args, **kwargs)  # raises if `original` does not either
                raise

        setattr(owner, name, stand)
        return original
