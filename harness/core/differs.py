"""The statements that a tree or a patch changes, and which of them ran.

engines/difference.py finds them, the engine processes watch them (engines/inside/changes.py, patches.py), a trace carries them,
and the judge reads them: a case that runs no changed statement says nothing about the change.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from .terminal import count
from .verdict import Verdict

SHOWN = 5  # names of a list that a sentence holds
NEAR = "near "
_MOST_OF_A_GATE = 60  # columns


class Differs(Struct, frozen=True, kw_only=True):
    """What a trace says of a change: of the tree that it was recorded on, or of a patch in memory.

    Functions are dotted names, module.function or module.Class.method; statements are places, file:line of the changed source.

    base        what the tree was made from: a release, or the commit of HEAD; patch: the name of a patch, "" of a tree
    functions   functions of which code changed, or that read a name of their module that did; ran: those of which a changed
                statement ran, while the engine was built or while the case was driven
    statements  the changed statements of each of these functions; executed: those that ran
    gates       the conditions on the device under which changed statements stand, by place
    modules     modules that changed outside of functions, or lost some (`removed`); imported: those that were imported
    files       changed files that nothing here runs: no Python, and no documentation
    unlisted    changed Python files whose original is not at hand: each of their functions is among `functions`
    near        what held around changed statements: a branch was taken or not, two compared numbers were equal or near
    """

    base: str
    patch: str = ""
    functions: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()
    statements: dict[str, tuple[str, ...]] = {}
    executed: tuple[str, ...] = ()
    gates: dict[str, str] = {}
    modules: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    near: tuple[str, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether what ran says something about the change. An import of changed code outside of functions does not: that a
        constant is bound says nothing of who reads it, and those who do are among the functions."""
        return bool(self.ran) if self.functions else not self.modules and not self.files and not self.removed

    @property
    def idle(self) -> tuple[str, ...]:
        """Changed functions of which no changed statement ran."""
        ran = set(self.ran)
        return tuple(name for name in self.functions if name not in ran)

    @property
    def places(self) -> tuple[str, ...]:
        """All changed statements."""
        return tuple(dict.fromkeys(place for places in self.statements.values() for place in places))

    @property
    def unexecuted(self) -> tuple[str, ...]:
        """Changed statements that did not run, or the functions, of a trace that does not tell statements apart."""
        if not self.statements:
            return self.idle
        executed = set(self.executed)
        return tuple(place for place in self.places if place not in executed)

    @property
    def about(self) -> str:
        return f"{self.patch} changes the engine" if self.patch else f"This tree differs from {self.base}"

    @property
    def doubt(self) -> str:
        """Why an equal case says nothing about the change; "" if it does."""
        if self.reached:
            return ""
        if self.patch:
            return (
                f"the patch edits {self.functions[0]}, and none of its changed statements ran: {self._phrase(self.unexecuted)}"
            )
        names = self.functions or self.modules or (*self.removed, *self.files)
        runs = "the case runs none of it" if self.functions or self.modules else "nothing here runs it"
        where = f" ({self._phrase(self.unexecuted)})" if self.statements else ""
        return f"this tree differs from {self.base} in {join_names(names)}{where}, and {runs}"

    @property
    def headline(self) -> str:
        """Which part of the change did not run, where another part did; "" if all of it ran, or nothing."""
        if not self.reached:
            return ""
        what, of = ("statement", self.places) if self.statements else ("function", self.functions)
        missed, absent = self.unexecuted, [name for name in self.modules if name not in self.imported]
        parts = [f"{len(missed)} of {count(len(of), f'changed {what}')} did not run: {self._phrase(missed)}"] if missed else []
        parts += [f"nothing here runs {join_names([*self.files, *absent])}"] if self.files or absent else []
        return "; ".join(parts)

    def _phrase(self, places: Sequence[str]) -> str:
        """Places in a sentence, with the condition on the device under which one stands and the option that meets it."""
        return join_names([self._with_gate(place) for place in places[: SHOWN + 1]] + list(places[SHOWN + 1 :]))

    def _with_gate(self, place: str) -> str:
        gate = self.gates.get(place, "")
        if not gate:
            return place
        runs = "; --device cuda runs it" if needs_cuda(gate) else ""
        return f"{place} (only if {textwrap.shorten(gate, _MOST_OF_A_GATE, placeholder=' …')}{runs})"

    def lines(self, ran: Sequence[str] | None = None) -> list[str]:
        """What a report says: which of it ran, in the words of `ran`, which did not, and what nothing here runs."""
        lines = self.list_functions(ran)
        return [f"{self.about}. {lines[0]}", *lines[1:]] if lines else [f"{self.about} in comments or documentation alone."]

    def list_functions(self, ran: Sequence[str] | None = None, shown: int = SHOWN, gone: str = "Removed") -> list[str]:
        """The same without the base, `shown` names of each kind; an empty list for comments or documentation alone. gone: what
        to call what the tree has no more."""
        kinds = {
            "Run": self.ran if ran is None else ran,
            "Not run": self.idle,
            "Changed outside of functions": self.modules,
            gone: self.removed,
            "Not run here": self.files,
        }
        lines = [f"{word}: {join_names(names, shown)}." for word, names in kinds.items() if names]
        if self.statements:
            places = self.places
            text = f"Changed statements that ran: {len(places) - len(self.unexecuted)} of {len(places)}"
            lines.append(f"{text}; not: {self._phrase(self.unexecuted)}." if self.unexecuted else f"{text}.")
        if self.unlisted:
            lines.append(f"Each function of {join_names(self.unlisted)} counts as changed: the original is not at hand.")
        return lines


def doubts_of(each: Sequence[Differs], *, mutual: bool) -> list[str]:
    """Why what ran on two trees says nothing about what differs between them; [] if it does.

    mutual  whether each says in what it differs from the other. Then one of them must have run a difference; else each that was
            changed must have
    """
    doubts = [differs.doubt for differs in each if differs.doubt]
    if not mutual:
        return doubts
    return [] if any(differs.ran for differs in each) else doubts


def runs_no_change(verdict: Verdict, differs: Differs | None) -> bool:
    """Whether a case is unknown only because it runs no function that its tree changes."""
    return differs is not None and verdict.vacuous and verdict.reason == differs.doubt


def unknown_changes(version: str) -> str:
    """What to say of a tree whose changes are not known, by what traces call it; "" of a release, changed or not.

    That is a tree without the dist-info of its wheel, and a checkout whose changes are all committed.
    """
    if re.match(r"\d{1,3}(\.\d|$)", version) or "+dirty." in version:
        return ""
    return (
        f"it is not known what {version} changes, or whether that ran: its changes are committed, or it has no dist-info; "
        "`eagletwin compare BASE TREE` compares it with another"
    )


class Changes(Struct):
    """What many cases ran of a change.

    ran, executed  in how many cases each changed function and each changed statement ran; `of`: how many cases there were
    compared       cases that ran a changed statement and were run without the change, too; altered: those of them in which a
                   recorded number was another one; mends: live bugs of the base, of which the own case is right with the change
    """

    differs: Differs | None = None
    ran: dict[str, int] = {}
    of: int = 0
    executed: dict[str, int] = {}
    compared: int = 0
    altered: int = 0
    mends: tuple[str, ...] = ()

    def add(self, differs: Differs | None) -> None:
        if differs is not None:
            executed = dict.fromkeys(differs.executed, 1)
            self.update(Changes(differs, dict.fromkeys(differs.ran, 1), 1, executed))

    def update(self, other: "Changes") -> None:
        if other.differs is not None:
            self.differs = other.differs if self.differs is None else merge_differs([self.differs, other.differs])
            self.ran = _add_counts(self.ran, other.ran)
            self.executed = _add_counts(self.executed, other.executed)
            self.of += other.of
            self.compared, self.altered = self.compared + other.compared, self.altered + other.altered

    @property
    def doubt(self) -> str:
        """Why the cases say nothing about the changes; "" if a case ran a change, or nothing was changed."""
        return self.differs.doubt if self.differs is not None else ""

    @property
    def headline(self) -> str:
        """Which part of the change no case ran; "" if all of it ran, or nothing."""
        return self.differs.headline if self.differs is not None else ""

    @property
    def lines(self) -> list[str]:
        """What a report says of it; nothing of a release."""
        if self.differs is None:
            return []
        often = [f"{name} in {self.ran[name]} of {count(self.of, 'case')}" for name in self.differs.ran]
        return [*self.differs.lines(often), *([self.effect] if self.effect else [])]

    @property
    def effect(self) -> str:
        """What the change does to the numbers; "" where no case was run without it."""
        if not self.compared:
            return ""
        of = f"{count(self.compared, 'case')} that ran it and {'is' if self.compared == 1 else 'are'} right"
        if not self.altered:
            return f"It changed no recorded number in {of}."
        bugs = f" It mends {join_names(self.mends)}, whose own case is wrong without it." if self.mends else ""
        return f"It changed recorded numbers in {self.altered} of {of}.{bugs}"


def add_changes(counts: dict[str, Changes], changes: Iterable[Differs]) -> None:
    """One more case of which each change, by its patch ("" of the tree), is counted by itself."""
    for change in changes:
        counts.setdefault(change.patch, Changes()).add(change)


def _add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in one | other}  # type: ignore[operator]


class Point(Struct, frozen=True, array_like=True, order=True):
    """Where a changed statement is in the source, and where a call that notes it goes: before or after the statement at this
    line and column, at the beginning of the function there (entry), into the `else` that it lacks, or into an expression of the
    statement. lost: nowhere, since whether the change takes effect cannot be seen.

    gate  the condition on the device under which it stands
    test  what must hold there, of a statement that is gone and stood under it, or of a default; the expression, of one
    """

    line: int
    column: int
    where: Literal["before", "after", "entry", "else", "expression", "lost"] = "before"
    gate: str = ""
    test: str = ""

    def place(self, file: str) -> str:
        """What reports call it: file:line."""
        words = {"after": ", after it", "else": ", its else", "lost": ", whose effect cannot be seen"}
        test = textwrap.shorten(self.test, _MOST_OF_A_GATE, placeholder=" …")
        test = test and (f" ({test})" if self.where == "expression" else f", if {test}")
        return f"{file}:{self.line}{words.get(self.where, '')}{test}"


class ChangedFunction(Struct, frozen=True, array_like=True):
    """A changed function: its dotted name, the line of its def, and whether it is a Triton kernel, whose source is compiled.

    points  what changed in it; places: what reports call each of these
    goals   conditions around what changed, which a search wants to meet
    code    a digest of its code, without docstrings and places
    """

    name: str
    line: int
    kernel: bool = False
    points: tuple[Point, ...] = ()
    places: tuple[str, ...] = ()
    code: str = ""
    goals: tuple[Point, ...] = ()

    @property
    def calls(self) -> tuple[tuple[Point, str], ...]:
        """Each point with its place."""
        return tuple(zip(self.points, self.places, strict=True))

    @property
    def goal_calls(self) -> tuple[tuple[Point, str], ...]:
        """The same of the goals: the names begin with NEAR."""
        return tuple((point, f"{NEAR}{self.name}:{number}") for number, point in enumerate(self.goals))

    def of_file(self, file: str) -> "ChangedFunction":
        """The function with its places; several statements that begin on one line are told apart by their columns."""
        lines = [point.place(file) for point in self.points]
        places = tuple(
            f"{line}:{point.column + 1}" if lines.count(line) > 1 else line
            for point, line in zip(self.points, lines, strict=True)
        )
        return replace(self, places=places)


def changes_of(base: str, functions: Iterable[ChangedFunction], patch: str = "") -> Differs:
    """What these functions change, before anything ran."""
    listed = list(functions)
    statements: dict[str, tuple[str, ...]] = {}
    for one in listed:  # of one name there may be several
        statements[one.name] = (*statements.get(one.name, ()), *one.places)
    gates = {place: point.gate for one in listed for point, place in one.calls if point.gate}
    return Differs(base=base, patch=patch, functions=tuple(statements), statements=statements, gates=gates)


def with_executed(differs: Differs, ran: Iterable[str]) -> Differs:
    """The change, of which these statements ran."""
    places = set(ran)
    executed = tuple(place for place in differs.places if place in places)
    ran_functions = (name for name in differs.functions if not places.isdisjoint(differs.statements.get(name, ())))
    near = tuple(sorted(place for place in places if place.startswith(NEAR)))
    return replace(differs, executed=executed, ran=tuple(ran_functions), near=near)


class Watch(Struct, frozen=True):
    """What an engine process is to watch: the functions of each module that changed, also if none of its functions did."""

    differs: Differs
    modules: dict[str, tuple[ChangedFunction, ...]]


def merge_differs(each: Sequence[Differs]) -> Differs:
    """What several ranks, or several cases, ran of one change: a statement ran if it ran in any."""
    ran, imported = {name for one in each for name in one.ran}, {name for one in each for name in one.imported}
    executed, first = {place for one in each for place in one.executed}, each[0]
    return replace(
        first,
        ran=tuple(name for name in first.functions if name in ran),
        executed=tuple(place for place in first.places if place in executed),
        imported=tuple(name for name in first.modules if name in imported),
        near=tuple(sorted({place for one in each for place in one.near})),
    )


def together(each: Sequence[Differs]) -> Differs | None:
    """Several changes as one, as a tree that is run with a patch; None of none."""
    if len(each) < 2:
        return each[0] if each else None
    first = each[0]
    return replace(
        first,
        patch=" and ".join(one.patch for one in each if one.patch) if first.patch else "",
        functions=tuple(dict.fromkeys(name for one in each for name in one.functions)),
        ran=tuple(dict.fromkeys(name for one in each for name in one.ran)),
        statements={name: places for one in each for name, places in one.statements.items()},
        executed=tuple(dict.fromkeys(place for one in each for place in one.executed)),
        gates={place: gate for one in each for place, gate in one.gates.items()},
        near=tuple(dict.fromkeys(place for one in each for place in one.near)),
    )


def needs_cuda(gate: str) -> bool:
    """Whether a condition on the device is met by a GPU."""
    if gate.startswith("not "):
        inner = gate[4:]
        return inner.startswith("(not ") and needs_cuda(inner.removeprefix("(not ").removesuffix(")"))
    return "cuda" in gate and "disable_cuda" not in gate and not re.search(r"(is|==) False\b", gate)


def join_names(names: Sequence[str], shown: int = SHOWN) -> str:
    """Names in a sentence, the first few of many."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
