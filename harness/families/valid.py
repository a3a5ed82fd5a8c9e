"""Which cases the recipes admit, and the cases of strangers read and checked by that.

core/case.py says what a case looks like, field by field; each dimension has the rules that tie its fields to others and to the
model.
"""

from pathlib import Path

import msgspec

from eagletwin.harness.core.case import MAX_FILE_BYTES, SCHEMA, Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import read_input, refuse_duplicates
from eagletwin.harness.core.request_inputs import expanded
from eagletwin.harness.core.terminal import nearest

from . import RECIPES
from .dimensions import DIMENSIONS, FEATURES


def _refuse(cause: str, remedy: str) -> InputError:
    return InputError(cause, consequence="nothing was run and nothing was written", remedy=remedy)


def read_case(path: Path) -> Case:
    """The case in a file. Raises InputError for anything that is not a valid case."""
    try:
        data = read_input(path, MAX_FILE_BYTES)
    except OSError as error:
        raise _refuse(f"{path}: {error.strerror}", "name a case file (JSON) or the id of a ledger entry") from error
    if len(data) > MAX_FILE_BYTES:
        raise _refuse(f"{path}: larger than {MAX_FILE_BYTES} bytes", "a case is a few requests; cut it down")
    return decode_case(data, str(path))


def decode_case(data: bytes, origin: str) -> Case:
    """Decode and validate JSON; `origin` names it in errors."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refuse(f"{origin}: not JSON ({error})", "give a case file written by eagletwin") from error
    try:
        refuse_duplicates(data)
    except ValueError as error:
        raise _refuse(f"{origin}: {error}", "leave one of the two out") from error
    schema = raw.get("schema", SCHEMA) if isinstance(raw, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise _refuse(
            f"{origin}: case schema {schema}; this eagletwin reads up to {SCHEMA}", "use the eagletwin that wrote it, or newer"
        )
    try:
        case = msgspec.convert(raw, Case)
    except msgspec.ValidationError as error:
        raise _refuse(f"{origin}: {error}", "correct the field; docs/reference/case.md lists all of them") from error
    check_case(case, origin)
    return case


def check_model(model: str, origin: str) -> None:
    """Raises InputError if no recipe has this name."""
    if model not in RECIPES:
        raise InputError(
            f"{origin}: no model recipe is called {model!r}",
            consequence="nothing was run: this architecture is not covered, and no verdict can be given on its arithmetic",
            remedy=f"{nearest(model, RECIPES)}; all run the same scheduler, worker, trees and commits: "
            "docs/guide/acceptance-fell.md says what can be asked about other models",
        )


def check_case(case: Case, origin: str) -> None:
    """The rules that tie fields together. Raises InputError."""
    if case.schema != SCHEMA:
        raise _refuse(f"{origin}: case schema {case.schema} does not exist", f"set it to {SCHEMA}")
    check_model(case.model, origin)
    unknown = [feature for feature in case.exercises if feature not in FEATURES]
    if unknown:
        raise _refuse(f"{origin}: exercises {unknown[0]!r} is not known", nearest(unknown[0], FEATURES))
    for dimension in sorted(DIMENSIONS.values(), key=lambda one: one.of_sent):
        for cause, remedy in dimension.refusals(expanded(case) if dimension.of_sent else case):
            raise _refuse(f"{origin}: {cause}", remedy)


def admits(case: Case) -> bool:
    """Whether an engine would be given this case."""
    try:
        check_case(case, case.name)
    except InputError:
        return False
    return True
