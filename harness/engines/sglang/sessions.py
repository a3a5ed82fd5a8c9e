"""Streaming sessions of a case, from the client's side: a request is handed in when the one before it has been answered, a
session is opened with its first request, and closed when the case says so, at the latest when all requests have ended.

Called by drive.py. Each request of a session is recorded when it is handed in, and each close: stage `session`.
"""

from collections.abc import Iterator
from typing import Any

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.request_inputs import before, whole_prompts
from eagletwin.harness.core.trace import Recorder, When

from .fates import Fates

_LENGTH = 1 << 20  # of a session's text; SGLang asks for it and does not look at it


class OpenSessions:
    """Which sessions of a case are open, by what the client knows."""

    def __init__(self, case: Case, recorder: Recorder) -> None:
        self._case, self._recorder = case, recorder
        self._names = case.sessions
        self._closes = 0
        self._open: list[str] = []
        self._opening: set[str] = set()  # requests that came with a session that was not open

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def may_come(self, request: Request, fates: Fates) -> bool:
        """Whether a request may be handed in now, as far as its session goes."""
        earlier = before(self._case, request.id)
        return not earlier or earlier in fates.finished

    def enter(self, request: Request, iteration: int) -> Iterator[Any]:
        """What comes before a request that is handed in: the message that opens its session, if it is not open."""
        if not request.session:
            return
        opens = request.session not in self._open
        self._recorder.add(request.id, 0, "session", when=When(iteration), numbers={"opens": int(opens)})
        if opens:
            self._opening.add(request.id)
            from sglang.srt.managers import io_struct

            self._open.append(request.session)
            yield io_struct.OpenSessionReqInput(capacity_of_str_len=_LENGTH, session_id=request.session, streaming=True)

    def prompts(self, fates: Fates) -> dict[str, tuple[int, ...]]:
        """By request of a session: all that it was asked."""
        ended = (name for name in fates.finished if name not in fates.aborted and name in fates.answers)
        return whole_prompts(self._case, {name: fates.answers[name].tokens for name in ended}, self._opening)

    def close(self, name: str, iteration: int) -> Iterator[Any]:
        """A session that is not open is not closed: its client knows."""
        if name not in self._open:
            return
        from sglang.srt.managers import io_struct

        self._open.remove(name)
        numbers = {"closes": self._names.index(name)}
        self._recorder.add("", 0, "session", step=self._closes, when=When(iteration), numbers=numbers)
        self._closes += 1
        yield io_struct.CloseSessionReqInput(session_id=name)

    def close_all(self, iteration: int) -> Iterator[Any]:
        for name in tuple(self._open):
            yield from self.close(name, iteration)
