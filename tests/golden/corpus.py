"""The golden corpus: cases with their verdicts, a line of JSON each, so that two versions of eagletwin can be compared.

A line has the case and the patches themselves: a later version runs the same, whatever it would draw itself.
"""

import dataclasses
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from eagletwin.cases.blocks import block_of
from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import on_a_cpu, why_unreachable
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.core.case import Case, without_defaults
from eagletwin.harness.core.errors import EagletwinError, exit_code_of
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import CPU, Limits, Mode, RunSpec
from eagletwin.harness.engines.host import Host

# Which process runs a case depends on the case alone: an engine that is reused has then run the same cases before.
PROCESSES = 2
# Seconds. A busy machine is no hang: a step may take minutes there.
LIMITS = Limits(step=300.0, case=3600.0)
# Fields of a verdict. Left out: headroom, a share of a float bound, which differs with the processor.
FIELDS = (
    *("status", "rule", "first", "later", "reason", "vacuous", "undecided", "choices", "ties", "adopted", "relaxed"),
    *("exercised", "checked", "unseen", "impossible", "unjudged", "without", "view"),
)


@dataclasses.dataclass(frozen=True)
class Item:
    """One run of one case. entries: of the ledger, whose patches they are; side: `green` or `red` of the one entry."""

    id: str
    case: Case
    run: RunSpec
    entries: tuple[str, ...] = ()
    side: str = ""


def ledger() -> Iterator[Item]:
    """Both sides of each entry that a CPU can run, in its own model."""
    for entry in LEDGER.values():
        mode = on_a_cpu(entry)
        for side in ("green", "red") if not why_unreachable(entry, mode) else ():
            run = entry.run(getattr(entry, side), RunSpec(mode=mode, limits=LIMITS))
            yield Item(f"ledger/{entry.id}/{side}", entry.case, run, (entry.id,), side)


def drawn(host: Host, seed: int, blocks: Iterable[int], done: Collection[str]) -> Iterator[Item]:
    """The cases of these blocks of a search, each with the remedies and the view that the search begins it with. done: ids of
    cases that are not run again: no engine is built for a block that has no other."""
    draw_from_seeds_alone()
    matcher, chosen = KnownBugMatcher(host, RunSpec(limits=LIMITS)), SearchOptions(seed=seed).constraints
    for number in blocks:
        block = block_of(seed, number, chosen)
        cases = {f"drawn/{seed}/{number:05}/{place:02}": case for place, case in enumerate(block.cases())}
        run, entries = matcher.run, tuple[Entry, ...]()
        if not all(name in done for name in cases):
            views = matcher.views(block.probe)
            view = views[Random(block.draw_seed).randrange(len(views))]
            entries = () if block.as_released else matcher.present(block.probe, view)
            run = matcher.trials(entries, view).run
        yield from (Item(name, case, run, tuple(entry.id for entry in entries)) for name, case in cases.items())


def stored(lines: list[dict[str, Any]]) -> Iterator[Item]:
    """The runs of a file. Patches that this version cannot read are those of its own ledger."""
    texts = {line["id"]: line["patch"] for line in lines if "patch" in line}
    for line in lines:
        if "patch" in line:
            continue
        try:
            patches = tuple(msgspec.convert(texts[name], Patch) for name in line["patches"])
        except msgspec.ValidationError as error:
            print(f"{line['id']}: patches of this ledger, since those of the file are not read: {error}", file=sys.stderr)
            entries = [LEDGER[name] for name in line["entries"]]
            own = [getattr(one, line["side"]).patches if line["side"] else (one.remedy,) for one in entries]
            patches = tuple(dict.fromkeys(patch for of in own for patch in of if patch is not None))
        run = RunSpec(mode=msgspec.convert(line["mode"], Mode), view=line["view"], patches=patches, limits=LIMITS)
        yield Item(line["id"], msgspec.convert(line["case"], Case), run, tuple(line["entries"]), line["side"])


def line_of(item: Item, verdict: dict[str, Any]) -> dict[str, Any]:
    """What is stored of a run."""
    case = without_defaults(msgspec.json.decode(msgspec.json.encode(item.case), type=Case))  # as it is read again: 1 is 1.0
    return {
        "id": item.id,
        "digest": digest(case),
        "verdict": verdict,
        "entries": item.entries,
        "side": item.side,
        "mode": msgspec.to_builtins(item.run.mode),
        "view": item.run.view,
        "patches": [f"patch/{digest(msgspec.to_builtins(patch))}" for patch in item.run.patches],
        "case": case,
    }


def verdict_of(verdict: object, finding: str, clean: bool) -> dict[str, Any]:
    """The part of a verdict that is compared, of this version or another. finding, clean: of the trial. A case whose remedy
    is never called is unknown and clean: a search counts it as equal."""
    plain = json.dumps({name: msgspec.to_builtins(getattr(verdict, name, None)) for name in FIELDS})
    said = json.loads(re.sub(r"/[^ \"]*/site-packages/", "", plain))  # of this machine
    return {**said, "finding": finding, "clean": clean, "exit": exit_code_of(said["status"])}


def belongs_to(name: str) -> int:
    """The process that runs the item of this id: one process runs all cases of a block."""
    return zlib.crc32(name.rpartition("/")[0].encode()) % PROCESSES


def drawn_in(process: int, host: Host, seed: int, cases: int, skip: int, done: Collection[str]) -> Iterator[Item]:
    """A process's part of `cases` drawn cases, of the blocks after `skip`."""
    blocks = (number for number in count(skip) if belongs_to(f"drawn/{seed}/{number:05}/") == process)
    return islice(drawn(host, seed, blocks, done), cases // PROCESSES + (process < cases % PROCESSES))


def run_part(file: Path, process: int, items: Iterable[Item], more: Callable[[Host, Collection[str]], Iterable[Item]]) -> None:
    """Append a line for each item of this process that `file` lacks, and for those that take a host of the usual mode."""
    done = {line["id"] for line in read(file)}
    parts: dict[str, list[Item]] = {}
    for item in items:
        if belongs_to(item.id) == process:
            parts.setdefault(" ".join(item.run.mode.options), []).append(item)
    parts.setdefault("", [])
    with file.open("a") as out:
        for _, part in sorted(parts.items(), reverse=True):  # the usual mode, which has the most, comes last
            mode = part[0].run.mode if part else CPU
            with Host(mode=mode) as host:
                for item in chain(part, more(host, done) if mode == CPU else ()):
                    if item.id not in done:
                        out.writelines(map(_text, (*_patches(item, done), line_of(item, _run(host, item)))))
                        out.flush()


def read(file: Path) -> list[dict[str, Any]]:
    """Its lines; one that was not written to its end is left out."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def sort(file: Path) -> None:
    """Each line once, in the order of ids."""
    save(file, read(file))


def save(file: Path, found: Iterable[dict[str, Any]]) -> None:
    lines = {line["id"]: line for line in found}
    file.write_text("".join(_text(lines[name]) for name in sorted(lines)))


def _patches(item: Item, done: set[str]) -> Iterator[dict[str, Any]]:
    for patch in item.run.patches:
        text = msgspec.to_builtins(patch)
        if (name := f"patch/{digest(text)}") not in done:
            done.add(name)
            yield {"id": name, "patch": text}


def _run(host: Host, item: Item) -> dict[str, Any]:
    trials = Trials(host, item.run)
    try:
        trial = trials.look_alone(item.case) if item.side else trials.look(item.case)
    except EagletwinError as error:
        return {"status": "error", "reason": str(error), "exit": error.exit_code}
    return verdict_of(trial.verdict, str(trial.signature or ""), trial.clean)


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, sort_keys=True) + "\n"
