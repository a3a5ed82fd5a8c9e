"""A campaign reported to a person, and written down for a program: as a search, with who ran it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.terminal import fold

from ..fuzz.report import exit_code as exit_code_of_search
from ..fuzz.report import tally_text, write_summary
from .books import Books
from .page import CampaignDone, LegDone


def done_of(books: Books) -> CampaignDone:
    """How it went so far."""
    legs = [
        LegDone(leg=leg.called, cases=own.cases, blocks=len(own.done), statuses=dict(own.statuses), closed=own.closed)
        for leg, own in zip(books.terms.legs, books.legs, strict=True)
    ]
    lost = {one.what: one.why for one in books.lost}
    return CampaignDone(
        legs=legs, nodes=dict(books.nodes), deaths=books.deaths, drivers=books.drivers, again=books.again, lost=lost
    )


def campaign_text(books: Books, columns: int, code: int | None) -> str:
    """What was run, what it reached and what it left out. code: as of tally_text."""
    done = done_of(books)
    lines = [tally_text(books.fuzz, books.findings, columns, code), *fold(done.sentence, columns, "")]
    for leg in done.legs:
        if leg.closed:
            lines += ["Would not start, so that nothing was looked at:", f"  {leg.leg}: {leg.closed}"]
    for what, why in done.lost.items():
        lines += fold(f"Given up, and not looked at: {what}: {why}", columns, "")
    if not books.all_done:
        lines.append(f"It goes on with: eagletwin campaign --resume {books.folder}")
    return "\n".join(lines)


def write_campaign(books: Books, code: int | None) -> dict[str, Any]:
    """summary.json and the page. Returns the figures. code: as of tally_text."""
    return write_summary(books.folder, books.fuzz, books.findings, code, _more(books))


def exit_code(books: Books) -> int:
    """As of `fuzz`; what was given up was not looked at."""
    code = exit_code_of_search(books.fuzz, [finding.status for finding in books.findings])
    given_up = books.lost or books.inquiries or any(leg.closed for leg in books.legs)
    return EXIT_UNKNOWN if code == EXIT_EQUAL and given_up else code


def _more(books: Books) -> Mapping[str, Any]:
    unconfirmed = [
        {
            "signature": msgspec.to_builtins(job.seen.signature),
            "status": job.seen.verdict.status,
            "folder": str(Path(job.folder, "minimal")),
            "cases": job.cases,
            "shrink_looks": 0,
        }
        for job in books.inquiries.values()
    ]
    return {"unconfirmed": unconfirmed, "campaign": msgspec.to_builtins(done_of(books))}
