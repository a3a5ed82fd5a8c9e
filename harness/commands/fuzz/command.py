"""`eagletwin fuzz`: generate cases until one shows something new, and shrink it."""

import gc
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as changed

from eagletwin.harness.core.errors import EXIT_INTERRUPTED, EXIT_UNKNOWN, AlreadyReported, exit_code_of
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import progress, show, width

from ..as_json import tell_result, with_json
from ..options import DEFAULT_RUNS, Runs, Verbose, tell
from ..result import SearchFacts
from ..run_options import CHANGES, HOW, JUDGING, LIMITS, SOURCE, STRICT, run_options
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
    Not,
    Only,
    Processes,
    SamplingOption,
    Seed,
    Shrink,
    ShrinkMinutes,
    SmallTrees,
    Topk,
    UpdateWeights,
)

if TYPE_CHECKING:
    from eagletwin.harness.engines.host import Host

    from .options import SearchOptions
    from .search import Fuzz
    from .shrinking import Finding


@with_json
@run_options(CHANGES, JUDGING, STRICT, SOURCE, HOW, LIMITS)
def fuzz(
    minutes: Minutes = MINUTES,
    max_cases: MaxCases = MAX_CASES,
    seed: Seed = 0,
    findings: Findings = 1,
    shrink_minutes: ShrinkMinutes = SHRINK_MINUTES,
    processes: Processes = 0,
    shrink: Shrink = None,
    only: Only = None,
    left_out: Not = None,
    model: Model = None,
    topk: Topk = None,
    context_length: ContextLength = None,
    small_trees: SmallTrees = False,
    update_weights: UpdateWeights = None,
    sampling: SamplingOption = None,
    ask: Asks = None,
    out: Runs = DEFAULT_RUNS,
    verbose: Verbose = False,
    *,
    spec: RunSpec,
) -> int:
    """Generate cases until one shows something new, then shrink it.

    What is equal with the fix of a known bug is known: it is counted, and the search goes on. Exit codes speak of the rest: 1 a
    divergence was found; 125 a crash, a hang or another unknown was found, no case was equal, an engine would not start, or the
    reference could not decide more than a tenth of the cases; 0 nothing new was found. A crash is a finding as a divergence is:
    it is made small and kept, with its repro.py. Its code is 125 because no number was shown to be wrong, and `git bisect run`
    skips such a commit.
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
        only=tuple(only or ()),
        left_out=tuple(left_out or ()),
        processes=processes,
        run=spec,
        out=out,
    )
    options.check()  # before anything slow is imported
    return search(options, verbose=verbose) if shrink is None else make_small(shrink, options)


def search(options: "SearchOptions", *, verbose: bool = False) -> int:
    """Search, and print what is found and what was looked at; the exit code."""
    source = options.source
    tell(f"importing SGLang {source.called}; then cases, for up to {options.minutes:g} min in all")
    from eagletwin.harness.check.trials import Trials
    from eagletwin.harness.core.files import new_run_folder
    from eagletwin.harness.engines.host import Host, WouldNotStart

    from .report import exit_code, finding_text, tally_text, write_summary
    from .search import Fuzz

    host = Host(source=source, mode=options.run.mode)
    folder = new_run_folder(options.out, f"fuzz-{options.seed}")
    looking = Fuzz(Trials(host, options.run), folder, options.plan, tell)
    found = list["Finding"]()
    code: int | None = None
    try:
        with ExitStack() as stack:
            looking.line = stack.enter_context(progress("cases"))
            stack.enter_context(host)
            _share(looking, options, host, stack)
            for finding in islice(looking.search(), options.findings):
                found.append(finding)
                show(finding_text(finding, width()))
            if not found:
                looking.compare_with_base()
        code = exit_code(looking, [finding.status for finding in found])
    except WouldNotStart as error:
        show(f"UNKNOWN\n\n  {error.kept_in(folder)}")
        code = EXIT_UNKNOWN
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        raise AlreadyReported(code) from None
    finally:
        try:
            summary = write_summary(folder, looking, found, code)
        except OSError as error:
            summary = _keep_elsewhere(folder, looking, found, code, error)
        show(tally_text(looking, found, width(), code, verbose=verbose))
        tell_result(SearchFacts(interrupted=code == EXIT_INTERRUPTED, folder=str(folder), summary=summary))
    return code


def make_small(file: Path, options: "SearchOptions") -> int:
    """Make a case from a file smaller, and print what it comes to; the exit code."""
    from eagletwin.harness.check.confirm import brief
    from eagletwin.harness.check.known import Mends, apart, entries_of
    from eagletwin.harness.core.files import new_run_folder
    from eagletwin.harness.engines.host import Host
    from eagletwin.harness.engines.source import resolve
    from eagletwin.harness.families.valid import read_case

    from .looking import CaseSeen
    from .report import finding_text
    from .shrinking import Shrinking, Teller

    case = changed(read_case(file), exercises=())
    with Host(source=resolve(options.run.sglang), mode=options.run.mode) as host, progress("runs") as line:
        run, workarounds = apart(options.run)
        mends = Mends(host, run)
        trial = mends.trials(entries_of(workarounds)).look_alone(case)
        if trial.signature is None:
            show(f"{trial.verdict.status.upper()}  {case.name}: {brief(trial.verdict)}\n\n  There is nothing to make small.")
            return exit_code_of(trial.verdict.status)
        shrinking = Shrinking(
            CaseSeen(block=0, case=case, verdict=trial.verdict, signature=trial.signature, mended=workarounds, view=run.view),
            mends,
            new_run_folder(options.out, f"shrink-{case.name}"),
            seconds=60 * options.shrink_minutes,
            seed=options.seed,
            command=options.run.command("fuzz", "--shrink", file),
            teller=Teller(aside=lambda case, signature, undecided: None, news=tell, look=line.look),
        )
        shrinking.shrink(None)
        finding = shrinking.conclude(1, 0.0)
    show(finding_text(finding, width()))
    return exit_code_of(finding.outcome.verdict.status)


def _share(looking: "Fuzz", options: "SearchOptions", host: "Host", stack: ExitStack) -> None:
    """Have other processes run blocks as well, if there are several. Raises WouldNotStart: of one import more than one process
    would speak."""
    from eagletwin.cases.blocks import BLOCK

    from .pool import Several, cores

    processes = min(options.processes or cores(), -(-options.max_cases // BLOCK))
    if options.run.mode.device == "cuda" and not options.processes:  # a GPU has one user, if nobody says otherwise
        processes = 1
    if processes > 1:
        looking.pool = several = Several(looking.mends, options, processes)
        stack.enter_context(several)
    host.connection()
    gc.freeze()  # what was imported lives as long as the search: to look at it again and again takes 1 % of one


def _keep_elsewhere(folder: Path, looking: "Fuzz", found: "list[Finding]", code: int | None, error: OSError) -> dict[str, Any]:
    """The run folder cannot be written: what was found goes to another place, and what is told says where."""
    import tempfile

    from .report import write_summary

    other = Path(tempfile.mkdtemp(prefix="eagletwin-runs-"))
    tell(f"note: {folder} cannot be written ({error.strerror}); what was found last is in {other}")
    looking.keep_elsewhere(other)
    return write_summary(other, looking, found, code)
