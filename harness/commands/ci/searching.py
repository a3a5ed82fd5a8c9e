"""Searches of a CI job, one a family: `eagletwin fuzz` past the live bugs that this SGLang was seen to have."""

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from eagletwin.cases.ledger import patches_of
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, EagletwinError, InputError
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.families import RECIPES

from ..fuzz.command import search
from ..fuzz.options import SearchOptions
from ..fuzz.page import SUMMARY

ANY = ""  # the family of a search that names no model


def stands_in_the_way(family: str) -> tuple[str, ...]:
    """Live bugs that show in nearly every case of a family, and have a remedy: a search would end at them."""
    if family == ANY:
        return ()
    recipe = RECIPES[family]
    return (("multi-layer-chunk-tail-2",) if recipe.mtp_layers else ()) + (() if recipe.reads_states else ("standalone-shift",))


@dataclass(frozen=True, slots=True)
class FamilyFinding:
    """A finding of a search. known: the ledger's bug that it may be."""

    line: str
    status: str
    folder: str
    known: str


@dataclass(frozen=True, slots=True)
class FamilySearch:
    """What came of one search.

    said      its headline, or why it did not run
    remedies  of which live bugs it had the remedy
    folder    its run folder, if it ran
    """

    family: str
    said: str
    code: int
    cases: int = 0
    findings: tuple[FamilyFinding, ...] = ()
    remedies: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def called(self) -> str:
        return self.family or "Llamas with a single draft layer"

    @property
    def exit_code(self) -> int:
        """As fuzz has it. A bug that the ledger knows is no news, but what lies behind it was not looked at."""
        if self.code != EXIT_DIVERGED:
            return self.code
        news = any(found.status == "diverged" and not found.known for found in self.findings)
        return EXIT_DIVERGED if news else EXIT_UNKNOWN


def search_family(family: str, live: Collection[str], minutes: float, seed: int, run: RunSpec, out: Path) -> FamilySearch:
    """Search one family, and keep its run folder below `out`. live: bugs that this SGLang has. Raises InputError."""
    remedies = [bug for bug in stands_in_the_way(family) if bug in live]
    words = tuple(word for bug in remedies for word in ("--remedy", bug))
    spec = replace(run, patches=patches_of(None, remedies, None), changes=words)
    options = SearchOptions(minutes=minutes, seed=seed, model=family or None, run=spec, out=out)
    options.check()
    try:
        code = search(options)
    except InputError:
        raise
    except EagletwinError as error:  # a remedy that no longer fits ends this search, and no other
        return FamilySearch(family, " ".join(error.cause.split()), EXIT_UNKNOWN, remedies=tuple(remedies))
    file = out / f"fuzz-{seed}" / SUMMARY
    if not file.is_file():  # it did not start
        return FamilySearch(family, "SGLang would not start", code if code != EXIT_EQUAL else EXIT_UNKNOWN)
    return _read(family, code, file, tuple(remedies))


def search_so_far(family: str, live: Collection[str], seed: int, out: Path) -> FamilySearch:
    """What a search that was ended had looked at and found until then."""
    remedies = tuple(bug for bug in stands_in_the_way(family) if bug in live)
    file = out / f"fuzz-{seed}" / SUMMARY
    if not file.is_file():
        return FamilySearch(family, "interrupted before its first case", EXIT_UNKNOWN, remedies=remedies)
    seen = _read(family, EXIT_UNKNOWN, file, remedies)
    code = EXIT_DIVERGED if any(found.status == "diverged" for found in seen.findings) else EXIT_UNKNOWN
    return dataclasses.replace(seen, said=f"interrupted: {seen.said}", code=code)


def _read(family: str, code: int, file: Path, remedies: tuple[str, ...]) -> FamilySearch:
    summary: dict[str, Any] = json.loads(file.read_bytes())
    findings = []
    for one in summary["findings"]:
        line = _line(one["signature"], one["status"])
        findings.append(FamilyFinding(line, one["status"], one["folder"], one["known"]))
    return FamilySearch(family, summary["headline"], code, summary["tally"]["cases"], tuple(findings), remedies, file.parent)


def _line(signature: dict[str, Any] | None, status: str) -> str:
    """A finding's signature in a line: rule, stage, exception, as far as it has them."""
    words = [str(value) for value in (signature or {}).values() if isinstance(value, str) and value]
    return f"{status}: {', '.join(words)}" if words else status
