"""The command line in the process of the tests, with SGLang imported once for many commands: what is left of a command's cost
is its cases. forked.py does the same for sessions of pytest.

A Zygote that a command closes is kept, and the next command that starts one of the same SGLang in the same mode is given it.
All else is as behind the console script: arguments, exit code, what is printed, the current folder. What a process of its own
makes of it, tests of test_commands.py see, which start one.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec

from eagletwin.harness.cli.main import main
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import Source
from eagletwin.harness.engines.start import Zygote

MOST = 4  # kept at once: each holds a third of a gigabyte of its own

_kept: dict[bytes, Zygote] = {}  # by what each was started for; the one used last comes last
_start, _close = Zygote.start, Zygote.close
_STATE = ("connection", "_process", "_log", "_scratch", "ready", "version")  # of one that was started


def eagletwin(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Type a command in this folder."""
    words = [str(argument) for argument in arguments]
    out, errors = io.StringIO(), io.StringIO()
    with (
        keeping(),
        patch.object(sys, "argv", ["eagletwin", *words]),
        patch.dict(os.environ),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        code = main()
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """What is closed in this block is kept, and taken by the next."""
    with patch.multiple(Zygote, start=_start_or_take, close=_keep):
        yield


def have(source: Source) -> None:
    """Have a Zygote of this SGLang among those that are kept."""
    with keeping(), Host(source=source) as host:
        host.connection()


class _Elsewhere:
    """The process of a Zygote in a fork of the one that started it, which it outlives."""

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002  as Popen has it
        return 0


def inherit() -> None:
    """In a fork: what is kept is used here, and left to the process that started it."""
    for kept in _kept.values():
        kept._process = _Elsewhere()  # type: ignore[assignment]
        kept._log, kept._scratch = None, ""


def close_own() -> None:
    """In a fork, at its end: close what it started itself."""
    for kept in _kept.values():
        _close(kept)
    _kept.clear()


@contextlib.contextmanager
def all_closed() -> Iterator[None]:
    """What is kept ends with this."""
    yield
    while _kept:
        _close(_kept.popitem()[1])


def _named(zygote: Zygote) -> bytes:
    source = zygote.source
    facts = (source.called, source.version, [str(path) for path in source.paths], zygote.mode, zygote._watch, zygote.program)
    return msgspec.json.encode(facts)


def _start_or_take(zygote: Zygote) -> None:
    kept = _kept.pop(_named(zygote), None)
    if kept is None or kept.ended:
        _start(zygote)
        return
    zygote.connection.close()
    zygote._theirs.close()
    for name in _STATE:
        setattr(zygote, name, getattr(kept, name))


def _keep(zygote: Zygote) -> None:
    """In place of closing it. One that never came up, or that ended, is closed; closing twice does nothing."""
    if zygote._process is None or not zygote.ready or zygote.ended or type(zygote) is not Zygote:
        _close(zygote)
        return
    kept = Zygote(zygote.source, zygote.mode, watch=zygote._watch)
    kept.connection.close()
    kept._theirs.close()
    for name in _STATE:
        setattr(kept, name, getattr(zygote, name))
    zygote.connection, zygote._process, zygote._scratch, zygote._log = zygote._theirs, None, "", None  # a closed socket
    if (older := _kept.pop(_named(kept), None)) is not None:
        _close(older)
    _kept[_named(kept)] = kept
    while len(_kept) > MOST:
        _close(_kept.pop(next(iter(_kept))))
