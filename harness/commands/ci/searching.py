"""Searches of a CI job: `eagletwin fuzz` of everything, or one search for each model recipe that is named."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Changes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, EagletwinError, InputError
from eagletwin.harness.core.run_spec import RunSpec

from ..fuzz.command import search
from ..fuzz.options import SearchOptions
from ..fuzz.page import SUMMARY

UNCONFIRMED = "unconfirmed"  # the search was ended while it made the case smaller


@dataclass(frozen=True, slots=True)
class FamilyFinding:
    """A finding of a search.

    line    rule, stage, exception; place: the first wrong number
    status  of its verdict, or UNCONFIRMED; known: the ledger's bug that it may be
    case    the smallest; changes: the options that it runs with; ran: changed functions that it called
    """

    line: str
    status: str
    folder: str
    known: str
    place: str = ""
    case: Case | None = None
    changes: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FamilySearch:
    """What came of one search.

    said      its headline, or why it did not run
    past      known bugs that explain what its cases showed; left_out: what it did not look at
    folder    its run folder, if it ran
    changes   what was changed in the SGLang, and how many cases ran it
    """

    family: str
    said: str
    code: int
    cases: int = 0
    findings: tuple[FamilyFinding, ...] = ()
    past: tuple[str, ...] = ()
    folder: Path | None = None
    changes: Changes = field(default_factory=Changes)
    left_out: tuple[str, ...] = ()

    @property
    def called(self) -> str:
        return self.family or "everything"

    @property
    def exit_code(self) -> int:
        """As fuzz has it. A finding whose smallest case may be a known bug is no news, but the case that was found may."""
        if self.code != EXIT_DIVERGED:
            return self.code
        news = any(found.status == "diverged" and not found.known for found in self.findings)
        return EXIT_DIVERGED if news else EXIT_UNKNOWN


def search_family(family: str, minutes: float, seed: int, run: RunSpec, out: Path, base: str = "") -> FamilySearch:
    """Search one family, or everything, and keep the run folder below `out`. base: as in SearchOptions. Raises InputError."""
    options = SearchOptions(minutes=minutes, seed=seed, only=(family,) if family else (), run=run, base=base, out=out)
    options.check()
    try:
        code = search(options)
    except InputError:
        raise
    except EagletwinError as error:  # it ends this search, and no other
        return FamilySearch(family, " ".join(error.cause.split()), EXIT_UNKNOWN)
    file = out / f"fuzz-{seed}" / SUMMARY
    if not file.is_file():  # it did not start
        return FamilySearch(family, "SGLang would not start", code if code != EXIT_EQUAL else EXIT_UNKNOWN)
    return _read(family, code, file)


def search_so_far(family: str, seed: int, out: Path) -> FamilySearch:
    """What a search that was ended had looked at and found until then."""
    file = out / f"fuzz-{seed}" / SUMMARY
    if not file.is_file():
        return FamilySearch(family, "interrupted before its first case", EXIT_UNKNOWN)
    seen = _read(family, EXIT_UNKNOWN, file)
    code = EXIT_DIVERGED if any(found.status == "diverged" for found in seen.findings) else EXIT_UNKNOWN
    return dataclasses.replace(seen, code=code)


def _read(family: str, code: int, file: Path) -> FamilySearch:
    summary: dict[str, Any] = json.loads(file.read_bytes())
    findings = []
    for one in summary["findings"]:
        line, case = _line(one["signature"], one["status"]), msgspec.convert(one["case"], Case)
        more = one["place"], case, tuple(one["changes"]), tuple(one["ran"])
        findings.append(FamilyFinding(line, one["status"], one["folder"], one["known"], *more))
    for one in summary["unconfirmed"]:
        findings.append(FamilyFinding(_line(one["signature"], one["status"]), UNCONFIRMED, one["folder"], ""))
    past = tuple(one["id"] for one in summary["known"] if one["cases"])
    left_out = tuple(summary["not_looked_at"])
    cases, changes = summary["tally"]["cases"], msgspec.convert(summary["tally"]["changes"], Changes)
    return FamilySearch(family, summary["headline"], code, cases, tuple(findings), past, file.parent, changes, left_out)


def _line(signature: dict[str, Any] | None, status: str) -> str:
    """A finding's signature in a line: rule, stage, exception, as far as it has them."""
    words = [str(value) for value in (signature or {}).values() if isinstance(value, str) and value]
    return f"{status}: {', '.join(words)}" if words else status
