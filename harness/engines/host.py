"""The caller's side of the engine processes: start them, run cases on them, outlive them.

A Host is one zygote (SGLang imported once). An EngineProcess is one configuration, forked from it. Neither can take the
caller down: whatever happens to them ends in a trace whose ending says so, or in an error that says what to do.
"""

import contextlib
import re
import select
import shutil
import socket
from collections.abc import Collection
from functools import reduce
from pathlib import Path
from types import TracebackType

import msgspec

from eagletwin.harness.core.case import Case, Event, Request, encode_case, expand_samples
from eagletwin.harness.core.errors import EagletwinError, HarnessError, InputError, Unwritable
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import Ending, EngineInfo, Jitter
from eagletwin.harness.core.run_spec import CPU, DEFAULT_LIMITS, Kernels, Limits, Mode, mode_of_case
from eagletwin.harness.core.trace import Trace, new_header, rank_folder, write_trace
from eagletwin.harness.families.valid import check_case, read_trace
from eagletwin.harness.families.weights import model_pair

from . import plain_decode, protocol
from .machine import MOST_SECONDS, answers_within
from .plain_decode import of_both
from .source import INSTALLED, Source
from .start import Zygote, import_again

# Import and build take some 10 s on an idle machine; these limits only end what will never answer.
IMPORT_SECONDS = 300.0
BUILD_SECONDS = 300.0
# And this what is on its way.
_REST_SECONDS = 60.0
# Engines that stay up at once. Each holds some 0.05 GB of its own, and threads of SGLang's that wake up now and then;
# building one again takes under a second. Of several ranks one stays: each rank has a dozen threads of gloo, and eight engines
# of two ranks that wait wake up 18,000 times a second.
MAX_ENGINES = 8

_OWN_WORD = "; the release's own traceback:"


class WouldNotStart(EagletwinError):
    """SGLang cannot be imported, or refuses the configuration. For a verdict: unknown.

    log    the file with everything that the process printed, if it was kept
    trace  the release's own traceback, which the message ends with
    ours   it is eagletwin that does not run the configuration, whatever the release
    """

    log: Path | None = None

    def __init__(self, cause: str, *, consequence: str, remedy: str, trace: str = "", ours: bool = False) -> None:
        super().__init__(cause, consequence=consequence, remedy=remedy)
        self.trace, self.ours = trace, ours

    def __str__(self) -> str:
        said = "".join(f"\n    {line}" for line in self.trace.rstrip().splitlines())
        return f"{super().__str__()}{said}"

    def kept_in(self, folder: Path) -> str:
        """The message, with the log moved into a run folder."""
        if self.log is None:
            return str(self)
        kept = shutil.move(self.log, folder / "import.log")
        return str(self).replace(str(self.log), str(kept))


class PatchDoesNotApply(HarnessError):
    """A patch and this SGLang do not fit."""


class Host:
    """A process with SGLang imported, from which engines are forked: `zygote`, which was started, or one of its own for
    `source`. Use as a context manager."""

    def __init__(self, zygote: Zygote | None = None, source: Source = INSTALLED, mode: Mode = CPU) -> None:
        self._zygote = zygote
        self.source, self.mode = (source, mode) if zygote is None else (zygote.source, zygote.mode)
        self._engines: dict[bytes, EngineProcess] = {}
        self._others: dict[tuple[str, Mode], Host] = {}

    @property
    def version(self) -> str:
        """The SGLang that was imported; empty as long as none is."""
        return "" if self._zygote is None else self._zygote.version

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def beside(self, source: Source | None = None, mode: Mode | None = None) -> "Host":
        """A host of another SGLang, or in another mode, which is closed with this one; this one, if it is neither."""
        source, mode = source or self.source, mode or self.mode
        if (source.called, mode) == (self.source.called, self.mode):
            return self
        if (source.called, mode) not in self._others:
            self._others[source.called, mode] = Host(source=source, mode=mode)
        return self._others[source.called, mode]

    def close(self) -> None:
        for other in self._others.values():  # which may start again, as this one may
            other.close()
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def engine(
        self,
        case: Case,
        patches: tuple[Patch, ...] = (),
        kernels: Kernels = "fast",
        foreseen: Collection[Patch] = (),
    ) -> "EngineProcess":
        """The engine for this case's configuration, built first if need be, or forked from one that stands. Raises
        WouldNotStart, PatchDoesNotApply, and InputError for kernels that do not know the mode's type.

        foreseen: patches with which engines are wanted later, where this one is built: these may then be forked from it.
        """
        if self.mode.device == "cpu" and self.mode.dtype == "bfloat16" and kernels in ("interpreter", "shadow"):
            raise InputError(
                f"--kernels {kernels}: Triton's interpreter computes with the bits of bfloat16 as if they were integers",
                consequence="nothing was run",
                remedy="use --kernels fast or checked with --dtype bfloat16",
            )
        configuration = case.configuration()
        key = _key(configuration, patches, kernels)
        if self._zygote is not None and self._zygote.ready and self._zygote.ended:
            self.close()  # the zygote was killed from outside, and its engines died with it
        engine = self._engines.get(key)
        if engine is None or not engine.alive:
            self._engines = {name: other for name, other in self._engines.items() if other.alive}
            idle = [name for name, other in self._engines.items() if not other.busy]
            mode = mode_of_case(self.mode, configuration.engine.sglang)
            build = protocol.Build(
                configuration, patches, kernels, mode, foreseen=self._forkable(configuration, mode, foreseen)
            )
            engine = self._fork_engine(build)
            most = MAX_ENGINES if mode.processes == 1 else 1
            for name in idle[: max(0, len(self._engines) - most + 1)] if engine is None else ():
                self._engines.pop(name).close()
            engine = engine or self._with_plain(build)
        for used in (engine.origin, engine):  # last in the dict: used most recently
            name = next((name for name, other in self._engines.items() if other is used), key)
            if used is not None:
                self._engines.pop(name, None)
                self._engines[name] = used
        return engine

    def _forkable(self, configuration: Case, mode: Mode, foreseen: Collection[Patch]) -> tuple[str, ...]:
        """The functions that these patches change, where an engine may be forked from another: what is connected to other
        ranks, uses a GPU, or has one beside it that decodes plainly cannot."""
        if mode.device != "cpu" or mode.processes > 1 or configuration.engine.sglang.plain_decode:
            return ()
        return tuple(sorted({target for patch in foreseen for target in patch.targets}))

    def _fork_engine(self, build: protocol.Build) -> "EngineProcess | None":
        """The engine, forked from one that has the first of its patches; None: there is none, or it cannot be that."""
        for count in reversed(range(len(build.patches))):
            origin = self._engines.get(_key(build.configuration, build.patches[:count], build.kernels))
            if origin is not None and not origin.busy and (engine := origin.fork(build.patches[count:])) is not None:
                return engine
        return None

    def probe(self, probe: protocol.Probe) -> list[list[int]]:
        """Call one function of SGLang alone. Raises WouldNotStart with the release's word if it cannot be called."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                protocol.send(self.connection(), probe, theirs.fileno())
            ours.settimeout(BUILD_SECONDS)
            try:
                answer, _ = protocol.receive(ours)
            except TimeoutError:
                answer = protocol.Refused(f"its process did not answer within {BUILD_SECONDS:.0f} s", "")
            except (EOFError, ConnectionError):
                ended = self._how_it_ended()
                answer = protocol.Refused(f"its process {ended.error}", ended.trace)
        if isinstance(answer, protocol.Probed):
            return answer.numbers
        if not isinstance(answer, protocol.Refused):
            raise protocol.unexpected_message(answer)
        raise WouldNotStart(
            f"{probe.name} cannot be called: {answer.error}",
            consequence="nothing is known of it",
            remedy=f"another release{_OWN_WORD if answer.trace else ''}",
            trace=answer.trace,
        )

    def _with_plain(self, build: protocol.Build) -> "EngineProcess":
        """An engine, with the one beside it that decodes plainly, if the configuration has it."""
        engine = self._build(build)
        if build.configuration.engine.sglang.plain_decode:
            plain = plain_decode.plain_configuration(build.configuration)
            try:
                as_always = msgspec.structs.replace(build, configuration=plain, plain=True, mode=self.mode)
                engine.plain = self._build(as_always)
            except BaseException:
                engine.close()
                raise
        return engine

    def _build(self, build: protocol.Build) -> "EngineProcess":
        connection = self.connection()
        ours, theirs = socket.socketpair()
        with theirs:
            protocol.send(connection, build, theirs.fileno())
        ours.settimeout(_REST_SECONDS)
        try:
            if not answers_within(ours, BUILD_SECONDS):
                raise TimeoutError
            answer, _ = protocol.receive(ours)
        except (EOFError, TimeoutError, ConnectionError) as error:
            ours.close()
            silent = protocol.Refused(f"did not answer within {BUILD_SECONDS:.0f} s", "")
            ended = silent if isinstance(error, TimeoutError) else self._how_it_ended()
            raise WouldNotStart(
                f"the engine process {ended.error} while it was built",
                consequence="no case was run on this configuration",
                remedy="free some memory, an engine takes about 0.7 GB; `eagletwin info doctor`"
                + ("; where it stood:" if ended.trace else ""),
                trace=ended.trace,
            ) from error
        if isinstance(answer, protocol.PatchDidNotApply):
            ours.close()
            raise PatchDoesNotApply(
                answer.error,
                consequence="the patched engine was not built, so nothing is proven either way",
                remedy=f"adapt the patch to this release of {self.mode.title}",
            )
        if isinstance(answer, protocol.Refused):
            ours.close()
            if answer.full:
                raise Unwritable(answer.full)
            whose = f"; the limit is eagletwin's, not {self.mode.title}'s" if answer.ours else _OWN_WORD
            raise WouldNotStart(
                f"{'eagletwin' if answer.ours else self.mode.title} does not run this configuration: {answer.error}",
                consequence="no case was run on this configuration",
                remedy=f"change the configuration{whose if answer.ours or answer.trace else ''}",
                trace="" if answer.ours else answer.trace,
                ours=answer.ours,
            )
        if not isinstance(answer, protocol.Built):
            ours.close()
            raise protocol.unexpected_message(answer)
        return EngineProcess(ours, answer.engine, self.source, build.foreseen)

    def _how_it_ended(self) -> protocol.Refused:
        """The end of the process that this host had forked last, and the stack at which a signal ended it."""
        assert self._zygote is not None
        with contextlib.suppress(EOFError, OSError):
            if self.mode.device == "cpu":  # another is no zygote
                protocol.send(self._zygote.connection, protocol.HowEnded())
                said: protocol.Refused = protocol.receive(self._zygote.connection, protocol.Refused)[0]
                return said
        return protocol.Refused("hung up", "")

    def shared(self) -> socket.socket | None:
        """A connection at which another process joins this zygote, so that SGLang is imported once; None: it takes no others.
        Returns at once."""
        if self.mode.device != "cpu":
            return None
        if self._start_zygote().edited:  # it may have to start again, and takes others then
            self.connection()
        return self._start_zygote().shared()

    def _start_zygote(self) -> Zygote:
        if self._zygote is None:
            self._zygote = Zygote(self.source, self.mode)
            self._zygote.start()
        return self._zygote

    def connection(self) -> socket.socket:
        """The connection to a zygote that has imported SGLang."""
        zygote = self._start_zygote()
        if not zygote.ready:
            answer = self._imported(zygote)
            while isinstance(answer, protocol.TooLate) or (zygote.follows and not isinstance(answer, protocol.Ready)):
                zygote.start_again()
                answer = self._imported(zygote)
            if isinstance(answer, protocol.Refused):
                if zygote.edited:
                    import_again()
                if answer.full:
                    self.close()
                    raise Unwritable(answer.full)
                raise self._no_import(answer.error, answer.trace)
            if not isinstance(answer, protocol.Ready):
                raise protocol.unexpected_message(answer)
            zygote.connection.settimeout(None)
            zygote.ready, zygote.version = True, answer.version
        return zygote.connection

    def _imported(self, zygote: Zygote) -> object:
        """What a zygote says when SGLang is imported, or not."""
        zygote.connection.settimeout(IMPORT_SECONDS)
        try:
            answer, _ = protocol.receive(zygote.connection)
        except (EOFError, TimeoutError, ConnectionError) as error:
            raise self._no_import(f"the process that imports it ended or fell silent ({type(error).__name__})") from error
        return answer

    def _no_import(self, cause: str, trace: str = "") -> WouldNotStart:
        assert self._zygote is not None
        log = self._zygote.keep_log()
        self.close()
        place = place_in(trace, self.source.paths[0]) if self.source.tree else ""
        whole = f"; the whole message is in {log}" if log else ""
        error = WouldNotStart(
            f"{self.mode.title} cannot be imported: {cause}",
            consequence="no case was run",
            remedy=f"{f'look at {place}' if place else '`eagletwin info doctor`'}{whole}",
        )
        error.log = log
        return error


def place_in(trace: str, root: Path) -> str:
    """File and line of the innermost frame of a traceback below a folder; a syntax error counts as one. Empty: none."""
    frames = re.findall(r'^ *File "(.+)", line (\d+)', trace, re.MULTILINE)
    inside = [f"{file}:{line}" for file, line in frames if Path(file).is_relative_to(root)]
    return inside[-1] if inside else ""


def _key(configuration: Case, patches: tuple[Patch, ...], kernels: Kernels) -> bytes:
    return encode_case(configuration) + repr((patches, kernels)).encode()


class EngineProcess:
    """One configuration of the real worker. Cases run in forks of a process that never runs one itself.

    foreseen  functions that patches of its forks may change; origin: the engine that it was forked from, and ends with
    """

    def __init__(
        self,
        connection: socket.socket,
        info: EngineInfo,
        source: Source,
        foreseen: tuple[str, ...] = (),
        origin: "EngineProcess | None" = None,
    ) -> None:
        self._connection = connection
        self.info = info
        self.source = source
        self.origin = origin
        self._foreseen = foreseen
        self._forks: list[EngineProcess] = []
        self._open = True
        self._broken = ""  # why nothing can be said to the process any more
        self._in_fork: list[Case] = []  # cases that the standing fork has run, in order
        self.busy = False  # a session is open
        self.plain: EngineProcess | None = None  # the same without speculative decoding

    @property
    def alive(self) -> bool:
        """Whether the process still runs: it sends nothing on its own, so a readable socket means that it ended."""
        gone = self._open and select.select([self._connection], [], [], 0)[0]
        if gone or not (self.plain is None or self.plain.alive):
            self.close()
        return self._open

    @property
    def before(self) -> tuple[Case, ...]:
        """The cases that ran before the last one in the same fork."""
        return tuple(self._in_fork[:-1])

    def close(self) -> None:
        """Hang up: the process ends, and whatever runs in it, or was forked from it."""
        self._open = self.busy = False
        self._connection.close()
        for fork in self._forks:
            fork.close()
        self._forks.clear()
        if self.plain is not None:
            self.plain.close()

    def fork(self, patches: tuple[Patch, ...]) -> "EngineProcess | None":
        """The same engine with these patches in addition, as if it had been built with them. None: that takes a build, which
        then says whether they fit."""
        targets = {edit.target for patch in patches for edit in patch.edits}
        if not targets or not targets.issubset(self._foreseen):
            return None
        ours, theirs = socket.socketpair()
        answer: object = None
        with contextlib.suppress(EOFError, OSError):  # the engine is gone
            with theirs:
                protocol.send(self._connection, protocol.Vary(patches), theirs.fileno())
            ours.settimeout(_REST_SECONDS)
            answer, _ = protocol.receive(ours)
        if isinstance(answer, protocol.Built):
            self._forks.append(EngineProcess(ours, answer.engine, self.source, self._foreseen, self))
            return self._forks[-1]
        ours.close()
        return None

    def run(
        self,
        case: Case,
        folder: Path,
        limits: Limits = DEFAULT_LIMITS,
        *,
        fresh: bool = True,
        until: int = -1,
        jitter: Jitter | None = None,
    ) -> Trace:
        """Run a case; its trace and the engine's log are in `folder`, which must be empty.

        fresh: in a fork that has run nothing, else in one that may have run other cases (`before`), which is several times
        faster. until: stop after this scheduler iteration. jitter: with pauses between the streams of a GPU, and nothing that
        waits for it; the trace then has what requests were sent, and the rows that the prefix cache keeps at the end.

        The trace's case has the requests that the scheduler is sent: others, where several samples of a prompt are wanted.
        """
        sent = expand_samples(case)
        self._begin(sent, folder, limits, fresh=fresh, until=until, jitter=jitter)
        trace = self._end(sent, folder)
        if self.plain is None or jitter is not None or trace.header.ending.kind != "finished":
            return trace
        return self.plain._run_plain_decode(trace, folder, limits, fresh=fresh)

    def _run_plain_decode(self, trace: Trace, folder: Path, limits: Limits, *, fresh: bool) -> Trace:
        """The trace in this folder, with what this engine, which decodes plainly, would have sent at each place."""
        sent = plain_decode.answers(trace)
        if not sent:
            return trace
        case, own = plain_decode.asked_case(trace.header.case, sent), folder / plain_decode.FOLDER
        own.mkdir()
        self._begin(case, own, limits, fresh=fresh, sends=sent)
        return plain_decode.with_answers(trace, self._end(case, own), folder)

    def session(self, case: Case, folder: Path, limits: Limits = DEFAULT_LIMITS) -> "Session":
        """Run a case step by step, adding to it on the way. `folder` must be empty."""
        self._begin(expand_samples(case), folder, limits, live=True)
        return Session(self, case, folder)

    def _begin(
        self,
        case: Case,
        folder: Path,
        limits: Limits,
        *,
        fresh: bool = True,
        until: int = -1,
        live: bool = False,
        jitter: Jitter | None = None,
        sends: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        if self.busy:
            raise InputError(
                "a session is open on this engine, and it runs one case at a time",
                consequence=f"case {case.name} was not run",
                remedy="finish or close the session first",
            )
        self.busy = live
        self._broken = ""
        try:
            # the engine process keeps the limits, which leave compilers out; this is for its own death
            self._connection.settimeout(limits.case + MOST_SECONDS + _REST_SECONDS)
            protocol.send(
                self._connection,
                protocol.Run(case, str(folder.absolute()), limits.step, limits.case, fresh, until, live, jitter, sends or {}),
            )
        except OSError as error:
            self._broken = type(error).__name__

    def _answer(self) -> protocol.Stepped | protocol.Ran | protocol.Failed:
        if not self._broken:
            try:
                answer, _ = protocol.receive(self._connection)
                if not isinstance(answer, protocol.Stepped | protocol.Ran | protocol.Failed):
                    raise protocol.unexpected_message(answer)
                return answer
            except (EOFError, OSError) as error:  # OSError: timed out, broken, or closed when the process was found gone
                self._broken = type(error).__name__
            except BaseException:  # the wait was interrupted: the late answer would be taken for the next case's
                self.close()
                raise
        self.close()
        ending = Ending(kind="crashed", detail=f"the engine process itself is gone ({self._broken})")
        return protocol.Ran(ending, tuple(range(self.info.processes)))

    def _end(self, case: Case, folder: Path, answer: protocol.Ran | protocol.Failed | None = None) -> Trace:
        """The trace of a run that is over."""
        self.busy = False
        if answer is None:
            given = self._answer()
            if isinstance(given, protocol.Stepped):
                raise protocol.unexpected_message(given)
            answer = given
        if isinstance(answer, protocol.Failed):
            self._in_fork.clear()
            raise HarnessError(
                f"the process of case {case.name} could not do its work: {answer.error}",
                consequence="the case has no trace and no verdict",
                remedy=f"look at {folder / 'engine.log'}, and at the free space and permissions of the folder",
            )
        del self._in_fork[answer.before :]
        self._in_fork.append(case)
        for rank in answer.silent:
            place = rank_folder(folder, rank)
            place.mkdir(exist_ok=True)
            info = msgspec.structs.replace(self.info, rank=rank)
            write_trace(
                place, new_header(case, model_pair(case.model).digest, info, answer.ending, (), before=answer.before), {}
            )
        trace = read_trace(folder)
        if trace.header.ending != answer.ending or any(one.header.ending != answer.ending for one in trace.others):
            # what ended it was seen from outside: of several ranks, the one which was first
            for rank, one in enumerate(trace.processes):
                write_trace(rank_folder(folder, rank), msgspec.structs.replace(one.header, ending=answer.ending), one.tensors)
            trace = read_trace(folder)
        if trace.earlier and trace.header.engine.patches:  # a stage may not call what another does
            header = reduce(of_both, (one.header for one in trace.earlier), trace.header)
            write_trace(folder, header, trace.tensors)
            trace = read_trace(folder)
        return trace


class Session:
    """A case that is run step by step: `case` has all that was added so far, and can be run again like any other.

    `step` adds to it and returns the trace of all that happened so far. `finish` runs it to its end.
    """

    def __init__(self, engine: EngineProcess, case: Case, folder: Path) -> None:
        self.case = case
        self.over = False
        self._engine = engine
        self._folder = folder
        self.trace = self._wait()

    @property
    def iteration(self) -> int:
        """The scheduler iteration that the next step runs."""
        return max((record.iteration for record in self.trace.header.records), default=0)

    def step(self, requests: tuple[Request, ...] = (), events: tuple[Event, ...] = (), chunk: int | None = None) -> Trace:
        """Run one scheduler iteration, before which these requests arrive and these events happen.

        `arrive` and `at` are set. chunk: the budget of the next prefill batch, if that is not to be chunked_prefill_size.
        """
        return self._send(requests, events, chunk, last=False)

    def finish(self) -> Trace:
        """Run to the end: everything drained, the cache flushed."""
        return self._send((), (), None, last=True)

    def close(self) -> None:
        """End the session. Unless it has finished, its engine is closed with it."""
        if not self.over:
            self.over = True
            self._engine.close()

    def _send(self, requests: tuple[Request, ...], events: tuple[Event, ...], chunk: int | None, *, last: bool) -> Trace:
        if self.over:
            raise InputError("the session is over", consequence="nothing was run", remedy="begin another")
        at = self.iteration
        chunks = self.case.chunks
        if chunk is not None:
            prefills = len({record.forward for record in self.trace.header.records if record.stage == "prefill"})
            usual = (self.case.chunked_prefill_size,) * (prefills - len(chunks))
            chunks = (*(chunks + usual)[:prefills], chunk)
        grown = msgspec.structs.replace(
            self.case,
            requests=self.case.requests + tuple(msgspec.structs.replace(request, arrive=at) for request in requests),
            events=self.case.events + tuple(msgspec.structs.replace(event, at=at) for event in events),
            chunks=chunks,
        )
        check_case(grown, "the session")
        self.case, before = grown, self.case
        with contextlib.suppress(OSError):  # the engine is gone: the answer says so
            sent = expand_samples(grown).requests[len(expand_samples(before).requests) :]
            protocol.send(self._engine._connection, protocol.Step(sent, events, chunks, last))
        self.trace = self._wait()
        return self.trace

    def _wait(self) -> Trace:
        answer = self._engine._answer()
        if isinstance(answer, protocol.Stepped):
            return read_trace(self._folder)
        self.over = True
        return self._engine._end(expand_samples(self.case), self._folder, answer)
