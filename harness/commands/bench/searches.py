"""How soon a search finds each bug of the ledger and makes it small.

`python -m eagletwin.harness.commands.bench.searches ENTRY SEEDS` searches for one entry, and prints the result as JSON;
`search_all` runs several such processes at a time.

A search has only those options that turn on what generated cases leave out: models of several layers and their trees, contexts
of a few tokens, trees smaller than their paths, new weights, requests that sample, and a view other than the declared one. A
finding counts for the entry if its smallest case shows nothing with the entry's fix, and breaks the entry's rule where another
entry has the same fix; else the search goes on.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin.cases.entry import Entry
from eagletwin.cases.reach import unreached
from eagletwin.cases.regressions import LEDGER, indices_overflow, row_overflow
from eagletwin.cases.regressions.greedy_drafts import PREFILL
from eagletwin.cases.regressions.multi_layer_chunk_tail import ALL_LAYERS
from eagletwin.cases.sampling import Kind
from eagletwin.cases.strategies import SMALL_TREE, cases, searched
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.child import RUN_MODULE
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families import RECIPES

from ..fuzz.search import Finding, Fuzz, Plan

SECONDS, SHRINK_SECONDS = 60.0, 20.0  # of one search
GIVE_UP = 3  # searches that found nothing, after which no more are made for an entry that none has found


class Hit(Struct, frozen=True):
    """One search that found the bug: how many cases and seconds it took, and how many runs and seconds to the smallest case.

    partial: time was up before it was smallest
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
    return unreached(entry)  # searches run on the CPU engine as it always is


def options(entry: Entry) -> dict[str, Any]:
    """Fields of a generated case's configuration that a search for the entry holds."""
    case, settings = entry.case, entry.case.engine.sglang
    options: dict[str, Any] = {}
    if RECIPES[case.model].mtp_layers:
        options |= {"model": case.model} | ({"topk": case.topk} if case.topk > 1 else {})
    elif not RECIPES[case.model].reads_states:  # drawn only where it is asked for, too
        options |= {"model": case.model}
    elif case.verify_nodes <= case.num_steps:
        options |= {"tree_size": SMALL_TREE}
    if settings.context_length:
        options |= {"context_length": settings.context_length}
    if settings.update_weights:
        options |= {"update_weights": settings.update_weights}
    return options


def _sampling(entry: Entry) -> Kind | None:
    """How requests of the cases sample; None: not at all."""
    if entry.case.engine.sglang.rejection_sampling:
        return "rejection"
    return "target" if entry.case.samples else None


def _words(entry: Entry) -> str:
    """The options of a search for the entry."""
    names = {"tree_size": "small trees"}
    words = [names.get(name) or f"{name} {value}" for name, value in options(entry).items()]
    words += [f"sampling {kind}" for kind in [_sampling(entry)] if kind]
    words += [f"view {entry.red.view}"] if entry.red.view != DECLARED_VIEW else []
    return ", ".join(words)


def _beside(entry: Entry) -> tuple[Patch | None, ...]:
    """Remedies that both sides have: of live bugs that most cases with these options would show."""
    case, live = entry.case, list[Patch | None]()
    several = bool(RECIPES[case.model].mtp_layers)
    if several:
        live.append(ALL_LAYERS)
    elif case.engine.sglang.rejection_sampling:
        live.append(PREFILL.remedy)
    if case.engine.sglang.context_length:
        live.append(indices_overflow.ENTRY.remedy)
        if entry.fixed == "":  # the fix of a fixed one is in the same function
            live.append(row_overflow.ENTRY.remedy)
    return tuple(patch for patch in live if patch is not entry.remedy)


def search(entry: Entry, seeds: int) -> Searched:
    """Search for an entry with each seed. The host stands before the clocks start."""
    beside = tuple(patch for patch in _beside(entry) if patch is not None)
    red, green = (beside + side.patches for side in (entry.red, entry.green))
    with Host() as host:
        host.engine(entry.case, red)
        found: list[Hit | None] = []
        while len(found) < seeds and (len(found) < GIVE_UP or any(found)):
            trials = Trials(host, RunSpec(patches=red, view=entry.red.view))
            found.append(_search(entry, trials, Trials(host, RunSpec(patches=green)), len(found)))
    return Searched(entry.id, _words(entry), len(found), tuple(one for one in found if one is not None))


def _search(entry: Entry, trials: Trials, mended: Trials, seed: int) -> Hit | None:
    kind = _sampling(entry)
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        fuzz = Fuzz(
            trials,
            Path(scratch),
            Plan(
                seed=seed,
                seconds=SECONDS,
                max_cases=10_000,
                shrink_seconds=SHRINK_SECONDS,
                command="",
                held=options(entry),
                draws=cases if kind is None else searched(kind, retract=True),
            ),
        )
        for finding in fuzz.search():
            if _is_of(entry, finding, mended):
                size = _size(finding.outcome.case)
                return Hit(finding.cases, finding.seconds, finding.shrink_looks, finding.shrink_seconds, size, finding.partial)
    return None


def _is_of(entry: Entry, finding: Finding, mended: Trials) -> bool:
    """Whether a finding is the entry's bug: its smallest case, run with the entry's fix, shows nothing."""
    verdict = finding.outcome.verdict
    if verdict.status != "diverged" and not verdict.rule.startswith("engine."):  # a worker that dies leaves a case unknown
        return False
    shared = any(other is not entry and other.remedy is not None and other.remedy is entry.remedy for other in LEDGER.values())
    if shared and verdict.rule != entry.rule:
        return False
    with_fix = mended.look_alone(finding.outcome.case).verdict
    # vacuous: one of the fix's edits is in a function that so small a case never calls; another one made the difference
    return with_fix.status == "equal" or with_fix.vacuous


def _size(case: Case) -> str:
    prompts = ", ".join(f"{len(request.prompt)}+{request.max_new_tokens}" for request in case.requests)
    parts = [f"num_steps {case.num_steps}", f"prompt+new {prompts}"]
    parts += [f"topk {case.topk}"] if case.topk > 1 else []
    parts += [f"chunks {list(case.chunks)}"] if case.chunks else []
    parts += [f"page_size {case.page_size}"] if case.page_size > 1 else []
    parts += [", ".join(event.kind for event in case.events)] if case.events else []
    return ", ".join(parts)


def search_all(entries: Sequence[Entry], seeds: int, at_once: int) -> Iterator[Searched]:
    """Search for all of them, `at_once` at a time, each in a process of its own; as they come."""

    def ask(entry: Entry) -> Searched:
        command = [*RUN_MODULE, "eagletwin.harness.commands.bench.searches", entry.id, str(seeds)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise HarnessError(
                f"the search for {entry.id} ended with exit code {done.returncode}: {done.stderr.decode()[-500:]}",
                consequence="it has no figure; the figures of the entries before it are kept",
                remedy=f"`{' '.join(command[1:])}` by itself says more",
            )
        return msgspec.json.decode(done.stdout, type=Searched)

    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(ask, entry) for entry in entries]
        try:
            for one in as_completed(waiting):
                yield one.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(search(LEDGER[sys.argv[1]], int(sys.argv[2]))))
