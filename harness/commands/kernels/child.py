"""Starts the process that runs the kernel tier, reads its messages, and outlives it whatever happens to it."""

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from eagletwin.harness.core.environment import RUN_MODULE
from eagletwin.harness.core.mode import CPU
from eagletwin.harness.engines.source import Source
from eagletwin.harness.engines.start import _environment

from .results import Began, Done, Imported, Message, NotImported, PropertyJob

IMPORT_SECONDS = 300.0  # as for engines: some 10 s on an idle machine; the limit only ends what will never answer
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
LOG_LINES = 8  # of the process's output, where it ended without a result


def run(source: Source, job: PropertyJob, limit: float) -> Iterator[Message]:
    """Messages of a process that runs the job on this SGLang, as they come. The last one is Done, or a Refused that says why
    the process did not get there.

    limit: seconds that one property and its planted faults may take.
    """
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        log, changes = Path(scratch, "output"), []
        if source.difference is not None:
            changes = [str(Path(scratch, "changes.json"))]
            Path(changes[0]).write_bytes(msgspec.json.encode(source.difference.watch))
        reading, writing = os.pipe()
        try:
            with log.open("wb") as output:
                child = subprocess.Popen(
                    [*RUN_MODULE, f"{__package__}.runner", str(writing), msgspec.json.encode(job).decode(), *changes],
                    pass_fds=[writing],
                    env=_environment(source, CPU) | {"TMPDIR": scratch},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            os.close(writing)
            writing = -1
            try:
                yield from _messages(child, reading, limit, log)
            finally:
                child.kill()
                child.wait()
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)


def _messages(child: "subprocess.Popen[bytes]", pipe: int, limit: float, log: Path) -> Iterator[Message]:
    doing, wait, rest = "it imported SGLang", IMPORT_SECONDS, b""
    while True:
        end = time.monotonic() + wait
        while b"\n" not in rest:
            if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
                yield NotImported(f"no answer within {wait:g} s while {doing}")
                return
            data = os.read(pipe, 1 << 16)
            if not data:
                yield NotImported(f"the process {_ended(child.wait())} while {doing}{_last_words(log)}")
                return
            rest += data
        line, _, rest = rest.partition(b"\n")
        message = _DECODER.decode(line)
        if isinstance(message, Began):
            wait, doing = limit, f"{message.property!r} ran"
        else:
            wait = IMPORT_SECONDS
            doing = "it looked for functions" if isinstance(message, Imported) else doing
        yield message
        if isinstance(message, Done | NotImported):
            return


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _last_words(log: Path) -> str:
    """The end of the process's output, for an error message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return "".join(f"\n    {line}" for line in lines)
