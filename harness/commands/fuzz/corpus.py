"""Cases that ran a change, in the cache by the content of each changed function: the next search of a branch begins with them.

They are run and judged as any case, so one that is out of date costs its own time, and alters no verdict.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import msgspec
from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import Source
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import check_case

from .tally import LEAST

_MOST = 24  # cases that a search begins with
_AMONG = 200  # cases of one function, of which the cache gets some
_CONTENTS = 8  # of one function, whose cases the cache has


@dataclass(slots=True)
class _Cases:
    """Of one function: cases in which something was found, and those that ran it, with the changed statements that each ran."""

    found: list[Case] = field(default_factory=list)
    ran: list[tuple[Case, set[str]]] = field(default_factory=list)

    @property
    def chosen(self) -> list[Case]:
        """As many as it takes to say that the change is right (tally.LEAST): small ones that run all statements, and further
        ones, which share their engines."""
        ran, first = set[str](), list[Case]()
        small = sorted(self.ran, key=lambda one: _size(one[0]))
        for case, places in small:
            if not places <= ran:
                first.append(case)
                ran |= places
        engines = dict.fromkeys(case.configuration() for case in (*first, *(case for case, _ in small)))
        place = {engine: number for number, engine in enumerate(engines)}
        rest = sorted((case for case, _ in small), key=lambda case: place[case.configuration()])
        return list(_once((*self.found, *first, *rest)))[:LEAST]


class Corpus:
    """The cases of the functions that a source changes; none of a source without a change."""

    def __init__(self, source: Source) -> None:
        watch = source.difference.watch if source.difference is not None else None
        base = watch.differs.base if watch is not None and watch.differs.base in releases() else ""
        codes = dict[str, list[str]]()  # of one name there may be several functions
        for one in chain.from_iterable(watch.modules.values()) if watch is not None else ():
            codes.setdefault(one.name, []).append(one.code)
        # function -> what the names of its files begin with, and the one of its content
        self._names = {name: (_digest(base, name), _digest(*code)) for name, code in codes.items()}
        self._cases = dict[str, _Cases]()

    def cases(
        self, wanted: Callable[[Case], bool] = lambda case: True, further: Sequence[Case] = (), recent: Sequence[Case] = ()
    ) -> tuple[Case, ...]:
        """What the cache has of these functions, of each by turns; where it has not their content, of the one before. Each
        second one is of these further ones: they show what is known of the functions, whatever ran them before. recent: fill up
        what are too few to say that the change is right."""
        turns = zip_longest(*(self._read(*names) for names in self._names.values()))
        cached = (case for turn in turns for case in turn if case is not None)
        each = (case for pair in zip_longest(further, cached) for case in pair if case is not None and wanted(case))
        found = tuple(_once(each))[:_MOST]
        return tuple(_once((*found, *filter(wanted, recent))))[: max(len(found), LEAST)]

    def add(self, case: Case, differs: Differs | None, *, found: bool = False) -> None:
        """A case that ran some of the change, if it did. found: something was found in it, so that it comes first."""
        if differs is None:
            return
        case = replace(case, exercises=())
        for name in (name for name in differs.ran if name in self._names):
            cases = self._cases.setdefault(name, _Cases())
            if found:
                cases.found.insert(0, case)
            elif len(cases.ran) < _AMONG:
                cases.ran.append((case, {place for place in differs.executed if place in differs.statements[name]}))

    @property
    def recent(self) -> tuple[Case, ...]:
        """What was added, as `write` leaves it."""
        return tuple(_once(case for turn in zip_longest(*self._chosen().values()) for case in turn if case is not None))[:_MOST]

    def _chosen(self) -> dict[str, list[Case]]:
        return {name: cases.chosen for name, cases in self._cases.items()}

    def write(self) -> None:
        """Leave what was added in the cache. A full disk ends no search."""
        for name, cases in self._chosen().items():
            key, content = self._names[name]
            file = cache_folder("corpus") / f"{key}-{content}.json"
            with suppress(OSError):
                partial = file.with_suffix(f".{os.getpid()}")
                partial.write_bytes(msgspec.json.encode(cases))
                partial.replace(file)
                for old in _of(key)[_CONTENTS:]:
                    old.unlink(missing_ok=True)

    def _read(self, key: str, content: str) -> list[Case]:
        with suppress(OSError, msgspec.MsgspecError, InputError):  # damaged, or of another eagletwin
            files = sorted(_of(key), key=lambda file: file.stem != f"{key}-{content}")  # its own is first
            cases = msgspec.json.decode(files[0].read_bytes(), type=list[Case]) if files else []
            for case in cases:
                check_case(case, str(files[0]))
            return cases
        return []


def _of(key: str) -> list[Path]:
    """The files of a function, the newest first."""
    return sorted(cache_folder("corpus").glob(f"{key}-*.json"), key=lambda file: (-file.stat().st_mtime_ns, file.name))


def _size(case: Case) -> tuple[int, int]:
    """How long it takes to build its engine, and to run it."""
    tokens = sum(len(request.prompt) + request.max_new_tokens for request in case.requests)
    return len(case.engine.sglang.graphs), tokens * RECIPES[case.model].target.num_layers


def _once(cases: Iterable[Case]) -> Iterator[Case]:
    """Each case under the first of its names."""
    yield from {replace(case, name="case"): case for case in cases}.values()


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
