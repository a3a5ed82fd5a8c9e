"""How soon a search finds each bug of the ledger and makes it small. `python -m eagletwin.harness.bench_search ENTRY SEEDS`
searches for one entry, and prints what it came to as JSON; `search_all` runs two such processes at a time.

Nothing is told but what generated cases hold back: the model, where several layers draft, topk where that is a live bug of
theirs, and that requests sample. What is found counts for the entry if the smallest case of it is equal with the entry's fix,
and breaks the entry's rule where another entry has the same fix; else the search goes on.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin.cases.entry import Entry
from eagletwin.cases.regressions import LEDGER
from eagletwin.cases.regressions.greedy_drafts import PREFILL
from eagletwin.cases.regressions.multi_layer_chunk_tail import ALL_LAYERS
from eagletwin.cases.sampling import Kind, searched
from eagletwin.cases.strategies import cases

from .case import Case
from .engines.process import Host
from .errors import HarnessError
from .fuzz import Fuzz
from .models.recipes import RECIPES
from .patch import Patch
from .trial import Trials

AT_ONCE = 2  # processes
SECONDS, SHRINK_SECONDS = 60.0, 20.0  # of one search
GIVE_UP = 3  # searches that found nothing, after which no more are made for an entry that none has found


class Found(Struct, frozen=True):
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
    """What the searches for an entry came to. told: what they were told; seeds: how many; found: of those that found it."""

    entry: str
    told: str
    seeds: int
    found: tuple[Found, ...]


def why_not(entry: Entry) -> str:
    """Why no search finds the bug of an entry; empty if one can."""
    case, settings = entry.case, entry.case.engine.sglang
    if entry.view is not None:
        return "the judge follows the release in this, by declaration"
    if settings.context_length:
        return f"needs a context of {settings.context_length} tokens; generated cases have the model's own, and stay far below"
    if settings.update_weights:
        return "needs new weights while it runs; generated cases load none"
    if case.topk > 1 and case.num_draft_tokens <= case.num_steps and not RECIPES[case.model].mtp_layers:
        return "needs a tree with fewer nodes than its longest path; generated trees have room for it"
    return ""


def told(entry: Entry) -> dict[str, Any]:
    """Fields of a generated case's configuration that a search for the entry holds."""
    if not RECIPES[entry.case.model].mtp_layers:
        return {}
    return {"model": entry.case.model} | ({"topk": entry.case.topk} if entry.case.topk > 1 else {})


def _sampling(entry: Entry) -> Kind | None:
    """How requests of the cases sample; None: not at all."""
    if entry.case.engine.sglang.rejection_sampling:
        return "rejection"
    return "target" if entry.case.samples else None


def _beside(entry: Entry) -> tuple[Patch, ...]:
    """What is mended on both sides: live bugs that every case with chunks, or with greedy requests, would show."""
    live = [ALL_LAYERS] if RECIPES[entry.case.model].mtp_layers else []
    if entry.case.engine.sglang.rejection_sampling and PREFILL.remedy is not None:
        live.append(PREFILL.remedy)
    return tuple(patch for patch in live if patch is not entry.remedy)


def search(entry: Entry, seeds: int) -> Searched:
    """Search for an entry with each seed. The host stands before the clocks start."""
    held, kind = told(entry), _sampling(entry)
    red, green = (_beside(entry) + side.patches for side in (entry.red, entry.green))
    with Host() as host:
        host.engine(entry.case, red)
        found: list[Found | None] = []
        while len(found) < seeds and (len(found) < GIVE_UP or any(found)):
            found.append(_search(entry, Trials(host, patches=red), Trials(host, patches=green), len(found), held))
    words = ", ".join(f"{name} {value}" for name, value in (held | ({"sampling": kind} if kind else {})).items())
    return Searched(entry.id, words, len(found), tuple(one for one in found if one is not None))


def _search(entry: Entry, trials: Trials, mended: Trials, seed: int, held: dict[str, Any]) -> Found | None:
    kind = _sampling(entry)
    shared = any(other is not entry and other.remedy is not None and other.remedy is entry.remedy for other in LEDGER.values())
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        fuzz = Fuzz(
            trials,
            Path(scratch),
            seed=seed,
            seconds=SECONDS,
            max_cases=10_000,
            shrink_seconds=SHRINK_SECONDS,
            command="",
            held=held,
            draws=cases if kind is None else searched(kind, retract=True),
        )
        for finding in fuzz.search():
            verdict, case = finding.outcome.verdict, finding.outcome.case
            if shared and verdict.rule != entry.rule:
                continue
            if verdict.status == "diverged" and mended.look_alone(case).status == "equal":
                return Found(
                    finding.cases, finding.seconds, finding.shrink_looks, finding.shrink_seconds, _size(case), finding.partial
                )
    return None


def _size(case: Case) -> str:
    prompts = ", ".join(f"{len(request.prompt)}+{request.max_new_tokens}" for request in case.requests)
    parts = [f"num_steps {case.num_steps}", f"prompt+new {prompts}"]
    parts += [f"topk {case.topk}"] if case.topk > 1 else []
    parts += [f"chunks {list(case.chunks)}"] if case.chunks else []
    parts += [f"page_size {case.page_size}"] if case.page_size > 1 else []
    return ", ".join(parts)


def searchable() -> list[Entry]:
    """The entries that a search can find."""
    return [entry for entry in LEDGER.values() if not why_not(entry)]


def search_all(entries: Sequence[Entry], seeds: int) -> list[Searched]:
    """Search for all of them, AT_ONCE at a time, each in a process of its own."""

    def ask(entry: Entry) -> Searched:
        command = [sys.executable, "-P", "-m", "eagletwin.harness.bench_search", entry.id, str(seeds)]
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise HarnessError(
                f"the search for {entry.id} ended with exit code {done.returncode}: {done.stderr.decode()[-500:]}",
                consequence="there is no figure of it, and no page was written",
                remedy=f"`{' '.join(command[1:])}` by itself says more",
            )
        return msgspec.json.decode(done.stdout, type=Searched)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, entries))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(search(LEDGER[sys.argv[1]], int(sys.argv[2]))))
