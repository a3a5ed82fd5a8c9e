"""`eagletwin fuzz`: generate cases until one shows something new, and shrink it."""

import gc
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as replace_fields

from eagletwin.harness.core.errors import EXIT_INTERRUPTED, EXIT_UNKNOWN, AlreadyReported, InputError, exit_code_of
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import progress, show, width

from ..options import (
    CHANGES,
    HOW,
    JUDGING,
    LIMITS,
    OUT,
    SEARCH,
    SOURCE,
    STRICT,
    VERBOSE,
    WHICH,
    log_progress,
    nothing_run,
    run_options,
)
from ..result import SearchFacts, emit_result, with_json

if TYPE_CHECKING:
    from eagletwin.harness.engines.host import Host
    from eagletwin.harness.engines.source import Source
    from eagletwin.harness.engines.start import Zygote

    from .coverage import Measured
    from .journal import Past
    from .options import SearchOptions
    from .pool import Workers
    from .search import Fuzz
    from .tally import FindingFacts, Summary
    from .watching import WatchedSearch


@with_json
@run_options(SEARCH, (OUT, VERBOSE), CHANGES, JUDGING, STRICT, SOURCE, WHICH, HOW, LIMITS)
def fuzz(*, spec: RunSpec, resume: Path | None, shrink: Path | None, watch: bool, verbose: bool, **search_options: Any) -> int:
    """Generate cases until one shows a new bug, then shrink it.

    In a changed tree the search goes where the change runs. A divergence that disappears when a known bug's fix is applied
    counts as known: the search goes on, and the exit code ignores it. A search that was ended continues with --resume.

    Exit codes: 0 nothing new was found. 1 a divergence was found. 125 a crash, a hang or another unknown was found, an engine
    did not start, fewer than ten cases ran the change, or the reference was undecided in a tenth of the cases. A crash is 125,
    because no value was shown to be wrong; `git bisect run` skips such a commit.
    """
    from .options import SearchOptions

    search_options |= {name: tuple(search_options[name] or ()) for name in ("only", "left_out")}
    options = SearchOptions(run=spec, **search_options)
    if watch and (resume or shrink or not Path(spec.release or "none").is_dir()):
        raise nothing_run(
            "--watch searches a source tree again each time that a file of it is saved", f"give --{spec.mode.engine} TREE"
        )
    if resume is not None:
        return search(*load_resumed_search(resume, options), verbose=verbose)
    options.check()  # before anything slow is imported
    if watch:
        from .watching import search_again

        return search_again(Path(spec.release), lambda one: search(options, verbose=verbose, watched=one))
    return search(options, verbose=verbose) if shrink is None else make_small(shrink, options)


def load_resumed_search(folder: Path, options: "SearchOptions") -> "tuple[SearchOptions, Past]":
    """The options of a search that continues, and what it left. Raises InputError for options that it was begun with."""
    from .journal import read_journal
    from .options import SearchOptions

    usual, limits = SearchOptions(), ("minutes", "max_cases", "findings", "shrink_minutes")
    given = {name: getattr(options, name) for name in limits if getattr(options, name) != getattr(usual, name)}
    here: dict[str, Any] = {"processes": options.processes, "address": options.address}
    if options != replace(usual, **given, **here, out=options.out):
        raise InputError(
            f"--resume {folder}, with options that a search begins with",
            consequence="nothing was run: it has them from its folder",
            remedy="give --minutes, --cases, --findings, --shrink-minutes, -n, --address and --verbose alone",
        )
    past = read_journal(folder)
    continued = replace(past.begun.options, **given, **here, out=folder.parent)
    if 0 < continued.findings <= len(past.findings):
        raise InputError(
            f"{folder} has {len(past.findings)} of {continued.findings} findings",
            consequence="nothing was run: the search is over",
            remedy=f"--findings {len(past.findings) + 1} continues it, and --findings 0 until the time is up",
        )
    if continued.source.called != past.begun.called:
        raise InputError(
            f"{folder} is a search of {continued.run.mode.title} {past.begun.called}, and this is {continued.source.called}",
            consequence="nothing was run: results of two trees would be mixed",
            remedy="begin another search",
        )
    return continued, past


def search(
    options: "SearchOptions", past: "Past | None" = None, *, verbose: bool = False, watched: "WatchedSearch | None" = None
) -> int:
    """Search, and print what is found and what was looked at; the exit code. past: of the earlier drivers of this search;
    watched: prints the verdict alone, as soon as there is one."""
    source = options.source
    if options.explain and source.difference is None and not options.run.patches:
        raise nothing_run(
            f"--explain, and it is not known what {options.run.mode.title} {source.called} changes",
            "give a tree with uncommitted changes, a --patch or a --revert",
        )
    with ExitStack() as stack:
        zygote, measured, options = _start(stack, source, options, resumed=past is not None, watched=watched is not None)
        if watched is None:
            title = f"{options.run.mode.title} {source.called}"
            log_progress(f"importing {title}; then cases, for up to {options.minutes:g} min in all")
        from eagletwin.harness.check.known import cases_of_change
        from eagletwin.harness.check.trials import Trials
        from eagletwin.harness.core.files import alone, new_run_folder
        from eagletwin.harness.engines.host import Host

        from .corpus import Corpus
        from .journal import JOURNAL, Journal
        from .pool import Actors
        from .search import Fuzz
        from .steering import draw_ahead

        corpus = Corpus(source)
        if past is None:
            recent = watched.recent if watched is not None and measured.often else ()
            first = corpus.cases(options.constraints.wanted, cases_of_change(source, options.run), recent)
            options = replace(options, first=first)
        host = Host(zygote)
        workers = stack.enter_context(Actors(_elsewhere(options))) if options.address else _processes(host, options, watched)
        folder = new_run_folder(options.out, f"fuzz-{options.seed}") if past is None else past.folder

        def refuse() -> None:
            raise nothing_run(f"another process searches in {folder}", "wait for it, or end it")

        stack.enter_context(alone(folder / JOURNAL, refuse))
        journal = stack.enter_context(Journal(folder) if past is None else Journal(folder, past.at, past.size))
        found = [] if past is None else past.findings
        looking = Fuzz(
            Trials(host, options.run),
            folder,
            options.plan,
            log_progress,
            past=past,
            journal=journal,
            measured=measured,
            corpus=corpus,
        )
        if watched is not None:
            watched.follow(looking)
            draw_ahead(looking.plan)  # at the start, while the tree is imported: the search after an edit has them
        return _search(looking, options, workers, found, verbose=verbose, watched=watched)


def _start(
    stack: ExitStack, source: "Source", options: "SearchOptions", *, resumed: bool, watched: bool
) -> "tuple[Zygote, Measured, SearchOptions]":
    """The process that imports the engine, which goes on; what is changed, in a line; and the options for that."""
    from eagletwin.harness.engines.start import Zygote

    mode = options.run.mode
    zygote = stack.enter_context(Zygote(source, mode, edited=watched))
    zygote.start()  # while this process reads the change and imports torch
    from .coverage import change_in

    measured = change_in(source, options.run.patches)
    options = options if resumed else options.for_change(measured)
    if options.run.mode != mode:
        zygote.close()
        zygote = stack.enter_context(Zygote(source, options.run.mode, edited=watched))
        zygote.start()
    if measured.text:
        log_progress(f"{measured.text}{options.drawn_too}")
    return zygote, measured, options


def _search(
    looking: "Fuzz",
    options: "SearchOptions",
    workers: "Workers | None",
    found: "list[FindingFacts]",
    *,
    verbose: bool,
    watched: "WatchedSearch | None" = None,
) -> int:
    from eagletwin.harness.engines.host import WouldNotStart
    from eagletwin.harness.page.render import text_of

    from .report import document_of, exit_code, finding_text, summary_facts, write_summary
    from .watching import saying_that_kernels_compile

    host, folder = looking.trials.host, looking.folder
    code: int | None = None
    try:
        with ExitStack() as stack:
            looking.line = stack.enter_context(progress("cases"))
            stack.enter_context(host)
            _share(looking, options, workers, stack)
            if options.run.mode.device == "cuda":
                stack.enter_context(saying_that_kernels_compile(looking))
            more = islice(looking.search(), options.findings - len(found)) if options.findings else looking.search()
            for finding in more:
                found.append(finding.facts)
                show(finding_text(finding, width()))
            if not found:
                looking.compare_with_base(explain=options.explain)
        code = exit_code(looking, [finding.status for finding in found])
    except WouldNotStart as error:
        show(f"UNKNOWN\n\n  {error.kept_in(folder)}")
        code = EXIT_UNKNOWN
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        raise AlreadyReported(code) from None
    finally:
        if looking.corpus is not None:
            looking.corpus.write()
        if watched is None or code is not None:  # what a save ended is searched again, and nobody waits for its page
            try:
                summary = write_summary(folder, looking, found, code)
            except OSError as error:
                summary = _keep_elsewhere(folder, looking, found, code, error)
            if watched is None:
                show(text_of(document_of(summary, folder), width(), verbose=verbose))
            elif code is not None and code != EXIT_INTERRUPTED:
                watched.answer(code)
            facts = summary_facts(summary)
            emit_result(SearchFacts(interrupted=code == EXIT_INTERRUPTED, folder=str(folder), summary=facts))
    return code


def make_small(file: Path, options: "SearchOptions") -> int:
    """Make a case from a file smaller, and print what it comes to; the exit code."""
    from eagletwin.harness.check.confirm import brief
    from eagletwin.harness.check.known import KnownBugMatcher, apart, entries_of
    from eagletwin.harness.core.files import new_run_folder
    from eagletwin.harness.engines.host import Host
    from eagletwin.harness.engines.source import resolve
    from eagletwin.harness.families.valid import read_case

    from .looking import CaseSeen
    from .report import finding_text
    from .shrinking import ShrinkCallbacks, Shrinking

    case = replace_fields(read_case(file), exercises=())
    with (
        Host(source=resolve(options.run.release, options.run.mode.engine), mode=options.run.mode) as host,
        progress("runs") as line,
    ):
        run, workarounds = apart(options.run)
        matcher = KnownBugMatcher(host, run)
        trial = matcher.trials(entries_of(workarounds)).look_alone(case)
        if trial.signature is None:
            show(f"{trial.verdict.status.upper()}  {case.name}: {brief(trial.verdict)}\n\n  There is nothing to make small.")
            return exit_code_of(trial.verdict.status)
        shrinking = Shrinking(
            CaseSeen(block=0, case=case, verdict=trial.verdict, signature=trial.signature, mended=workarounds, view=run.view),
            matcher,
            new_run_folder(options.out, f"shrink-{case.name}"),
            seconds=60 * options.shrink_minutes,
            seed=options.seed,
            command=options.run.command("fuzz", "--shrink", file),
            teller=ShrinkCallbacks(aside=lambda case, signature, undecided: None, news=log_progress, look=line.look),
        )
        shrinking.shrink(None)
        finding = shrinking.conclude(1, 0.0)
    show(finding_text(finding, width()))
    return exit_code_of(finding.outcome.verdict.status)


def _elsewhere(options: "SearchOptions") -> "SearchOptions":
    """The options for another process, which may run in another folder."""
    tree = options.run.release
    return replace(
        options, run=replace_fields(options.run, release=str(Path(tree).absolute()) if tree and Path(tree).exists() else tree)
    )


def _processes(host: "Host", options: "SearchOptions", watched: "WatchedSearch | None" = None) -> "Workers | None":
    """LocalWorkers that run blocks beside this one; None: there is one process."""
    from eagletwin.cases.blocks import BLOCK

    from .pool import LocalWorkers, cores

    number = min(options.processes or cores(), -(-options.max_cases // BLOCK))
    if options.run.mode.device == "cuda" and not options.processes:  # a GPU has one user, if nobody says otherwise
        number = 1
    if number == 1:
        return None
    # beside the import of what was saved, theirs would take seconds of it
    return LocalWorkers(host, options, number - 1, lambda: watched is None or watched.code is not None)


def _share(looking: "Fuzz", options: "SearchOptions", workers: "Workers | None", stack: ExitStack) -> None:
    """Begin, or continue, with these workers. Raises WouldNotStart: of one import more than one process would speak."""
    from .journal import Begun, Driven
    from .pool import BlockPool

    host, journal = looking.trials.host, looking.journal
    assert journal is not None
    looking.pool = pool = BlockPool(
        looking.matcher, looking.plan, workers, journal, looking.past, looking.tally, looking.measured
    )
    if looking.past is None:
        journal.add(Begun(_elsewhere(options), host.source.called, pool.ahead))
    journal.add(Driven())
    stack.enter_context(pool)
    host.connection()
    gc.freeze()  # what was imported lives as long as the search: to look at it again and again takes 1 % of one


def _keep_elsewhere(folder: Path, looking: "Fuzz", found: "list[FindingFacts]", code: int | None, error: OSError) -> "Summary":
    """The run folder cannot be written: what was found goes to another place, and what is told says where."""
    import tempfile

    from .report import write_summary

    other = Path(tempfile.mkdtemp(prefix="eagletwin-runs-"))
    log_progress(f"note: {folder} cannot be written ({error.strerror}); what was found last is in {other}")
    looking.keep_elsewhere(other)
    return write_summary(other, looking, found, code)
