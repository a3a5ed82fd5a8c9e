"""What makes a case a special one: the dimensions by which a case is compared with those of the ledger (known.py).

A new field of a case is one of its dimension's `kinds`, or has a reason in tests/harness/test_known.py why no bug needs it.
"""

from collections.abc import Mapping
from functools import lru_cache

from eagletwin.harness.core.case import Case
from eagletwin.harness.families.dimensions import DIMENSIONS

Kind = Mapping[str, bool]
KINDS = {name: has for dimension in DIMENSIONS.values() for name, has in dimension.kinds.items()}


@lru_cache(1024)  # each case of a search is compared with each of the ledger
def kind_of(case: Case) -> Kind:
    """Of each of KINDS whether the case has it."""
    return {name: has(case) for name, has in KINDS.items()}


def covers(needed: Kind, kind: Kind) -> bool:
    """Whether a case of this kind has all that is needed."""
    return all(kind[name] for name, needs in needed.items() if needs)


def likeness(one: Kind, other: Kind) -> int:
    """In how many dimensions two cases agree."""
    return sum(one[name] == other[name] for name in KINDS)
