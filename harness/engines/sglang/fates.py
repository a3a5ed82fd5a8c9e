"""What has become of a case's requests: which were handed in, what was sent for them, and which ended how."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array

from .eras import answers
from .hidden_states import GivenStates
from .logprobs import ToldLogprobs


@dataclass(slots=True)
class Messages:
    """What was sent towards the detokenizer for one request.

    tokens   of all messages, in order; decoded: the same as the detokenizer reads them
    sent     of each message: how many tokens it held, how many it counts so far (-1: it does not), and how many it decodes
    numbers  of the last message: why the request ended, and what is counted; histogram: of accepted drafts, if there is one
    logprobs  of all messages; states: hidden states
    """

    tokens: list[int] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    histogram: list[int] | None = None
    logprobs: ToldLogprobs = field(default_factory=ToldLogprobs)
    states: GivenStates = field(default_factory=GivenStates)

    def take(self, payload: Any, n: int) -> None:
        """A message, of which this is request number n."""
        ids = getattr(payload, "output_ids", None)
        tokens, decoded = list(ids[n]) if ids is not None else [], answers.decoded(payload, n)
        counts, reason = answers.counts(payload, n), payload.finished_reasons[n]
        self.tokens += tokens
        self.decoded += decoded
        self.logprobs.take(payload, n)
        self.states.take(payload, n)
        self.sent.append((len(tokens), max(counts["completion_tokens"], -1), len(decoded)))
        if reason is not None:
            self.numbers = counts | answers.finish(reason)
            self.histogram = answers.histogram(payload, n)

    @property
    def tensors(self) -> dict[str, Array]:
        """As they are recorded."""
        found = {
            "tokens": np.array(self.tokens, np.int64),
            "decoded": np.array(self.decoded, np.int64),
            "sent": np.array(self.sent, np.int64).reshape(-1, 3),
        }
        if self.histogram is not None:
            found["histogram"] = np.array(self.histogram, np.int64)
        found |= self.logprobs.tensors if self.logprobs.any else {}
        return found | self.states.tensors if self.states.any else found


@dataclass(slots=True)
class Fates:
    """All by the id of a request.

    handed_in  the scheduler has received them
    answers    what was sent towards the detokenizer
    aborted    the scheduler has said so
    dropped    aborted while they were queued, so no batch will end them
    finished   their end was recorded
    """

    handed_in: set[str] = field(default_factory=set)
    answers: dict[str, Messages] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)

    def sent(self, payload: Any) -> None:
        """Collect a batch of output: each message holds the tokens since the last one, and the reason if it is the last."""
        for n, name in enumerate(getattr(payload, "rids", None) or ()):
            self.answers.setdefault(name, Messages()).take(payload, n)
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
