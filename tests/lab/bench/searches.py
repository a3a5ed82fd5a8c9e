"""How soon a search finds each bug of the ledger and makes it small.

`python -m tests.lab.bench.searches ENTRY SEEDS PROCESSES` searches for one entry, and prints the result as
JSON; `search_all` runs several such processes at a time.

A search has no option and no hint: it is the default one, in as many processes as are asked for. Only where the judge declares
the bug, the view is the one in which it counts as wrong. A bug whose fix is undone is found when the smallest case of a finding
shows nothing with the fix, and breaks the entry's rule where another entry has the same fix; else the search goes on. A live
bug is searched for as if the ledger had neither it nor any other whose remedy mends it, too: it is found when its remedy makes
a case equal that those which are left do not explain.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace as changed

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import why_unreachable
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.harness.check.known import KnownBugMatcher, with_workarounds
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.pool import BlockPool, LocalWorkers
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.shrinking import Finding
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.host import Host

from ..common import ROOT, module

SECONDS, SHRINK_SECONDS = 300.0, 20.0  # of one search
GIVE_UP = 3  # searches that found nothing, after which no more are made for an entry that none has found


class Hit(Struct, frozen=True):
    """One search that found the bug: how many cases and seconds it took, and how many runs and seconds to the smallest case.

    smallest: empty where nothing was shrunk; partial: time was up before it was smallest
    """

    cases: int
    seconds: float
    runs: int
    shrink_seconds: float
    smallest: str
    partial: bool


class Searched(Struct, frozen=True):
    """The searches for an entry. told: their options, in words; seeds: how many ran; found: those that found it."""

    entry: str
    told: str
    seeds: int
    found: tuple[Hit, ...]


def why_not(entry: Entry) -> str:
    """Why no search is made for an entry; empty if one is."""
    return why_unreachable(entry)  # searches run on the CPU engine as it always is


def search(entry: Entry, seeds: int, processes: int) -> Searched:
    """Search for an entry with each seed. The host stands before the clocks start."""
    draw_from_seeds_alone()
    with Host() as host:
        run = RunSpec(patches=entry.red.patches, view=entry.red.view)
        host.engine(entry.case, run.patches)
        unknown = _that_mend(entry, host, run)
        found: list[Hit | None] = []
        while len(found) < seeds and (len(found) < GIVE_UP or any(found)):
            options = _options(len(found), run, unknown, processes)
            found.append(_live(entry, host, options) if unknown else _undone(entry, host, options))
    told = f"view {entry.red.view}" if entry.red.view != DECLARED_VIEW else ""
    return Searched(entry.id, told, len(found), tuple(one for one in found if one is not None))


def _options(seed: int, run: RunSpec, unknown: Sequence[str], processes: int) -> SearchOptions:
    return SearchOptions(
        minutes=SECONDS / 60,
        max_cases=10_000,
        seed=seed,
        shrink_minutes=SHRINK_SECONDS / 60,
        processes=processes,
        run=run,
        unknown=tuple(unknown),
    )


def _pool(matcher: KnownBugMatcher, options: SearchOptions) -> BlockPool:
    """This process, and workers beside it."""
    workers = LocalWorkers(matcher.host, options, options.processes - 1) if options.processes > 1 else None
    return BlockPool(matcher, options.plan, workers)


def _undone(entry: Entry, host: Host, options: SearchOptions) -> Hit | None:
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch, ExitStack() as stack:
        fuzz = Fuzz(Trials(host, options.run), Path(scratch), options.plan)
        fuzz.pool = stack.enter_context(_pool(fuzz.matcher, options))
        for finding in fuzz.search():
            if _is_of(entry, finding, host):
                size = _size(finding.outcome.case)
                return Hit(finding.cases, finding.seconds, finding.shrink_looks, finding.shrink_seconds, size, finding.partial)
    return None


def _that_mend(entry: Entry, host: Host, run: RunSpec) -> list[str]:
    """The live bugs with whose remedy alone the entry's case is equal; none if it is not live itself."""
    if entry.remedy is None:
        return []
    case = changed(entry.case, exercises=())
    apt = KnownBugMatcher(host, run).applicable(case, run.view)
    return [one.id for one in apt if one is entry or Trials(host, with_workarounds(run, (one,))).look_alone(case).clean]


def _live(entry: Entry, host: Host, options: SearchOptions) -> Hit | None:
    """Nothing is shrunk."""
    begun, cases = time.monotonic(), 0
    with _pool(KnownBugMatcher(host, options.run, options.unknown), options) as pool:
        for seen in chain.from_iterable(pool.blocks()):
            cases += isinstance(seen, CaseSeen)
            seconds = time.monotonic() - begun
            if isinstance(seen, CaseSeen) and _shows(entry, seen, host, options.run):
                return Hit(cases, seconds, 0, 0.0, "", partial=False)
            if seconds > SECONDS:
                return None
    return None


def _shows(entry: Entry, seen: CaseSeen, host: Host, run: RunSpec) -> bool:
    """Whether a case shows the entry's bug and none that the ledger has besides. Entries that share a remedy are told apart by
    their rules."""
    if seen.signature is None or seen.known or seen.verdict.undecided:
        return False
    if _shares(entry) and seen.verdict.rule != entry.rule:
        return False
    besides = [LEDGER[name] for name in seen.mended]
    return Trials(host, with_workarounds(run, [*besides, entry], seen.view)).look_alone(seen.case).clean


def _shares(entry: Entry) -> bool:
    """Whether another entry has the same remedy."""
    return any(other is not entry and other.remedy is not None and other.remedy is entry.remedy for other in LEDGER.values())


def _is_of(entry: Entry, finding: Finding, host: Host) -> bool:
    """Whether a finding is the entry's bug: its smallest case, run with the entry's fix, shows nothing."""
    verdict = finding.outcome.verdict
    if verdict.status != "diverged" and not verdict.rule.startswith("engine."):  # a worker that dies leaves a case unknown
        return False
    if _shares(entry) and verdict.rule != entry.rule:
        return False
    patches = tuple(patch for patch in finding.run.patches if patch != entry.revert)
    run = changed(finding.run, patches=patches, view=DECLARED_VIEW if entry.view is not None else finding.run.view)
    return Trials(host, run).look_alone(finding.outcome.case).clean


def _size(case: Case) -> str:
    prompts = ", ".join(f"{len(request.prompt)}+{request.max_new_tokens}" for request in case.requests)
    parts = [f"num_steps {case.num_steps}", f"prompt+new {prompts}"]
    parts += [f"topk {case.topk}"] if case.topk > 1 else []
    parts += [f"chunks {list(case.chunks)}"] if case.chunks else []
    parts += [f"page_size {case.page_size}"] if case.page_size > 1 else []
    parts += [", ".join(event.kind for event in case.events)] if case.events else []
    return ", ".join(parts)


def search_all(entries: Sequence[Entry], seeds: int, at_once: int, processes: int) -> Iterator[Searched]:
    """Search for all of them, `at_once` at a time, each in `processes` of its own; as they come. Raises HarnessError for the
    first that failed, when all others are through."""

    def ask(entry: Entry) -> Searched:
        command = module("tests.lab.bench.searches", entry.id, str(seeds), str(processes))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        if done.returncode:
            raise HarnessError(
                f"the search for {entry.id} ended with exit code {done.returncode}: {done.stderr.decode()[-500:]}",
                consequence="it has no figure; those of the other entries are kept",
                remedy=f"`{' '.join(command[1:])}` by itself says more",
            )
        return msgspec.json.decode(done.stdout, type=Searched)

    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(ask, entry) for entry in entries]
        failed = list[HarnessError]()
        try:
            for one in as_completed(waiting):
                try:
                    found = one.result()
                except HarnessError as error:
                    failed.append(error)
                else:
                    yield found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            raise failed[0]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(search(LEDGER[sys.argv[1]], *map(int, sys.argv[2:]))))
