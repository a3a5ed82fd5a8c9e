"""What a search is asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field

from eagletwin.cases.blocks import Asked
from eagletwin.harness.core.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a search is asked for.

    seconds, max_cases  when to stop generating; shrink_seconds: when to stop shrinking, for each finding
    command             what a person types to search like this again
    asked               what all blocks of cases have
    unmet               what a case lacks of what all cases are to have; empty: nothing
    """

    seed: int
    seconds: float
    max_cases: int
    shrink_seconds: float
    command: str
    asked: Asked = field(default_factory=Asked)
    unmet: Callable[[Case], str] = lambda case: ""
