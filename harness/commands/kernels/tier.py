"""What the kernel tier is made of: a property of one or more of SGLang's functions, the cases that it must hold for, and for
each function a fault which makes it fail. docs/explanation/kernels.md lists them all; properties/ holds them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import Tensor

from eagletwin.cases import sample_cases
from eagletwin.harness.core.patch import Edit

from .runtime import silence_function

# How a property says that SGLang and the reference differ: what, expected and actual.
#
# Functions instead of `assert`: a bare assertion shows no values outside pytest, and `python -O` removes it.

SHOWN = 400  # characters of a value in a message


class Unequal(AssertionError):
    """One output of SGLang is not what the reference computes."""

    def __init__(self, what: str, found: object, expected: object) -> None:
        self.what, self.found, self.expected = what, format_value(found), format_value(expected)
        place = first_difference(found, expected)
        self.place = f" at {place}" if place else ""
        super().__init__(f"{what}{self.place}: expected {self.expected}, actual {self.found}")


def same(what: str, found: object, expected: object) -> None:
    """Raise Unequal unless both are equal: tensors bit by bit in shape and values, a tensor and a list in numbers, all else by
    `==`."""
    one, other = (value.tolist() if isinstance(value, Tensor) else value for value in (found, expected))
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if torch.equal(found, expected):
            return
    elif one == other:
        return
    raise Unequal(what, one, other)


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


def format_value(value: object) -> str:
    """The value as Python writes it, cut to a length that can be read."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def fault(target: str, match: str, replacement: str) -> Edit:
    """What is planted: an expression of a function of SGLang, and what it becomes."""
    return Edit(target=target, match=match, replacement=replacement)


CASES = 120  # of each property: seconds for the tier, and five times what any planted fault needed


@dataclass(frozen=True)
class Property:
    """`holds(case)` raises Unequal, or the runtime a KernelViolation, unless SGLang does what reference/ says.

    faults: one edit or more for every function of SGLang that the property is about; each must make it fail.
    """

    cases: st.SearchStrategy[Any]
    holds: Callable[[Any], None]
    faults: tuple[Edit, ...]
    named: str = ""

    @property
    def name(self) -> str:
        """Words of `holds`, unless it is named otherwise."""
        return self.named or self.holds.__name__.replace("_", " ")

    def __call__(self, case: Any) -> None:
        """Hold it against one case."""
        self.holds(case)

    @property
    def functions(self) -> list[str]:
        """Dotted names of the functions that it compares."""
        return list(dict.fromkeys(fault.target for fault in self.faults))

    def check(self, config: settings, number: int | None = None) -> None:
        """Hold it against as many cases as `config` says; the last one it runs is the smallest that fails.

        number: the seed; None: the same cases in every run.
        """
        test = given(case=self.cases)(_test_function(self))
        config(test if number is None else seed(number)(test))()

    def notices(self, target: str, config: settings, number: int | None = None) -> bool:
        """Whether a case fails, in any way, while this function does nothing."""
        with silence_function(target):
            return self.failing(config, number, (Exception,)) is not None

    def failing(self, config: settings, number: int | None = None, wrong: tuple[type[Exception], ...] = ()) -> Any:
        """The first case that fails; None if none does. wrong: what counts as failing; empty: runtime.WRONG."""
        from .runtime import WRONG

        counted = wrong or WRONG

        def fails(case: Any) -> bool:
            try:
                self.holds(case)
            except counted:
                return True
            return False

        random = None if number is None else Random(number)
        try:
            return find(self.cases, fails, settings=settings(config, phases=(Phase.generate,)), random=random)
        except NoSuchExample:
            return None


def holds_for(cases: st.SearchStrategy[Any], *faults: Edit, named: str = "") -> Callable[[Callable[[Any], None]], Property]:
    """Makes a property of a function of a case, with the faults that it must catch."""
    return lambda holds: Property(cases, holds, faults, named)


def _test_function(of: Property) -> Callable[[Any], None]:
    def holds(case: Any) -> None:
        of.holds(case)

    holds.__qualname__ = holds.__name__ = of.name.replace(" ", "_")  # what is drawn depends on the name, and on nothing else
    return holds


def same_cases(count: int = CASES) -> settings:
    """Settings which draw the same cases in every run, on any machine."""
    sample_cases.register()
    sample_cases.draw_from_seeds_alone()
    quiet = [*settings.get_profile("eagletwin-ci").suppress_health_check, HealthCheck.filter_too_much]
    return settings(settings.get_profile("eagletwin-ci"), max_examples=count, suppress_health_check=quiet)


def seeded_settings(count: int = CASES) -> settings:
    """The same for a seed that is given: another seed draws other cases."""
    return settings(same_cases(count), derandomize=False, database=None)
