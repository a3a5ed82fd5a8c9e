"""The journal of a search, a file of lines that only grows: results of its cases, and conclusions on what was new in them.

A line is written before anything follows from it, so a search whose driver was killed continues from there (`fuzz --resume`):
it goes through the same cases in the same order, and takes their results from the journal as far as it has them. A killed
driver may leave a part of a line, which is not read, and is cut off when the file is opened again.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import msgspec
from msgspec import Struct

from eagletwin import __version__
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.signature import Signature

from ..options import log_progress, nothing_run
from .options import SearchOptions
from .tally import FindingFacts
from .worker import Seen, as_path

JOURNAL = "journal.jsonl"
_SURE = 1.0  # seconds after which lines are on the disk, whatever becomes of the machine


class Begun(Struct, frozen=True, tag=True):
    """The first line. called: which release or tree is searched; ahead: as in steering.Order."""

    options: SearchOptions
    called: str
    ahead: int
    version: str = __version__


class Driven(Struct, frozen=True, tag=True):
    """A driver begins."""


class Saw(Struct, frozen=True, tag=True):
    """A result of the block at a place. at: seconds since the search began, without those between two drivers."""

    place: int
    at: float
    seen: Seen


class Over(Struct, frozen=True, tag=True):
    """All cases of the block at a place have run. lost: the block was given up before: which, and why."""

    place: int
    lost: str = ""


class Died(Struct, frozen=True, tag=True):
    """A worker ended over a block."""

    place: int


class SetAside(Struct, frozen=True):
    """What a smaller case showed in place of what was shrunk."""

    case: Case
    signature: Signature
    undecided: bool


class Conclusion(Struct, frozen=True, tag=True):
    """What a case that looked new, for what it showed, came to: the bug that explains it, or a finding, as in summary.json."""

    case: Case
    signature: Signature
    bug: str = ""
    finding: FindingFacts | None = None
    asides: tuple[SetAside, ...] = ()


Record = Begun | Driven | Saw | Over | Died | Conclusion


@dataclass(slots=True)
class Past:
    """A journal, read.

    seen  results by the place of their block; over: places of blocks all of whose cases have run
    lost  blocks that were given up, and why; deaths: of workers
    at    seconds that the search has taken; drivers: how many there were; size: bytes of the lines
    """

    folder: Path
    begun: Begun
    seen: dict[int, list[Seen]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    deaths: int = 0
    concluded: list[Conclusion] = field(default_factory=list)
    at: float = 0.0
    drivers: int = 0
    size: int = 0

    @property
    def findings(self) -> list[FindingFacts]:
        return [one.finding for one in self.concluded if one.finding is not None]

    def add(self, record: Record) -> None:
        if isinstance(record, Saw):
            self.seen.setdefault(record.place, []).append(record.seen)
            self.at = record.at
        elif isinstance(record, Over):
            self.over.add(record.place)
            self.lost += [record.lost] if record.lost else []
        elif isinstance(record, Conclusion):
            self.concluded.append(record)
        self.deaths += isinstance(record, Died)
        self.drivers += isinstance(record, Driven)


class Journal:
    """The file, open for further lines. at: seconds that the search has taken until now; size: bytes of the lines that count.
    Safe among threads."""

    def __init__(self, folder: Path, at: float = 0.0, size: int = 0) -> None:
        self._opened = time.monotonic() - at
        self._lock, self._sure_at = Lock(), 0.0
        self._file: BinaryIO | None = (folder / JOURNAL).open("ab")
        self._file.truncate(size)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock, suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._file = None

    def saw(self, place: int, seen: Seen) -> None:
        self.add(Saw(place, round(time.monotonic() - self._opened, 3), seen))

    def add(self, record: Record) -> None:
        """Write a line. It outlives this process at once, and the machine within a second. A full disk ends no search."""
        line = msgspec.json.encode(record, enc_hook=str) + b"\n"
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(line)
                self._file.flush()
                if isinstance(record, Begun | Conclusion) or time.monotonic() > self._sure_at + _SURE:
                    os.fsync(self._file.fileno())
                    self._sure_at = time.monotonic()
            except OSError as error:
                log_progress(
                    f"note: {JOURNAL} cannot be written ({error.strerror}), so --resume would continue from before that"
                )
                self._file = None


def read_journal(folder: Path) -> Past:
    """Raises InputError for a folder without one, and for one of another eagletwin."""
    file, past = folder / JOURNAL, None
    decoder = msgspec.json.Decoder(Record, dec_hook=as_path)
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                record = _read(decoder, line, f"{file}, line {number}")
                if past is None:
                    past = Past(folder, _first(record, file))
                past.add(record)
                past.size += len(line)
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}", consequence="there is no search to continue", remedy="name the run folder of a search"
        ) from error
    return past or Past(folder, _first(None, file))


def _read(decoder: "msgspec.json.Decoder[Record]", line: bytes, where: str) -> Record:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{where}: {error}",
            consequence="the search cannot continue: its results are not known",
            remedy="continue with the eagletwin that began it, or begin another search",
        ) from error


def _first(record: Record | None, file: Path) -> Begun:
    if isinstance(record, Begun) and record.version == __version__:
        return record
    writer = f"eagletwin {record.version} began it" if isinstance(record, Begun) else "it does not say what is searched"
    raise nothing_run(f"{file}: {writer}", f"begin another search with eagletwin {__version__}")
