"""What a failed case leaves for programs: properties for JUnit XML, and an annotation for GitHub."""

import os
from dataclasses import dataclass
from pathlib import Path

from eagletwin.harness.check.argument import error, headline
from eagletwin.harness.check.confirm import Outcome
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.records import Header
from eagletwin.harness.core.signature import place_of
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.judge.model import model_of
from eagletwin.harness.page.render import NAME

from .twin import CaseFailed, Twin


@dataclass(frozen=True, slots=True)
class Reported:
    """A failed case when its test is over: as a line, as an argument, and as (name, value) for programs."""

    line: str
    text: str
    properties: tuple[tuple[str, str], ...]

    def annotation(self, path: Path, line: int, test: str) -> str:
        """The line of a log that GitHub shows beside the test. Files are named from the folder that GitHub checked out."""
        facts = dict(self.properties)
        more = [f"{name}: {facts[key]}" for name, key in (("again", "again"), ("report", "report")) if key in facts]
        return error("\n".join([self.line, *more]), f"{test}: {facts['rule']}", _from_workspace(path), line)


def conclude(twin: Twin, failed: CaseFailed) -> Reported:
    """Confirm and keep a failed case. A failure that cannot be confirmed is one all the same."""
    trial = failed.trial
    try:
        outcome = twin.conclude(failed)
    except (EagletwinError, OSError) as unconfirmed:
        text = f"{failed.argument}\n\n  It was seen once, and could not be confirmed: {unconfirmed}"
        return Reported(str(failed), text, tuple(_facts(trial.header, trial.verdict)))
    header, verdict = outcome.trace.header, outcome.verdict
    facts = (*_facts(header, verdict), *_kept(outcome))
    return Reported(headline(header, verdict), f"{outcome.report}\n  folder: {outcome.folder}", facts)


def _facts(header: Header, verdict: Verdict) -> list[tuple[str, str]]:
    found = verdict.first
    facts = [("status", verdict.status), ("rule", verdict.rule or verdict.status), ("sglang", header.engine.version)]
    if found is not None:
        facts.append(("place", place_of(found, header.case.num_steps, model_of(header).mtp_layers > 0)))
    return facts


def _kept(outcome: Outcome) -> list[tuple[str, str]]:
    facts = (("entry", outcome.known), ("again", outcome.again), ("report", str(outcome.folder / NAME)))
    return [(name, value) for name, value in facts if value]


def _from_workspace(path: Path) -> str:
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    return str(path.relative_to(workspace)) if workspace and path.is_relative_to(workspace) else str(path)
