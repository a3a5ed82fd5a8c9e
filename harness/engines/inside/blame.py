"""Whether the engine raised an exception or eagletwin did, on a CPU: decided by its class, or by the innermost frame of either.

The engine is at fault in its own code, where it calls a stub (a class of `theirs`), where it hands a stand-in
what the kernel in whose place it stands could not take either (`BadArguments`), where a capture does what CUDA refuses
(`CaptureError`), in the runtime of its Triton kernels, and in a call of its own that eagletwin stands around (`hand_on`). All
else that is raised in eagletwin's code is eagletwin's.
"""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .own_loader import folder_of

_HARNESS = Path(__file__).parents[2]


class BadArguments(RuntimeError):
    """A stand-in was handed what its kernel cannot take: raised by its checks of arguments alone."""


class CaptureError(RuntimeError):
    """CUDA refuses it while a stream is captured."""

    def __init__(self, operation: str, reason: str = "it waits for the device") -> None:
        super().__init__(f"operation not permitted when stream is capturing: {operation} ({reason})")


def demand(fits: bool, otherwise: str) -> None:
    """Raises BadArguments with what the arguments are otherwise."""
    if not fits:
        raise BadArguments(otherwise)


def demand_shapes(shape: Sequence[int], *tensors: Tensor) -> None:
    """Raises BadArguments if a tensor has another shape."""
    for tensor in tensors:
        demand(tuple(tensor.shape) == tuple(shape), f"a tensor of shape {[*tensor.shape]}, and not {[*shape]}")


@contextlib.contextmanager
def indices_of_caller() -> Iterator[None]:
    """For a kernel that looks up only what its caller gave: an index that leads outside is a BadArguments."""
    try:
        yield
    except IndexError as error:
        raise BadArguments(f"an index leads outside of what was given: {error}") from error


def hand_on(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function as the engine called it. Arguments that it does not take are its fault, and not that of what stands
    around it."""
    return function(*args, **kwargs)


theirs: list[type[BaseException]] = [BadArguments, CaptureError]


def is_ours(error: BaseException, package: str) -> bool:
    """Whether eagletwin failed, and not the worker."""
    if isinstance(error, tuple(theirs)):
        return False
    release = folder_of(package)
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        code = frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(release) or code.co_filename.endswith(", patched>") or code is hand_on.__code__:
            return False
        if file.is_relative_to(_HARNESS) and "triton_cpu" not in file.parts:
            return True
    return False


# Whether eagletwin's own code runs, in the midst of the engine's: what it reads is no access of the engine's.

in_own_code = False


@contextlib.contextmanager
def own_code(inside: bool = True) -> Iterator[None]:
    """While eagletwin's code runs; inside: False: while the engine's does again."""
    global in_own_code
    before, in_own_code = in_own_code, inside
    try:
        yield
    finally:
        in_own_code = before


# What eagletwin does not drive, whatever the engine would do with it. Raised while a worker is built; reported as a limit of
# eagletwin.


class NotDriven(Exception):
    """A configuration, or one of its settings on this release."""


# Switches of this adapter that are on in this process. A patch names them (core/patch.py), and patches.py puts them on.

ON: set[str] = set()


# Methods of single objects and functions of modules that something stands around for a while.

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

    def value(self, module: Any, name: str, value: Any) -> None:
        """A global of a module."""
        before = getattr(module, name)
        setattr(module, name, value)
        self._undo.append(lambda: setattr(module, name, before))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, around: Around) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with own_code(inside=False):
                return hand_on(original, *args, **kwargs)

        def stand(*args: Any, **kwargs: Any) -> Any:
            try:
                with own_code():
                    return around(call, *args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # `around` does not take them
                    hand_on(inspect.signature(original).bind, *args, **kwargs)  # raises if `original` does not either
                raise

        setattr(owner, name, stand)
        return original
