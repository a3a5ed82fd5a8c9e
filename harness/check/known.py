"""The known bugs that a divergence shows: those of the ledger whose candidate fixes make the same case equal."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import ENTRIES, entries_in
from eagletwin.cases.reach import case_in, why_unreachable
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, Engine, Mode, RunSpec, mode_of_case
from eagletwin.harness.core.verdict import DECLARED_VIEW, View
from eagletwin.harness.engines.changed_code import compare_sources
from eagletwin.harness.engines.host import Host, PatchDoesNotApply, WouldNotStart
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import Source, at_hand
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions import DIMENSIONS

from .trials import Trial, Trials, base_of

# The dimensions by which a case is compared with those of the ledger.
#
# A new field of a case is one of its dimension's `kinds`, or has a reason in tests/harness/test_known.py why no bug needs it.

Kind = Mapping[str, bool]
KINDS = {name: has for dimension in DIMENSIONS.values() for name, has in dimension.kinds.items()}


@lru_cache(1024)  # each case of a search is compared with each of the ledger
def kind_of(case: Case) -> Kind:
    """Of each of KINDS whether the case has it."""
    return {name: has(case) for name, has in KINDS.items()}


def covers(needed: Kind, kind: Kind) -> bool:
    """Whether a case of this kind has all that is needed."""
    return all(kind[name] for name, needs in needed.items() if needs)


def likeness(one: Kind, other: Kind) -> int:
    """In how many dimensions two cases agree."""
    return sum(one[name] == other[name] for name in KINDS)


# Whether the code that a remedy edits is, in another tree, as in the newest release.


def as_newest(source: Source, remedy: Patch) -> bool:
    """By the functions that the remedy edits. False where that cannot be seen: the release is not at hand, say."""
    if source.called == releases(source.engine)[-1]:
        return True
    newest = _newest(source.engine)
    if newest is None or remedy.switches or remedy.sglang_toggle is not None:
        return False
    return all(_same(edit.target, source.root, newest.root) for edit in remedy.edits)


@cache
def _newest(engine: Engine) -> Source | None:
    try:
        return at_hand(releases(engine)[-1], engine)
    except EagletwinError:
        return None


@cache
def _same(target: str, root: Path, newest: Path) -> bool:
    parts = target.split(".")
    files = [(Path(*parts[:length]).with_suffix(".py"), ".".join(parts[:length])) for length in range(1, len(parts))]
    for file, module in files:
        if (newest / file).is_file():
            return _changed_functions(root / file, newest / file, module).isdisjoint((target, module))
    return False


@cache
def _changed_functions(file: Path, newest: Path, module: str) -> frozenset[str]:
    """Functions that differ, by their names; the module's too where they cannot be told."""
    try:
        new, old = file.read_bytes(), newest.read_bytes()
        if new == old:
            return frozenset()
        found = compare_sources(old, new, module)
    except (OSError, SyntaxError, ValueError):
        return frozenset((module,))
    return frozenset((*(place.name for place in found.places), *found.removed))


# Which of several parts a case needs, such as remedies to be right, or features to show a fault: the fewest.
#
# Each question runs the case once, so they are asked of halves: one that is needed among eight takes three to six runs, where
# taking away one after the other takes eight.


Part = TypeVar("Part")


def fewest(parts: Sequence[Part], clean: Callable[[tuple[Part, ...]], bool]) -> tuple[Part, ...]:
    """The parts that are needed, in their order; of two that do the same, the one that comes first. clean: whether a case is
    right with these alone; it is with all of them, and not with none."""
    found = _minimize_parts((), tuple(parts), clean, asked=True)
    if clean(found):
        return found
    found = tuple(parts)  # fewer may be wrong where more and less are right: then one after the other is taken away
    for part in reversed(parts):
        others = tuple(one for one in found if one != part)
        if others and clean(others):
            found = others
    return found


def _minimize_parts(
    kept: tuple[Part, ...], parts: tuple[Part, ...], clean: Callable[[tuple[Part, ...]], bool], *, asked: bool
) -> tuple[Part, ...]:
    """Those of `parts` that are needed beside those that are kept. asked: the kept alone are known to be too few."""
    if not asked and clean(kept):
        return ()
    if len(parts) == 1:
        return parts
    middle = (len(parts) + 1) // 2
    first, second = parts[:middle], parts[middle:]
    of_second = _minimize_parts(kept + first, second, clean, asked=False)
    of_first = _minimize_parts(kept + of_second, first, clean, asked=not of_second)
    return of_first + of_second


# The bugs that one wrong case may show, and which of them it does: those whose remedies it needs to be right.


class Suspected:
    """apt: the bugs, whose remedies fit together. rule: what the case breaks with none of them. look: runs it with some.
    told: ids of those that explained a case like it, which are asked first.

    Of bugs with one remedy the first stands for all until they are named.
    """

    def __init__(
        self, apt: Sequence[Entry], rule: str, look: Callable[[tuple[Entry, ...]], Trial], told: Collection[str] = ()
    ) -> None:
        self._alike = {entry.id: [one for one in apt if one.remedy == entry.remedy] for entry in apt}
        self._first = [entry for entry in apt if entry is self._alike[entry.id][0]]
        self._rule, self._look = rule, look
        self._told = [entry.id for entry in self._first if any(one.id in told for one in self._alike[entry.id])]

    def alone(self) -> tuple[str, ...]:
        """One of those that break the rule, if its remedy is enough; it is with most cases."""
        breaking = [entry.id for entry in self._first if self._breaks(entry)]
        if len(self._told) == 1:
            breaking.sort(key=lambda name: name not in self._told)
        return next(((name,) for name in breaking if self._with((name,)).clean), ())

    def again(self) -> tuple[str, ...]:
        """The fewest of several that were told, if those are enough."""
        if len(self._told) < 2 or not self._with(self._told).clean:
            return ()
        return fewest(self._told, lambda names: self._with(names).clean)

    def together(self) -> tuple[str, ...]:
        """The fewest whose remedies are enough, where those of all are: those that break the rule before others."""
        likely = sorted(self._first, key=lambda entry: not self._breaks(entry))
        return fewest([entry.id for entry in likely], lambda names: self._with(names).clean)

    def named(self, names: Sequence[str]) -> tuple[Entry, ...]:
        """These as entries: of bugs with one remedy that whose rule is broken without it."""
        named = list[Entry]()
        for entry in (entry for entry in self._first if entry.id in names):
            others = [name for name in names if name != entry.id]
            alike = self._alike[entry.id]
            shown = self._with(others).verdict.rule if others and len(alike) > 1 else self._rule
            named.append(next((one for one in alike if one.rule == shown), entry))
        return tuple(named)

    def _breaks(self, entry: Entry) -> bool:
        return any(one.rule == self._rule for one in self._alike[entry.id])

    def _with(self, names: Collection[str]) -> Trial:
        return self._look(tuple(entry for entry in self._first if entry.id in names))


# Which known bug a divergence is: one of the ledger whose candidate fix makes the same case equal.
#
# A rule is broken by many bugs, so its name alone says little: what is equal under a fix is that bug, and nothing else is. A
# case that is still wrong under the fixes of all bugs that it may show has something new, which may be another rule's.

_WITHIN = {entry.within for entry in ENTRIES.values()} - {DECLARED_VIEW}  # views that stand for a live bug of each case
_ACCEPTED = {entry.accepted: entry for entry in ENTRIES.values() if entry.accepted is not None}
_UNDONE = [entry.revert for entry in ENTRIES.values() if entry.revert is not None]
_OF_LEDGER = [*_UNDONE, *(entry.remedy for entry in ENTRIES.values() if entry.remedy is not None)]


@cache
def _own_cases(mode: Mode) -> dict[Case, Entry]:
    each = ((case_in(entry, mode), entry) for entry in entries_in(mode.engine).values())
    return {case: entry for case, entry in each if case is not None}


def entry_of_case(case: Case, mode: Mode) -> Entry | None:
    """The entry whose own case this is, as a search in this mode runs it."""
    return _own_cases(mode).get(case)


def cases_of_change(source: Source, run: RunSpec) -> list[Case]:
    """The own cases of entries whose patch edits a function that the source changes, or a patch that is none of the ledger's:
    they show a fix that is undone, and one that is made. First those whose functions are most like the changed ones."""
    watch = source.difference.watch if source.difference is not None else None
    changed = set[str]() if watch is None else {*watch.differs.functions}
    changed |= {name for patch in run.patches if patch not in _OF_LEDGER for name in patch.targets}
    share = dict[Case, float]()
    for case, entry in _own_cases(run.mode).items():
        patch = entry.remedy or entry.revert
        if patch is not None and not changed.isdisjoint(patch.targets):
            share[case] = len(changed & patch.targets) / len(changed | patch.targets)
    return sorted(share, key=lambda case: -share[case])


def may_be(host: Host, case: Case, rule: str, run: RunSpec, *, beside: bool = False) -> str:
    """The id of a live bug that breaks this rule, with whose remedy the case is equal; "" if there is none. All of them are
    tried, since one that is left out would be called new. beside: it is none if the case is right in the engine without what
    was changed."""
    bug = _cure(host, candidates(case, rule, run, host.source.called), case, run)
    base = base_of(host, run) if bug and beside else None
    return "" if base is not None and base.right(case, (), run.view) else bug


def may_be_another(host: Host, entry: Entry, case: Case, rule: str, run: RunSpec) -> str:
    """The id of another bug whose remedy alone makes the case equal, as the entry's does."""
    found = [other for other in candidates(case, rule, run, host.source.called) if other.remedy != entry.remedy]
    return _cure(host, found, case, run)


def _cure(host: Host, entries: Sequence[Entry], case: Case, run: RunSpec) -> str:
    """The id of the first entry with whose remedy the case is equal; "" if none. Each remedy builds an engine, once."""
    first = {entry.remedy: entry for entry in reversed(entries)}
    return next((entry.id for entry in entries if first[entry.remedy] is entry and _cures(host, entry, case, run)), "")


def _cures(host: Host, entry: Entry, case: Case, run: RunSpec) -> bool:
    """Whether the case is equal with the entry's remedy."""
    assert entry.remedy is not None
    case = replace(case, exercises=())  # with the fix it may do something else
    try:
        return Trials(host, with_workarounds(run, (entry,))).look_alone(case).clean
    except EagletwinError:  # the remedy does not fit this engine, or there is no engine for it
        return False


def candidates(case: Case, rule: str, run: RunSpec, version: str) -> list[Entry]:
    """Bugs of this engine that break the rule, have a remedy that is not applied yet, and show in this mode: those whose own
    case is most like this one come first."""
    found = [entry for entry in _mendable(run, version) if entry.rule == rule and _is_reachable(entry, case, run.mode)]
    kind = kind_of(case)
    return sorted(found, key=lambda entry: -likeness(kind_of(entry.case), kind))


def may_have(version: str, entry: Entry) -> bool:
    """Whether an engine of this version has the bug; of a fork, or a commit, it may have each that is live."""
    release = version.partition("+")[0]
    return entry.is_in(release) if release in releases(entry.engine) else not entry.fixed


def may_show(entry: Entry, case: Case, mode: Mode = CPU) -> bool:
    """Whether a case has what makes the entry's own case a special one, or another that shows it, or needs none of it here."""
    kind = kind_of(case)
    return (entry.rounded and mode.dtype != "float32") or any(
        covers(kind_of(shown), kind) for shown in (entry.case, *entry.also)
    )


def entries_of(names: Sequence[str]) -> tuple[Entry, ...]:
    return tuple(ENTRIES[name] for name in names)


def remedies_of(entries: Iterable[Entry]) -> list[Patch]:
    """The candidate fixes of these entries."""
    return [entry.remedy for entry in entries if entry.remedy is not None]


def apart(run: RunSpec) -> tuple[RunSpec, tuple[str, ...]]:
    """A run without the candidate fixes of the ledger that are among its patches, and the entries that these are of."""
    named = {entry.remedy: entry.id for entry in reversed(ENTRIES.values()) if entry.remedy in run.patches}
    pairs = zip(run.changes[::2], run.changes[1::2], strict=True)
    changes = tuple(word for pair in pairs if pair[0] != "--remedy" for word in pair)
    patches = tuple(patch for patch in run.patches if patch not in named)
    return replace(run, patches=patches, changes=changes), tuple(named[patch] for patch in run.patches if patch in named)


def with_workarounds(run: RunSpec, entries: Sequence[Entry], view: View | None = None) -> RunSpec:
    """This run with the remedies of these entries as workarounds."""
    remedies = remedies_of(entries)
    words = tuple(word for entry in entries for word in ("--remedy", entry.id))
    return replace(
        run,
        workarounds=tuple(dict.fromkeys((*run.workarounds, *remedies))),
        changes=(*run.changes, *words),
        view=view or run.view,
    )


def _mendable(run: RunSpec, version: str) -> list[Entry]:
    return [
        entry
        for entry in entries_in(run.mode.engine).values()
        if entry.remedy is not None and entry.remedy not in run.applied and may_have(version, entry)
    ]


def _is_reachable(entry: Entry, case: Case, mode: Mode) -> bool:
    """Whether the case can show in this mode what the entry needs a mode for. A draft that reads the target's rows runs with
    overlap in every mode, where the release cannot do without (docs/explanation/frozen-kv.md)."""
    mode = mode_of_case(mode, case.engine.sglang)
    modes = {mode, replace(mode, overlap=mode.overlap or RECIPES[case.model].frozen)}
    return any(not why_unreachable(entry, one) for one in modes)


@dataclass(frozen=True, slots=True)
class Explained:
    """known: the bugs of the ledger that a case shows, if it shows nothing else. trial: what is left of it with these entries
    `mended`; without known bugs: what is new, or what it was, where no remedy changes it. cured: entries whose remedies make it
    equal, of a case that is right in the base, and so not known."""

    known: tuple[Entry, ...]
    mended: tuple[Entry, ...]
    trial: Trial
    cured: tuple[Entry, ...] = ()


class KnownBugMatcher:
    """The live bugs of one engine, as a search meets them: which of them a case may show, and what is left of a divergence when
    they are mended.

    What it says of a case depends on the engine, the case and what it was told alone, so that searches on any number of cores
    agree.
    """

    def __init__(self, host: Host, run: RunSpec, unknown: Collection[str] = ()) -> None:
        """unknown: ids of entries that it explains nothing with, nor mends."""
        self.host, self.run = host, run
        self.base = base_of(host, run)
        self._mendable = _mendable(run, host.source.called)
        self._unknown = frozenset(unknown)
        self.unfit: set[str] = set()  # entries whose remedy does not fit this engine
        self.unexpected: list[tuple[Trial, View]] = []  # cases of entries that are wrong in another way than the entry's
        self._trials: dict[tuple[tuple[str, ...], View], Trials] = {}
        self._shows: dict[tuple[str, View], bool] = {}

    @property
    def ran(self) -> int:
        """Cases that engines ran for all of this."""
        return sum(trials.ran for trials in self._trials.values())

    @cached_property
    def _usual(self) -> bool:
        """Whether cases run as the tests prove each entry: on a CPU, all rules. A pipeline counts as well, in which most
        entries' cases do not run: their targets have one layer."""
        run = self.run
        usual = (
            run.mode == self.host.mode == replace(CPU, pp=run.mode.pp, engine=run.mode.engine)
            and run.kernels == DEFAULT_RUN.kernels
        )
        return usual and not run.without

    @cached_property
    def _edited_functions(self) -> frozenset[str]:
        """Functions that patches change, but for fixes of the ledger that are undone: those mend none."""
        return frozenset[str]().union(*(patch.targets for patch in self.run.patches if patch not in _UNDONE))

    def as_proven(self, entry: Entry, view: View) -> bool:
        """Whether no case has to be run to see that this engine has the live bug: what its remedy edits is as in the newest
        release, where the tests prove it. A remedy too many mends nothing; sixty cases in advance take minutes."""
        if entry.remedy is None or entry not in self._mendable:
            return False
        # what the view `shifted` reads otherwise is a plain language model as a draft
        read_alike = view == "shifted" and entry.within == DECLARED_VIEW and RECIPES[entry.case.model].reads_states
        if view != entry.within and not read_alike:
            return False
        return self._as_newest(entry.remedy)

    def right_as_proven(self, entry: Entry) -> bool:
        """The same of a bug that is fixed, and that this engine is thus known not to have."""
        version = self.host.source.called
        return entry.revert is not None and not may_have(version, entry) and self._as_newest(entry.revert)

    def _as_newest(self, patch: Patch) -> bool:
        return self._usual and self._leaves_alone(patch)

    def _leaves_alone(self, patch: Patch) -> bool:
        """Whether what a patch edits is as in the newest release, and no patch of the run edits it."""
        return self._edited_functions.isdisjoint(patch.targets) and as_newest(self.host.source, patch)

    def trials(self, entries: Sequence[Entry] = (), view: View | None = None) -> Trials:
        """Runs cases with the remedies of these entries."""
        view = view or self.run.view
        key = tuple(entry.id for entry in entries), view
        if key not in self._trials:
            self._trials[key] = Trials(self.host, with_workarounds(self.run, entries, view), self._foresee)
        return self._trials[key]

    def views(self, case: Case) -> tuple[View, ...]:
        """In which views such a case is searched: that of the run, and, where that is the declared one, those in which bugs of
        the ledger show that another live bug hides in it, as long as this engine has that other one."""
        if self.run.view != DECLARED_VIEW:
            return (self.run.view,)
        mode = self.run.mode
        reached = (entry for entry in self._mendable if _is_reachable(entry, case, mode))
        within = {entry.within: None for entry in reached if may_show(entry, case, mode)}
        return tuple(dict.fromkeys((self.run.view, *filter(self.is_needed, within))))

    def is_needed(self, view: View) -> bool:
        """Whether the bug that a view accepts is there: a change may mend it."""
        entry = _ACCEPTED.get(view)
        if entry is None or entry.remedy is None:
            return True
        return self._leaves_alone(entry.remedy) or self._has(entry, DECLARED_VIEW)

    def applicable(self, case: Case, view: View) -> tuple[Entry, ...]:
        """Live bugs that such a case may show in this view, and whose remedies fit together."""
        found = tuple(entry for entry in self._may_show(case) if self._counts(entry, view))
        if found and not self._fits(case, found):
            self.unfit.update(entry.id for entry in found if not self._fits(case, (entry,)))
            found = tuple(entry for entry in found if entry.id not in self.unfit)
            while len(found) > 1 and not self._fits(case, found):
                found = found[:-1]
        return found

    def _foresee(self, case: Case) -> list[Patch]:
        return remedies_of(self._may_show(case))

    def _may_show(self, case: Case) -> list[Entry]:
        """Live bugs that such a case may show in some view, as far as their remedies are known to fit."""
        mode, left_out = self.run.mode, self.unfit | self._unknown
        reached = (entry for entry in self._mendable if entry.id not in left_out and _is_reachable(entry, case, mode))
        return [entry for entry in reached if may_show(entry, case, mode)]

    def present(self, case: Case, view: View) -> tuple[Entry, ...]:
        """Those that this engine was seen to have: the entry's own case breaks its rule here."""
        return tuple(entry for entry in self.applicable(case, view) if self._has(entry, view))

    def explain(self, trial: Trial, view: View, applied: tuple[Entry, ...] = (), told: Collection[str] = ()) -> "Explained":
        """What is behind a wrong case. applied: entries whose remedies it ran with already. told: ids of those that explained a
        case of the same configuration: cases that share one mostly show the same, so that these are tried first."""
        found = self._explain(trial, view, applied, told)
        return found if found.known or found.cured else self._in_base(trial, view, applied) or found

    def _in_base(self, trial: Trial, view: View, applied: tuple[Entry, ...]) -> "Explained | None":
        """The known bugs of a case that comes to the same in the base. Their remedies fit there; here they do not, since the
        change edits the same code. None: the case comes to something else, or no remedy is enough."""
        case, mode = trial.case, self.run.mode
        unfit = tuple(one for one in self._mendable if one.id in self.unfit and may_show(one, case, mode))
        if self.base is None or not unfit:
            return None
        if not self.base.shows(self.trials(applied, view).look_alone(case), remedies_of(applied), view):
            return None
        for known in (*((one,) for one in unfit), (*unfit, *self.applicable(case, view))):
            mended = self.base.look(case, remedies_of((*applied, *known)), view)
            if mended is not None and mended.clean:
                return Explained(known, applied, dataclasses.replace(trial, verdict=mended.verdict))
        return None

    def _explain(self, trial: Trial, view: View, applied: tuple[Entry, ...], told: Collection[str]) -> "Explained":
        case = trial.case
        apt = self.applicable(case, view)
        if {entry.id for entry in apt} <= {entry.id for entry in applied}:
            return Explained((), applied, trial)
        suspected = Suspected(apt, trial.verdict.rule, lambda entries: self.trials(entries, view).look(case), told)
        names = suspected.alone() or suspected.again()
        with_all = None if names else self.trials(apt, view).look(case)
        if with_all is not None and not with_all.clean:
            return Explained((), apt, with_all)
        if self._may_pass(trial) and self.trials(applied, view).look_alone(case).signature != trial.signature:
            return Explained((), applied, trial)  # it takes the cases before it, and none of these bugs
        known = suspected.named(names or suspected.together())
        if self.right_in_base(case, applied, view):
            return Explained((), applied, trial, known)
        return Explained(known, known, self.trials(known, view).look(case))

    def _may_pass(self, trial: Trial) -> bool:
        """Whether a case that is wrong may be right when it runs alone: others ran before it, its worker did not live to its
        end, or a GPU ran it. On a CPU the first case of a process runs as it does alone, number for number. The engine beside
        it that decodes plainly may have run others all the same: its process stays when the worker's is a new one."""
        alone = not trial.before and not trial.case.engine.sglang.plain_decode
        return not alone or trial.header.ending.kind != "finished" or self.host.mode.device != "cpu"

    def right_in_base(self, case: Case, applied: Sequence[Entry], view: View) -> bool:
        """Whether a case is right in the engine without the change that is searched, with the same remedies."""
        return self.base is not None and self.base.right(case, remedies_of(applied), view)

    def _counts(self, entry: Entry, view: View) -> bool:
        """Whether what the entry shows is wrong in this view. A view that stands for a live bug counts that bug as right. It
        reads the draft otherwise: what a request is sent is wrong in any view."""
        if entry.rule.startswith("output."):
            return True
        return entry.within == view if entry.within != DECLARED_VIEW else view not in _WITHIN or self._has(entry, view)

    def _has(self, entry: Entry, view: View) -> bool:
        view = view if entry.within == DECLARED_VIEW or not self.is_needed(entry.within) else entry.within
        key = entry.id, view
        if self.as_proven(entry, view):
            return True
        if key not in self._shows:
            try:
                trial = self.trials((), view).look(replace(entry.case, exercises=()))
                self._shows[key] = trial.verdict.rule == entry.rule
                if trial.signature is not None and not self._shows[key]:
                    self.unexpected.append((trial, view))
            except WouldNotStart:  # this engine does not run the entry's case at all
                self._shows[key] = False
        return self._shows[key]

    def saw(self, entry: Entry, view: View, trial: Trial) -> None:
        """What an entry's own case showed here in this view, so that it is not run again for that."""
        self._shows[entry.id, view] = trial.verdict.rule == entry.rule

    def _fits(self, case: Case, entries: Sequence[Entry]) -> bool:
        try:
            self.trials(entries).stand(case)
        except PatchDoesNotApply:
            return False
        return True
