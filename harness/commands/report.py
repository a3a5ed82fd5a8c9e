"""`eagletwin judge --html FOLDER`: the page of a run folder, a trace, a search or a server's recordings."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_HARNESS, InputError

from .as_json import tell_result
from .result import WrittenFacts

if TYPE_CHECKING:
    from eagletwin.harness.core.verdict import Verdict
    from eagletwin.harness.page.document import Document


def write_report(folder: Path, out: Path | None = None) -> int:
    """Write report.html of a folder there, or into the folder itself: one page, which needs nothing but itself.

    Returns an exit code, which says whether the page was written and nothing of what is on it.
    """
    make = _maker(folder)
    from eagletwin.harness.page.render import write_page

    page, place = make(), out or folder
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{place}: {error.strerror}", consequence="no page was made", remedy="give --out a folder that you may write"
        ) from error
    written = write_page(place, lambda: page)
    if written is None:
        return EXIT_HARNESS
    print(written)
    tell_result(WrittenFacts(files={"page": str(written)}))
    return EXIT_EQUAL


def _maker(folder: Path) -> "Callable[[], Document]":
    """What makes the page of this folder. Raises InputError for one that holds nothing that has a page."""
    from eagletwin.harness.check.recordings import is_session
    from eagletwin.harness.core.trace import HEADER

    from .acceptance.report import FACTS, acceptance_page
    from .bisect.report import REPORT, bisection_page
    from .compare.one_report import JOB, job_page
    from .compare.report import RECORD, comparison_page
    from .fuzz.report import search_page
    from .fuzz.summary import SUMMARY
    from .prove.report import PROOFS, proofs_page

    if is_session(folder):
        return lambda: _session(folder)
    if (folder / HEADER).is_file():
        return lambda: _trace(folder)
    for name, page in (
        (SUMMARY, search_page),
        (FACTS, acceptance_page),
        (JOB, job_page),
        (RECORD, comparison_page),
        (PROOFS, proofs_page),
        (REPORT, bisection_page),
    ):
        if (folder / name).is_file():
            return partial(page, folder)
    raise InputError(
        f"{folder} holds no trace, no recording, and nothing else that has a page",
        consequence="no page was made",
        remedy="name a run folder, or one that `eagletwin record` wrote into",
    )


def _trace(folder: Path) -> "Document":
    """A trace, with the verdict that lies beside it: it may rest on more than one run."""
    from eagletwin.harness.check.argument import argue
    from eagletwin.harness.check.repro import SCRIPT
    from eagletwin.harness.core.run_spec import DEFAULT_RUN
    from eagletwin.harness.families.traces import strangers_trace
    from eagletwin.harness.judge.judge import judge
    from eagletwin.harness.page.run import files_of, run_page

    trace = strangers_trace(folder)
    verdict = _verdict(folder) or judge(trace)
    script = folder / SCRIPT
    again = [shlex.join(["python", str(script)])] if script.is_file() else []
    again.append(DEFAULT_RUN.command("judge", folder))
    argument = argue(trace.header, verdict, trace=trace)
    return run_page(trace, verdict, argument=argument, again=again, files=files_of(folder))


def _verdict(folder: Path) -> "Verdict | None":
    """The verdict of a run folder. Raises InputError for one that cannot be read."""
    import msgspec

    from eagletwin.harness.core.verdict import Verdict

    file = folder / "verdict.json"
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Verdict)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read: {error}",
            consequence="no page was made",
            remedy="remove the file: the trace is then judged again",
        ) from error


def _session(folder: Path) -> "Document":
    from eagletwin.harness.check import recordings
    from eagletwin.harness.check.argument import WIDTH
    from eagletwin.harness.core.run_spec import DEFAULT_RUN

    from .recorded_page import session_page

    again = DEFAULT_RUN.command("judge", folder)
    session = recordings.judged(folder, frozenset())
    return session_page(session, folder, again, session.report(WIDTH, again))
