"""Messages between the caller's process and the engine processes: JSON with a length in front, over a Unix socket pair.

Both ends are ours and on one machine; the messages are typed so that a version mix-up shows as an error.
"""

import socket
import struct
from typing import Any, Literal

import msgspec
from msgspec import Struct

from eagletwin.harness.case import Case
from eagletwin.harness.patch import Patch
from eagletwin.harness.trace import Ending, EngineInfo

_LENGTH = struct.Struct("!I")


class Ready(Struct, frozen=True, tag=True):
    """Zygote -> caller: SGLang is imported."""

    version: str


# What executes Triton kernels: the fast runtime; Triton's interpreter; both, compared launch by launch; the fast runtime
# three times a launch, to find undefined values and races.
Kernels = Literal["fast", "interpreter", "shadow", "checked"]


class Build(Struct, frozen=True, tag=True):
    """Caller -> zygote, with one end of a socket pair attached: fork an engine for this configuration."""

    configuration: Case
    patches: tuple[Patch, ...]
    kernels: Kernels


class Built(Struct, frozen=True, tag=True):
    """Engine -> caller: the scheduler stands."""

    engine: EngineInfo


class Refused(Struct, frozen=True, tag=True):
    """SGLang raised while it was imported or the scheduler was built: `error` is its message, `trace` the traceback."""

    error: str
    trace: str


class PatchDidNotApply(Struct, frozen=True, tag=True):
    error: str


class Run(Struct, frozen=True, tag=True):
    """Caller -> engine: fork, run the case, write its trace into `folder`. Limits in seconds."""

    case: Case
    folder: str
    step_seconds: float
    case_seconds: float


class Ran(Struct, frozen=True, tag=True):
    """Engine -> caller: the case is over. `written` says whether the child wrote a trace itself."""

    ending: Ending
    written: bool


class Failed(Struct, frozen=True, tag=True):
    """Engine -> caller: the harness's own code failed in the case's process; nothing is known about the worker."""

    error: str


Message = Ready | Build | Built | Refused | PatchDidNotApply | Run | Ran | Failed


def send(connection: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """Send a message; a descriptor travels with it."""
    data = msgspec.json.encode(message)
    frame = _LENGTH.pack(len(data)) + data
    if descriptor is None:
        connection.sendall(frame)
    else:
        sent = socket.send_fds(connection, [frame], [descriptor])
        connection.sendall(frame[sent:])


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors. Raises EOFError when the other end is gone, TimeoutError by the socket's limit."""
    data, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    while len(data) < _LENGTH.size:
        data += _some(connection, _LENGTH.size - len(data))
    length = _LENGTH.unpack(data)[0]
    body = b""
    while len(body) < length:
        body += _some(connection, length - len(body))
    return msgspec.json.decode(body, type=Message), descriptors


def _some(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size)
    if not data:
        raise EOFError
    return data
