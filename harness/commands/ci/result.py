"""What a CI job says: its exit code, and the same as text, Markdown, annotations and a line of a history."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import replace as changed

from eagletwin import __version__
from eagletwin.harness.check.argument import error
from eagletwin.harness.core.differs import Changes, shortened, unknown_changes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.render import NAME

from ..compare.markdown import case_lines, code, folded, plain
from .searching import FamilyFinding, FamilySearch
from .standing import WORSE, Stand, Standing

_MOST_ROWS = 60
MEANING: dict[Stand, str] = {
    "lacks": "a fixed bug shows",
    "wrong": "a fixed bug's case is wrong by another rule than the bug's, so it may be any other",
    "unknown": "cannot tell",
    "holds": "fixed, and it does not show",
    "live": "known to be there, and it shows",
    "gone": "known to be there, and it does not show",
}
_TITLES: dict[Stand, str] = {"lacks": "{} shows", "wrong": "the case of {} is wrong"}
_HEADLINE = {EXIT_EQUAL: "nothing found", EXIT_DIVERGED: "wrong numbers", EXIT_UNKNOWN: "cannot tell"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneJob:
    """A job that is over, or was interrupted.

    base    what the SGLang is a change of, as traces call it; "": none was named
    run     how it was run, and again: the command, both without a path of this machine
    failed  why nothing ran
    """

    sglang: str
    version: str
    base: str = ""
    run: RunSpec = DEFAULT_RUN
    again: str = ""
    standings: Sequence[Standing]
    searches: Sequence[FamilySearch]
    folder: Path
    command: str
    seconds: float
    failed: str = ""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """1 if the case of a fixed bug is wrong or a search found a wrong number that no known bug explains; 125 if that cannot
        be told, or nothing ran of what was changed in a tree."""
        stands, codes = [one.stand for one in self.standings], [one.exit_code for one in self.searches]
        if set(stands) & set(WORSE) or EXIT_DIVERGED in codes:
            return EXIT_DIVERGED
        if self.failed or self.interrupted or "unknown" in stands or any(codes) or not (stands or codes):
            return EXIT_UNKNOWN
        return EXIT_UNKNOWN if self.changes.doubt or (self.run.strict and self.changes.headline) else EXIT_EQUAL

    @property
    def changes(self) -> Changes:
        """What was changed in a tree, and how many cases ran it, entries and generated ones."""
        all_of_them = Changes()
        for standing in self.standings:
            all_of_them.add(standing.differs)
        for search in self.searches:
            all_of_them.update(search.changes)
        return all_of_them

    @property
    def change_lines(self) -> list[str]:
        """What to say of these changes, or why nothing can be said of them."""
        lines, doubt = self.changes.lines, self.changes.doubt
        lines += ["No case ran any of that, so this job says nothing about it."] * bool(doubt)
        unknown = unknown_changes(self.version)
        if self.base and not self.failed:
            unknown = f"It differs from {self.base} in too many files to say which of its functions ran."
        return lines or ([unknown] if unknown else [])

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
    unseen = job.changes.headline
    lines = [f"{job.headline.upper().partition(';')[0]}  SGLang {job.version}", *[f"NOT SEEN  {unseen}"] * bool(unseen)]
    lines += ["", f"  {job.headline.partition('; ')[2]}"]
    lines += [f"  {job.failed}"] if job.failed else []
    for one in _first(job):
        lines.append(f"  {one.stand:8} {one.id}: {one.line or MEANING[one.stand]}")
    for search in job.searches:
        lines.append(f"  search   {search.called}: {search.said}")
        lines += [f"           {found.line}{_known(found.known)}; {found.folder}" for found in search.findings]
    lines += ["", *(f"  {line}" for line in job.change_lines)] if job.change_lines else []
    return "\n".join([*lines, "", f"  again: {job.command}", f"  folder: {job.folder}", f"  page:   {job.folder / NAME}"])


def _first(job: OneJob) -> list[Standing]:
    """What a person is told of first."""
    return [one for stand in (*WORSE, "unknown", "gone") for one in job.of(stand)]


def _known(bug: str) -> str:
    return f" (it may be {bug})" if bug else ""


def markdown_of(job: OneJob) -> str:
    """For the summary of a job: what is wrong first. All that is not eagletwin's own word is shown as it is."""
    lines = [f"## eagletwin: {_HEADLINE[job.exit_code]}", ""]
    lines += [f"**{plain(job.failed)}**", ""] if job.failed else []
    lines += [f"**Not seen**: {plain(job.changes.headline)}.", ""] if job.changes.headline else []
    for search in job.searches:
        for found in search.findings:
            lines += _finding(job, found)
    rows = [_row(job, one) for one in _first(job)]
    if rows:
        lines += ["| entry | | what | again |", "|---|---|---|---|", *rows[:_MOST_ROWS], ""]
    base = f" as a change of {code(job.base)}" if job.base else ""
    lines += [f"SGLang {code(job.version)}{base}: {job.headline.partition('; ')[2]}.", *map(plain, job.change_lines), ""]
    lines += [plain(f"Search of {one.called}: {one.said}.") for one in job.searches]
    live = [one.id for one in job.of("live")]
    known = list(dict.fromkeys([*live, *(name for one in job.searches for name in one.past)]))
    lines += ["", f"{count(len(known), 'known live bug')} of SGLang showed; the page names them."] if known else [""]
    for search in job.searches:
        if search.left_out:
            lines += ["", *folded(f"Not looked at by the search of {search.called}, and the option for it", search.left_out)]
    return "\n".join([*lines, f"Again: {code(job.again)}", ""])


def _finding(job: OneJob, found: FamilyFinding) -> list[str]:
    """Rule and place, and the smallest case as a file that anybody can run."""
    lines = [f"### {plain(found.line + _known(found.known))}", ""]
    lines += [f"{plain(found.place)}."] if found.place else []
    lines += [f"Changed functions that it runs: {plain(shortened(found.ran))}."] if found.ran else []
    if found.case is None:
        return [*lines, "The search was ended while it made the case smaller.", ""]
    again = changed(job.run, changes=found.changes).command("check", "case.json")
    return [*lines, "", *case_lines(found.case), "", f"As {code('case.json')}: {code(again)}", ""]


def _row(job: OneJob, one: Standing) -> str:
    word = f"**{one.stand}**" if one.stand in WORSE else one.stand
    title = one.question.entry.title if one.question.entry is not None else ""
    again = changed(job.run, view=one.question.view).command("check", one.id)
    return f"| {code(one.id)} | {word} | {plain(title)}<br>{plain(one.line or MEANING[one.stand])} | {code(again)} |"


def annotations_of(job: OneJob) -> Iterator[str]:
    """A line for all that makes the code other than 0."""
    if job.failed:
        yield error(job.failed, "eagletwin cannot tell")
    for one in job.standings:
        if one.counts:
            assert one.question.entry is not None
            title = f"eagletwin: {_TITLES.get(one.stand, '{} cannot tell').format(one.id)}"
            what = MEANING["wrong"] if one.stand == "wrong" else one.question.entry.title
            yield error(f"{what}\n{one.line}\nagain: {one.again}", title)
    if job.changes.doubt:
        yield error(" ".join(job.change_lines), "eagletwin: nothing ran of what was changed")
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
        "base": job.base,
        "exit_code": job.exit_code,
        "seconds": round(job.seconds, 1),
        "failed": job.failed,
        "interrupted": job.interrupted,
        "not_seen": job.changes.headline,
        "changes": job.change_lines,
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
