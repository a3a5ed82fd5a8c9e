"""What a CI job says: its exit code, and the same as text, Markdown, annotations and a line of a history."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from eagletwin import __version__
from eagletwin.harness.check.annotations import error
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.words import count
from eagletwin.harness.page.render import NAME

from ..compare.markdown import code, plain
from .searching import FamilySearch
from .standing import Stand, Standing

_MOST_ROWS = 60
MEANING: dict[Stand, str] = {
    "lacks": "a fixed bug shows",
    "unknown": "cannot tell",
    "holds": "fixed, and it does not show",
    "live": "known to be there, and it shows",
    "gone": "known to be there, and it does not show",
}
_HEADLINE = {EXIT_EQUAL: "nothing found", EXIT_DIVERGED: "wrong numbers", EXIT_UNKNOWN: "cannot tell"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneJob:
    """A job that is over, or was interrupted. failed: why nothing ran."""

    sglang: str
    version: str
    standings: Sequence[Standing]
    searches: Sequence[FamilySearch]
    folder: Path
    command: str
    seconds: float
    failed: str = ""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """1 if a fixed bug shows or a search found a wrong number that no known bug explains; 125 if that cannot be told."""
        stands, codes = [one.stand for one in self.standings], [one.exit_code for one in self.searches]
        if "lacks" in stands or EXIT_DIVERGED in codes:
            return EXIT_DIVERGED
        if self.failed or self.interrupted or "unknown" in stands or any(codes) or not (stands or codes):
            return EXIT_UNKNOWN
        return EXIT_EQUAL

    def of(self, stand: Stand) -> list[Standing]:
        return [one for one in self.standings if one.stand == stand]

    @property
    def headline(self) -> str:
        numbers = [f"{len(self.of(stand))} {stand}" for stand in get_args(Stand) if self.of(stand)]
        ledger = f"ledger: {', '.join(numbers)}" if numbers else "no entry of the ledger was asked"
        searched = f"{count(sum(one.cases for one in self.searches), 'case')} searched" if self.searches else "no search"
        ended = "interrupted; " * self.interrupted
        return f"{_HEADLINE[self.exit_code]}; {ended}{ledger}; {searched}"


def text_of(job: OneJob) -> str:
    lines = [f"{job.headline.upper().partition(';')[0]}  SGLang {job.version}", "", f"  {job.headline.partition('; ')[2]}"]
    lines += [f"  {job.failed}"] if job.failed else []
    for one in (*job.of("lacks"), *job.of("unknown"), *job.of("gone")):
        lines.append(f"  {one.stand:8} {one.id}: {one.line or MEANING[one.stand]}")
    for search in job.searches:
        lines.append(f"  search   {search.called}: {search.said}")
        lines += [f"           {found.line}{_known(found.known)}; {found.folder}" for found in search.findings]
    return "\n".join([*lines, "", f"  again: {job.command}", f"  folder: {job.folder}", f"  page:   {job.folder / NAME}"])


def _known(bug: str) -> str:
    return f" (it may be {bug})" if bug else ""


def markdown_of(job: OneJob) -> str:
    """For the summary of a job. All that is not eagletwin's own word is shown as it is."""
    lines = [
        f"## eagletwin: {_HEADLINE[job.exit_code]}",
        "",
        f"SGLang {code(job.version)}: {job.headline.partition('; ')[2]}.",
        "",
    ]
    lines += [f"**{plain(job.failed)}**", ""] if job.failed else []
    rows = [*job.of("lacks"), *job.of("unknown"), *job.of("gone")]
    if rows:
        lines += ["| entry | | what | again |", "|---|---|---|---|", *map(_row, rows[:_MOST_ROWS]), ""]
    if job.searches:
        lines += ["| search | cases | result | past |", "|---|---:|---|---|", *map(_search, job.searches), ""]
    rest = [*job.of("holds"), *job.of("live")]
    if rest:
        title = f"{len(job.of('holds'))} fixes hold, {count(len(job.of('live')), 'known bug')} show"
        lines += ["<details>", f"<summary>{title}</summary>", "", "| entry | | what |", "|---|---|---|"]
        lines += [f"| {code(one.id)} | {one.stand} | {plain(one.line)} |" for one in rest]
        lines += ["", "</details>", ""]
    return "\n".join([*lines, f"Again: {code(job.command)}", ""])


def _row(one: Standing) -> str:
    word = f"**{one.stand}**" if one.stand == "lacks" else one.stand
    title = one.question.entry.title if one.question.entry is not None else ""
    return f"| {code(one.id)} | {word} | {plain(title)}<br>{plain(one.line or MEANING[one.stand])} | {code(one.again)} |"


def _search(one: FamilySearch) -> str:
    found = "".join(f"<br>{plain(each.line + _known(each.known))}" for each in one.findings)
    return f"| {code(one.called)} | {one.cases} | {plain(one.said)}{found} | {code(', '.join(one.past))} |"


def annotations_of(job: OneJob) -> Iterator[str]:
    """A line for all that makes the code other than 0."""
    if job.failed:
        yield error(job.failed, "eagletwin cannot tell")
    for one in job.standings:
        if one.counts:
            assert one.question.entry is not None
            title = f"eagletwin: {one.id} {'shows' if one.stand == 'lacks' else 'cannot tell'}"
            yield error(f"{one.question.entry.title}\n{one.line}\nagain: {one.again}", title)
    for search in job.searches:
        if search.exit_code != EXIT_EQUAL:
            found = "".join(f"\n{each.line}{_known(each.known)}" for each in search.findings)
            yield error(f"{search.said}{found}", f"eagletwin: search of {search.called}")


def facts_of(job: OneJob) -> dict[str, Any]:
    """A line of the history."""
    return {
        "schema": 1,
        "eagletwin": __version__,
        "sglang": job.sglang,
        "version": job.version,
        "exit_code": job.exit_code,
        "seconds": round(job.seconds, 1),
        "failed": job.failed,
        "interrupted": job.interrupted,
        "ledger": {stand: [one.id for one in job.of(stand)] for stand in get_args(Stand)},
        "searches": [
            {
                "family": one.family,
                "exit_code": one.exit_code,
                "cases": one.cases,
                "past": list(one.past),
                "findings": [{"line": each.line, "status": each.status, "known": each.known} for each in one.findings],
            }
            for one in job.searches
        ],
    }
