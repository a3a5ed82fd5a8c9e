"""Making a finding small: Hypothesis draws its block again up to the case that showed it, and shrinks from there. After it, and
of a case from a file, which has no block, one thing after the other is taken away."""

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

from eagletwin.cases.blocks import Block
from eagletwin.cases.sample_cases import shrink
from eagletwin.cases.strategies import MODELS
from eagletwin.harness.check.confirm import Outcome, alike, brief, confirm, needed_in
from eagletwin.harness.check.known import KnownBugMatcher, entries_of, remedies_of
from eagletwin.harness.check.repro import SCRIPT, write_script
from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.case import (
    Case,
    EngineSettings,
    Request,
    SGLangSettings,
    encode_case,
    in_runs,
    pretty_case,
    sent_for,
    without_defaults,
)
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.signature import Signature, signature_of
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import PatchDoesNotApply, WouldNotStart
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.valid import admits
from eagletwin.harness.page.run import write_run

from .looking import CaseSeen
from .tally import FindingFacts

# What became smaller while a case was shrunk, in words: `chunks 40 → 0, page_size 4 → 1`; and how large a case is.

# Of all cases; what only some have is measured by its dimension.
_MEASURES: dict[str, Callable[[Case], object]] = {
    "model": lambda case: case.model,
    "prompt tokens": lambda case: sum(len(request.prompt) for request in case.requests),
    "new tokens": lambda case: sum(request.max_new_tokens for request in case.requests),
    "events": lambda case: len(case.events),
    **{dimension.name: dimension.size for dimension in DIMENSIONS.values() if dimension.size is not None},
}


def smaller(found: Case, now: Case) -> str:
    """How a case differs from the one that was found, by its sizes; empty if by none of them."""
    changes = [(name, measure(found), measure(now)) for name, measure in _MEASURES.items()]
    return ", ".join(
        f"{name} {_format_value(before)} → {_format_value(after)}" for name, before, after in changes if before != after
    )


def _format_value(size: object) -> object:
    return {"True": "on", "False": "off"}.get(str(size), size)


def _size(request: Request) -> str:
    notes = [f"{request.n} samples"] if request.n > 1 else []
    if request.sampling is not None:
        chosen = without_defaults(request.sampling).items()
        notes += [f"{name} {value:g}" for name, value in chosen] or ["sampled"]
    return f"{request.id} {len(request.prompt)}+{request.max_new_tokens}" + (f" ({', '.join(notes)})" if notes else "")


def sizes(case: Case) -> str:
    """How large a case is, without what it has none of."""
    prompts = ", ".join(map(_size, case.requests))
    chunks = f"chunks {in_runs(list(case.chunks))}, " if case.chunks else ""
    return (
        f"{case.model}, num_steps {case.num_steps}, topk {case.topk}, page_size {case.page_size}, {chunks}"
        f"{count(len(case.events), 'event')}, requests (prompt+new) {prompts}"
    )


_NEWS = 5.0  # seconds between two lines of progress


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    signature what all smaller cases had to show as well
    found     the case as it was generated; outcome: its smallest form, confirmed
    cases, seconds            until it was found
    shrink_looks, shrink_seconds  until it was smallest; partial: time was up before
    run       how it was run: with remedies of known bugs, where these would come first
    apart     why it is no known bug, though a remedy makes it equal; or that the base shows the same; empty: neither
    model     why its model is not the smallest; empty: it is, or that is not known
    """

    signature: Signature
    found: Case
    outcome: Outcome
    cases: int
    seconds: float
    shrink_looks: int
    shrink_seconds: float
    partial: bool
    run: RunSpec = DEFAULT_RUN
    apart: str = ""
    model: str = ""

    @property
    def status(self) -> str:
        return self.outcome.verdict.status

    @property
    def facts(self) -> FindingFacts:
        """The same for summary.json."""
        return FindingFacts(
            signature=self.signature,
            status=self.status,
            folder=str(self.outcome.folder),
            cases=self.cases,
            seconds=round(self.seconds, 3),
            shrink_looks=self.shrink_looks,
            shrink_seconds=round(self.shrink_seconds, 3),
            partial=self.partial,
            known=self.outcome.known,
            apart=self.apart,
            changes=list(self.run.changes),
            place=brief(self.outcome.verdict),
            ran=list(differs.ran) if (differs := self.outcome.trace.differs) is not None else [],
            case=msgspec.to_builtins(self.outcome.case),
        )


class _Over(BaseException):
    """Leaves Hypothesis: time is up. Not an Exception, so that it is not taken for a failing test."""


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest case so far, what it came to, and the cases before it in its process."""

    case: Case
    verdict: Verdict
    before: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkCallbacks:
    """Who is told: `aside` of cases that show something else, `news` of what became smaller, `look` of what is looked at."""

    aside: Callable[[Case, Signature, bool], None]
    news: Callable[[str], None]
    look: Callable[[str], None]


class Shrinking:
    """The shrinking of one finding. What it has so far is on disk at any time."""

    def __init__(
        self,
        seen: CaseSeen,
        matcher: KnownBugMatcher,
        folder: Path,
        *,
        seconds: float,
        seed: int,
        command: str,
        teller: ShrinkCallbacks,
    ) -> None:
        assert seen.signature is not None
        self.seen, self.signature, self.folder = seen, seen.signature, folder
        self.looks, self.partial = 0, False
        self._matcher, self._seed, self._command = matcher, seed, command
        self._trials = self._with(seen.mended)
        self._needed = seen.mended  # the workarounds that the smallest case so far needs
        self._alone = False  # whether it shows without the cases before it
        self._teller = teller
        self._begun = self._reported_at = time.monotonic()
        self._until, self._said = self._begun + seconds, ""
        self._failed: Exception | None = None
        self._counts: Callable[[Case], bool] | None = None
        self._smallest = self._last = Smallest(seen.case, seen.verdict, seen.before)
        self.keep_in(folder)

    def shrink(self, block: Block | None, counts: Callable[[Case], bool] | None = None) -> None:
        """Look at smaller cases until there is none, or time is up. What depends on the cases before it stays as it is. counts:
        what a smaller case that shows the same must be as well."""
        self._counts = counts
        alone = self._trials.look_alone(self.seen.case)
        self._alone = self._is_alike(alone, self.seen.verdict)
        if not self._alone:
            return
        self._drop_workarounds(alone)
        with contextlib.suppress(_Over):
            if block is None:
                self._cut()
                return
            shrink(block.strategy, block.size, block.draw_seed, lambda case: case == self.seen.case, self._shows)
            self._smallest = self._last  # the last case that Hypothesis ran is the simplest it found
            self._cut()  # it ends where no step of its own helps: one of several things that a request asks for may be left
        if self._failed is not None:
            raise self._failed

    def _cut(self) -> None:
        """Take one thing after the other away, as long as the case shows the same without it."""
        reduce_case(self._smallest.case, self._try_case)
        found = replace(self.seen.case, model=MODELS[0])  # the smallest may be too small to show it there
        if self._smallest.case.model != MODELS[0] and admits(found) and self._try_case(found, anywhere=True):
            self._cut()

    def _shows(self, case: Case) -> bool:
        """Whether a smaller case shows the same."""
        try:
            return self._try_case(case)
        except (EagletwinError, OSError) as error:  # Hypothesis would shrink it, as if the case had failed
            self._failed = error
            raise _Over from error

    def _try_case(self, case: Case, *, anywhere: bool = False) -> bool:
        until = -1 if anywhere else _iteration(self._smallest.verdict)
        trial = self._trials.known(case, until)
        if trial is None:
            if time.monotonic() > self._until:
                self.partial = True
                raise _Over
            self.looks += 1
            self._teller.look(f"{self.signature}: smaller case {self.looks}")
            try:
                trial = self._trials.look(case, until)
            except WouldNotStart as error:
                if not (error.ours or error.trace):  # no word of the engine's: the process died, or was silent
                    raise
                return False  # the engine has no such configuration, or breaks there in another way than what is shrunk
            if trial.signature not in (None, self.signature):
                assert trial.signature is not None
                self._teller.aside(case, trial.signature, trial.verdict.undecided)
            elif trial.signature is not None and trial.before:
                alone = self._trials.look_alone(case)
                if not self._is_alike(alone, trial.verdict):
                    self._trials.forget(case)
                    return False
        if trial.signature != self.signature or not self._shows_with_needed(case, until):
            return False
        if self._counts is not None and not self._counts(case):
            return False
        self._take(trial)
        return True

    def _take(self, trial: Trial) -> None:
        self._last = Smallest(trial.case, trial.verdict, trial.before)
        if size(trial.case) < size(self._smallest.case):
            self._smallest = self._last
            self._keep_smallest()
        if time.monotonic() > self._reported_at + _NEWS:
            self._reported_at = time.monotonic()
            changes = smaller(self.seen.case, self._smallest.case)
            news = changes if changes != self._said else "nothing smaller since then"
            self._said = changes
            self._teller.news(f"{count(self.looks, 'more run')}: {news or 'nothing smaller yet'}")

    def _is_alike(self, trial: Trial, verdict: Verdict) -> bool:
        return trial.signature == self.signature and alike(trial.verdict, verdict)

    def _with(self, names: Sequence[str]) -> Trials:
        """Runs cases with these workarounds."""
        return self._matcher.trials(entries_of(names), self.seen.view)

    def _drop_workarounds(self, alone: Trial, *, last: bool = False) -> None:
        """Keep those that the smallest case needs. alone: what it shows with all of them; last: it gets no smaller."""
        names, view = self.seen.mended, self.seen.view
        self._needed = needed_in(self._matcher, alone, names, view, last=last, enough=self._needed)
        self._keep_smallest()

    def _shows_with_needed(self, case: Case, until: int) -> bool:
        """Whether a case that shows it with all workarounds does with the needed ones."""
        if self._needed == self.seen.mended:
            return True
        try:
            return self._with(self._needed).look(case, until).signature == self.signature
        except (WouldNotStart, PatchDoesNotApply):
            return False

    def keep_in(self, folder: Path) -> None:
        """Write what was found, and its smallest case so far, into this folder from now on."""
        self.folder = folder
        (folder / "minimal").mkdir(parents=True, exist_ok=True)
        (folder / "found.json").write_text(pretty_case(self.seen.case), encoding="utf-8")
        self._keep_smallest()

    def _keep_smallest(self) -> Case:
        minimal, run = self.folder / "minimal", self._with(self._needed).run
        case = replace(self._smallest.case, name=f"minimal-{self.folder.name}")
        (minimal / "case.json").write_text(pretty_case(case), encoding="utf-8")
        run = replace(run, finding=str(self.signature))
        write_script(minimal, case, run, command=self._command, source=self._matcher.host.source, seed=self._seed)
        return case

    def conclude(self, cases: int, seconds: float, apart: str = "") -> Finding:
        """Confirm the smallest case in fresh forks. apart: as in Finding."""
        if self._alone and self.seen.mended:
            self._drop_workarounds(self._trials.look_alone(self._smallest.case), last=True)
        trials, case = self._with(self._needed), self._keep_smallest()
        outcome = confirm(
            trials.stand(case),
            case,
            self._smallest.verdict,
            self._smallest.before,
            self.folder / "minimal",
            trials.run,
            again=shlex.join(["python", str(self.folder / "minimal" / SCRIPT)]),
            host=trials.host,
        )
        write_run(*outcome.of_page)
        return Finding(
            signature=self._confirm_smallest(outcome),
            found=self.seen.case,
            outcome=outcome,
            cases=cases,
            seconds=seconds,
            shrink_looks=self.looks,
            shrink_seconds=time.monotonic() - self._begun,
            partial=self.partial,
            run=trials.run,
            apart=apart or self._as_base(outcome),
            model=self._why_model(),
        )

    def _as_base(self, outcome: Outcome) -> str:
        """Says that the base records the same in the smallest case, if it does."""
        base, shown = self._matcher.base, Trial(outcome.case, outcome.verdict, outcome.trace.header, ())
        if base is None or not base.shows(shown, remedies_of(entries_of(self._needed)), self.seen.view):
            return ""
        return f"{base.called} records the same in this case: it is not the change."

    def _why_model(self) -> str:
        case = self._smallest.case
        if case.model == MODELS[0] or self.partial or not self._alone:
            return ""
        plain = admits(replace(case, model=MODELS[0]))
        return f"not in {MODELS[0]}" if plain else f"{MODELS[0]} runs no such case"

    def _confirm_smallest(self, outcome: Outcome) -> Signature:
        """What the smallest case shows in fresh forks. If it is something else there than what was found, that is set aside."""
        shown = signature_of(outcome.verdict, outcome.trace.header.ending)
        if outcome.verdict.first is None and outcome.trace.header.ending.kind == "finished":
            return self.signature  # a state leak, or nondeterministic: the trace of the run that showed it is gone
        if shown is None or shown == self.signature:
            return self.signature
        self._teller.aside(self.seen.case, self.signature, False)
        self.signature = shown
        self._keep_smallest()
        return shown


def _iteration(verdict: Verdict) -> int:
    """Where a smaller case must show it: no later than the smallest so far. Runs are stopped there. -1: anywhere, as a kernel's
    violations have no iteration."""
    first = verdict.first
    return first.iteration if first is not None and first.stage != "kernel" else -1


def size(case: Case) -> tuple[int, int, bytes]:
    """By which one case is smaller than another: the model first, whose name may be longer than that of a larger one."""
    data = encode_case(case)
    return MODELS.index(case.model) if case.model in MODELS else len(MODELS), len(data), data


def reduce_case(case: Case, shows: Callable[[Case], bool]) -> Case:
    """The case without all that it shows the same without, one thing after the other."""
    while cut := next((one for one in cuts(case) if size(one) < size(case) and shows(one)), None):
        case = cut
    return case


def cuts(case: Case) -> Iterator[Case]:
    """Valid cases that are smaller by one thing each, those that lack the most first."""
    for cut in _cuts(case):
        if cut == case or (cut.topk == 1 and cut.verify_nodes != cut.num_steps + 1):  # the engine has no such chain
            continue
        if admits(cut):
            yield cut


def _cuts(case: Case) -> Iterator[Case]:
    for request in case.requests if len(case.requests) > 1 else ():
        others = tuple(one for one in case.requests if one.id != request.id)
        names = [sent.id for sent in sent_for(request)]
        yield replace(case, requests=others, events=tuple(one for one in case.events if one.request not in names))
    yield replace(case, events=())
    yield replace(case, chunks=())
    for kept in (len(case.chunks) // 2, len(case.chunks) - 1):
        yield replace(case, chunks=case.chunks[: max(kept, 0)])
    yield from _with_budget(case)
    yield from _simpler(case)
    for dimension in DIMENSIONS.values():
        yield from dimension.simpler(case)
    for number in range(len(case.events)):
        yield replace(case, events=case.events[:number] + case.events[number + 1 :])
        yield replace(case, events=case.events[:number] + case.events[number + 2 :])  # a pause and its end
    for number, request in enumerate(case.requests):
        for short_request in _shorter(request):
            yield _with_request(case, number, short_request)
    for number, chunk in enumerate(case.chunks):
        for less in (case.page_size, chunk - case.page_size):
            if 0 < less < chunk:
                shorter = replace(case, chunks=(*case.chunks[:number], less, *case.chunks[number + 1 :]))
                yield shorter
                yield from _with_prompts_cut(shorter, chunk - less)


def _with_budget(case: Case) -> Iterator[Case]:
    """With the budget of all prefill batches in place of many equal ones."""
    head = case.chunks
    while head and head[-1] == case.chunks[-1]:
        head = head[:-1]
    if len(case.chunks) - len(head) > 2:
        yield replace(case, chunks=head, chunked_prefill_size=case.chunks[-1])


def _with_prompts_cut(case: Case, less: int) -> Iterator[Case]:
    """With one prompt shorter by as many tokens as its chunk: its last chunk has as many as before."""
    for number, request in enumerate(case.requests):
        if len(request.prompt) > less:
            yield _with_request(case, number, replace(request, prompt=request.prompt[less:]))


def _with_request(case: Case, number: int, request: Request) -> Case:
    """With another one in this place."""
    return replace(case, requests=(*case.requests[:number], request, *case.requests[number + 1 :]))


def _simpler(case: Case) -> Iterator[Case]:
    """With one setting as it usually is, or one size less."""
    usual, settings = SGLangSettings(), case.engine.sglang
    for name in settings.__struct_fields__:
        yield replace(case, engine=EngineSettings(sglang=replace(settings, **{name: getattr(usual, name)})))
    sizes: dict[str, tuple[Any, ...]] = {
        "model": MODELS[: MODELS.index(case.model) if case.model in MODELS else len(MODELS)],
        "num_steps": tuple(range(1, case.num_steps)),
        "topk": tuple(range(1, case.topk)),
        "num_draft_tokens": (0, case.num_steps + 1, case.num_draft_tokens - 1) if case.num_draft_tokens else (),
        "page_size": (1,) if case.page_size > 1 else (),
    }
    for name, values in sizes.items():
        for value in values:
            yield replace(case, **{name: value})
            if name in ("num_steps", "topk"):  # a tree of fewer steps or branches has fewer nodes
                yield replace(case, **{name: value, "num_draft_tokens": 0})


def _shorter(request: Request) -> Iterator[Request]:
    half = len(request.prompt) // 2
    for prompt in (request.prompt[:1], request.prompt[:half], request.prompt[half:], request.prompt[:-1], request.prompt[1:]):
        if 0 < len(prompt) < len(request.prompt):
            yield replace(request, prompt=prompt)
    for new in (1, request.max_new_tokens // 2, request.max_new_tokens - 1):
        if 0 < new < request.max_new_tokens:
            yield replace(request, max_new_tokens=new, min_new_tokens=min(request.min_new_tokens, new))
    for less in (0, request.arrive - 1):
        if 0 <= less < request.arrive:
            yield replace(request, arrive=less)
    for field in fields(Request):
        if field.default is not NODEFAULT:
            yield replace(request, **{field.name: field.default})
        if isinstance(value := getattr(request, field.name), Struct):
            parts = ((part.name, part.default) for part in fields(value) if part.default is not NODEFAULT)
            yield from (replace(request, **{field.name: replace(value, **{part: plain})}) for part, plain in parts)
