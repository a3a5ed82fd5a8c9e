"""`eagletwin judge --html FOLDER`: the page of a run folder, a trace, a search or a server's recordings."""

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from eagletwin.harness.check.argument import WIDTH, argue
from eagletwin.harness.check.recordings import CompareRecording, JudgedServer, LookedAt, is_session, judge_recordings
from eagletwin.harness.check.repro import SCRIPT
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_HARNESS, InputError
from eagletwin.harness.core.recording import RecordedServer, RecordingComparison
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import HEADER, Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.deserved.draft import check_device, on
from eagletwin.harness.deserved.precision import Pair, load_served
from eagletwin.harness.deserved.recorded import compare_recording, started_of
from eagletwin.harness.families.valid import strangers_trace
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.page.document import Document, DocumentSection, TableCell, row, table
from eagletwin.harness.page.render import write_page
from eagletwin.harness.page.run import files_of, run_page

from .options import let_threads_sleep
from .result import WrittenFacts, emit_result

# The page of a server's recordings: all of them by status, their time line, and the first that diverged in full.


_KINDS = {"equal": "right", "diverged": "wrong", "unknown": "doubt"}


def session_page(session: JudgedServer, folder: Path, again: str, argument: str) -> Document:
    """The page. argument: as the terminal has it."""
    recorded = sum(session.counts.values())
    said = ", ".join(f"{number} {status}" for status, number in sorted(session.counts.items()) if number)
    untold = sum(session.untold.values())
    said += f"; no draft was compared in {untold}" if untold else ""
    sections = (_all(session),) if session.looked else ()
    if session.first is None:
        return Document(
            title=f"Recordings of {folder.name}",
            status=session.status,
            headline=f"{count(recorded, 'recorded request')}: {said or 'none'}",
            sections=sections,
            argument=argument,
            again=(again,) if again else (),
        )
    first = run_page(session.first.trace, session.first.verdict, argument=argument, again=(again,) if again else ())
    return replace(
        first,
        title=f"Recordings of {folder.name}; in full: {session.first.folder.name}",
        status=session.status,
        headline=f"{count(recorded, 'recorded request')}: {said}. {first.headline}",
        sections=(*first.sections, *sections),
    )


def _all(session: JudgedServer) -> DocumentSection:
    beside = session.weighed is not None
    rows = (
        row(
            *(one.folder.name, TableCell(one.status, _KINDS[one.status]), str(one.rounds)),
            f"{one.tokens / one.rounds:.2f}" if one.rounds else "",
            *((_drafts(one),) if beside else ()),
            one.headline,
            tags=(one.status, *((one.untold.cause,) if one.untold is not None else ())),
        )
        for one in session.looked
    )
    untold = tuple(sorted(why.cause for why in session.untold))
    recordings = table(
        "Recorded requests",
        ("recording", "status", "rounds", "tokens a round", *["drafts beside the checkpoints"] * beside, "what"),
        rows,
        filters=(("Status", tuple(_KINDS)), *((("Drafts not compared", untold),) if untold else ())),
        searched=True,
    )
    return DocumentSection(
        heading="All recordings",
        lines=(
            "`eagletwin judge --html` of one recording's folder makes its own page, with its time line.",
            *(session.beside_checkpoints() if beside else ()),
        ),
        tables=(recordings,),
    )


def _drafts(one: LookedAt) -> TableCell:
    """How much was drafted in the rule's own count, or why nothing of it was compared."""
    if one.untold is not None:
        return TableCell(f"not compared: {one.untold.cause}", "doubt")
    number = 0 if one.weighed is None else one.weighed["draft.proposal"]
    return TableCell(f"{number} compared" if number else "not compared", "" if number else "doubt")


# `eagletwin judge --target --draft`: the checkpoints of a recorded server, loaded once for each type that its ranks ran in.


def recording_comparer(target: str, draft: str, device: str) -> CompareRecording:
    """Compares a recording with these two. Raises InputError for checkpoints that are no pair."""
    check_device(device)
    let_threads_sleep()
    pairs: dict[tuple[str, str, str], Pair] = {}

    def compare(said: RecordedServer, folder: Path, trace: Trace) -> RecordingComparison:
        import torch

        altered = _has_altered_logits(folder)
        started = started_of(said)
        with on(torch.device(device)):
            computed = started.dtype, started.quantization, started.kv_dtype  # of each launch its own
            if computed not in pairs:
                pairs[computed] = load_served(target, draft, started, device)
            return compare_recording(pairs[computed], trace, said, altered=altered)

    return compare


def _has_altered_logits(folder: Path) -> bool:
    """Whether the request's logits were changed. Raises InputError for a recording whose token ids are permuted."""
    said = json.loads((folder / HEADER).read_bytes())
    if said.get("private"):
        raise InputError(
            f"{folder} has permuted token ids (record --private)",
            consequence="no model can say what such a text deserves",
            remedy="leave --target and --draft out, or record without --private",
        )
    return bool(said["request"].get("altered", True))  # recordings from before this was said may have been


def write_report(folder: Path, out: Path | None = None) -> int:
    """Write report.html of a folder there, or into the folder itself: one page, which needs nothing but itself.

    Returns an exit code, which says whether the page was written and nothing of what is on it.
    """
    make = _maker(folder)
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
    emit_result(WrittenFacts(files={"page": str(written)}))
    return EXIT_EQUAL


def _maker(folder: Path) -> Callable[[], Document]:
    """What makes the page of this folder. Raises InputError for one that holds nothing that has a page."""
    # `judge` of a server needs none of these
    from .acceptance.report import FACTS, acceptance_page
    from .bisect.report import REPORT, bisection_page
    from .compare.one_report import JOB, job_page
    from .compare.report import RECORD, comparison_page
    from .fuzz.report import search_page
    from .fuzz.tally import SUMMARY
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


def _trace(folder: Path) -> Document:
    """A trace, with the verdict that lies beside it: it may rest on more than one run."""
    trace = strangers_trace(folder)
    verdict = _verdict(folder) or judge(trace)
    script = folder / SCRIPT
    again = [shlex.join(["python", str(script)])] if script.is_file() else []
    again.append(DEFAULT_RUN.command("judge", folder))
    argument = argue(trace.header, verdict, trace=trace)
    return run_page(trace, verdict, argument=argument, again=again, files=files_of(folder))


def _verdict(folder: Path) -> Verdict | None:
    """The verdict of a run folder. Raises InputError for one that cannot be read."""
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


def _session(folder: Path) -> Document:

    again = DEFAULT_RUN.command("judge", folder)
    session = judge_recordings(folder, frozenset())
    return session_page(session, folder, again, session.report(WIDTH, again))
