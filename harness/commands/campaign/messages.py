"""What a campaign hands to its workers, and what they answer: JSON, so that no machine runs what another one sent."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.signature import Signature

from ..fuzz.looking import CaseSeen, Unstarted
from ..fuzz.messages import BlockFailed
from ..fuzz.options import SearchOptions
from ..fuzz.plan import Plan


class Leg(Struct, frozen=True):
    """A part of a campaign: one SGLang, with the cases that are generated, or with a corpus.

    sglang  as `--sglang` names it
    corpus  its cases; none: they are generated
    """

    sglang: str
    corpus: tuple[Case, ...] = ()

    @property
    def called(self) -> str:
        return (self.sglang or "installed") + (", corpus" if self.corpus else "")


class Terms(Struct, frozen=True):
    """What a campaign is.

    version  of eagletwin
    words    of the command line, beside those of the options: further releases, and the corpus
    """

    version: str
    options: SearchOptions
    legs: tuple[Leg, ...]
    words: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What a person types to have it again."""
        return self.options.run.command("campaign", *self.options.words, *self.words)

    def options_of(self, leg: int) -> SearchOptions:
        """The options of a search that is this leg alone."""
        run = msgspec.structs.replace(self.options.run, sglang=self.legs[leg].sglang)
        return dataclasses.replace(self.options, run=run)

    def plan_of(self, leg: int) -> Plan:
        return dataclasses.replace(self.options_of(leg).plan, command=self.command)


class BlockJob(Struct, frozen=True, tag=True):
    """A block is to be run. earlier: what came of its first cases, where a worker died over it."""

    leg: int
    block: int
    earlier: tuple[CaseSeen, ...] = ()

    @property
    def called(self) -> str:
        return f"block {self.block}"


class InquiryJob(Struct, frozen=True, tag=True):
    """A case that shows something new is to be looked into.

    number          of the inquiry
    folder          what messages call the folder of the finding: from where the driver runs
    cases, seconds  until it was found
    columns         of the driver's terminal
    """

    leg: int
    number: int
    seen: CaseSeen
    folder: str
    cases: int
    seconds: float
    columns: int

    @property
    def called(self) -> str:
        return f"the shrinking of {self.seen.signature}"


class Up(Struct, frozen=True, tag=True):
    """A worker is there. version: its eagletwin's."""

    version: str
    node: str
    process: int


class SetAside(Struct, frozen=True, tag=True):
    """A smaller case showed something else than what is shrunk."""

    case: Case
    signature: Signature
    undecided: bool


class BugBehind(Struct, frozen=True, tag=True):
    """What looked new is a known bug's."""

    bug: str


class Packed(Struct, frozen=True, tag=True):
    """One thing that was found, as it travels: fuzz's Finding without its trace.

    text   its report, as it is printed
    files  of its folder, by their paths in it; none in a journal, since they lie in the folder
    """

    signature: Signature
    status: str
    name: str
    text: str
    facts: dict[str, Any]
    files: dict[str, bytes] = {}


class Refusal(Struct, frozen=True, tag=True):
    """This SGLang cannot be imported, there or anywhere: nothing of the leg can be run."""

    why: str


Job = BlockJob | InquiryJob
Answer = Up | CaseSeen | Unstarted | BlockFailed | SetAside | BugBehind | Packed | Refusal


def packed(message: Terms | Job | Answer) -> bytes:
    return msgspec.json.encode(message, enc_hook=str)


def read_terms(data: bytes) -> Terms:
    return msgspec.json.decode(data, type=Terms, dec_hook=as_path)


def read_job(data: bytes) -> Job:
    job: Job = msgspec.json.decode(data, type=Job)
    return job


def read_answer(data: bytes) -> Answer:
    answer: Answer = msgspec.json.decode(data, type=Answer)
    return answer


def as_path(wanted: type, value: Any) -> Any:
    """What msgspec does not read by itself."""
    return Path(value) if wanted is Path else value
