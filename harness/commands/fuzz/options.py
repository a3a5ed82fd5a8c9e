"""The options of `eagletwin fuzz`, as one value, and the plan of a search that they make. Options that no case can meet
together are refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path

from msgspec.structs import replace as replace_fields

from eagletwin.cases.blocks import SearchConstraints, block_of
from eagletwin.cases.strategies import PAGE_SIZES
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import CPU, DEFAULT_ENGINE, DEFAULT_RUN, FLASHMLA_PAGE, WIDEST, Mode, RunSpec, unusual
from eagletwin.harness.engines.source import Source, as_change, resolve
from eagletwin.harness.families.valid import runs_in

from ..options import MAX_CASES, MINUTES, SHRINK_MINUTES, nothing_run
from .coverage import Measured, feature_filter, held_by, mode_for, sampling_of

# The feature without which a view changes nothing.
_OF_VIEW = {"true_tree": "trees", "committed": "layers", "shifted": "plain-draft"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A search, apart from the engine.

    seconds, max_cases  when to stop generating; shrink_seconds: when to stop shrinking, for each finding
    command             what a person types to search like this again
    asked               what all blocks of cases have
    first               cases that the search begins with
    """

    seed: int
    seconds: float
    max_cases: int
    shrink_seconds: float
    command: str
    asked: SearchConstraints = field(default_factory=SearchConstraints)
    first: tuple[Case, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The options of a search, by their names on the command line.

    findings   how many end it; 0: none does
    processes  how many run cases; 0: one a core, or with an address as many as the cluster has room for
    address    of a Ray cluster; "": the processes are of this machine
    run        the options that choose no cases
    explain    whether the effect of a right change is shown
    unknown    ids of entries that the search is not to know: of no option, `search` of tests/lab alone sets it
    base       a release or a folder that the engine is a change of: of no option, `compare` alone sets it
    beside     as in SearchConstraints: of no option, what a change is in asks for it (`for_change`)
    first      cases that the search begins with: of no option, they ran the change before (corpus.py)
    """

    minutes: float = MINUTES
    max_cases: int = MAX_CASES
    seed: int = 0
    findings: int = 1
    shrink_minutes: float = SHRINK_MINUTES
    only: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    processes: int = 0
    address: str = ""
    explain: bool = False
    run: RunSpec = DEFAULT_RUN
    unknown: tuple[str, ...] = ()
    base: str = ""
    beside: tuple[str, ...] = ()
    first: tuple[Case, ...] = ()
    out: Path = Path("eagletwin-runs")

    def check(self) -> None:
        """Raises InputError for options that no generated case meets, and names those that exclude each other."""
        feature_filter(self.only, self.left_out)  # it knows the names
        if self.run.mode.attention == "flashmla":
            raise nothing_run(
                f"--attention flashmla takes pages of {FLASHMLA_PAGE}, and no generated case has more than {PAGE_SIZES[-1]}",
                "use another attention backend, or write the case yourself (docs/reference/case.md) and `check` it",
            )
        constraints = [("--only", "only", name) for name in self.only] + [("--not", "left_out", name) for name in self.left_out]
        if self.run.view in _OF_VIEW:
            constraints.append((f"--view {self.run.view}, which needs", "only", _OF_VIEW[self.run.view]))
        if self._has_block(constraints):
            return
        mode = " ".join(self.run.mode.options)
        for chosen in (*combinations(constraints, 1), *combinations(constraints, 2), constraints):
            if not self._has_block(chosen):
                named = " and ".join(f"{option} {name}" for option, _, name in chosen)
                raise nothing_run(
                    (f"no generated case has {named}" if named else "no generated case runs")
                    + (f" with {mode}" if mode else ""),
                    "give --dtype bfloat16: the kernels of its models know no float32"
                    if self._in_bfloat16()._has_block(chosen)
                    else "leave one of these options out, or write the case yourself (docs/reference/case.md)",
                )

    def _in_bfloat16(self) -> "SearchOptions":
        return replace(self, run=replace_fields(self.run, mode=replace_fields(self.run.mode, dtype="bfloat16")))

    def _has_block(self, constraints: Sequence[tuple[str, str, str]]) -> bool:
        """Whether a case is generated that meets these: an option, its field, and a feature each."""
        fields = {field: tuple(name for _, of, name in constraints if of == field) for field in ("only", "left_out")}
        try:
            block_of(self.seed, 0, replace(self, only=fields["only"], left_out=fields["left_out"]).constraints)
        except InputError:
            return False
        return True

    @property
    def constraints(self) -> SearchConstraints:
        """What all blocks of cases have."""
        return _constraints(self.only, self.left_out, self.run.mode, self.beside)

    def for_change(self, measured: Measured) -> "SearchOptions":
        """The same for a search of this change: where a changed statement runs in cases alone that no search has unless it is
        asked for, it has them; in another data type, if nothing else runs the change."""
        mode, names = self.run.mode, measured.rare
        modes = {mode_for(name, mode) for name in names}
        mode = modes.pop() if measured.only_rare and len(modes) == 1 else mode
        beside = tuple(name for name in names if mode_for(name, mode) == mode)
        return replace(self, beside=beside, run=replace_fields(self.run, mode=mode))

    @property
    def drawn_too(self) -> str:
        """What a change has added, as the end of a sentence."""
        dtype = f" in {self.run.mode.dtype}" if self.run.mode.dtype != CPU.dtype else ""
        return f"; with {' and '.join(self.beside)}{dtype}, which run it" if self.beside else ""

    @property
    def source(self) -> Source:
        """The engine that is searched, as a change of its base if one is named. Raises InputError, NotFetched."""
        return as_change(resolve(self.run.release, self.run.mode.engine), self.base)

    @property
    def plan(self) -> Plan:
        """The same for a search."""
        return Plan(
            seed=self.seed,
            seconds=60 * self.minutes,
            max_cases=self.max_cases,
            shrink_seconds=60 * self.shrink_minutes,
            command=self.command,
            asked=self.constraints,
            first=self.first,
        )

    @property
    def command(self) -> str:
        """What to type to search like this again."""
        given = (
            ("--minutes", self.minutes, MINUTES),
            ("--cases", self.max_cases, MAX_CASES),
            ("--findings", self.findings, 1),
            ("--shrink-minutes", self.shrink_minutes, SHRINK_MINUTES),
        )
        words = [word for name in self.only for word in ("--only", name)]
        words += [word for name in self.left_out for word in ("--not", name)]
        words += ["--explain"] * self.explain
        return self.run.command("fuzz", "--seed", self.seed, *unusual(given), *words)


@cache
def _constraints(only: tuple[str, ...], left_out: tuple[str, ...], mode: Mode, beside: tuple[str, ...]) -> SearchConstraints:
    """One object for several searches of a process, so that its blocks are drawn once."""
    wanted = feature_filter(only, left_out)
    return SearchConstraints(
        held=held_by(only, mode),
        sampling=sampling_of(only, left_out),
        wanted=lambda probe: wanted(probe) and runs_in(probe, mode),
        widest=WIDEST[mode.dtype],
        retract=not mode.overlap,
        overlap=mode.overlap,
        stages=mode.pp,
        production=mode.engine == DEFAULT_ENGINE and mode.device == "cpu" and mode.processes == 1 and not mode.graphs,
        engine=mode.engine,
        beside=beside,
    )
