"""`eagletwin compare BASE HEAD`: what a pull request of SGLang breaks, fixes and leaves, as a comment for it."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from eagletwin.cases.reach import unreached, unreached_text
from eagletwin.harness.core.errors import EXIT_INTERRUPTED, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.run_spec import RunSpec, exact, unusual
from eagletwin.harness.core.terminal import show, width

from ..as_json import print_object
from ..fuzz.typed import MAX_CASES, MINUTES
from ..options import DEFAULT_RUNS, Runs, tell
from ..result import SaidFacts
from ..run_options import HOW, LIMITS, STRICT, run_options
from .typed import (
    SHRINK_MINUTES,
    AsJson,
    AsMarkdown,
    Base,
    Cases,
    Head,
    Ledger,
    Minutes,
    Seed,
    ShrinkMinutes,
)

if TYPE_CHECKING:
    from .report import Comparing


@run_options(STRICT, HOW, LIMITS)
def compare(
    base: Base,
    head: Head,
    cases: Cases = MAX_CASES,
    seed: Seed = 0,
    ledger: Ledger = None,
    minutes: Minutes = MINUTES,
    shrink_minutes: ShrinkMinutes = SHRINK_MINUTES,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Compare a pull request of SGLang with its base: what it breaks, what it fixes, and what it does to acceptance.

    Entries of the ledger run on both, then generated cases: those of `eagletwin fuzz`, and more of the kinds that run the
    change. Exit codes: 1 something is newly broken; 125 it cannot be told: none of the changed functions ran, or a side could
    not run; 0 otherwise.
    """
    if markdown and as_json:
        raise InputError("--markdown and --json", consequence="nothing was run", remedy="leave out either")
    from ..fuzz.options import SearchOptions
    from .asking import Asking
    from .questions import asked_of_ledger, entries_named

    entries = entries_named(ledger or ["all"])
    beyond = [entry for entry in entries if unreached(entry, spec.mode)]
    if beyond and "all" not in (ledger or ["all"]):
        said = "\n".join(unreached_text(entry, spec.mode) for entry in beyond)
        (tell if markdown or as_json else print)(said)
        if as_json:
            print_object(SaidFacts(exit_code=EXIT_UNKNOWN, said=said))
        return EXIT_UNKNOWN
    given = ("--cases", cases, MAX_CASES), ("--seed", seed, 0), ("--minutes", exact(minutes), exact(MINUTES))
    own = unusual((*given, ("--shrink-minutes", exact(shrink_minutes), exact(SHRINK_MINUTES))))
    words = [*own, *(word for name in ledger or () for word in ("--ledger", name))]
    questions = asked_of_ledger(entries, spec.mode)
    if not (questions or cases):
        raise InputError(
            "--cases 0 and no entry of the ledger", consequence="nothing was run", remedy="give either, or leave both out"
        )
    search = SearchOptions(minutes=minutes, max_cases=cases, seed=seed, shrink_minutes=shrink_minutes, run=spec)
    search.check()
    words += [*["--markdown"] * markdown, *["--json"] * as_json]
    asking = Asking(
        names=(base, head),
        questions=questions,
        plan=replace(search.plan, command=spec.command("compare", base, head, *words)),
        words=words,
        unreached=tuple(entry.id for entry in beyond),
        run=spec,
        out=out,
    )
    return asking.report(lambda one: _print(one, markdown=markdown, as_json=as_json))


def _print(one: "Comparing", *, markdown: bool, as_json: bool) -> None:
    from .markdown import markdown_of
    from .report import facts_of, text_of

    if as_json and one.ended not in (None, EXIT_INTERRUPTED):  # stdout gets the error; comparison.json has this
        tell(text_of(one, width()))
    elif as_json:
        print(json.dumps(facts_of(one), indent=1))
    elif markdown:
        print(markdown_of(one))
    else:
        show(text_of(one, width()))
