"""What the benchmark has measured so far, kept as JSON next to its page: each part with its day and its machine.

The page is written from it (report.py), so that it can be completed part by part, on a machine that is quiet for a
few minutes at a time, and no part takes another's date.
"""

import datetime
import os
import platform
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import installed_version

from .searches import Searched
from .speed import Share, Spread, StepTimes

RECORD = "benchmarks.json"


class Stamp(Struct, frozen=True):
    """When and on what a part was measured."""

    date: str
    machine: str
    versions: str


class Speed(Struct, frozen=True):
    """By topk cases/s, what of a case is trace and judge, and a decode step in both runtimes; cases/s of one process and of two
    at once; seconds from the shell to the verdict, until another engine stands, and of a case by what grows and its size.
    """

    stamp: Stamp
    rates: dict[int, Spread]
    shares: dict[int, Share]
    steps: dict[int, StepTimes]
    alone: Spread
    together: Spread
    start: Spread
    growth: dict[str, dict[int, Spread]]
    build: Spread | None = None  # not measured yet


class Search(Struct, frozen=True):
    """The searches for one entry. at_once: how many entries were searched for at a time; processes: of each search."""

    stamp: Stamp
    at_once: int
    searched: Searched
    processes: int = 1


class BenchRecord(Struct, frozen=True):
    """All parts: speed, and the searches by entry. What is absent was not measured yet."""

    speed: Speed | None = None
    searches: dict[str, Search] = {}


def read_record(folder: Path) -> BenchRecord:
    """The record in a folder; empty if the folder has no record."""
    path = folder / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchRecord)
    except FileNotFoundError:
        return BenchRecord()
    except msgspec.DecodeError as error:
        raise InputError(
            f"{path}: {error}", consequence="nothing was measured: it would have been written over", remedy="move it away"
        ) from error


def write_record(folder: Path, record: BenchRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def stamp() -> Stamp:
    """Of this day and machine."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores ({_processor()}), {platform.system()}"
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("sglang", "torch", "triton"))
    return Stamp(datetime.date.today().isoformat(), machine, f"Python {platform.python_version()}, {versions}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
