"""`eagletwin fuzz`: generate cases until one diverges, and shrink it."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN, AlreadyReported
from eagletwin.harness.core.progress import progress
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import show, width

from ..as_json import tell_result, with_json
from ..options import DEFAULT_RUNS, Runs, tell
from ..result import SearchFacts
from ..run_options import CHANGES, HOW, JUDGING, LIMITS, SOURCE, run_options
from .typed import (
    MAX_CASES,
    MINUTES,
    SHRINK_MINUTES,
    Asks,
    ContextLength,
    Findings,
    MaxCases,
    Minutes,
    Model,
    SamplingOption,
    Seed,
    ShrinkMinutes,
    SmallTrees,
    Topk,
    UpdateWeights,
)

if TYPE_CHECKING:
    from .options import SearchOptions
    from .search import Finding, Fuzz


@with_json
@run_options(CHANGES, JUDGING, SOURCE, HOW, LIMITS)
def fuzz(
    minutes: Minutes = MINUTES,
    max_cases: MaxCases = MAX_CASES,
    seed: Seed = 0,
    findings: Findings = 1,
    shrink_minutes: ShrinkMinutes = SHRINK_MINUTES,
    model: Model = None,
    topk: Topk = None,
    context_length: ContextLength = None,
    small_trees: SmallTrees = False,
    update_weights: UpdateWeights = None,
    sampling: SamplingOption = "none",
    ask: Asks = None,
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Generate cases until one diverges, then shrink it.

    Exit codes: 1 a divergence was found; 125 a crash, a hang or another unknown was found, no case was equal, or the reference
    could not decide more than a tenth of the cases; 0 nothing was found, and at least one case was equal. A crash is a finding
    as a divergence is: it is made small and kept, with its repro.py. Its code is 125 because no number was shown to be wrong,
    and `git bisect run` skips such a commit.
    """
    from .options import SearchOptions

    options = SearchOptions(
        minutes=minutes,
        max_cases=max_cases,
        seed=seed,
        findings=findings,
        shrink_minutes=shrink_minutes,
        model=model,
        topk=topk,
        context_length=context_length,
        small_trees=small_trees,
        update_weights=update_weights,
        sampling=sampling,
        asks=tuple(dict.fromkeys(ask or ())),
        run=spec,
        out=out,
    )
    options.check()  # before anything slow is imported
    return search(options)


def search(options: "SearchOptions") -> int:
    """Search, and print what is found and what was looked at; the exit code."""
    from eagletwin.harness.engines.source import resolve

    source = resolve(options.run.sglang)
    tell(f"importing SGLang {source.called}; then cases, for up to {options.minutes:g} min in all")
    from eagletwin.harness.check.trials import Trials
    from eagletwin.harness.core.folders import new_run_folder
    from eagletwin.harness.engines.host import Host, WouldNotStart

    from .report import finding_text, tally_text, write_summary
    from .search import Fuzz, Plan

    host = Host(source=source, mode=options.run.mode)
    folder = new_run_folder(options.out, f"fuzz-{options.seed}")
    trials = Trials(host, options.run)
    plan = Plan(
        seed=options.seed,
        seconds=60 * options.minutes,
        max_cases=options.max_cases,
        shrink_seconds=60 * options.shrink_minutes,
        command=options.command,
        held=options.held,
        draws=options.draws,
        unmet=options.unmet,
    )
    looking = Fuzz(trials, folder, plan, tell)
    found, interrupted = list["Finding"](), False
    try:
        with progress("cases") as looking.line, host:
            for finding in islice(looking.search(), options.findings):
                found.append(finding)
                show(finding_text(finding, width()))
    except WouldNotStart as error:
        show(f"UNKNOWN\n\n  {error.kept_in(folder)}")
        return EXIT_UNKNOWN
    except KeyboardInterrupt:
        interrupted = True
        raise AlreadyReported(EXIT_INTERRUPTED) from None
    finally:
        try:
            summary = write_summary(folder, looking, found)
        except OSError as error:
            summary = _keep_elsewhere(folder, looking, found, error)
        show(tally_text(looking, found, width(), interrupted=interrupted))
        tell_result(SearchFacts(interrupted=interrupted, folder=str(folder), summary=summary))
    return _exit_code(looking, found)


def _keep_elsewhere(folder: Path, looking: "Fuzz", found: "list[Finding]", error: OSError) -> dict[str, Any]:
    """The run folder cannot be written: what was found goes to another place, and what is told says where."""
    import tempfile

    from .report import write_summary

    other = Path(tempfile.mkdtemp(prefix="eagletwin-runs-"))
    tell(f"note: {folder} cannot be written ({error.strerror}); what was found last is in {other}")
    looking.keep_elsewhere(other)
    return write_summary(other, looking, found)


def _exit_code(looking: "Fuzz", found: "list[Finding]") -> int:
    if any(finding.outcome.verdict.status == "diverged" for finding in found):
        return EXIT_DIVERGED
    return EXIT_EQUAL if looking.looked_enough and not found else EXIT_UNKNOWN
