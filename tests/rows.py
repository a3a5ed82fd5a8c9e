"""Rows of a table that costs a process or an engine each: which of them `make quick`, `make test` and `make quality` run."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def rows(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """values for `parametrize`: those after the first `quick` are slow."""
    return [value if number < quick else _marked(value, pytest.mark.slow) for number, value in enumerate(values)]


def spread(values: Iterable[Any], *kinds: Callable[[Any], object]) -> list[Any]:
    """values for `parametrize`: each is long of which an earlier one has every kind.

    kinds: functions of a value; without any, the first value stays. `make test` runs each kind at least once, `make quality`
    the other rows.
    """
    seen: set[tuple[int, object]] = set()
    found = []
    for value in values:
        own = {(number, kind(value)) for number, kind in enumerate(kinds)} or {(0, None)}
        found.append(_marked(value, pytest.mark.long) if own <= seen else value)
        seen |= own
    return found


def first_of_each(values: Iterable[Any], kind: Callable[[Any], object]) -> list[Any]:
    """The first value of each kind."""
    found: dict[object, Any] = {}
    for value in values:
        found.setdefault(kind(value), value)
    return list(found.values())


def long(*values: Any) -> list[Any]:
    """values for `parametrize` that `make quality` runs, and `make test` does not."""
    return [_marked(value, pytest.mark.long) for value in values]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
