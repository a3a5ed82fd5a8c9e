"""Cases from files as blocks of a search: those of one engine configuration stand together."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.blocks import AS_RELEASED, BLOCK
from eagletwin.harness.core.case import Case, encode_case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.families.valid import read_case


@dataclass(frozen=True, slots=True)
class CorpusBlock:
    """Up to BLOCK cases of one configuration."""

    number: int
    own: tuple[Case, ...]

    @property
    def draw_seed(self) -> int:
        return self.number

    @property
    def as_released(self) -> bool:
        """In as many as of a search, from the first on: there may be one block alone."""
        return self.number % AS_RELEASED == 0

    @property
    def probe(self) -> Case:
        return self.own[0]

    def cases(self) -> list[Case]:
        return list(self.own)


def read_corpus(folder: Path) -> tuple[Case, ...]:
    """The different cases in the JSON files of a folder, and of the folders in it. Raises InputError."""
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    cases = dict.fromkeys(replace(read_case(file), exercises=()) for file in files)
    if not cases:
        raise InputError(
            f"{folder} holds no case",
            consequence="nothing was run",
            remedy="name a folder with files of cases, such as `known/` or `set-aside/` of a search",
        )
    return tuple(cases)


def blocks_of(corpus: Sequence[Case]) -> list[CorpusBlock]:
    """The corpus in blocks, the same for the same cases."""
    alike: dict[bytes, list[Case]] = {}
    for case in corpus:
        alike.setdefault(encode_case(case.configuration()), []).append(case)
    own = [tuple(cases[at : at + BLOCK]) for cases in alike.values() for at in range(0, len(cases), BLOCK)]
    return [CorpusBlock(number, cases) for number, cases in enumerate(own)]
