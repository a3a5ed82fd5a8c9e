"""`eagletwin compare`: a tree with the ledger and its base, a pull request with its base, or two runs number for number."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace as replace_fields

from eagletwin.cases.ledger import case_of, find_entry
from eagletwin.cases.reach import unreached_text, why_unreachable
from eagletwin.harness.core.errors import EXIT_UNKNOWN, InputError
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, RunSpec, exact, unusual
from eagletwin.harness.core.terminal import count, nearest, show, width

from ..options import (
    HOW,
    LIMITS,
    MAX_CASES,
    MINUTES,
    OUT,
    OUTPUT,
    STRICT,
    WHICH,
    Names,
    flag,
    log_progress,
    nothing_run,
    option,
    run_options,
)
from ..result import emit_result, wants_json, with_json

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry

    from ..result import ComparisonFacts

SHRINK_MINUTES, LINES = 0.5, 20
_ONE, _TWO, _RUNS = "One tree", "Two trees", "Number for number"


What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[BASE] [HEAD]",
        help="One release or source tree, by default the installed one, or the newest; two of them, BASE and HEAD; or two run "
        "folders.",
        show_default=False,
    ),
]
_SEARCH = (
    option("", "ledger", Names, None, "none|all|ID", show_default=False)(
        "Entries of the ledger that run: `all` that the mode reaches, `none`, or these. Repeatable. Default: all; of two "
        "trees without live bugs whose code is that of the newest release in both."
    ),
    option("", "minutes", float, MINUTES, "MINUTES", min=0.0)(
        "Limits the generated cases, which come after the ledger. 0: none."
    ),
    option("", "cases", int, MAX_CASES, "N", min=0)("Limits the generated cases. 0: none."),
    option("", "seed", int, 0, "N", min=0)("The same seed draws the same cases."),
)
_OUTPUT = (
    flag(OUTPUT, "markdown")("Print a comment for the pull request, in Markdown."),
    option(OUTPUT, "summary", Path | None, None, "FILE")("Append that comment to this file."),
)
_OF_ONE = (
    option(_ONE, "base", str, "", "BASE", show_default=False)(
        "What the tree is a change of: a revision of the same checkout, a release or a folder. The report says which of "
        "the functions that differ ran; if none did, the code is 125. Default: its commit or release."
    ),
    option(_ONE, "family", Names, None, "MODEL", show_default=False)(
        "Generate cases of this model recipe (docs/reference/case.md), in an equal part of the time. Repeatable. Default: "
        "one search of everything."
    ),
    option(_ONE, "history", Path | None, None, "FILE")("Append a line of JSON to this file: what came out, and of what."),
)
_OF_TWO = (
    option(_TWO, "shrink_minutes", float, SHRINK_MINUTES, "MINUTES", min=0.0)(
        "Limits the shrinking of one example of each way in which HEAD is newly broken."
    ),
)
_OF_RUNS = (
    option(_RUNS, "case", str, "", "CASE", show_default=False)(
        "Run this case, or entry of the ledger, alone on both, and compare what they record."
    ),
    option(_RUNS, "lines", int, LINES, min=1)("How many differences to print."),
)


@with_json
@run_options(_SEARCH, _OF_ONE, _OF_TWO, _OF_RUNS, _OUTPUT, (OUT,), STRICT, WHICH[:1], HOW, LIMITS)
def compare(what: What = None, *, spec: RunSpec, **given: Any) -> int:
    """Compare a release or tree with known bugs or with another one, or compare two runs value by value.

    One, as a CI job: the case of each fix in the ledger, then a search as `eagletwin fuzz` has it. BASE and HEAD: what a
    pull request breaks, what it fixes, and what it does to acceptance. Entries of the ledger run first, then generated cases,
    which go where the change runs. Two run folders, or --case: each number that differs.

    Exit codes: 0 nothing below. 1 a fixed bug shows again, a search found a divergence that no known bug explains, HEAD breaks
    something, or a number differs by more than the judge's bound. 125 cannot tell.
    """
    names = tuple(what or ())
    runs = any(_is_run(name) for name in names)
    kind = _RUNS if runs or given["case"] else _ONE if len(names) < 2 else _TWO
    others = {_ONE: (*_OF_TWO, *_OF_RUNS), _TWO: (*_OF_ONE, *_OF_RUNS), _RUNS: (*_OF_ONE, *_OF_TWO, *_SEARCH, *_OUTPUT)}[kind]
    _check_fit(names, kind, [one.name for one in others if given[one.name] != one.usual])
    case, lines, base, history = (given.pop(name) for name in ("case", "lines", "base", "history"))
    if kind == _RUNS:
        return _numbers(names, "" if runs else case, lines, given["out"], spec, extra=runs and case)
    search = _Search(**given | {"family": tuple(given["family"] or ())})
    return search.one(names, base, history, spec) if kind == _ONE else search.two(names, spec)


def _is_run(name: str) -> bool:
    if not Path(name).is_dir():
        return False
    from eagletwin.harness.core.trace import HEADER  # it imports torch

    return (Path(name) / HEADER).is_file()


def _numbers(names: tuple[str, ...], case: str, lines: int, out: Path, spec: RunSpec, *, extra: object) -> int:
    if extra or (not case and spec != RunSpec(limits=spec.limits, strict=spec.strict)):
        raise InputError(
            "options of an engine, with two runs that were recorded before",
            consequence="nothing was compared",
            remedy="leave them out; or name two releases or trees, and --case",
        )
    both = names[0], names[1]
    if not case:
        from .numbers import compare_runs

        return compare_runs(*both, lines)
    from eagletwin.harness.core.files import new_run_folder
    from eagletwin.harness.engines.source import resolve

    entry, title = find_entry(case), spec.mode.title
    if entry is not None and why_unreachable(entry, spec.mode):
        print(unreached_text(entry, spec.mode))
        return EXIT_UNKNOWN
    chosen, sources = case_of(case), (resolve(both[0], spec.mode.engine), resolve(both[1], spec.mode.engine))
    folder = new_run_folder(out, f"{chosen.name}-compare")
    log_progress(f"{chosen.name} runs on {title} {both[0]} (left) and on {both[1]} (right); both are imported first")
    log_progress(f"folder: {folder}")
    from .numbers import compare_case

    return compare_case(chosen, both, sources, lines, folder, spec)


@dataclass(frozen=True, slots=True)
class _Search:
    """What was typed of entries and generated cases."""

    ledger: list[str] | None
    minutes: float
    cases: int
    seed: int
    family: tuple[str, ...]
    shrink_minutes: float
    markdown: bool
    summary: Path | None
    out: Path

    @property
    def words(self) -> list[str]:
        """What to type to have it again."""
        given = (
            ("--minutes", exact(self.minutes), exact(MINUTES)),
            ("--cases", self.cases, MAX_CASES),
            ("--seed", self.seed, 0),
            ("--shrink-minutes", exact(self.shrink_minutes), exact(SHRINK_MINUTES)),
            *(("--family", name, "") for name in self.family),
            *(("--ledger", name, "") for name in self.ledger or ()),
        )
        return [*unusual(given), *["--markdown"] * self.markdown]

    def entries(self, spec: RunSpec) -> "list[Entry] | None":
        """The entries that are named, each once; None: one of them is named that the mode does not reach, which was said."""
        from .groups import select_entries
        from .one import must_take_more

        must_take_more("--summary", self.summary)
        if self.markdown and wants_json():
            raise nothing_run("--markdown and --json", "leave out either")
        ledger = self.ledger or ["all"]
        found = {entry.id: entry for entry in select_entries(ledger, spec.mode.engine)}
        beyond = [entry for entry in found.values() if why_unreachable(entry, spec.mode)]
        if beyond and "all" not in ledger:
            print("\n".join(unreached_text(entry, spec.mode) for entry in beyond))
            return None
        if not found and not (self.minutes and self.cases):
            raise nothing_run(
                "no entry of the ledger and no generated case", "leave out --ledger none, or --minutes 0 and --cases 0"
            )
        return list(found.values())

    def one(self, names: tuple[str, ...], base: str, history: Path | None, spec: RunSpec) -> int:
        families = _families(self.family or ("",)) if self.minutes and self.cases else []
        entries = self.entries(spec)
        if entries is None:
            return EXIT_UNKNOWN
        from ..fuzz.options import SearchOptions
        from .one import Against

        run = replace_fields(spec, release=names[0] if names else "")
        search = SearchOptions(minutes=self.minutes, max_cases=self.cases, seed=self.seed, run=run, out=self.out)
        for name in families:
            replace(search, only=(name,) if name else ()).check()
        return Against(
            entries=[entry for entry in entries if not why_unreachable(entry, spec.mode)],
            families=families,
            search=search,
            base=base,
            words=self.words,
            summary=self.summary,
            history=history,
            markdown=self.markdown,
        ).report()

    def two(self, names: tuple[str, ...], spec: RunSpec) -> int:
        entries = self.entries(spec)
        if entries is None:
            return EXIT_UNKNOWN
        from ..fuzz.options import SearchOptions
        from .groups import cases_of_ledger
        from .two import ComparisonRun

        search = SearchOptions(
            minutes=self.minutes,
            max_cases=self.cases if self.minutes else 0,
            seed=self.seed,
            shrink_minutes=self.shrink_minutes,
            run=spec,
        )
        search.check()
        asking = ComparisonRun(
            names=(names[0], names[1]),
            questions=cases_of_ledger(entries, spec.mode),
            every=self.ledger is not None,
            plan=replace(search.plan, command=spec.command("compare", *names, *self.words)),
            words=self.words,
            unreached=tuple(entry.id for entry in entries if why_unreachable(entry, spec.mode)),
            run=spec,
            out=self.out,
        )
        return asking.report(self._show)

    def _show(self, one: "ComparisonFacts") -> None:
        from eagletwin.harness.page.render import markdown_of, text_of

        from .one import append
        from .report import document_of

        document = document_of(one, Path(one.folder))
        append(self.summary, markdown_of(document))
        print(markdown_of(document)) if self.markdown else show(text_of(document, width()))
        emit_result(one)


def _check_fit(names: tuple[str, ...], kind: str, misplaced: list[str]) -> None:
    """Raises InputError for names and options that do not go together. misplaced: options that were given and are of no use."""
    if len(names) > 2 or (kind == _RUNS and len(names) != 2):
        raise InputError(
            f"compare cannot do this with {count(len(names), 'name')}",
            consequence="nothing was compared",
            remedy="`eagletwin compare TREE`, `compare BASE HEAD`, `compare BASE HEAD --case CASE`, or two run folders",
        )
    if misplaced:
        there = {_ONE: "one tree", _TWO: "two trees", _RUNS: "a comparison number for number"}[kind]
        option = f"--{misplaced[0].replace('_', '-')}"
        raise nothing_run(f"{option} with {there}", f"leave {option} out")


def _families(names: tuple[str, ...]) -> list[str]:
    """Raises InputError for a model recipe that is not there."""
    from eagletwin.harness.families import RECIPES

    unknown = [name for name in names if name and name not in RECIPES]
    if unknown:
        raise nothing_run(
            f"--family {unknown[0]}: there is no such recipe", nearest(unknown[0], RECIPES, "`eagletwin info models`")
        )
    return list(dict.fromkeys(names))


def old_arguments(words: list[str], old: str) -> list[str]:
    """The arguments of `ci` and `diff` as `compare` takes them: a tree is an argument, and the case of `diff` an option."""
    trees, rest = list[str](), list[str]()
    left = iter(words)
    for word in left:
        name, _, value = word.partition("=")
        if name == f"--{DEFAULT_ENGINE}":
            trees.append(value or next(left, ""))
        else:
            rest.append(word)
    if old == "diff" and trees:
        if rest[:1] == [] or rest[0].startswith("-") or len(trees) != 2:
            raise nothing_run(
                "`eagletwin diff` is now `eagletwin compare`",
                f"eagletwin compare {' '.join(trees) if len(trees) == 2 else 'BASE HEAD'} --case CASE",
            )
        rest = ["--case", *rest]
    return [*trees, *rest]
