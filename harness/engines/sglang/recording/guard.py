"""Which requests of a server are recorded, and wraps that cannot break it and know what they cost."""

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from eagletwin.harness.core.recording import Skipped
from eagletwin.harness.engines.inside.blame import Around, Wraps
from eagletwin.harness.engines.protocol import RecordOptions

# Wraps that cannot break what they stand around, and that know what they cost.
#
# A server must go on whatever a tap makes of it. If one fails, SGLang's own call is made (or its result is handed on), and the
# recordings that were under way are given up.


class Clock:
    """Time that taps took, without the calls that they stand around [s]; since: the clock when it began."""

    def __init__(self) -> None:
        self.since = time.perf_counter()
        self.taken = 0.0

    @property
    def share(self) -> float:
        return self.taken / max(time.perf_counter() - self.since, 1e-9)


class _Call:
    """SGLang's own function, called once: what came of it, and when it ran."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.called = self.raised = False
        self.result: Any = None
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called, begin = True, time.perf_counter()
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException:
            self.raised = True
            raise
        finally:
            self.seconds += time.perf_counter() - begin
        return self.result


class Guards:
    """Makes the wraps of one listener. failed(error): told of a tap that failed; active(): whether a chosen request runs."""

    def __init__(self, failed: Callable[[Exception], None], active: Callable[[], bool]) -> None:
        self.clock = Clock()
        self._failed = failed
        self._active = active

    def around(self, tap: Around, *, always: bool = False) -> Around:
        """The tap, guarded. always: also where no chosen request is in the batch."""

        def call_guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not (always or self._active()):
                return original(*args, **kwargs)
            call, begin = _Call(original), time.perf_counter()
            try:
                return tap(call, *args, **kwargs)
            except Exception as error:
                if call.raised:  # SGLang's own
                    raise
                self._failed(error)
                return call.result if call.called else call(*args, **kwargs)
            finally:
                self.clock.taken += time.perf_counter() - begin - call.seconds

        return call_guarded


class GuardedWraps(Wraps):
    """Wraps whose taps are guarded. Those of ALWAYS decide whether a batch is listened to."""

    ALWAYS = ("forward_batch_generation", "process_batch_result")

    def __init__(self, guards: Guards) -> None:
        super().__init__()
        self._guards = guards

    def _set(self, owner: Any, name: str, around: Around) -> Any:
        return super()._set(owner, name, self._guards.around(around, always=name in self.ALWAYS))


# Which requests of a server are recorded: every N-th, those that are named, and none while it costs too much.


class Choice:
    """Sees each request when it is first prefilled. All ranks see them in one order, so all choose the same, but where one
    rank alone is over its limits.

    too_much  says why no further request can be recorded now; None: one can
    """

    def __init__(self, options: RecordOptions, too_much: Callable[[], Skipped | None]) -> None:
        self._options = options
        self._too_much = too_much
        self._met: WeakSet[Any] = WeakSet()
        self.seen = 0
        self.skipped: dict[Skipped, int] = {}

    def chooses(self, request: Any) -> bool:
        """Whether a request of a prefill is to be recorded from here on. Asked again of one that it has met: no."""
        if request in self._met:
            return False
        self._met.add(request)
        number, self.seen = self.seen, self.seen + 1
        if number % self._options.every and request.rid not in self._options.requests:
            return False
        why = self._too_much() or _not_listened_to(request)
        if why is not None:
            self.skipped[why] = self.skipped.get(why, 0) + 1
        return why is None


def _not_listened_to(request: Any) -> Skipped | None:
    """What the judge knows no rule for: prompts that are not tokens alone."""
    if getattr(request, "multimodal_inputs", None) is not None or getattr(request, "input_embeds", None) is not None:
        return "not_tokens_alone"
    return None
