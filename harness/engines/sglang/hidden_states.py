"""The hidden states that messages to the detokenizer give a request: each has all that there are so far, or the last alone."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array

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
