"""`python -m tests.golden`: verdicts of the ledger and of drawn cases, so that two versions of eagletwin can be compared."""

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from eagletwin.harness.core.errors import interrupt_on_sigterm

from .compare import differences, text

if TYPE_CHECKING:
    from eagletwin.harness.engines.host import Host

    from .corpus import Item


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
