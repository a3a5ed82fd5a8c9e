"""Which requests of a server are recorded: every N-th, those that are named, and none while it costs too much."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from eagletwin.harness.core.recording import Skipped
from eagletwin.harness.engines.record_options import RecordOptions


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
