"""The features of a case that can be taken away one by one: its dimensions, each with a way to do so that leaves the rest as it
is.

Taking one away may be done in several ways (which request stays?): then the fault needs the feature if it shows in none.
Ways are valid cases, or are left out.
"""

from collections.abc import Collection

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, encode_case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.dimensions.dimension import Dimension
from eagletwin.harness.families.valid import decode_case

FEATURES = tuple(dimension for dimension in DIMENSIONS.values() if dimension.without is not None)


def features_of(case: Case) -> tuple[Dimension, ...]:
    """The features that a case has."""
    return tuple(feature for feature in FEATURES if feature.has(case))


def variants(case: Case, without: Collection[Dimension]) -> list[Case]:
    """All ways to do without these features: valid cases that name nothing they are for. Equal ones once."""
    found = [replace(case, exercises=())]
    for feature in FEATURES:
        if feature in without and feature.without is not None:
            found = [other for one in found for other in (feature.without(one) if feature.has(one) else (one,))]
    return [other for other in dict.fromkeys(found) if _valid(other)]


def _valid(case: Case) -> bool:
    """Each field's bounds as well."""
    try:
        decode_case(encode_case(case), "a variant")
    except InputError:
        return False
    return True
