"""Rows of a table that costs a process each: `make quick` runs the first ones, the whole suite runs all."""

from collections.abc import Iterable
from typing import Any

import pytest


def rows(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """values for `parametrize`: those behind the first `quick` are slow."""
    return [
        value if number < quick else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]
