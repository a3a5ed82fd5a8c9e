"""`eagletwin campaign`: one search over many processes and machines, which can be killed and goes on."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace as changed

from eagletwin.harness.core.errors import EXIT_INTERRUPTED, AlreadyReported, InputError
from eagletwin.harness.core.files import alone, new_run_folder
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import progress, show, width

from ..as_json import tell_result, with_json
from ..fuzz.typed import (
    MAX_CASES,
    SHRINK_MINUTES,
    Asks,
    ContextLength,
    MaxCases,
    Minutes,
    Model,
    Not,
    Only,
    SamplingOption,
    Seed,
    ShrinkMinutes,
    SmallTrees,
    Topk,
    UpdateWeights,
)
from ..options import DEFAULT_RUNS, Runs, tell
from ..result import SearchFacts
from ..run_options import CHANGES, HOW, JUDGING, LIMITS, run_options
from .typed import MINUTES, Address, CorpusFolder, PerGpu, Releases, Resume, Workers

if TYPE_CHECKING:
    from ..fuzz.options import SearchOptions
    from .books import Books
    from .drive import Crew
    from .messages import Terms


@with_json
@run_options(CHANGES, JUDGING, HOW, LIMITS)
def campaign(
    address: Address = "",
    workers: Workers = 0,
    per_gpu: PerGpu = 1,
    resume: Resume = None,
    minutes: Minutes = MINUTES,
    max_cases: MaxCases = MAX_CASES,
    seed: Seed = 0,
    shrink_minutes: ShrinkMinutes = SHRINK_MINUTES,
    corpus: CorpusFolder = None,
    only: Only = None,
    left_out: Not = None,
    model: Model = None,
    topk: Topk = None,
    context_length: ContextLength = None,
    small_trees: SmallTrees = False,
    update_weights: UpdateWeights = None,
    sampling: SamplingOption = None,
    ask: Asks = None,
    sglang: Releases = None,
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Search on many processes and machines, on Ray; find each thing once, and shrink it once.

    The search is that of `fuzz`, and goes on until its time is up: a finding ends it no more. A worker that dies is replaced; a
    driver that dies goes on with --resume. Exit codes are those of `fuzz`; 125 also if a part of it was given up.
    """
    from ..fuzz.options import SearchOptions

    releases = list(dict.fromkeys(sglang or [""]))
    options = SearchOptions(
        minutes=minutes,
        max_cases=max_cases,
        seed=seed,
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
        run=changed(spec, sglang=_absolute(releases[0])),
        out=out,
    )
    from .on_ray import load_ray

    terms = begun(options, releases, corpus) if resume is None else gone_on(options, releases, corpus, resume)
    load_ray()  # where it is missing no folder is made
    folder = new_run_folder(out, f"campaign-{seed}") if resume is None else resume
    mode = terms.options.run.mode
    gpus = mode.tp / per_gpu if mode.device == "cuda" else 0.0
    return _on_ray(terms, folder, (address, workers, gpus))


def begun(options: "SearchOptions", releases: Sequence[str], corpus: Path | None) -> "Terms":
    """The terms of a new campaign. Raises InputError for options that contradict each other, and for an SGLang that is not
    there."""
    from eagletwin import __version__
    from eagletwin.harness.engines.source import resolve

    from .corpus import read_corpus
    from .messages import Leg, Terms

    options.check()
    cases = read_corpus(corpus) if corpus is not None else ()
    legs = tuple(Leg(_absolute(name), cases) for name in releases)
    for leg in legs:
        resolve(leg.sglang)
    words = [word for leg in legs[1:] for word in ("--sglang", leg.sglang)]
    words += ["--corpus", str(corpus)] if corpus is not None else []
    if cases:
        options = replace(options, max_cases=min(options.max_cases, len(cases) * len(legs)))
    return Terms(__version__, options, legs, tuple(words))


def gone_on(options: "SearchOptions", releases: Sequence[str], corpus: Path | None, folder: Path) -> "Terms":
    """The terms of a campaign that goes on. Raises InputError for options that are its own already."""
    from eagletwin import __version__

    from ..fuzz.options import SearchOptions
    from .journal import CampaignBegan, read_journal

    usual = SearchOptions(minutes=options.minutes, max_cases=options.max_cases, out=options.out)
    if options != usual or releases != [""] or corpus is not None:
        raise InputError(
            f"--resume {folder}, with options that a campaign is begun with",
            consequence="nothing was run: it has them from its folder",
            remedy="leave all out but --address, --workers, --per-gpu, --minutes and --cases",
        )
    first = next(read_journal(folder), None)
    if not isinstance(first, CampaignBegan) or first.terms.version != __version__:
        had = "its journal is empty" if not isinstance(first, CampaignBegan) else f"eagletwin {first.terms.version} began it"
        raise InputError(
            f"{folder}: {had}", consequence="nothing was run", remedy=f"begin a campaign with eagletwin {__version__}"
        )
    own = first.terms.options
    return changed(
        first.terms,
        options=replace(
            own,
            minutes=options.minutes if options.minutes != MINUTES else own.minutes,
            max_cases=options.max_cases if options.max_cases != MAX_CASES else own.max_cases,
        ),
    )


def _on_ray(terms: "Terms", folder: Path, where: tuple[str, int, float]) -> int:
    """Drive a campaign on Ray; the exit code."""
    from .messages import packed
    from .on_ray import OnRay

    address, workers, gpus = where
    tell(f"starting workers on Ray at {address or 'this machine'}; the campaign is in {folder}")
    with OnRay(packed(terms), address, workers, gpus) as crew:
        return conduct(terms, folder, crew)


def conduct(terms: "Terms", folder: Path, crew: "Crew") -> int:
    """Drive a campaign, or go on with it, and print what is found and what was looked at; the exit code."""
    from .books import Books
    from .drive import Driver
    from .journal import JOURNAL, CampaignBegan, Drove, Journal, read_journal
    from .report import exit_code

    code: int | None = None
    with ExitStack() as stack:
        stack.enter_context(alone(folder / ".driver", lambda: _refuse(folder)))
        books = Books(terms, folder, tell, width())
        known = list(read_journal(folder)) if (folder / JOURNAL).exists() else []
        for record in known:
            books.note(record)
        journal = stack.enter_context(Journal(folder))
        books.fuzz.line = stack.enter_context(progress("cases"))
        for record in ([] if known else [CampaignBegan(terms)]) + [Drove(books.last_at)]:
            journal.add(record)
            books.note(record)
        try:
            Driver(books, journal, crew, lambda finding: show(finding.text)).drive()
            code = exit_code(books)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
            raise AlreadyReported(code) from None
        finally:
            _conclude(books, code)
    return code


def _conclude(books: "Books", code: int | None) -> None:
    from .report import campaign_text, write_campaign

    summary = write_campaign(books, code)
    show(campaign_text(books, width(), code))
    tell_result(SearchFacts(interrupted=code == EXIT_INTERRUPTED, folder=str(books.folder), summary=summary))


def _refuse(folder: Path) -> None:
    raise InputError(f"another driver works on {folder}", consequence="nothing was run", remedy="wait until it ends, or end it")


def _absolute(name: str) -> str:
    """A source tree, as a worker that runs elsewhere finds it."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name
