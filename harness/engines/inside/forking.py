"""Who forks whom, where an engine runs on a CPU as one process.

    caller ── socket ── zygote            imports the engine; has no worker
                          └─ engine       one configuration: patches applied, worker built; it never runs a case itself
                               └─ runner  runs one case after another, and writes their traces (runner.py)

Further callers may join (protocol.Join): a search on several cores imports the engine once. What one of them asked for is its
own, and so is the folder of its engines' files, since engines of two callers stand and run at once.

A runner, a fork of the engine, runs up to CASES_PER_RUNNER cases, since a fork costs more than a small case; it is replaced
when a case asks for a fresh one, and after anything but a clean end. Patches of functions that are not called while an engine
is built can come later: then another engine is forked from it, which takes a tenth of the time of a build.
"""

import contextlib
import faulthandler
import gc
import itertools
import os
import select
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from msgspec.structs import replace

from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.terminal import describe_exit
from eagletwin.harness.engines import protocol

from . import own_loader, patches, runner
from .adapter import EngineAdapter
from .supervise import Runner, die_with_parent, reap, supervise

CASES_PER_RUNNER = 60
_MOST_WORDS = 4000  # bytes of the stack of a process that crashed

# By the message that asks for it: what serves the caller, in a fork.
Forks = Mapping[type, Callable[[socket.socket, Any], NoReturn]]


def serve_callers(connection: socket.socket, version: str, forks: Forks, before_a_fork: Callable[[Any], None]) -> None:
    """Say that the engine is imported; then fork what the callers ask for until the first of them hangs up."""
    gc.freeze()  # keep the collector from touching, and so copying, pages that the children share
    ready = protocol.Ready(version)
    protocol.send(connection, ready)
    callers = {connection: ""}  # and the folder for what the engines of a further one leave
    joined, forked, ended = itertools.count(), dict[socket.socket, _Fork](), dict[int, int]()
    while True:
        caller = select.select(callers, [], [])[0][0]
        try:
            message, descriptors = protocol.receive(caller)
        except (EOFError, ConnectionError):
            if caller is not connection:  # a further one: the others go on
                shutil.rmtree(callers.pop(caller), ignore_errors=True)
                forked.pop(caller, None)
                caller.close()
                continue
            return
        if isinstance(message, protocol.Join):
            further = socket.socket(fileno=descriptors[0])
            callers[further] = os.path.join(tempfile.gettempdir(), f"j-{next(joined)}")
            with contextlib.suppress(OSError):  # it has just ended
                protocol.send(further, ready)
            continue
        ended |= reap()
        if isinstance(message, protocol.HowEnded) and caller in forked:
            protocol.send(caller, forked[caller].how_it_ended(ended))
            continue
        if type(message) not in forks:
            raise protocol.unexpected_message(message)
        before_a_fork(message)
        words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process is the caller's last
        process = os.fork()
        if process == 0:
            faulthandler.enable(words)
            _leave_files_in(callers[caller])
            for one in callers:
                one.close()
            forks[type(message)](socket.socket(fileno=descriptors[0]), message)
        os.close(descriptors[0])
        ended.pop(process, None)  # another one of its number
        forked[caller] = _Fork(process, words)


@dataclass(frozen=True)
class _Fork:
    """The last process that was forked for a caller. words: where it writes the stack at which a signal ends it"""

    process: int
    words: IO[bytes]

    def how_it_ended(self, ended: dict[int, int]) -> protocol.Refused:
        """ended: the statuses of those that were waited for"""
        if self.process not in ended:
            ended[self.process] = os.waitpid(self.process, 0)[1]
        self.words.seek(0)
        how = describe_exit(os.waitstatus_to_exitcode(ended[self.process]))
        stack = self.words.read(_MOST_WORDS).decode(errors="replace").partition("\nExtension modules: ")[0]
        return protocol.Refused(how, stack)


def _leave_files_in(folder: str) -> None:
    """What this process leaves for a while lies in this folder; empty: where that of its parent does."""
    if folder:
        with contextlib.suppress(OSError):  # the engine meets it again, and tells the caller
            os.makedirs(folder, exist_ok=True)
            os.environ["TMPDIR"] = tempfile.tempdir = folder


@contextlib.contextmanager
def left_to_the_engine() -> Iterator[None]:
    """What fails here fails in the engine again, which tells the caller. The log has it in any case."""
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):  # the log cannot be written
            traceback.print_exc()


def answer(adapter: EngineAdapter, connection: socket.socket, worker: Any, info: EngineInfo, build: protocol.Build) -> NoReturn:
    """Serve the caller of an engine until it hangs up."""
    standing: Runner | None = None
    while True:
        try:
            message, descriptors = protocol.receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        if isinstance(message, protocol.Vary):
            reap()
            if os.fork() == 0:
                connection.close()
                if standing is not None:
                    standing.hang_up()  # here: it ends when the engine that it belongs to does the same
                _vary(adapter, socket.socket(fileno=descriptors[0]), worker, info, build, message.patches)
            os.close(descriptors[0])
            continue
        if not isinstance(message, protocol.Run):
            raise protocol.unexpected_message(message)
        spent = standing is not None and (standing.ran >= CASES_PER_RUNNER or (message.fresh and standing.ran > 0))
        if standing is not None and (spent or standing.is_gone()):
            standing.hang_up()  # it ends by itself
            standing = None
        reap()
        if standing is None:
            standing = _start(adapter, connection, worker, info, build)
        ended = supervise(standing, connection, message)
        if isinstance(ended, protocol.Ran) and ended.ending.kind == "finished":
            standing.ran += 1
        else:
            standing = None
        try:
            protocol.send(connection, ended)
        except OSError:  # the caller no longer waits
            os._exit(0)


def _vary(
    adapter: EngineAdapter,
    connection: socket.socket,
    worker: Any,
    info: EngineInfo,
    build: protocol.Build,
    more: tuple[Patch, ...],
) -> NoReturn:
    """Serve the caller with these patches in addition, in a fork of the engine that stands."""
    die_with_parent()
    if not all(map(patches.may_follow, more)):
        protocol.send(connection, protocol.TooLate())
        os._exit(0)
    apply_patches(connection, more)
    info = replace(info, patches=(*info.patches, *(patch.name for patch in more)))
    protocol.send(connection, protocol.Built(info))
    answer(adapter, connection, worker, info, replace(build, patches=(*build.patches, *more)))


def info_of(build: protocol.Build, package: str, kernels: str, **more: Any) -> EngineInfo:
    """What a trace says of the engine. more: what the room that knows it adds."""
    import torch
    import transformers
    import triton

    return EngineInfo(
        name=package,
        version=own_loader.version(package),
        device=build.mode.device,
        kernels=kernels,
        torch=str(torch.__version__),
        triton=str(triton.__version__),
        transformers=str(transformers.__version__),
        patches=tuple(patch.name for patch in build.patches),
        **more,
    )


def apply_patches(connection: socket.socket, wanted: tuple[Patch, ...]) -> None:
    """Apply patches. If one does not fit, reports why and ends the process."""
    try:
        for patch in wanted:
            patches.apply(patch)
    except patches.PatchFailed as error:
        protocol.send(connection, protocol.PatchDidNotApply(str(error)))
        os._exit(0)


def _start(adapter: EngineAdapter, caller: socket.socket, worker: Any, info: EngineInfo, build: protocol.Build) -> Runner:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        caller.close()
        ours.close()
        die_with_parent()
        runner.serve(adapter, theirs, worker, info, build)
    theirs.close()
    return Runner([child], [ours])
