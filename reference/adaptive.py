"""How many draft steps the next round has, where that follows from the drafts accepted so far. Plain numbers and no tensor.

Semantics: SGLang's documentation of adaptive speculative decoding and of its configuration file, and the pull requests that
brought them (#21599, #24055): an exponential average of accepted drafts, looked at now and then, moves the choice up or down
among the candidates, each batch size by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the configuration sets for all tiers.

    alpha     weight of the newest batch in the average
    interval  batches from one decision to the next; warmup: batches before them
    up, down  added to the thresholds of more and of fewer steps
    ceiling   0: none; else no choice stays above, or moves down to more than, the average times this
    """

    alpha: float = 0.2
    interval: int = 5
    warmup: int = 10
    up: float = 0.0
    down: float = -0.25
    ceiling: float = 0.0


@dataclass(slots=True)
class Tier:
    """The choice of one range of batch sizes.

    choices  ascending; steps: the one that holds; average: of drafts accepted a request; told: batches so far
    """

    knobs: Knobs
    choices: list[int]
    steps: int
    average: float = field(init=False)
    told: int = 0

    def __post_init__(self) -> None:
        self.choices = sorted(set(self.choices))
        if self.steps not in self.choices:
            self.steps = self.choices[len(self.choices) // 2]
        self.average = float(self.steps - 1)  # neither up nor down

    def tell(self, accepted: Sequence[int]) -> bool:
        """A batch accepted so many drafts of each request. Whether another number of steps holds now."""
        if not accepted:
            return False
        if self.steps > 0:  # a round without drafts says nothing of them
            weight = self.knobs.alpha
            self.average = (1 - weight) * self.average + weight * (sum(accepted) / len(accepted))
        self.told += 1
        due = self.told - self.knobs.warmup
        if due <= 0 or due % self.knobs.interval:
            return False
        before, self.steps = self.steps, self._choose_steps()
        return self.steps != before

    def _choose_steps(self) -> int:
        if self.steps == 0:
            return self._probe()
        fewer = [choice for choice in self.choices if choice < self.steps]
        target = self.steps
        while fewer and self.average <= max(fewer[-1], 1) - 0.5 + self.knobs.down:
            target = fewer.pop()
        if target == self.steps:
            more = [choice for choice in self.choices if choice > self.steps]
            while more and self.average > target - 0.5 + self.knobs.up:
                target = more.pop(0)
        if self.knobs.ceiling > 0 and target <= self.steps:
            most = max(1, math.ceil(self.average * self.knobs.ceiling))
            target = max([choice for choice in self.choices if choice <= min(target, most)], default=self.choices[0])
        return target

    def _probe(self) -> int:
        """Rounds without drafts tell nothing, so drafts are tried again; where none ever were, from a neutral average."""
        target = next((choice for choice in self.choices if choice > 0), 0)
        if target > 0 and self.average < 0:
            self.average = float(target - 1)
        return target


class Policy:
    """The tiers of a server, by the smallest batch that each is for."""

    def __init__(self, steps: int, tiers: dict[int, Sequence[int]], knobs: Knobs) -> None:
        self._tiers = {least: Tier(knobs, list(choices), steps) for least, choices in sorted(tiers.items())}

    def of(self, batch: int) -> Tier:
        """The tier of a batch of this size: a batch below all of them has the first."""
        least = max((least for least in self._tiers if least <= batch), default=min(self._tiers))
        return self._tiers[least]
