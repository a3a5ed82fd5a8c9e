"""One server: SGLang's own launch_server in a process group of its own, and its supervisor, a fork of front.py.

The supervisor ends all of the group when the caller hangs up or one of its processes ends, waits until none is left, and says
what ended it. Each process dies with its parent, so that nothing outlives a supervisor that is killed either.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from eagletwin.harness.core.terminal import describe_exit
from eagletwin.harness.engines import protocol, triton_cpu
from eagletwin.harness.engines.inside import patches
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.engines.inside.supervise import die_with_parent, wait_for_all
from eagletwin.harness.engines.sglang import kernels
from eagletwin.harness.engines.sglang.boot import boot, single_rank
from eagletwin.harness.engines.sglang.stand_ins import stubs

from . import arguments, front_end, messages

_PR_SET_CHILD_SUBREAPER = 36
# Bytes of a folder: a socket's path has 107 at most (sun_path), and SGLang's names in it some 12.
_LONGEST = 90


def serve(caller: socket.socket, asked: messages.Serve) -> NoReturn:
    """Serve until the caller hangs up, or the server ends; then say how it ended."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # front.py's own
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # children of a launcher that died are this process's to end
    folder = _folder()
    said, theirs = socket.socketpair()
    launcher = os.fork()
    if launcher == 0:
        caller.close()
        said.close()
        os.setpgid(0, 0)
        die_with_parent()
        _launch(theirs, asked, folder)
    theirs.close()
    error = _watch(caller, said, launcher)
    _end(launcher)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        protocol.send(caller, messages.ServerEnded(error))
    os._exit(0)


def _folder() -> str:
    """A new folder for the server's files. Sockets are among them, whose paths must be short."""
    folder = tempfile.mkdtemp(prefix="server-")
    if len(os.fsencode(folder)) <= _LONGEST:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="eagletwin-server-", dir="/tmp")


def _watch(caller: socket.socket, said: socket.socket, launcher: int) -> str:
    """Hand on what the server's processes say, until they end or the caller hangs up. Returns what ended them."""
    error = ""
    while True:
        ready = select.select([caller, said], [], [])[0]
        if caller in ready:  # it says nothing more, so this is its end
            return ""
        try:
            message, _ = protocol.receive(said, messages.Said)
        except (EOFError, ConnectionError):  # all that held the other end are gone
            code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
            return error or f"its first process {describe_exit(code)}"
        if isinstance(message, protocol.Refused):
            error = error or message.error
        with contextlib.suppress(OSError):
            protocol.send(caller, message)


def _end(launcher: int) -> None:
    """End the process group, and collect all that it leaves."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(launcher, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher, signal.SIGKILL)
    wait_for_all()


def _launch(word: socket.socket, asked: messages.Serve, folder: str) -> NoReturn:
    """The launcher: SGLang's front end stays in this process, which forks the others."""
    status = 1
    try:
        _settle(asked, folder)
        for patch in asked.patches:
            patches.apply(patch)
        front_end.make_able(asked, folder, boot.SHIMS)
        front_end.end_at_once(lambda error: _tell(word, error, ""), boot.SHIMS)
        arguments.register_models(asked)
        single_rank.meet_nobody(boot.SHIMS)
        _watch_scheduler(word, asked)
        front_end.launch(arguments.words(asked))
        status = 0
    except patches.PatchFailed as error:
        protocol.send(word, protocol.PatchDidNotApply(str(error)))
    except NotDriven as error:
        protocol.send(word, protocol.Refused(str(error), "", ours=True))
    except SystemExit as stop:
        _tell(word, f"SGLang ended with exit status {stop.code}", "")
    except BaseException as error:
        traceback.print_exc()
        _tell(word, _brief(error), traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _settle(asked: messages.Serve, folder: str) -> None:
    """Make this process one that serves for long: its output, its files, its garbage."""
    descriptor = os.open(asked.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ |= asked.variables
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    gc.enable()
    # what would go unseen, and is said once: a fix was undone in code that runs, a stub was called, a kernel ran unchecked
    patches.ran = _Ran(patches.ran)
    stubs.called = _Called()
    triton_cpu.watch_fallbacks(
        lambda kernel, why: print(f"note: {kernel} ran in Triton's interpreter: {why}", file=sys.stderr, flush=True)
    )


class _Ran(set[str]):
    """Functions that were called with edits in them; those of a patch are said on stderr, the first time."""

    def add(self, name: str) -> None:
        if name not in self and any(name == edited.name for one in patches.applied for edited in one.functions):
            print(f"note: {name} ran, as patched", file=sys.stderr, flush=True)
        super().add(name)


class _Called(list[str]):
    """A list of stubs that were called, which says so on stderr: SGLang may swallow the exception."""

    def append(self, name: str) -> None:
        print(f"error: {name} was called, a stub of a package that this server lacks", file=sys.stderr, flush=True)
        super().append(name)


def _watch_scheduler(word: socket.socket, asked: messages.Serve) -> None:
    """Have the scheduler, when it is built in its own process, take its kernels from here, and say that it stands; and what
    ended it if it fails."""
    scheduler: Any = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    build = scheduler.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        kernels.prepare(asked.kernels, asked.mode, boot.SHIMS)
        with kernels.building(asked.kernels, asked.mode):
            build(self, *args, **kwargs)
        changed = boot.differing(self, arguments.settings(asked))
        if changed:
            raise NotDriven(f"SGLang changes {changed} without being asked")
        kernels.run(asked.kernels, asked.mode, self)
        protocol.send(word, messages.Serving((*boot.SHIMS, *stubs.describe_stubs())))

    scheduler.__init__ = _telling(built, word)
    if hasattr(scheduler, "run_event_loop"):  # up to 0.5.9 its process chooses between two loops
        scheduler.run_event_loop = _telling(scheduler.run_event_loop, word)


def _telling(function: Callable[..., Any], word: socket.socket) -> Callable[..., Any]:
    def reporting(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _tell(word, f"its scheduler failed: {_brief(error)}", traceback.format_exc())
            raise

    return reporting


def _tell(word: socket.socket, error: str, trace: str) -> None:
    with contextlib.suppress(OSError):
        protocol.send(word, protocol.Refused(error, trace))


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
