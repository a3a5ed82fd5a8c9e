"""`eagletwin judge TRACE`: judge a recorded trace again, or what a server recorded, without the engine."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eagletwin.harness.core.errors import InputError, exit_code_of
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.terminal import show, width

from .options import JUDGING, flag, option, run_options
from .result import JudgeFacts, RecordedFacts, emit_result, with_json

if TYPE_CHECKING:
    from eagletwin.harness.check.recordings import JudgedServer


_CHECKPOINTS = "The checkpoints of a recorded server"
OPTIONS = (
    option(_CHECKPOINTS, "target", str, "", "CHECKPOINT", show_default=False)("Its target: folder or name."),
    option(_CHECKPOINTS, "draft", str, "", "CHECKPOINT", show_default=False)("Its draft: folder or name."),
    option(_CHECKPOINTS, "device", Literal["cpu", "cuda"], "cpu", "DEVICE")("Where the pair is computed: cpu or cuda."),
    flag("", "html")("Make the page report.html of any run folder, and print no verdict. Exit code: 0 if it is written."),
    option("", "out", Path | None, None, "FOLDER")("With --html: write it there, not into the folder itself."),
)


@with_json
@run_options(OPTIONS, JUDGING)
def judge(
    trace: Annotated[
        Path, typer.Argument(help="A folder with trace.json and trace.safetensors, or one that `eagletwin record` wrote into.")
    ],
    *,
    target: str,
    draft: str,
    device: str,
    html: bool,
    out: Path | None,
    spec: RunSpec,
) -> int:
    """Judge a recorded trace again, or the requests that a server recorded. Needs no engine.

    The requests of a server are judged by the rules that need no weights (`eagletwin info rules`); with --target and --draft
    what was drafted and committed, too, and the rows that `record --rows` kept."""
    from eagletwin.harness.check import recordings
    from eagletwin.harness.core.trace import HEADER

    if html:
        from .report import write_report

        return write_report(trace, out)
    if out is not None:
        raise InputError("--out belongs to --html", consequence="nothing was judged", remedy="leave it out, or give --html")
    if bool(target) != bool(draft) or (target and not recordings.is_session(trace)):
        raise InputError(
            "--target and --draft belong together, and to a folder that `eagletwin record` wrote into",
            consequence="nothing was judged",
            remedy="give both, or leave them out: a trace of `check` names its recipe",
        )
    if recordings.is_session(trace):
        return _server(trace, spec, (target, draft), device)
    if trace.is_dir() and not (trace / HEADER).exists():
        raise InputError(
            f"{trace} holds no {HEADER}, and no server recorded into it",
            consequence="nothing was judged",
            remedy="name the folder of a trace, or one that `eagletwin record` wrote into (the server says so on stderr)",
        )
    from eagletwin.harness.check.argument import argue
    from eagletwin.harness.families.valid import strangers_trace
    from eagletwin.harness.judge.judge import judge as judging

    recorded = strangers_trace(trace)
    verdict = judging(recorded, spec.without, spec.view)
    text = argue(recorded.header, verdict, again=spec.command("judge", trace), trace=recorded, columns=width())
    show(text)
    emit_result(JudgeFacts(status=verdict.status, verdict=verdict, report=text))
    return exit_code_of(verdict.status)


def _tell_session(session: "JudgedServer", again: str) -> None:
    requests = [
        RecordedFacts(
            folder=str(one.folder),
            status=one.status,
            headline=one.headline,
            rounds=one.rounds,
            tokens=one.tokens,
            weighed=dict(one.weighed or {}),
            untold="" if one.untold is None else one.untold.cause,
        )
        for one in session.looked
    ]
    untold = {why.cause: number for why, number in session.untold.items()}
    emit_result(JudgeFacts(status=session.status, requests=requests, untold=untold, report=session.report(width(), again)))


def _server(folder: Path, spec: RunSpec, pair: tuple[str, str], device: str) -> int:
    """pair: names of the checkpoints; empty ones: they are not at hand"""
    from eagletwin.harness.check import recordings

    if spec.view != DEFAULT_RUN.view:
        raise InputError(
            f"--view {spec.view}: a view says what numbers must be, and a server's recording has none",
            consequence="nothing was judged",
            remedy="leave it out",
        )
    from eagletwin.harness.check.argument import WIDTH
    from eagletwin.harness.page.render import write_page

    from .report import session_page

    weigh, again = None, spec.command("judge", folder)
    if pair[0]:
        from .report import recording_comparer

        weigh = recording_comparer(*pair, device)
        again += f" --target {shlex.quote(pair[0])} --draft {shlex.quote(pair[1])}"
        again += f" --device {device}" if device != "cpu" else ""
    session = recordings.judge_recordings(folder, spec.without, weigh)
    show(session.report(width(), again))
    _tell_session(session, again)
    written = write_page(folder, lambda: session_page(session, folder, again, session.report(WIDTH, again)))
    if written is not None:
        print(f"  page: {written}")
    return exit_code_of(session.status)
