"""Messages between a search and the processes that run its blocks: a line of JSON each. Both ends are ours."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .looking import CaseSeen, Unstarted
from .options import SearchOptions

TRIES = 3  # processes that may end over one block, or one inquiry, before it is given up


class Wanted(Struct, frozen=True):
    """A block is to be run. earlier: what came of its first cases, where a process ended over it."""

    block: int
    earlier: tuple[CaseSeen, ...] = ()


class BlockOver(Struct, frozen=True, tag=True):
    """The block is over."""


class BlockFailed(Struct, frozen=True, tag=True):
    """The harness's own code failed: nothing is known of the block."""

    cause: str
    consequence: str
    remedy: str


Answer = CaseSeen | Unstarted | BlockOver | BlockFailed


def written(message: Answer | Wanted | SearchOptions) -> bytes:
    """The message as a line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def read_answer(line: bytes) -> Answer:
    answer: Answer = msgspec.json.decode(line, type=Answer)
    return answer


def read_options(line: bytes) -> SearchOptions:
    return msgspec.json.decode(line, type=SearchOptions, dec_hook=as_path)


def as_path(wanted: type, value: Any) -> Any:
    return Path(value) if wanted is Path else value
