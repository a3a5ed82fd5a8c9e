"""What a server is to record: two environment variables, which `eagletwin record` sets and the server's processes read."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import InputError

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


def asked(environ: Mapping[str, str] = os.environ) -> tuple[Path, RecordOptions] | None:
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
