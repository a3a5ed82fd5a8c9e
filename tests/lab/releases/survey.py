"""Ask releases for what is not known yet, and keep the answers: each ledger entry, and greedy output of common cases."""

import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random
from typing import Literal

from msgspec import Struct

from eagletwin.cases.entry import Entry, Known, Probe
from eagletwin.cases.reach import on_a_cpu, why_unreachable
from eagletwin.harness.commands.matrix import Matrix, Question
from eagletwin.harness.commands.prove.proof import hosts
from eagletwin.harness.core.case import Case, Request, without_defaults
from eagletwin.harness.core.errors import EagletwinError, HarnessError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Limits, RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Verdict
from eagletwin.harness.engines.host import Host, PatchDoesNotApply
from eagletwin.harness.engines.provision import NotFetched, releases
from eagletwin.harness.families.dimensions.dimension import tokens

from ..common import read_answers, write_answers

# What was measured on the releases, next to the page that is made of it.

FILE = "releases.jsonl"
_OUTPUT = "greedy output"  # in the place of an entry


class Cell(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cell"):
    """An entry of the ledger on a release.

    asked   digest of what was run and how it was judged: another case or view must be measured anew
    status  `green`: equal. `red`: diverged, or ended as the entry says, by `rule`. `cannot tell`: `why`
    own     the rule is the entry's: what shows is this bug and not another that comes before it
    """

    asked: str
    status: Literal["green", "red", "cannot tell"]
    rule: str = ""
    own: bool = False
    why: str = ""


class Output(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="output"):
    """The results of the common cases.

    tokens    a digest of each case's emitted tokens; "" of one that did not finish: `why`, of the first of them
    packages  what it ran with
    """

    asked: str
    tokens: tuple[str, ...] = ()
    why: str = ""
    packages: str = ""


class Measured(Struct, kw_only=True):
    """A release: its cells by entry, and its output. It is filled while it is measured."""

    release: str
    cells: dict[str, Cell] = {}
    output: Output | None = None


def read(folder: Path) -> dict[str, Measured]:
    """Each known release, oldest first, with what is known of it. Raises InputError for a file of another kind."""
    answers = read_answers(folder / FILE, Cell | Output, "nothing was measured")
    found = {name: Measured(release=name) for name in releases()}
    for name, by_entry in answers.items():
        measured = found.setdefault(name, Measured(release=name))
        measured.output = by_entry.pop(_OUTPUT, None)
        measured.cells = by_entry
    return found


def write(folder: Path, found: Collection[Measured]) -> None:
    """Write what is known of all releases, in place of what was there."""
    answers: dict[str, dict[str, Struct]] = {one.release: {**one.cells} for one in found}
    for one in found:
        if one.output is not None:
            answers[one.release][_OUTPUT] = one.output
    write_answers(folder / FILE, answers)


# Ask releases for what is not known yet: each entry of the ledger, and greedy output of common cases.

# Cases that every release can run: one chain of drafts, pages of one slot, no tree, no prefix cache, no events.
#
# What they emit must be the same everywhere, token for token, and what the target alone would say: the bugs of the ledger that
# all of these releases have or had change drafts, and verification repairs those.

COUNT = 100
_OF_A_MODEL = 20


def common_cases(model: str = "") -> tuple[Case, ...]:
    """All of them; or some, of this model."""
    return tuple(common_case(seed, model) for seed in range(_OF_A_MODEL if model else COUNT))


def common_case(seed: int, model: str = "") -> Case:
    """1-3 requests of 1-40 prompt tokens, in chunks or not, one after the other or at once; 1-4 draft steps."""
    random = Random(seed)
    requests = tuple(
        Request(
            id=f"r{number}",
            prompt=tokens(random.randrange(1 << 30), random.randint(1, 40), 96),
            max_new_tokens=random.randint(1, 12),
            arrive=random.choice((0, 0, number)),
        )
        for number in range(random.randint(1, 3))
    )
    return Case(
        name=f"common-{seed}{f'-{model}' if model else ''}",
        model=model or ("llama-tiny", "llama-gqa")[seed // 4 % 2],
        num_steps=1 + seed % 4,  # an engine for each model and number of steps: eight for all cases
        chunked_prefill_size=(1024, 8)[seed % 2],
        requests=requests,
    )


# Run the ledger on a release, and the cases that all releases have in common.

LIMITS = Limits(step=60.0, case=300.0)
_CELL = "cell"  # the run folder of a cell, which is removed
_PLACE = re.compile(r"/\S*?/(?=sglang/)|(?<=\.py):\d+(?= in |, and )")


def asked_of(entry: Known) -> str:
    """A digest of what a cell runs, how it is judged, and what would make it red."""
    if isinstance(entry, Probe):
        return _digest(f"{entry.call.words} {entry.rule}".encode())
    mended = sorted({patch.name for patch in entry.beside.values()})
    return _digest(f"{without_defaults(entry.case)} {entry.red.view} {entry.rule}{mended or ''}".encode())


def asked_output(cases: Sequence[Case]) -> str:
    """A digest of the common cases."""
    return _digest(str([without_defaults(case) for case in cases]).encode())


def cell_of(entry: Known, verdict: Verdict) -> Cell:
    """What a verdict of the release, unchanged but for an entry's `beside`, says of an entry."""
    asked, own = asked_of(entry), verdict.rule == entry.rule
    if verdict.status == "equal":
        return Cell(asked=asked, status="green")
    if verdict.status == "diverged" or (own and entry.rule.startswith("engine.")):
        return Cell(asked=asked, status="red", rule=verdict.rule, own=own)
    why = ": ".join(part for part in (verdict.rule, verdict.reason) if part)
    return Cell(asked=asked, status="cannot tell", rule=verdict.rule, why=_without_places(why))


def cell_without_asking(entry: Known) -> Cell | None:
    """What can be said of an entry without asking a release, on a CPU; None: a release must be asked."""
    why = "" if isinstance(entry, Probe) else why_unreachable(entry, on_a_cpu(entry))
    return Cell(asked=asked_of(entry), status="cannot tell", why=why) if why else None


def measure(
    host: Host | NotFetched,
    known: Measured,
    entries: Sequence[Known],
    cases: Sequence[Case],
    *,
    keep: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Fill in what is not known of a release, of these entries and the common cases; and `keep` it after each answer.

    Of a release that cannot be had, what is known stays; the rest was not `asked`, so it is asked next time.
    """
    if isinstance(host, NotFetched):
        for entry in entries:
            if entry.id not in known.cells or known.cells[entry.id].asked != asked_of(entry):
                known.cells[entry.id] = Cell(asked="", status="cannot tell", why=_without_places(host.cause))
        if known.output is None or known.output.asked != asked_output(cases):
            known.output = Output(asked="", why=_without_places(host.cause))
        say(f"{known.release:13} {host.cause}")
        keep()
        return
    for entry in entries:
        begun = time.monotonic()
        cell = known.cells[entry.id] = _cell(host, entry, known.release)
        said, seconds = f"{cell.status} {cell.rule}".strip(), time.monotonic() - begun
        say(f"{known.release:13} {entry.id:26} {said}, {seconds:.1f} s" + (f": {cell.why}" if cell.why else ""))
        keep()
    if known.output is None or known.output.asked != asked_output(cases):
        begun = time.monotonic()
        known.output = _output(host, cases)
        finished = sum(bool(tokens) for tokens in known.output.tokens)
        took = f"{time.monotonic() - begun:.1f} s {known.output.why}"
        say(f"{known.release:13} output of {finished} of {len(cases)} common cases, {took}")
        keep()


def _cell(host: Host, entry: Known, release: str) -> Cell:
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        what, patches = (entry, ()) if isinstance(entry, Probe) else (entry.case, _beside(entry, release))
        if isinstance(entry, Entry):
            host = host.beside(mode=on_a_cpu(entry))
        view = entry.red.view if isinstance(entry, Entry) else DECLARED_VIEW
        run = RunSpec(mode=host.mode, view=view, limits=LIMITS, patches=patches)
        answer = Matrix().ask(host, Question(what=what, name=_CELL, out=Path(scratch), run=run))
        error, verdict = answer.error, answer.verdict
        if isinstance(error, PatchDoesNotApply):
            why = f"{patches[0].name}, which mends what would show first, does not apply to this release"
            return Cell(asked=asked_of(entry), status="cannot tell", why=why)
        if error is not None:  # it does not start, it refuses the configuration, or the harness failed on it
            why = _without_places(f"{error.cause}{_last_words(Path(scratch) / _CELL)}".replace(scratch, ""))
            asked = "" if isinstance(error, HarnessError) else asked_of(entry)  # which says nothing of the release
            return Cell(asked=asked, status="cannot tell", why=why)
    return may_be_of_what_is_mended(entry, release, cell_of(entry, verdict), verdict.reason)


def may_be_of_what_is_mended(entry: Known, release: str, cell: Cell, reason: str) -> Cell:
    """The cell; none, where a worker ends on a release that the entry clears: what mends another bug may end it there."""
    beside = _beside(entry, release)
    if not beside or cell.status != "red" or not cell.rule.startswith("engine.") or entry.is_in(release):
        return cell
    why = f"{cell.rule}: {reason}, beside {beside[0].name}, which may be what ends the worker of this release"
    return Cell(asked=cell.asked, status="cannot tell", rule=cell.rule, why=_without_places(why))


def _beside(entry: Known, release: str) -> tuple[Patch, ...]:
    """What is mended on this release, so that the entry can show."""
    return (entry.beside[release],) if isinstance(entry, Entry) and release in entry.beside else ()


def _without_places(why: str) -> str:
    """On one line, without the folders and line numbers that are this machine's and this release's."""
    return _PLACE.sub("", " ".join(why.split()))


def _last_words(folder: Path) -> str:
    """The last line of the log of a case that ran, where there is one."""
    log = folder / "engine.log"
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")


def _output(host: Host, cases: Sequence[Case]) -> Output:
    tokens, why, packages = [], "", ""
    for case in cases:
        try:
            engine = host.engine(case)
            with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
                trace = engine.run(case, Path(scratch), LIMITS, fresh=False)
        except EagletwinError as error:
            tokens.append("")
            why = why or f"{case.name}: {error.cause}"
            continue
        info = engine.info
        packages = f"torch {info.torch}, triton {info.triton}, transformers {info.transformers}"
        tokens.append(digest_of(emitted(trace)) if trace.header.ending.kind == "finished" else "")
        if not tokens[-1]:
            why = why or f"{case.name} {trace.header.ending.kind}: {trace.header.ending.detail}"
    return Output(asked=asked_output(cases), tokens=tuple(tokens), why=_without_places(why), packages=packages)


def emitted(trace: Trace) -> dict[str, list[int]]:
    """The tokens that each request was answered with."""
    records = enumerate(trace.header.records)
    return {record.request: trace.integers(number, "tokens") for number, record in records if record.stage == "finished"}


def digest_of(tokens: dict[str, list[int]]) -> str:
    return _digest(repr(sorted(tokens.items())).encode())


def plain_greedy(case: Case) -> dict[str, list[int]]:
    """What the target alone says to each request of a common case, by the reference, in float64."""
    from eagletwin.harness.families.weights import target_says  # it imports torch

    return {request.id: target_says(case.model, request.prompt, request.max_new_tokens) for request in case.requests}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


# The ledger on every release: ask what is not known yet, keep each answer, and hand out all of them.


def fill(
    folder: Path,
    names: Sequence[str],
    ledger: Sequence[Known],
    wanted: Sequence[Known],
    cases: Sequence[Case],
    *,
    again: bool,
    say: Callable[[str], None],
) -> list[Measured]:
    """What is known of all releases in `folder`, after these were asked for what is missing of the wanted entries, and of
    greedy output to the common cases.

    again: also for what is known of them; output too, if all of the ledger is wanted. Stopped half way, it goes on from there.
    """
    found = read(folder)
    missing = {}
    for name in names:
        cells = found[name].cells
        unasked = {entry.id: cell for entry in wanted if (cell := cell_without_asking(entry)) is not None}
        if any(cells.get(entry) != cell for entry, cell in unasked.items()):
            cells.update(unasked)
            write(folder, found.values())
        due_here = [entry for entry in wanted if entry.id not in unasked]
        missing[name] = [
            entry for entry in due_here if again or entry.id not in cells or cells[entry.id].asked != asked_of(entry)
        ]
    due = [name for name in names if missing[name] or _output_is_due(found[name], cases)]
    for name, host in hosts(due):
        if again and len(wanted) == len(ledger) and not isinstance(host, NotFetched):
            found[name].output = None
        measure(host, found[name], missing[name], cases, keep=lambda: write(folder, found.values()), say=say)
    asked = {entry.id: asked_of(entry) for entry in ledger}
    for measured in found.values():
        # cells of entries that left the ledger, or whose case has changed since, are dropped
        measured.cells = {name: cell for name, cell in measured.cells.items() if cell.asked in ("", asked.get(name))}
        if measured.output is not None and measured.output.asked not in ("", asked_output(cases)):
            measured.output = None
    return list(found.values())


def _output_is_due(measured: Measured, cases: Sequence[Case]) -> bool:
    return measured.output is None or measured.output.asked != asked_output(cases)


def right_output(cases: Sequence[Case]) -> list[str]:
    """Digests of what the target alone says to each common case."""
    return [digest_of(plain_greedy(case)) for case in cases]


def differs(measured: Sequence[Measured], right: Sequence[str]) -> bool:
    """Whether a release answers any common case with other tokens."""
    outputs = [one.output.tokens for one in measured if one.output is not None]
    return any(token not in (true, "") for tokens in outputs for token, true in zip(tokens, right, strict=False))
