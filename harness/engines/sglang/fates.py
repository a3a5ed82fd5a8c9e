"""What has become of a case's requests: which were handed in, what was emitted for them, and which ended how."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Fates:
    """All by the id of a request.

    handed_in  the scheduler has received them
    emitted    tokens that were sent towards the detokenizer
    aborted    the scheduler has said so
    dropped    aborted while they were queued, so no batch will end them
    finished   their end was recorded
    """

    handed_in: set[str] = field(default_factory=set)
    emitted: dict[str, list[int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    def sent(self, payload: Any) -> None:
        """Collect a batch of output: each message holds the tokens since the last one, and the reason if it is the last."""
        for n, name in enumerate(getattr(payload, "rids", None) or ()):
            ids = getattr(payload, "output_ids", None)
            self.emitted.setdefault(name, []).extend(ids[n] if ids is not None else ())
            reason = payload.finished_reasons[n]
            if reason is not None and reason.get("type") == "abort":
                self.aborted.add(name)
        if type(payload).__name__ == "AbortReq":  # it was queued, or between two chunks
            self.aborted.add(payload.rid)
            self.dropped.add(payload.rid)

    def arrive(self, names: Iterable[str]) -> None:
        self.handed_in.update(names)

    def finish(self, names: Iterable[str], ended: Callable[[str], bool]) -> list[str]:
        """Those that ended since the last call, in the order of `names`. ended: by SGLang's own account."""
        news = [name for name in names if name not in self.finished and (name in self.dropped or ended(name))]
        self.finished.update(news)
        return news

    def unfinished(self) -> list[str]:
        return sorted(self.handed_in - self.finished)
