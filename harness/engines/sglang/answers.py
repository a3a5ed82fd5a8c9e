"""What messages to the detokenizer say of requests: their fates, the probabilities of tokens, and hidden states."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import LOGPROBS

from .compat import workers

# What messages to the detokenizer say of the probabilities of tokens: of the prompt's, and of those that are sent.


@dataclass(slots=True)
class ToldLogprobs:
    """Of one request: by part and kind the rows of all messages, in their order. A row is what is said of one place.

    values, ids  of the tokens of each row; None where nothing is said
    sent         of each message: how many places of the answer it spoke of
    """

    values: dict[str, list[Any]] = field(default_factory=dict)
    ids: dict[str, list[Any]] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)

    def take(self, payload: Any, n: int) -> None:
        """A message, of which this is request number n. One of a batch in which nobody wants to know says nothing."""
        if getattr(payload, "output_token_logprobs_val", None) is None:
            self.sent.append(0)
            return
        for name in LOGPROBS:
            values, ids = (_entry(payload, f"{name}_{part}", n) for part in ("val", "idx"))
            self.values.setdefault(name, []).extend(values)
            self.ids.setdefault(name, []).extend(ids)
            if name == "output_token_logprobs":
                self.sent.append(len(values))

    @property
    def any(self) -> bool:
        return any(map(len, self.ids.values()))

    @property
    def tensors(self) -> dict[str, Array]:
        """As they are recorded: the numbers of all rows one after another, and how many each row has; -1: it says nothing."""
        found: dict[str, Array] = {"logprobs_sent": np.array(self.sent, np.int64)}
        for name in LOGPROBS:
            for said, numbers, dtype in (("values", self.values[name], np.float64), ("ids", self.ids[name], np.int64)):
                rows = [_row(one) for one in numbers]
                flat = [number for row in rows for number in row or ()]
                found[f"{name}_{said}_rows"] = np.array([-1 if row is None else len(row) for row in rows], np.int64)
                found[name if said == "values" else f"{name}_ids"] = np.array(flat, dtype)
        return found


def _entry(payload: Any, name: str, n: int) -> list[Any]:
    values = getattr(payload, name, None)
    return list(values[n] or ()) if values is not None and n < len(values) else []


def _row(said: Any) -> list[float] | None:
    """One number, or several."""
    if said is None:
        return None
    if isinstance(said, int | float):
        return [said]
    return [nan if number is None else number for number in (said.tolist() if hasattr(said, "tolist") else said)]


# The hidden states that messages to the detokenizer give a request: each has all that there are so far, or the last alone.

_Row = list[float]


@dataclass(slots=True)
class GivenStates:
    """Of one request. A message holds entries; an entry is one row, or a list of rows.

    entries  of the last message that had some: the rows of each; single: whether it was a row and no list
    counts   of each message: how many entries it had
    lasts    of each message that had one: its last row
    """

    entries: list[list[_Row]] = field(default_factory=list)
    single: list[bool] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lasts: list[_Row] = field(default_factory=list)

    def take(self, payload: Any, n: int) -> None:
        """A message, of which this is request number n. What it holds may grow after it was sent, so it is copied."""
        given = getattr(payload, "output_hidden_states", None)
        own = given[n] if given is not None and n < len(given) else None
        entries = [] if not own else [own] if isinstance(own[0], float) else own
        self.counts.append(len(entries))
        if entries:
            self.single = [not entry or isinstance(entry[0], float) for entry in entries]
            self.entries = [[list(e)] if s else [list(row) for row in e] for e, s in zip(entries, self.single, strict=True)]
            self.lasts.append(self.entries[-1][-1])

    @property
    def any(self) -> bool:
        return any(self.counts)

    @property
    def tensors(self) -> dict[str, Array]:
        """As they are recorded: the numbers of all rows one after another, how many each row has, and how many rows each entry
        has; -1: it is a row itself. `last_hidden` has the last rows of all messages."""
        rows = [row for entry in self.entries for row in entry]
        sizes = [-1 if single else len(entry) for entry, single in zip(self.entries, self.single, strict=True)]
        return {
            "given_hidden": np.array([number for row in rows for number in row], np.float64),
            "given_widths": np.array([len(row) for row in rows], np.int64),
            "given_entries": np.array(sizes, np.int64),
            "given_counts": np.array(self.counts, np.int64),
            "last_hidden": np.array([number for row in self.lasts for number in row], np.float64),
            "last_widths": np.array([len(row) for row in self.lasts], np.int64),
        }


# What has become of a case's requests: which were handed in, what was sent for them, and which ended how.


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
        tokens, decoded = list(ids[n]) if ids is not None else [], workers.decode_ids(payload, n)
        counts, reason = workers.counts(payload, n), payload.finished_reasons[n]
        self.tokens += tokens
        self.decoded += decoded
        self.logprobs.take(payload, n)
        self.states.take(payload, n)
        self.sent.append((len(tokens), max(counts["completion_tokens"], -1), len(decoded)))
        if reason is not None:
            self.numbers = counts | workers.finish(reason)
            self.histogram = workers.histogram(payload, n)

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
