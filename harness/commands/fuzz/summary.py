"""summary.json, which a program reads, and of which the document of a search is made."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from eagletwin.harness.core.signature import Signature

from ..page_facts import read_facts
from .tally import Tally

SUMMARY = "summary.json"


class FindingFacts(Struct, kw_only=True):
    """A finding. cases, seconds: until it was found; shrink_looks, shrink_seconds: until it was smallest.

    known    the ledger's bug that the smallest case may be; apart: why it is not
    changes  the options that the case runs with; place: the first wrong number; ran: changed functions that it called
    """

    signature: Signature
    status: str
    folder: str
    cases: int
    seconds: float
    shrink_looks: int
    shrink_seconds: float
    partial: bool = False
    known: str = ""
    apart: str = ""
    changes: list[str] = []
    place: str = ""
    ran: list[str] = []
    case: dict[str, Any] = {}

    @property
    def title(self) -> str:
        return f"{self.status}: {self.signature}{f' (it may be {self.known})' if self.known else ''}"


class UnconfirmedFacts(Struct, kw_only=True):
    """A finding that was still being made smaller when the search ended."""

    signature: Signature
    status: str
    folder: str
    cases: int
    shrink_looks: int


class AsideFacts(Struct, kw_only=True):
    """A signature that was seen and not looked into. example: the file of a case that shows it"""

    signature: Signature
    cases: int
    example: str
    undecided: bool = False


class KnownFacts(Struct, kw_only=True):
    """A bug of the ledger. mended: cases that may show it, and ran with its remedy; shows: what the `cases` showed"""

    id: str
    cases: int
    mended: int
    shows: dict[str, int] = {}
    example: str = ""


class EffectFacts(Struct, kw_only=True):
    """The smallest case in which a right change alters a recorded value.

    case     its file, beside which the traces lie; sizes: how large it is
    place    of the first value that differs; base, tree: the two values
    on_base  the base's verdict on it, or the first wrong value there
    runs     smaller cases that were tried; partial: time was up
    """

    case: str
    sizes: str
    place: str
    base: str
    tree: str
    on_base: str
    runs: int
    partial: bool = False


class Summary(Struct, kw_only=True):
    """The result of a search.

    headline, remarks, meaning  how it is summed up, in sentences, and what its exit code means; not_seen: what did not run
    command     searches like this again; resume: continues it, where it was ended
    effect      where a search found nothing and was to explain what the change does
    known_note  why bugs are known that this mode cannot reach; refused: why engines did not start, by model and reason
    """

    seconds: float
    tally: Tally
    headline: str = ""
    remarks: list[str] = []
    not_seen: str = ""
    command: str = ""
    resume: str = ""
    exit_code: int | None = None
    meaning: str = ""
    not_looked_at: list[str] = []
    refused: dict[str, str] = {}
    known: list[KnownFacts] = []
    known_note: str = ""
    findings: list[FindingFacts] = []
    unconfirmed: list[UnconfirmedFacts] = []
    set_aside: list[AsideFacts] = []
    effect: EffectFacts | None = None


def read_summary(folder: Path) -> Summary:
    """Raises InputError for a summary that cannot be read."""
    return read_facts(folder / SUMMARY, Summary, "the folder of a search of this eagletwin")
