"""The process in which cases run, one after another, on one worker: a fork of the engine, or a process of its own.

Between two cases everything that the harness set up is taken down, the scheduler has been drained and flushed, and the pools
are poisoned again; what the worker itself keeps is the only thing that one case can hand on to the next.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import unwritable
from eagletwin.harness.core.records import Ending, EngineInfo, Jittered, Record
from eagletwin.harness.core.trace import Recorder, new_header, write_trace
from eagletwin.harness.engines import protocol
from eagletwin.harness.families.weights import model_pair

from . import blame, changes, own_loader, patches, violations
from .adapter import EndlessCase, EngineAdapter, Stopped
from .blame import NotDriven
from .supervise import HARNESS_FAILED, UNWRITABLE, LastWord, Progress

_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


@dataclass(frozen=True, slots=True)
class CaptureFailed:
    """In the place of a scheduler that raised this while it captured its CUDA graphs."""

    error: BaseException


def serve(
    adapter: EngineAdapter, connection: socket.socket, scheduler: Any, info: EngineInfo, build: protocol.Build
) -> NoReturn:
    """Run the cases that come through the connection until it closes, or until one does not end cleanly."""
    before = 0
    called_while_built = set(patches.ran)
    executed_while_built = changes.executed - changes.captured  # a graph's count where it is replayed
    last_word = LastWord()
    try:
        if not isinstance(scheduler, CaptureFailed):
            adapter.start(build, scheduler)
        while True:
            try:
                message, _ = protocol.receive(connection)
            except (EOFError, ConnectionError):
                os._exit(0)
            if not isinstance(message, protocol.Run):
                raise protocol.unexpected_message(message)
            if message.fresh:  # a fork has run nothing; a process on a GPU is reset (drive.py), which counts as fresh
                before = 0
            adapter.clear()
            patches.ran.intersection_update(called_while_built)
            changes.executed.intersection_update(executed_while_built)
            case = _Run(adapter, connection, scheduler, info, message, before)
            own_loader.forget_blocks()
            last_word.write = case.write_so_far
            ending = case.run()
            last_word.write = None
            own_loader.write_blocks(info.device)
            protocol.send(connection, protocol.Ran(ending, before=before))
            if ending.kind != "finished":
                os._exit(0)
            before += 1
    except BaseException as error:  # never leave by return or raise: this is a fork, and above it stands the engine's own loop
        with contextlib.suppress(OSError):  # the log cannot be written
            traceback.print_exc()
        os._exit(UNWRITABLE if unwritable(error) else HARNESS_FAILED)


class _Run:
    """One case: its recorder, how far it got, and its trace."""

    def __init__(
        self,
        adapter: EngineAdapter,
        connection: socket.socket,
        scheduler: Any,
        info: EngineInfo,
        message: protocol.Run,
        before: int,
    ) -> None:
        self._adapter = adapter
        self._connection = connection
        self._scheduler = scheduler
        self._info = info
        self._message = message
        self._before = before
        self._recorder = Recorder()
        self._where = "start"
        self._jittered: Jittered | UnsetType = UNSET
        self._progress = Progress(Path(message.folder))

    def run(self) -> Ending:
        """Run the case and write its trace. A Python exception of the worker is an ending; anything worse ends the process."""
        import torch

        self._open_log()
        if isinstance(self._scheduler, CaptureFailed):
            return self._ending_of_capture(self._scheduler.error)
        driven = self._adapter.drive(self._scheduler, self._message, self._recorder, self._note_stage, self._live(), self._info)
        try:
            with torch.inference_mode(), self._adapter.watch(self._scheduler):
                driven.run(self._message.fresh and self._info.device == "cuda")
            ending = Ending(kind="finished")
        except Stopped as stop:
            ending = Ending(kind="stopped", detail=str(stop), where=self._where)
        except NotDriven as error:
            ending = Ending(kind="unseen", detail=f"eagletwin does not run this case: {error}", where=self._where)
        except EndlessCase as error:
            ending = Ending(kind="hung", detail=str(error), where=self._where)
        except (Exception, SystemExit) as error:
            if unwritable(error):  # whoever was writing: the machine is at fault, and nothing is known of the worker
                raise
            traceback.print_exc()
            ending = Ending(kind="crashed", detail=_brief(error), where=self._where, origin=self._origin(error))
            on_cpu = self._info.device == "cpu"  # a GPU may fail when it is asked, with what the worker did
            if on_cpu and blame.is_ours(error, self._adapter.PACKAGE):
                ending = replace(ending, kind="unseen", detail=f"eagletwin itself failed: {_brief(error)}")
        if ending.kind == "finished" and (detail := self._adapter.swallowed()):
            ending = Ending(kind="crashed", detail=detail, where=self._where)
        ending = violations.ending_of(self._adapter.faults(), self._where) or ending
        self._jittered = driven.jittered or UNSET
        self._write(driven.case, ending)
        self._progress.close()
        return ending

    def _ending_of_capture(self, error: BaseException) -> Ending:
        """The worker ended while it captured its graphs: so does each case."""
        traceback.print_exception(error)
        where = "capture of CUDA graphs"
        ending = Ending(kind="crashed", detail=_brief(error), where=where, origin=self._origin(error))
        self._write(self._message.case, ending)
        self._progress.close()
        return ending

    def _origin(self, error: BaseException) -> str:
        """An exception's class, and the release's innermost frame by file and function; without one, the innermost of all."""
        release = own_loader.folder_of(self._adapter.PACKAGE)
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if frame.filename.endswith(", patched>"):
                return f"{type(error).__name__} in {frame.filename.strip('<').removesuffix(', patched>')}"
            if Path(frame.filename).is_relative_to(release):
                return f"{type(error).__name__} in {Path(frame.filename).relative_to(release)}:{frame.name}"
        return f"{type(error).__name__} in {Path(frames[-1].filename).name}:{frames[-1].name}"

    def _open_log(self) -> None:
        """What the worker prints goes to this case's own file."""
        log = os.open(os.path.join(self._message.folder, "engine.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # A library has its own handler print the frames of C++. It reads the symbols of all libraries for that, which takes
        # seconds on a busy machine: the death would be called a hang.
        faulthandler.disable()
        for number in _FATAL:
            signal.signal(number, signal.SIG_DFL)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR2, file=2)

    def _note_stage(self, stage: str) -> None:
        iteration = self._recorder.records[-1].iteration if self._recorder.records else 0
        self._where = f"{stage}, iteration {iteration}"
        self._progress.note(self._where)

    def _live(self) -> Callable[[int, Case], tuple[Case, bool]] | None:
        if not self._message.live:
            return None

        def ask(iteration: int, case: Case) -> tuple[Case, bool]:
            """Hand over what happened so far; take what comes before this iteration. Says whether there will be more."""
            self._write(case, Ending(kind="stopped", detail=f"before iteration {iteration}", where=self._where))
            protocol.send(self._connection, protocol.Stepped(iteration))
            step, _ = protocol.receive(self._connection)
            if not isinstance(step, protocol.Step):
                raise protocol.unexpected_message(step)
            arrived = tuple(replace(request, arrive=iteration) for request in step.requests)
            events = tuple(replace(event, at=iteration) for event in step.events)
            grown = replace(
                case, requests=case.requests + arrived, events=case.events + events, chunks=step.chunks or case.chunks
            )
            return grown, not step.last

        return ask

    def write_so_far(self) -> None:
        """The trace of a case that is stuck. The last record may wait for its tensors."""
        tensors, records = dict(self._recorder.tensors), list(self._recorder.records)
        missing = (n for n, one in enumerate(records) if any(f"{n}.{name}" not in tensors for name in one.tensors))
        whole = next(missing, len(records))
        tensors = {name: tensor for name, tensor in tensors.items() if int(name.partition(".")[0]) < whole}
        self._write(self._message.case, Ending(kind="hung", where=self._where), records[:whole], tensors)

    def _write(
        self,
        case: Case,
        ending: Ending,
        records: list[Record] | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        records = self._recorder.records if records is None else records
        header = new_header(
            case,
            model_pair(case.model).digest,
            self._info,
            ending,
            records,
            violations.fallbacks(),
            patches.idle(),
            self._before,
        )
        patched, unreached = patches.changes() or UNSET, patches.idle_functions() or UNSET
        header = replace(header, differs=changes.differs(), patched=patched, unreached_edits=unreached)
        header = replace(header, jittered=self._jittered)
        write_trace(Path(self._message.folder), header, self._recorder.tensors if tensors is None else tensors)


def _brief(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
