"""What messages to the detokenizer say of the probabilities of tokens: of the prompt's, and of those that are sent."""

from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import LOGPROBS


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
