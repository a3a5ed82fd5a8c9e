"""How a property says that SGLang and the reference differ: what, expected and actual.

Functions instead of `assert`: a bare assertion shows no values outside pytest, and `python -O` removes it.
"""

import torch
from torch import Tensor

SHOWN = 400  # characters of a value in a message


class Unequal(AssertionError):
    """One output of SGLang is not what the reference computes."""

    def __init__(self, what: str, found: object, expected: object) -> None:
        self.what, self.found, self.expected = what, shown(found), shown(expected)
        place = first_difference(found, expected)
        self.place = f" at {place}" if place else ""
        super().__init__(f"{what}{self.place}: expected {self.expected}, actual {self.found}")


def same(what: str, found: object, expected: object) -> None:
    """Raise Unequal unless both are equal: tensors bit by bit in shape and values, anything else by `==`."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if not torch.equal(found, expected):
            raise Unequal(what, found.tolist(), expected.tolist())
    elif found != expected:
        raise Unequal(what, found, expected)


def true(what: str, condition: bool) -> None:
    """Raise Unequal unless the condition, which `what` states, is true."""
    if not condition:
        raise Unequal(what, False, True)


def first_difference(found: object, expected: object) -> str:
    """Index of the first entry of two nested lists that differs, such as [2][0]; "" if it is the whole or a length."""
    if not isinstance(found, list) or not isinstance(expected, list) or len(found) != len(expected):
        return ""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            return f"[{index}]{first_difference(one, other)}"
    return ""


def shown(value: object) -> str:
    """The value as Python writes it, cut to a length that can be read."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
