"""The ledger on every release: ask what is not known yet, keep each answer, and hand out all of them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from eagletwin.cases.entry import Known
from eagletwin.harness.commands.prove.proof import hosts
from eagletwin.harness.core.case import Case
from eagletwin.harness.engines.provision import NotFetched

from .results import Measured, read, write
from .survey import asked_of, asked_output, cell_without_asking, digest_of, measure, plain_greedy


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
