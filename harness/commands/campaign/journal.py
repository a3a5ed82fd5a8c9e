"""What a campaign has seen, as lines of a file that only grows: whoever reads it again knows what the driver knew.

A line is written before anything follows from it. A driver that is killed may leave a part of a line, which nobody reads, and
which is cut off when the file is opened for further ones.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import InputError

from ..fuzz.looking import CaseSeen, Unstarted
from .messages import BugBehind, Packed, SetAside, Terms, as_path

JOURNAL = "journal.jsonl"
_SURE = 1.0  # seconds after which lines are on the disk, whatever becomes of the machine


class CampaignBegan(Struct, frozen=True, tag=True):
    """The campaign began: the first line."""

    terms: Terms


class Drove(Struct, frozen=True, tag=True):
    """A driver began, or goes on."""

    at: float


class Joined(Struct, frozen=True, tag=True):
    """A worker is up."""

    node: str
    process: int


class Saw(Struct, frozen=True, tag=True):
    """What came of a case. at: seconds since the campaign began, without those between two drivers."""

    leg: int
    block: int
    at: float
    told: CaseSeen | Unstarted


class BlockDone(Struct, frozen=True, tag=True):
    """All cases of a block have run."""

    leg: int
    block: int


class InquiryOver(Struct, frozen=True, tag=True):
    """An inquiry came to its end. asides: what smaller cases showed."""

    number: int
    told: BugBehind | Packed
    asides: tuple[SetAside, ...] = ()


class Died(Struct, frozen=True, tag=True):
    """A worker ended, over a block, or over an inquiry, or without a job."""

    leg: int = -1
    block: int = -1
    inquiry: int = -1
    why: str = ""


class LegClosed(Struct, frozen=True, tag=True):
    """The SGLang of a leg would not start."""

    leg: int
    why: str


Record = CampaignBegan | Drove | Joined | Saw | BlockDone | InquiryOver | Died | LegClosed


class Journal:
    """The file, open for further lines. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO = (folder / JOURNAL).open("ab")
        _cut(folder / JOURNAL)
        self._sure_at = 0.0

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.close()

    def add(self, record: Record) -> None:
        """Write a line. It outlives this process at once, and the machine within a second."""
        self._file.write(msgspec.json.encode(record, enc_hook=str) + b"\n")
        self._file.flush()
        if isinstance(record, CampaignBegan | InquiryOver) or time.monotonic() > self._sure_at + _SURE:
            os.fsync(self._file.fileno())
            self._sure_at = time.monotonic()


def read_journal(folder: Path) -> Iterator[Record]:
    """The lines of a journal; what a killed driver left of a line is none. Raises InputError."""
    file = folder / JOURNAL
    try:
        decoder = msgspec.json.Decoder(Record, dec_hook=as_path)
        with file.open("rb") as lines:
            whole = (line for line in lines if line.endswith(b"\n"))
            for number, line in enumerate(whole, 1):
                yield _read(decoder, line, file, number)
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}",
            consequence="there is no campaign to go on with",
            remedy="name the folder of a campaign",
        ) from error


def _cut(file: Path) -> None:
    """Take away what follows the last end of a line."""
    with file.open("r+b") as opened:
        end = opened.seek(0, os.SEEK_END)
        at = end
        while at > 0:
            begin = max(0, at - 65536)
            opened.seek(begin)
            place = opened.read(at - begin).rfind(b"\n")
            if place >= 0:
                at = begin + place + 1
                break
            at = begin
        if at < end:
            opened.truncate(at)


def _read(decoder: "msgspec.json.Decoder[Record]", line: bytes, file: Path, number: int) -> Record:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{file}, line {number}: {error}",
            consequence="the campaign cannot go on: what it saw is not known",
            remedy="go on with the eagletwin that began it, or begin another campaign",
        ) from error
