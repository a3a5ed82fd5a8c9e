"""A search told to a person, and written down for a program."""

from pathlib import Path

import msgspec

from eagletwin.harness.exercised import FEATURES
from eagletwin.harness.fuzz import Finding, Fuzz, Tally
from eagletwin.harness.words import count


def finding_text(finding: Finding) -> str:
    """The argument of the smallest case, and what it took to get there."""
    case = finding.outcome.case
    prompts = ", ".join(f"{request.id} {len(request.prompt)}+{request.max_new_tokens}" for request in case.requests)
    lines = [
        finding.outcome.report,
        f"  folder: {finding.outcome.folder}",
        "",
        f"Found after {count(finding.cases, 'case')}, {finding.seconds:.1f} s. "
        f"Smallest after {count(finding.shrink_looks, 'more run')}, "
        f"{finding.shrink_seconds:.1f} s{', when the time for shrinking was up' if finding.partial else ''}: "
        f"{case.model}, num_steps {case.num_steps}, topk {case.topk}, page_size {case.page_size}, "
        f"{f'chunks {list(case.chunks)}, ' if case.chunks else ''}"
        f"{count(len(case.events), 'event')}, requests (prompt+new) {prompts}.",
    ]
    return "\n".join(lines)


def tally_text(search: Fuzz, findings: list[Finding], *, interrupted: bool = False) -> str:
    """What was run and what it reached, in a few lines. A finding that was still being shrunk counts as found."""
    tally, seconds = search.tally, search.seconds
    reached = ", ".join(f"{name} {tally.exercised[name]}" for name in FEATURES if tally.exercised[name])
    names = {"unknown": "unknown (or never called what a patch edits)" if search.patched else "unknown"}
    statuses = ", ".join(f"{number} {names.get(status, status)}" for status, number in sorted(tally.statuses.items()))
    headline = f"{len(search.found)} FOUND" if search.found else "NOTHING FOUND" if tally.cases else "NOTHING LOOKED AT"
    lines = [f"{'INTERRUPTED, ' if interrupted else ''}{headline}  seed {search.seed}", ""]
    if not tally.cases:
        lines.append(f"No case came to its end in {seconds:.1f} s: this says nothing about the release.")
        return "\n".join([*lines, f"Folder: {search.folder}"])
    lines.append(
        f"{count(tally.cases, 'case')} in {seconds:.1f} s: {statuses}. {tally.ties} of {tally.choices} choices were ties."
    )
    lines.append(f"{count(len(tally.configurations), 'configuration')} searched: {_most(tally)}.")
    lines.append(f"Exercised: {reached or 'nothing named'}.")
    for kind, number in sorted(tally.set_aside.items()):
        lines.append(f"{count(number, 'more case')} showed {kind}, which had been found: no further look at that.")
    for name, number in sorted(tally.fallbacks.items()):
        lines.append(f"Unchecked in {count(number, 'case')}, since Triton's interpreter ran it: {name}.")
    unfinished = search.found[len(findings) :]
    if unfinished:
        lines.append(f"Stopped while shrinking: the smallest case so far is in {unfinished[-1] / 'minimal'}.")
    lines.append(f"Folder: {search.folder}")
    return "\n".join(lines)


def _most(tally: Tally) -> str:
    """The configurations that most cases had. A block of cases shares one, so a short search sees few."""
    named = [f"{name} ({count(number, 'case')})" for name, number in tally.configurations.most_common(3)]
    return "; ".join(named) + ("; …" if len(tally.configurations) > 3 else "")


def write_summary(folder: Path, search: Fuzz, findings: list[Finding]) -> None:
    """summary.json: the figures of tally_text, and of each finding."""
    tally = search.tally
    figures = {
        "seconds": round(search.seconds, 3),
        "tally": msgspec.to_builtins(tally),
        "findings": [
            {
                "kind": finding.kind,
                "status": finding.outcome.verdict.status,
                "folder": str(finding.outcome.folder),
                "cases": finding.cases,
                "seconds": round(finding.seconds, 3),
                "shrink_looks": finding.shrink_looks,
                "shrink_seconds": round(finding.shrink_seconds, 3),
                "partial": finding.partial,
                "case": msgspec.to_builtins(finding.outcome.case),
            }
            for finding in findings
        ],
    }
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
