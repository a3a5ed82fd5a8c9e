"""Messages between the caller's process and the engine processes: JSON with a length in front, over a Unix socket pair.

Both ends are ours and on one machine; the messages are typed so that a version mix-up shows as an error.
"""

import os
import socket
import struct
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.core.errors import HarnessError, InputError, unwritable
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import Ending, EngineInfo, Jitter
from eagletwin.harness.core.run_spec import CPU, Kernels, Mode

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 2


class Import(Struct, frozen=True, tag=True):
    """Caller -> ancestor, with the zygote's end of the caller's connection and of its leash: fork a zygote.

    words        its arguments, behind the number of its connection
    folder, log  the one it stands in, and the file that takes what it prints
    stays        fork an ancestor that has imported this SGLang
    """

    environment: dict[str, str]
    words: list[str]
    folder: str
    log: str
    stays: bool = False


class Ready(Struct, frozen=True, tag=True):
    """Zygote -> caller: SGLang is imported."""

    version: str


class Join(Struct, frozen=True, tag=True):
    """Caller -> zygote, with one end of a socket pair attached: at the other end a further caller asks for engines. It is told
    Ready, too."""


class Build(Struct, frozen=True, tag=True):
    """Caller -> zygote, with one end of a socket pair attached: an engine for this configuration.

    rank, port  which rank this is, and the port at which all ranks meet (a single rank too); the process that starts them
                fills both in
    foreseen    functions that patches of a Vary may change
    plain       without speculative decoding
    """

    configuration: Case
    patches: tuple[Patch, ...]
    kernels: Kernels
    mode: Mode = CPU
    rank: int = 0
    port: int = 0
    foreseen: tuple[str, ...] = ()
    plain: bool = False


class Vary(Struct, frozen=True, tag=True):
    """Caller -> engine, with one end of a socket pair attached: fork an engine with these patches in addition."""

    patches: tuple[Patch, ...]


class TooLate(Struct, frozen=True, tag=True):
    """Forked engine -> caller: with the patches, it might have been built otherwise. Zygote of an edited tree -> caller: with
    the edit, it might have been imported otherwise."""


class CannotFollow(Exception):
    """An edited tree has to be imported: what a zygote says TooLate for."""


class HowEnded(Struct, frozen=True, tag=True):
    """Caller -> zygote: how the last process ended that was forked for this caller. The answer is a Refused."""


class Built(Struct, frozen=True, tag=True):
    """Engine -> caller: the scheduler stands."""

    engine: EngineInfo


class Refused(Struct, frozen=True, tag=True):
    """The engine could not be started: `error` says why.

    trace  the traceback, if SGLang raised while it was imported or the scheduler was built
    ours   it is the adapter's limit, and not SGLang's
    full   why the process could not write its files. If set, the error says nothing about SGLang
    """

    error: str
    trace: str
    ours: bool = False
    full: str = ""


class PatchDidNotApply(Struct, frozen=True, tag=True):
    error: str


class Run(Struct, frozen=True, tag=True):
    """Caller -> engine -> runner: run the case, write its trace into `folder`. Limits in seconds.

    fresh  in a process that has run nothing, not in one that may have run other cases
    until  stop after this scheduler iteration; -1: run to the end
    live   stop before each scheduler iteration, write the trace so far, answer Stepped, and wait for a Step
    jitter  run it with these pauses, and record what requests are sent alone
    sends   of a plain engine: what each request is sent, whatever the engine would have sent it
    """

    case: Case
    folder: str
    step_seconds: float
    case_seconds: float
    fresh: bool = True
    until: int = -1
    live: bool = False
    jitter: Jitter | None = None
    sends: dict[str, tuple[int, ...]] = {}


class Stepped(Struct, frozen=True, tag=True):
    """Runner -> engine -> caller, live: all that happened before this scheduler iteration is in the trace."""

    iteration: int


class Step(Struct, frozen=True, tag=True):
    """Caller -> engine -> runner, live: what comes before the next iteration. `last`: run to the end after it."""

    requests: tuple[Request, ...] = ()
    events: tuple[Event, ...] = ()
    chunks: tuple[int, ...] = ()
    last: bool = False


class Ran(Struct, frozen=True, tag=True):
    """Runner -> engine -> caller: the case is over. `silent`: ranks that wrote no trace themselves; `before`: how many cases
    that process had run."""

    ending: Ending
    silent: tuple[int, ...] = ()
    before: int = 0


class Failed(Struct, frozen=True, tag=True):
    """Engine -> caller: the harness's own code failed in the runner; nothing is known about the worker."""

    error: str


class Probe(Struct, frozen=True, tag=True):
    """Caller -> zygote, with one end of a socket pair attached: call one function of SGLang, in a fork (call_function.py)."""

    name: str
    given: dict[str, list[int]]
    patches: tuple[Patch, ...] = ()


class Probed(Struct, frozen=True, tag=True):
    """Fork -> caller: what the function answered."""

    numbers: list[list[int]]


_OfEngines = Join | Build | Vary | HowEnded | Built | TooLate | Refused | PatchDidNotApply
Message = Import | Ready | _OfEngines | Run | Stepped | Step | Ran | Failed | Probe | Probed


def send(connection: socket.socket, message: Struct, *descriptors: int) -> None:
    """Send a message; descriptors travel with it."""
    data = msgspec.json.encode(message)
    frame = _LENGTH.pack(len(data)) + data
    if not descriptors:
        connection.sendall(frame)
    else:
        sent = socket.send_fds(connection, [frame], descriptors)
        connection.sendall(frame[sent:])


def receive(connection: socket.socket, kinds: Any = Message) -> tuple[Any, list[int]]:
    """The next message, of these kinds, and its descriptors. Raises EOFError when the other end is gone, TimeoutError by the
    socket's limit."""
    data, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
    while len(data) < _LENGTH.size:
        data += _some(connection, _LENGTH.size - len(data))
    length = _LENGTH.unpack(data)[0]
    body = b""
    while len(body) < length:
        body += _some(connection, length - len(body))
    return msgspec.json.decode(body, type=kinds), descriptors


def refusal_of(error: BaseException, prefix: str = "") -> Refused:
    """What to send of an exception that keeps an engine from being started. Call it where the exception is handled."""
    return Refused(f"{prefix}{type(error).__name__}: {error}", traceback.format_exc(), full=unwritable(error))


def unexpected_message(message: object) -> HarnessError:
    """What to raise for a message that the other end must not send here: the two are of different versions, or one is wrong.

    An error and not an `assert`, which `python -O` removes.
    """
    return HarnessError(
        f"a process of the engine said {type(message).__name__}, which has no place here",
        consequence="the case has no verdict",
        remedy="see that one eagletwin alone is installed; if so, this is a bug in it",
    )


def _some(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size)
    if not data:
        raise EOFError
    return data


# What a server is to record: two environment variables, which `eagletwin record` sets and the server's processes read.

FOLDER, OPTIONS = "EAGLETWIN_RECORD", "EAGLETWIN_RECORD_OPTIONS"


class RecordOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which requests are recorded, and how much that may cost.

    every     the first request and each N-th after it
    requests  ids of requests that are recorded in any case
    private   permute token ids, each request's by a permutation of its own; key: what those are made from, hexadecimal. All
              ranks need the same
    share     of the scheduler's time that recording may take; above it no further request is chosen
    megabytes of files, at most
    rounds    of a request, at most: its recording stops there
    at_once   requests that are recorded at one time, at most
    rows      KV rows of the draft, the first so many of each request: what `judge` compares with a checkpoint
    """

    every: int = 50
    requests: tuple[str, ...] = ()
    private: bool = False
    key: str = ""
    share: float = 0.02
    megabytes: int = 1024
    rounds: int = 4096
    at_once: int = 4
    rows: int = 0


def environment(folder: Path, options: RecordOptions) -> dict[str, str]:
    """The two variables. The folder must be absolute: a server may run elsewhere."""
    return {FOLDER: str(folder), OPTIONS: msgspec.json.encode(options).decode()}


def read_record_options(environ: Mapping[str, str] = os.environ) -> tuple[Path, RecordOptions] | None:
    """What this process was asked to record; None: nothing. Raises InputError."""
    folder = environ.get(FOLDER)
    if not folder:
        return None
    try:
        options = msgspec.json.decode(environ.get(OPTIONS) or "{}", type=RecordOptions)
        if (
            options.every < 1
            or not 0 < options.share <= 1
            or min(options.megabytes, options.rounds, options.at_once) < 1
            or options.rows < 0
        ):
            raise ValueError("a number is out of range")
    except (ValueError, msgspec.DecodeError) as error:
        raise InputError(
            f"{OPTIONS} cannot be read: {error}",
            consequence="the server runs, and nothing is recorded",
            remedy='set it as `eagletwin record --print` does, such as {"every": 50}, or leave it out',
        ) from error
    return Path(folder), options
