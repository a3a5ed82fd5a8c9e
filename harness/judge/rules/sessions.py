"""Streaming sessions: what their requests are asked, behind which rows they go on (`session.rows`), and what sessions hold.

A request of a session is, to every other rule, one whose prompt is all that was said in the session before, with its own prompt
after it, and which arrived when it was handed in: with_full_prompts() makes the case such a one. What is left is where its
rows come from.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from eagletwin.harness.core.case import Adapter, Case, Request, whole_prompts
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace

from ..compare import Place
from ..context import Rules
from ..replay import RequestReplay
from . import rule, stages
from .events import WORK

_RULE = "session.rows"


def with_full_prompts(trace: Trace) -> Trace:
    """The trace, with requests of sessions as if each had come with all of its prompt when it was handed in."""
    case, records = trace.header.case, trace.header.records
    if not case.sessions:
        return trace
    came = {record.request: record for record in records if record.stage == "session" and record.request}
    opening = {name for name, record in came.items() if record.numbers["opens"]}
    answers = {
        record.request: trace.integers(number, "tokens")
        for number, record in enumerate(records)
        if record.stage == "finished" and not record.numbers["aborted"]
    }
    prompts, never = whole_prompts(case, answers, opening), 1 + max((record.iteration for record in records), default=0)

    def with_full_prompt(request: Request) -> Request:
        if not request.session:
            return request
        arrive = came[request.id].iteration if request.id in came else never
        return replace(request, prompt=prompts[request.id], arrive=arrive)

    header = replace(trace.header, case=replace(case, requests=tuple(map(with_full_prompt, case.requests))))
    return Trace(header, trace.tensors, [with_full_prompts(other) for other in trace.others])


@dataclass(slots=True)
class _Session:
    """One of them, at one place of the trace.

    open     by what its client knows
    running  its request that was handed in and has not ended
    tokens   that were said in it, by requests that ended by themselves
    keeps    whether it must have rows of theirs: nothing happened that may take them
    adapter  of the last of these requests: rows are of no use to one with another
    spare    rows of the last of these requests behind `tokens` - 1 that are still those of tokens which were said
    """

    open: bool = False
    running: str = ""
    tokens: int = 0
    keeps: bool = False
    adapter: Adapter | None = None
    spare: int = 0


@dataclass(slots=True)
class _Run:
    """A request of a session. said: tokens before its own prompt; kept: whether the session must have had rows of them; most:
    how many of them it can have had; end: where its last chunk ended; None: it had none"""

    said: int
    kept: bool
    most: int
    end: int | None = None


class Sessions(Rules):
    def begin(self) -> None:
        self._page = self._case.page_size
        self._of = {request.id: request.session for request in self._case.requests if request.session}
        self._sessions = {name: _Session() for name in self._case.sessions}
        self._runs: dict[str, _Run] = {}
        self._flushes = {event.at for event in self._case.events if event.kind == "flush"}
        self._in_pauses = _flushes_in_pauses(self._case)
        self._works = {record.iteration for record in self._records if record.stage in WORK}
        self._turns = self._trace.header.engine.pp
        self._layers = max(1, self._model.mtp_layers)
        self._own_tokens_only = self._model.memory and self._model.ahead > 0

    @property
    def any_open(self) -> bool:
        """Whether a session may lock rows of the prefix cache."""
        return any(session.open or session.running for session in self._sessions.values())

    def keeps_rows_of(self, request: str) -> bool:
        """Whether a request is of a session, which keeps its rows in the place of the prefix cache."""
        return request in self._of

    def goes_on(self, request: str) -> bool:
        """Whether a request goes on behind rows that its session keeps, and not behind the prefix cache's."""
        return request in self._runs and self._runs[request].kept

    @stages("session")
    def note_change(self, _number: int, record: Record) -> None:
        if not record.request:
            self._sessions[self._case.sessions[record.numbers["closes"]]].open = False
            return
        session = self._sessions[self._of[record.request]]
        if record.numbers["opens"]:
            session.open, session.tokens, session.keeps = True, 0, False
        session.running = record.request
        most = session.tokens - 1 if self._own_tokens_only else session.tokens - 1 + session.spare
        keeps = session.keeps and session.adapter == self._replays[record.request].adapter
        self._runs[record.request] = _Run(session.tokens, keeps, most)

    @stages("finished")
    def ended(self, number: int, record: Record) -> None:
        session = self._sessions.get(self._of.get(record.request, ""))
        if session is None:
            return
        session.running = ""
        if record.numbers["aborted"]:
            session.keeps = False
            return
        replay = self._replays[record.request]
        session.tokens = len(replay.prompt) + len(self._trace.integers(number, "tokens"))
        # its end was seen when the iteration of the flush began; the engine refuses it as long as what ran last counts as
        # running
        at = record.iteration
        flushed = at in self._flushes and self._works.isdisjoint(range(at - self._turns, at))
        session.keeps, session.adapter = not flushed, replay.adapter
        session.spare = int(len(replay.tokens) > session.tokens)

    @rule("session.rows", "4", weights="no")
    @stages("prefill")
    def prefill(self, _number: int, record: Record) -> None:
        """A request of a session goes on behind the rows that the session keeps: all those of its tokens before the last one
        that the request before it was sent, and none of that token or behind it."""
        # A chunk is over: if it was the first since the request was queued, it began where the session's rows end.
        run = self._runs.get(record.request)
        if run is None:
            return
        start, before = record.numbers["start"], run.end
        first, run.end = before is None, record.numbers["end"]
        if start == before or not self._compare.on(_RULE):
            return
        place = Place(record, "target.extend", step=-1)
        if before is not None:  # it was retracted, and the session keeps what it had
            least = before - self._layers
            if start < least and not self._taken_away(record):
                self._compare.report(place, _RULE, "first row after a retraction", f"{least} at least", start)
        elif first and run.kept:
            least = max(0, run.said - self._layers)
            if not least <= start <= run.most:
                self._report(place, run, least, start)
        elif start >= len(self._replays[record.request].prompt):
            most = len(self._replays[record.request].prompt) - 1
            why = "All that was said in its session, by requests that ended by themselves, and its own prompt are so long."
            self._compare.report(place, _RULE, "first row to be prefilled", f"{most} at most", start, why)

    def _report(self, place: Place, run: _Run, least: int, start: int) -> None:
        expected = str(run.most) if least == run.most else f"{least} to {run.most}"
        why = (
            f"{run.said} tokens were said before its prompt. Row {run.said - 1} is that of the last one, which no forward had "
            "consumed when the answer was complete"
        )
        if self._own_tokens_only:
            why += ", and the draft's row there is one of the token behind it, which this prompt begins with"
        self._compare.report(place, _RULE, "first row to be prefilled", expected, start, f"{why}.")

    def _taken_away(self, record: Record) -> bool:
        """Whether a session may have lost its rows by now: in a flush, or with a request that is to be aborted."""
        aborted = (event for event in self._case.events if event.kind == "abort" and event.request == record.request)
        return any(at <= record.iteration for at in (*self._flushes, *(event.at for event in aborted)))

    def account(self, number: int, place: Place) -> None:
        """What sessions hold between batches: one that is closed nothing, one that waits the pages of its tokens at most."""
        if place.record.iteration in self._flushes:
            for session in self._sessions.values():
                session.keeps = False
            for run in self._runs.values() if place.record.iteration in self._in_pauses else ():
                run.kept &= run.end is not None
        if "whose" not in place.record.tensors or not self._compare.on("pool.accounting"):
            return
        whose = self._trace.integers(number, "whose")
        for index, (name, session) in enumerate(self._sessions.items()):
            held, most = whose.count(index), -(-session.tokens // self._page) * self._page
            if session.running or held <= (most if session.open else 0):
                continue
            expected = f"{most} at most: {session.tokens} tokens were said in it" if session.open else "none: it is closed"
            self._compare.report(place, "pool.accounting", f"slots that session {name} holds", expected, held)


def _flushes_in_pauses(case: Case) -> set[int]:
    """Iterations of flushes that come in a pause, in which the engine flushes though requests wait."""
    found, paused = set[int](), False
    for event in sorted(case.events, key=lambda event: event.at):
        if event.kind == "flush" and paused:
            found.add(event.at)
        elif event.kind in ("pause", "resume"):
            paused = event.kind == "pause"
    return found


def session_evidence(trace: Trace, replays: dict[str, RequestReplay]) -> dict[str, set[str]]:
    """Of each feature of sessions (families/dimensions/session.py) the requests that showed it; of a close, the session."""
    found, case = dict[str, set[str]](), trace.header.case
    of = {request.id: request.session for request in case.requests if request.session}
    last, running = dict[str, tuple[str, int, bool]](), set[str]()  # session -> request, tokens said by then, whether aborted
    waits, begun, closed = set[str](), set[str](), set[str]()
    for number, record in enumerate(trace.header.records):
        name, session = record.request, of.get(record.request, "")
        if record.stage == "session" and not name:
            session = case.sessions[record.numbers["closes"]]
            closed.add(session)
            if session in running:
                found.setdefault("session_waits_to_close", set()).add(session)
        elif record.stage == "session":
            if record.numbers["opens"]:
                last.pop(session, None)
                if session in closed:
                    found.setdefault("session_again", set()).add(name)
            elif last[session][2]:
                found.setdefault("session_after_abort", set()).add(name)
            else:
                waits.add(name)
            running.add(session)
        elif record.stage == "prefill" and session:
            if name in waits and record.numbers["start"]:
                waits.remove(name)
                before, said, _ = last[session]
                found.setdefault("session_goes_on", set()).add(name)
                if record.numbers["start"] % case.page_size:
                    found.setdefault("session_in_page", set()).add(name)
                if len(replays[before].tokens) > said:
                    found.setdefault("session_cut", set()).add(name)
            elif name in begun and record.attempt + record.round > 0 and "mixed" not in record.numbers:
                found.setdefault("session_retracted", set()).add(name)
            begun.add(name)
        elif record.stage == "finished" and session:
            running.discard(session)
            said = len(replays[name].prompt) + len(trace.integers(number, "tokens"))
            last[session] = (name, said, bool(record.numbers["aborted"]))
    return found
