"""What both sides are asked: entries of the ledger as the tree is, and generated cases."""

from collections.abc import Sequence
from dataclasses import dataclass

from eagletwin.cases.blocks import Block
from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import ledger_of
from eagletwin.cases.reach import unreached
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.mode import Mode
from eagletwin.harness.core.verdict import DECLARED_VIEW, View


@dataclass(frozen=True, slots=True)
class Question:
    """A case that both sides run, how it is judged, and the entry that it belongs to; None: it was generated.

    mended  entries whose remedies both sides run it with; block: of a generated case, the one that draws it
    """

    name: str
    case: Case
    view: View = DECLARED_VIEW
    entry: Entry | None = None
    mended: tuple[Entry, ...] = ()
    block: Block | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """The options for these remedies."""
        return tuple(word for entry in self.mended for word in ("--remedy", entry.id))

    @property
    def shape(self) -> str:
        return "tree" if self.case.topk > 1 else "chain"


def entries_named(names: Sequence[str]) -> list[Entry]:
    """The entries that `--ledger` names: none, all, or by their ids. Raises InputError."""
    if "none" not in names:
        return ledger_of(list(names))
    if len(set(names)) > 1:
        raise InputError(
            "--ledger none, and other entries as well",
            consequence="nothing was run",
            remedy="leave out either",
        )
    return []


def asked_of_ledger(entries: Sequence[Entry], mode: Mode) -> list[Question]:
    """The entries that the mode reaches, each once, in the view in which the entry's bug is a divergence."""
    once = {entry.id: entry for entry in entries if not unreached(entry, mode)}
    return [Question(entry.id, entry.case, entry.red.view, entry) for entry in once.values()]
