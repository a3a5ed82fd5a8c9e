"""`eagletwin judge` of a server's recordings: its checkpoints, loaded once for each type, and its page."""

import json
from pathlib import Path

from msgspec.structs import replace

from eagletwin.harness.check.recordings import JudgedServer, LookedAt, Weigh
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.recording import RecordedServer, Weighed
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import HEADER, Trace
from eagletwin.harness.deserved.device import check_device, on
from eagletwin.harness.deserved.pair import Pair, load_served
from eagletwin.harness.deserved.recorded import started_of, weigh
from eagletwin.harness.page.document import Document, DocumentSection, TableCell, row, table
from eagletwin.harness.page.run import run_page

from .options import let_threads_sleep

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


def weighing(target: str, draft: str, device: str) -> Weigh:
    """Compares a recording with these two. Raises InputError for checkpoints that are no pair."""
    check_device(device)
    let_threads_sleep()
    pairs: dict[tuple[str, str, str], Pair] = {}

    def weighed(said: RecordedServer, folder: Path, trace: Trace) -> Weighed:
        import torch

        altered = _altered(folder)
        started = started_of(said)
        with on(torch.device(device)):
            computed = started.dtype, started.quantization, started.kv_dtype  # of each launch its own
            if computed not in pairs:
                pairs[computed] = load_served(target, draft, started, device)
            return weigh(pairs[computed], trace, said, altered=altered)

    return weighed


def _altered(folder: Path) -> bool:
    """Whether the request's logits were changed. Raises InputError for a recording whose token ids are permuted."""
    said = json.loads((folder / HEADER).read_bytes())
    if said.get("private"):
        raise InputError(
            f"{folder} has permuted token ids (record --private)",
            consequence="no model can say what such a text deserves",
            remedy="leave --target and --draft out, or record without --private",
        )
    return bool(said["request"].get("altered", True))  # recordings from before this was said may have been
