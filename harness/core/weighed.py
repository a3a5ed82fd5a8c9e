"""What a pair of checkpoints says of a recording of its server, and why it may say nothing of what was drafted. Plain data."""

from collections import Counter
from dataclasses import dataclass, field

from .verdict import Divergence


@dataclass(frozen=True, slots=True)
class Untold:
    """Why nobody can tell which drafts a request deserves.

    cause   in a few words, for tables and programs
    why     a sentence's part that explains it; remedy: a sentence's part, what to do to have such requests compared
    """

    cause: str
    why: str
    remedy: str


@dataclass(slots=True)
class Weighed:
    """One recording: comparisons by rule, and what diverged, in the order of the data.

    open    choices that are too close to tell
    untold  why none of its drafts was compared; None: some were
    """

    divergences: list[Divergence] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    open: int = 0
    untold: Untold | None = None
