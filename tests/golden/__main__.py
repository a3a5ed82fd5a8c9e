"""`python -m tests.golden`: verdicts of the ledger and of drawn cases, so that two versions of eagletwin can be compared."""

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagletwin.harness.core.errors import interrupt_on_sigterm

if TYPE_CHECKING:
    from eagletwin.harness.engines.host import Host

    from .corpus import Item


# What differs between two files of golden verdicts, or of commands: a verdict that is another, and numbers beside it.

# What makes a verdict another one. The rest is listed, and fails nothing.
DECISIVE = ("clean", "exit", "finding", "rule", "status", "undecided", "vacuous")
PLACE = ("rule", "request", "round", "stage", "step", "layer", "rank", "index")
Line = dict[str, Any]


def differences(old: list[Line], new: list[Line]) -> dict[bool, dict[str, list[str]]]:
    """What changed -> the ids of the lines in which it did; decisive changes under True."""
    found: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    befores, afters = ({line["id"]: line for line in lines if "patch" not in line} for lines in (old, new))
    for name in sorted(befores | afters):
        before, after = befores.get(name), afters.get(name)
        if before is None or after is None:
            found[before is not None].setdefault("only in NEW" if before is None else "missing in NEW", []).append(name)
            continue
        for decisive, what in _changes(before, after):
            found[decisive].setdefault(what, []).append(name)
    return found


def text(found: dict[bool, dict[str, list[str]]], compared: int) -> Iterator[str]:
    """Lines for people: the most frequent change first."""
    for decisive, title in ((True, "verdicts that changed"), (False, "verdicts that stand, with other numbers or words")):
        groups = sorted(found[decisive].items(), key=lambda group: (-len(group[1]), group[0]))
        lines = {name for names in found[decisive].values() for name in names}
        yield f"{title}: {len(lines)} of {compared}"
        for what, names in groups:
            some = names if decisive else names[:3]
            yield f"  {len(names)} x {what}: {', '.join(some)}{', …' * (len(some) < len(names))}"


def _changes(before: Line, after: Line) -> Iterator[tuple[bool, str]]:
    if before.get("digest") != after.get("digest"):
        yield True, "digest: another case"
        return
    old, new = flat(before["verdict"]), flat(after["verdict"])
    places = [[said.get(f"first.{name}") for name in PLACE] for said in (old, new)]
    if places[0] != places[1]:
        yield True, f"place: {places[0]} -> {places[1]}"
    for name in sorted(old | new):
        if old.get(name) == new.get(name) or (name.removeprefix("first.") in PLACE and name != "rule"):
            continue
        number = isinstance(old.get(name, 0), int) and isinstance(new.get(name, 0), int) and name not in DECISIVE
        yield name in DECISIVE, name if number else f"{name}: {' -> '.join(_apart(repr(old.get(name)), repr(new.get(name))))}"


def _apart(old: str, new: str, width: int = 150) -> tuple[str, str]:
    """Two long texts from a little before the place where they differ."""
    if max(len(old), len(new)) <= width:
        return old, new
    same = next((place for place, both in enumerate(zip(old, new, strict=False)) if both[0] != both[1]), width)
    start = max(0, same - 40)
    return old[start : start + width], new[start : start + width]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested objects by their dotted names; a list is a leaf."""
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for one, inner in value.items() for key, leaf in flat(inner, f"{name}.{one}".lstrip(".")).items()}


def main() -> int:
    """Exit code 1: a verdict changed, or a process failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    write = verbs.add_parser("write", help="run both sides of the ledger and cases that a search draws; goes on in FILE")
    write.add_argument("file", type=Path)
    write.add_argument("--cases", type=int, default=2000)
    write.add_argument("--seed", type=int, default=0)
    write.add_argument("--skip", type=int, default=0, metavar="BLOCKS")
    write.add_argument("--ledger", action=argparse.BooleanOptionalAction, default=True)
    replay = verbs.add_parser("replay", help="run the cases and patches of OLD with this version; goes on in NEW")
    replay.add_argument("old", type=Path)
    replay.add_argument("file", metavar="new", type=Path)
    for verb in (write, replay):
        verb.add_argument("--process", type=int, help=argparse.SUPPRESS)
    compare = verbs.add_parser("compare", help="print what differs; exit code 1: a verdict")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    verbs.add_parser("commands", help="run a table of fast commands").add_argument("file", type=Path)
    given = parser.parse_args()
    with interrupt_on_sigterm():
        return run(given)


def run(given: argparse.Namespace) -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    from . import commands, corpus

    if given.verb == "compare":
        old, new = corpus.read(given.old), corpus.read(given.new)
        found = differences(old, new)
        print("\n".join(text(found, sum("patch" not in line for line in old))))
        return int(bool(found[True]))
    if given.verb == "commands":
        corpus.save(given.file, commands.lines())
        return 0
    if given.process is not None:
        return part(given, given.process)
    given.file.touch()
    corpus.sort(given.file)
    call = [sys.executable, "-m", "tests.golden", *sys.argv[1:], "--process"]
    others = [subprocess.Popen([*call, str(process)]) for process in range(1, corpus.PROCESSES)]
    try:
        part(given, 0)
        failed = [other.wait() for other in others]
    finally:
        for other in others:
            other.terminate()
            other.wait()
        corpus.sort(given.file)
    return int(any(failed))


def part(given: argparse.Namespace, process: int) -> int:
    """What one of the processes runs."""
    from . import corpus

    def more(host: "Host", done: "Collection[str]") -> "Iterable[Item]":
        return corpus.drawn_in(process, host, given.seed, given.cases, given.skip, done) if given.verb == "write" else ()

    items = corpus.stored(corpus.read(given.old)) if given.verb == "replay" else corpus.ledger() if given.ledger else ()
    corpus.run_part(given.file, process, items, more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
