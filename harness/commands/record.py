"""`eagletwin record FOLDER -- COMMAND`: start a server whose scheduler records some of its requests."""

import os
import secrets
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.engines.protocol import RecordOptions, environment

from .options import Names, flag, log_progress, option, run_options

_USUAL = RecordOptions()
_WHICH, _COST = "Which requests", "What it may cost"
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the recordings go.")]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="COMMAND", help="Behind `--`: what starts the server, as you start it.", show_default=False),
]
OPTIONS = (
    option(_WHICH, "every", int, _USUAL.every, "N", min=1)("The first request, and each N-th after it."),
    option(_WHICH, "request", Names, None, "RID")("The request of this id, too. Repeat for more."),
    flag(_WHICH, "private")("Permute token ids, each request's in a way of its own."),
    option(_COST, "share", float, _USUAL.share, "SHARE", min=0.0001, max=1)(
        "Choose no further request above this share of the scheduler's time."
    ),
    option(_COST, "megabytes", int, _USUAL.megabytes, "MB", min=1)("Of all files of a rank, at most."),
    option(_COST, "rounds", int, _USUAL.rounds, "N", min=1)("Of a request, at most: it is recorded so far."),
    option(_COST, "at_once", int, _USUAL.at_once, "N", min=1)("Requests that are recorded at one time, at most."),
    option(_WHICH, "rows", int, _USUAL.rows, "N", min=0)(
        "The draft's KV rows, too: the first N of a request, for `judge --target --draft`."
    ),
    option("", "print_", bool, False, "", "--print")("Print the two variables for a shell, and start nothing."),
)


@run_options(OPTIONS)
def record(
    folder: Folder, command: Command = None, *, request: list[str] | None, private: bool, rows: int, print_: bool, **limits: Any
) -> int:
    """Record requests of a real server, for `eagletwin judge FOLDER`.

    The command becomes this process, with two environment variables set, by which SGLang's plugin framework loads the taps in
    its scheduler. Without them eagletwin does nothing in a server."""
    if private and rows:
        raise InputError(
            "--rows was given with --private",
            consequence="no server was started: rows tell token ids, and permuted ids explain no row",
            remedy="leave one of the two out",
        )
    key = secrets.token_hex(16) if private else ""
    options = RecordOptions(requests=tuple(request or ()), private=private, key=key, rows=rows, **limits)
    variables = environment(folder.absolute(), options)
    if print_:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
        return 0
    program = shutil.which(command[0]) if command else None
    if not command or program is None:
        raise InputError(
            f"{command[0]!r} is no program" if command else "no command was given",
            consequence="no server was started",
            remedy=f"give what starts it behind `--`: eagletwin record {folder} -- python -m sglang.launch_server …",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror}", consequence="no server was started", remedy="name a folder that can be written"
        ) from error
    plugins = os.environ.get("SGLANG_PLUGINS")
    if plugins:  # a list of those that are loaded: it must name this one as well
        names = [name.strip() for name in plugins.split(",") if name.strip()]
        variables["SGLANG_PLUGINS"] = ",".join(dict.fromkeys([*names, "eagletwin"]))
    log_progress(f"recording into {folder}; afterwards: eagletwin judge {folder}")
    return os.execvpe(program, command, {**os.environ, **variables})
