"""A dimension: one thing that a case can have, and all that eagletwin derives from it.

Its file names its field, and only what differs from most others. `of_requests` and `of_settings` fill in the rest.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec.structs import fields, replace

from eagletwin.harness.core.case import Case, Event, Request, Sampling, SGLangSettings
from eagletwin.reference.sizes import reserved_slots

if TYPE_CHECKING:
    from hypothesis import strategies as st
else:

    class _Strategies:
        """Hypothesis, whose import takes half a second, which an engine and a judge do not need."""

        DrawFn = Any  # of annotations

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("hypothesis.strategies"), name)

    st = _Strategies()

__all__ = ["st"]

Has = Callable[[Case], bool]
Ways = Callable[[Case], Iterator[Case]]
Refusal = tuple[str, str]  # the cause and the remedy


def _none(*_: object) -> Iterator[Any]:
    return iter(())


def _nothing(*_: object) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Dimension:
    """One thing that a case can have.

    name      of the field, and of what a search is to draw (`cases.blocks.SearchConstraints`)
    words     in reports
    row       meaning and bounds of a request's field, in docs/reference/case.md
    key       of `fuzz --only` and `--not`; empty: there is no such topic
    has       whether a case has it
    size      how much of it a case has, for the progress of shrinking; None: that says nothing
    says, plain  what the case has, and what takes its place, for `bisect --features`
    without   the ways to do without it that leave the rest of the case as it is; None: bisect does not take it away
    simpler   cases that have less of it. Shrinking also sets each field to its default
    refusals  why no engine is given such a case; of_sent: which the scheduler sees (core/case.py)
    kinds     what of it makes a case a special one, by which known bugs are matched (harness/check/known.py)
    modes     option of a mode -> why eagletwin does not run the case with it
    happened  name for `Case.exercises` -> its sentence, and whether a run (harness/judge/features.py) shows it
    example   a value, for the smallest case that has it
    draw      a value for a request, of a model with so many tokens; draw_case: for a whole case, each step of which is to be
              admitted; settle: a request after everything else is drawn
    of_prompt whether it asks for something of the prompt, so that a request may ask for nothing else
    values    of a setting with which users launch the engine: those that a search draws; share: of the blocks that are launched
              as users do, how many have one
    message   fields of the message that hands a request to SGLang's scheduler; arguments: of ServerArgs, for such a case
    """

    name: str
    words: str
    has: Has
    row: str = ""
    key: str = ""
    size: Callable[[Case], object] | None = None
    says: Callable[[Case], str] = lambda case: ""
    plain: str = ""
    without: Ways | None = None
    simpler: Ways = _none
    refusals: Callable[[Case], Iterator[Refusal]] = _none
    of_sent: bool = True
    kinds: Mapping[str, Has] = field(default_factory=dict)
    modes: Mapping[str, str] = field(default_factory=dict)
    happened: Mapping[str, tuple[str, Callable[[Any], bool]]] = field(default_factory=dict)
    example: Any = None
    draw: "Callable[[st.DrawFn, Request, int], Any] | None" = None
    draw_case: "Callable[[st.DrawFn, Case, Has], Case] | None" = None
    settle: Callable[[Case, Request, int], Request] | None = None
    of_prompt: bool = False
    values: tuple[Any, ...] = ()
    share: float = 0.0
    message: Callable[[Request], Mapping[str, Any]] = _nothing
    arguments: Callable[[Case], Mapping[str, Any]] = _nothing

    def put(self, request: Request, value: Any) -> Request:
        return put(request, self.name, value)


# Fields by their names. min_p is one of a request's sampling.


@cache
def usual(name: str) -> Any:
    """The default of a request's field, or of its sampling's."""
    return next(one.default for one in (*fields(Request), *fields(Sampling)) if one.name == name)


def get(request: Request, name: str) -> Any:
    """A request's field; the default of one of its sampling, if it does not sample."""
    if hasattr(request, name):
        return getattr(request, name)
    return usual(name) if request.sampling is None else getattr(request.sampling, name)


def put(request: Request, name: str, value: Any) -> Request:
    """The request with this value of a field; as it is, if that is one of its sampling and it does not sample."""
    if hasattr(request, name):
        return replace(request, **{name: value})
    return request if request.sampling is None else replace(request, sampling=replace(request.sampling, **{name: value}))


def with_requests(case: Case, change: Callable[[Request], Request]) -> Case:
    return replace(case, requests=tuple(map(change, case.requests)))


def with_request(case: Case, number: int, request: Request) -> Case:
    """The case with another request in the place of this one."""
    return replace(case, requests=(*case.requests[:number], request, *case.requests[number + 1 :]))


def draw_each(name: str, values: tuple[Any, ...]) -> "Callable[[st.DrawFn, Case, Has], Case]":
    """A drawing of one of these values for each request that can have it."""

    def drawn(draw: st.DrawFn, case: Case, admits: Has) -> Case:
        for number, request in enumerate(case.requests):
            wanted = with_request(case, number, put(request, name, draw(st.sampled_from(values))))
            case = wanted if admits(wanted) else case
        return case

    return drawn


def with_events(case: Case, stays: Callable[[Event], bool]) -> Case:
    return replace(case, events=tuple(filter(stays, case.events)))


def with_settings(case: Case, **changes: object) -> Case:
    return replace(case, engine=replace(case.engine, sglang=replace(case.engine.sglang, **changes)))


def on_one_rank(case: Case) -> Case:
    return with_settings(with_requests(case, lambda request: replace(request, dp_rank=0)), attn_dp_size=1)


def of_requests(
    name: str,
    words: str,
    *,
    kind: bool = False,
    message: str | Callable[[Request], Mapping[str, Any]] = _nothing,
    argument: str = "",
    size: Callable[[Any], int] = lambda value: 1,
    refuses: Callable[[Case, Request], Iterator[Refusal]] = _none,
    smaller: Callable[[Any], Iterator[Any]] = _none,
    **more: Any,
) -> Dimension:
    """A field of requests.

    kind      known bugs are matched by whether a case has it
    message   the field of SGLang's message that takes its value; argument: what SGLang is started with, where a case has it
    size, smaller  of one value of it: its size, and smaller values
    refuses   why no engine is given a request, behind the request's name
    more      other fields of Dimension
    """

    def having(case: Case) -> list[Request]:
        return [request for request in case.requests if get(request, name) != usual(name)]

    def simpler(case: Case) -> Iterator[Case]:
        for number, request in enumerate(case.requests):
            for value in smaller(get(request, name)):
                yield with_request(case, number, put(request, name, value))

    def refusals(case: Case) -> Iterator[Refusal]:
        for request in case.requests:
            for cause, remedy in refuses(case, request):
                yield f"request {request.id!r}{cause}", remedy

    usually: dict[str, Any] = {
        "has": lambda case: bool(having(case)),
        "simpler": simpler,
        "refusals": refusals,
        "message": (lambda request: {message: get(request, name)}) if isinstance(message, str) else message,
        "size": lambda case: sum(size(get(request, name)) for request in having(case)),
        "says": lambda case: f"{len(having(case))} of {len(case.requests)} requests",
        "plain": "none",
        "without": lambda case: iter([with_requests(case, lambda request: put(request, name, usual(name)))]),
        "arguments": lambda case: {argument: True} if argument and having(case) else {},
    }
    return Dimension(name=name, words=words, **_of_kind(name, kind, usually | more))


def of_settings(name: str, words: str, *, kind: bool = False, argument: str = "", **more: Any) -> Dimension:
    """A setting of SGLang's engine. kind, argument, more: as in `of_requests`."""
    default = getattr(SGLangSettings(), name)

    def value(case: Case) -> Any:
        return getattr(case.engine.sglang, name)

    usually: dict[str, Any] = {
        "has": lambda case: value(case) != default,
        "size": value,
        "says": lambda case: f"{name} {value(case)}",
        "plain": f"{name} {default}",
        "without": lambda case: iter([with_settings(case, **{name: default})]),
        "arguments": lambda case: {argument: value(case)} if argument and value(case) != default else {},
    }
    return Dimension(name=name, words=words, **_of_kind(name, kind, usually | more))


def _of_kind(name: str, kind: bool, more: dict[str, Any]) -> dict[str, Any]:
    return more | {"kinds": {name: more["has"]} | more.get("kinds", {})} if kind else more


# What several of them need


def round_slots(case: Case) -> int:
    """Slots that SGLang sets aside for one round of a request, before its tree is known."""
    return reserved_slots(case.topk, case.most_steps, case.page_size, case.most_nodes)


def tokens(seed: int, count: int, vocabulary: int) -> tuple[int, ...]:
    """The first `count` tokens of a stream that only the seed decides: two of one seed are one a prefix of the other."""
    random = Random(seed)
    return tuple(random.randrange(vocabulary) for _ in range(count))
