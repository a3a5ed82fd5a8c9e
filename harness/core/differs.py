"""In what a source tree differs from the SGLang that it was made from, and which of that ran.

engines/difference.py finds it, the engine processes watch it (engines/sglang/changes.py), a trace carries it, and the judge
reads it: where functions changed and a case runs none of them, the case says nothing about the change.
"""

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from .verdict import Verdict
from .words import count

SHOWN = 5  # names of a list that a sentence holds
CALLED = "A function counts as run when it is called; whether its changed lines ran is not known."


class Differs(Struct, frozen=True, kw_only=True):
    """What a trace says of the tree that it was recorded on. Names are dotted: module.function or module.Class.method.

    base       what the tree was made from: a release, or the commit of HEAD
    functions  functions that were changed or added, or that read a name of their module that was; ran: those that were called,
               while the engine was built or while the case was driven
    modules    modules that changed outside of functions, or lost some (`removed`); imported: those that were imported
    files      changed files that nothing here runs: no Python, and no documentation
    unlisted   changed Python files whose original is not at hand: each of their functions is among `functions`
    """

    base: str
    functions: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether what ran says something about the change. Code outside of functions, and what was removed, takes effect by
        being imported; that counts where no function changed, since an import alone calls none. A module that is gone is
        imported by nothing, so that alone a case says nothing about it."""
        if self.functions:
            return bool(self.ran)
        return bool(self.imported) if self.modules else not self.files and not self.removed

    @property
    def idle(self) -> tuple[str, ...]:
        """Changed functions that were not called."""
        called = set(self.ran)
        return tuple(name for name in self.functions if name not in called)

    @property
    def doubt(self) -> str:
        """Why an equal case says nothing about the change; "" if it does."""
        if self.reached:
            return ""
        names = self.functions or self.modules or (*self.removed, *self.files)
        runs = "the case runs none of it" if self.functions or self.modules else "nothing here runs it"
        return f"this tree differs from {self.base} in {shortened(names)}, and {runs}"

    def lines(self, ran: Sequence[str] | None = None) -> list[str]:
        """What a report says: which of it ran, in the words of `ran`, which did not, and what nothing here runs."""
        lines, about = self.listed(ran), f"This tree differs from {self.base}"
        return [f"{about}. {lines[0]}", *lines[1:]] if lines else [f"{about} in comments or documentation alone."]

    def listed(self, ran: Sequence[str] | None = None, shown: int = SHOWN, gone: str = "Removed") -> list[str]:
        """The same without the base, `shown` names of each kind; an empty list for comments or documentation alone. gone: what
        to call what the tree has no more."""
        kinds = {
            "Run": self.ran if ran is None else ran,
            "Not run": self.idle,
            "Changed outside of functions": self.modules,
            gone: self.removed,
            "Not run here": self.files,
        }
        lines = [f"{word}: {shortened(names, shown)}." for word, names in kinds.items() if names]
        if self.ran:
            lines.append(CALLED)
        if self.unlisted:
            lines.append(f"Each function of {shortened(self.unlisted)} counts as changed: the original is not at hand.")
        return lines


def doubts_of(each: Sequence[Differs], *, mutual: bool) -> list[str]:
    """Why what ran on two SGLangs says nothing about what differs between them; [] if it does.

    mutual  whether each says in what it differs from the other. Then one of them must have run a difference; else each that was
            changed must have
    """
    doubts = [differs.doubt for differs in each if differs.doubt]
    if not mutual:
        return doubts
    if any(differs.functions for differs in each):  # a function that one side has alone is an import of the other's module
        return [] if any(differs.ran for differs in each) else doubts
    return [] if any(differs.imported for differs in each) else doubts


def runs_no_change(verdict: Verdict, differs: Differs | None) -> bool:
    """Whether a case is unknown only because it runs no function that its tree changes."""
    return differs is not None and verdict.vacuous and verdict.reason == differs.doubt


def unknown_changes(version: str) -> str:
    """What to say of a tree whose changes are not known, by what traces call it; "" of a release, changed or not.

    That is a tree without the dist-info of its wheel, and a checkout whose changes are all committed.
    """
    if re.match(r"\d+\.\d", version) or "+dirty." in version:
        return ""
    return (
        f"What {version} changes is not known: its changes are committed, or it has no dist-info. So nothing says whether a "
        "change ran; `eagletwin diff CASE --sglang BASE --sglang TREE` compares it with another."
    )


class Changes(Struct):
    """What many cases ran of a tree's changes. ran: how many cases called each changed function; `of`: how many there were."""

    differs: Differs | None = None
    ran: dict[str, int] = {}
    of: int = 0

    def add(self, differs: Differs | None) -> None:
        """One more case."""
        if differs is not None:
            self.update(Changes(differs, dict.fromkeys(differs.ran, 1), 1))

    def update(self, other: "Changes") -> None:
        """The cases of another count of the same tree."""
        if other.differs is not None:
            self.differs = other.differs if self.differs is None else merged([self.differs, other.differs])
            self.ran = {name: self.ran.get(name, 0) + other.ran.get(name, 0) for name in self.ran | other.ran}
            self.of += other.of

    @property
    def doubt(self) -> str:
        """Why the cases say nothing about the changes; "" if a case ran a change, or nothing was changed."""
        return self.differs.doubt if self.differs is not None else ""

    @property
    def lines(self) -> list[str]:
        """What a report says of it; nothing of a release."""
        if self.differs is None:
            return []
        often = [f"{name} in {self.ran[name]} of {count(self.of, 'case')}" for name in self.differs.ran]
        return self.differs.lines(often)


class ChangedFunction(Struct, frozen=True, array_like=True):
    """A changed function: its dotted name, the line of its def, and whether it is a Triton kernel, whose source is compiled."""

    name: str
    line: int
    kernel: bool = False


class Watch(Struct, frozen=True):
    """What an engine process is to watch: the functions of each module that changed, also if none of its functions did."""

    differs: Differs
    modules: dict[str, tuple[ChangedFunction, ...]]


def merged(each: Sequence[Differs]) -> Differs:
    """The differences of several ranks as one: a function ran if it ran on any rank."""
    ran, imported = {name for one in each for name in one.ran}, {name for one in each for name in one.imported}
    first = each[0]
    return replace(
        first,
        ran=tuple(name for name in first.functions if name in ran),
        imported=tuple(name for name in first.modules if name in imported),
    )


def shortened(names: Sequence[str], shown: int = SHOWN) -> str:
    """Names in a sentence, the first few of many."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
